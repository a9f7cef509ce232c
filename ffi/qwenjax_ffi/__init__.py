"""qwenjax_ffi: one typed JAX function per operation, its reference, its kernel and the choice between them."""
