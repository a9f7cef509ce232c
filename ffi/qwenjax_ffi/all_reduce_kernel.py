"""The all-reduce kernels as JAX functions: `qwenjax_kernels.all_reduce` through CuTeDSL's FFI.

They take and return the epoch array of a symmetric heap (`symmetric_memory`), in place where XLA may.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.all_reduce_choice import Algorithm
from qwenjax_ffi.symmetric_memory_exchange import timeout_seconds


def all_reduce(x: jax.Array, epochs: jax.Array, ranks: int, algorithm: Algorithm) -> tuple[jax.Array, jax.Array]:
    """The sum of x over the ranks of the heap behind `epochs`, and the epochs. x has at least one element."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = _call((shape,), 1, ranks, x, algorithm, 0, 0.0)
    return call(x, epochs)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    eps: float,
    epochs: jax.Array,
    ranks: int,
    algorithm: Algorithm,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """residual + the sum of x, its RMSNorm times weight, and the epochs. x, residual: [..., features] of one dtype."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = _call((shape, shape), 1, ranks, x, algorithm, x.shape[-1], eps)
    return call(x, epochs, residual, weight)


def _call(
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    epochs_argument: int,
    ranks: int,
    x: jax.Array,
    algorithm: Algorithm,
    row: int,
    eps: float,
) -> Any:
    from cutlass.jax import cutlass_call

    timeout_ns = round(timeout_seconds() * 1e9)
    problem = (ranks, jnp.dtype(x.dtype).name, x.size, algorithm, row, eps, timeout_ns)

    def run(*operands: jax.Array) -> Any:
        epochs = operands[epochs_argument]
        return cutlass_call(
            _launcher(*problem),
            output_shape_dtype=(*outputs, jax.ShapeDtypeStruct(epochs.shape, epochs.dtype)),
            input_output_aliases={epochs_argument: len(outputs)},
            compile_key=("qwenjax all_reduce", *problem),
        )(*operands)

    return run


@functools.cache
def _launcher(
    ranks: int, dtype: str, elements: int, algorithm: Algorithm, row: int, eps: float, timeout_ns: int
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.all_reduce import AllReduce

    dtypes = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
    kernel = AllReduce(
        ranks=ranks,
        dtype=dtypes[dtype],
        elements=elements,
        algorithm=algorithm,
        row=row,
        eps=eps,
        timeout_ns=timeout_ns,
    )

    @cute.jit
    def plain(stream, x, epochs, out):  # type: ignore[no-untyped-def]
        kernel.launch(stream, x.iterator.toint(), epochs.iterator.toint(), None, None, out.iterator.toint(), None)

    @cute.jit
    def fused(stream, x, epochs, residual, weight, out, normed):  # type: ignore[no-untyped-def]
        kernel.launch(
            stream,
            x.iterator.toint(),
            epochs.iterator.toint(),
            residual.iterator.toint(),
            weight.iterator.toint(),
            out.iterator.toint(),
            normed.iterator.toint(),
        )

    return fused if row else plain
