"""The all-reduce kernels as JAX functions: `qwenjax_kernels.all_reduce` through CuTeDSL's FFI.

They take and return the epoch array of a symmetric heap (`symmetric_memory`), in place where XLA may.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.all_reduce_choice import Algorithm
from qwenjax_ffi.symmetric_memory_exchange import timeout_seconds


def all_reduce(
    x: jax.Array, epochs: jax.Array, ranks: int, algorithm: Algorithm, token_rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The sum of x over the ranks of the heap behind `epochs`, and the epochs. x has at least one element.

    token_rows: int32 [tokens, top_k]; where given, x is rows, and what is summed over the ranks is
    `grouped_gemm.sum_rows` of them in x's dtype, bfloat16: it is never written out, but for algorithm "two_shot" alone.
    """
    shape = jax.ShapeDtypeStruct(_shape(x, token_rows), x.dtype)
    return _call((shape,), ranks, algorithm, 0, 0.0, x, epochs, token_rows)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    eps: float,
    epochs: jax.Array,
    ranks: int,
    algorithm: Algorithm,
    token_rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """residual + the sum of x, its RMSNorm times weight, and the epochs. x, residual: [..., features] of one dtype.

    token_rows: as `all_reduce` has it; residual is [tokens, features] then.
    """
    shape = jax.ShapeDtypeStruct(_shape(x, token_rows), x.dtype)
    return _call((shape, shape), ranks, algorithm, x.shape[-1], eps, x, epochs, token_rows, residual, weight)


def _shape(x: jax.Array, token_rows: jax.Array | None) -> tuple[int, ...]:
    return x.shape if token_rows is None else (token_rows.shape[0], x.shape[1])


def _call(
    outputs: tuple[jax.ShapeDtypeStruct, ...], ranks: int, algorithm: Algorithm, row: int, eps: float,
    x: jax.Array, epochs: jax.Array, token_rows: jax.Array | None, *others: jax.Array,
) -> Any:  # fmt: skip
    from cutlass.jax import cutlass_call

    timeout_ns = round(timeout_seconds() * 1e9)
    top_k, features = (0, 0) if token_rows is None else (token_rows.shape[1], x.shape[1])
    dtype, elements = jnp.dtype(x.dtype).name, math.prod(outputs[0].shape)
    problem = (ranks, dtype, elements, algorithm, row, top_k, features, eps, timeout_ns)
    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=(*outputs, jax.ShapeDtypeStruct(epochs.shape, epochs.dtype)),
        input_output_aliases={1: len(outputs)},
        compile_key=("qwenjax all_reduce", *problem),
    )
    return call(x, epochs, token_rows, *others)


@functools.cache
def _launcher(
    ranks: int, dtype: str, elements: int, algorithm: Algorithm, row: int, top_k: int, features: int, eps: float,
    timeout_ns: int,
) -> Any:  # fmt: skip
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.all_reduce import AllReduce
    from qwenjax_kernels.device import address_of

    dtypes = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
    kernel = AllReduce(
        ranks=ranks,
        dtype=dtypes[dtype],
        elements=elements,
        algorithm=algorithm,
        row=row,
        top_k=top_k,
        features=features,
        eps=eps,
        timeout_ns=timeout_ns,
    )

    @cute.jit
    def plain(stream, x, epochs, token_rows, out):  # type: ignore[no-untyped-def]
        addresses = map(address_of, (x, epochs, token_rows, None, None, out, None))
        kernel.launch(stream, *addresses)

    @cute.jit
    def fused(stream, x, epochs, token_rows, residual, weight, out, normed):  # type: ignore[no-untyped-def]
        addresses = map(address_of, (x, epochs, token_rows, residual, weight, out, normed))
        kernel.launch(stream, *addresses)

    return fused if row else plain
