"""The kernels around the experts' matmuls as JAX functions: sorting a rank's rows by expert, adding up a token's rows.

`routing.sort_rows` and `grouped_gemm.sum_rows` define the results; `unavailable` says why a kernel cannot run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.implementation import gpu_unavailable
from qwenjax_kernels.expert_rows_limits import MAX_EXPERTS, MAX_TOP_K


@functools.cache
def machine_unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None where they can."""
    return gpu_unavailable(("9.0", "10.0", "10.3"), "Hopper and Blackwell")


def sort_unavailable(ids: jax.Array, weights: jax.Array, num_experts: int) -> str | None:
    """Why no kernel can sort these pairs on this machine; None where one can."""
    if ids.dtype != jnp.int32 or weights.dtype != jnp.float32:
        return f"ids are {ids.dtype} and weights {weights.dtype}, the kernel takes int32 and float32"
    if not ids.size:
        return "there are no pairs"
    if not 1 <= num_experts <= MAX_EXPERTS:
        return f"{num_experts} experts a rank, the kernel is for 1 to {MAX_EXPERTS}"
    return machine_unavailable()


def sum_unavailable(
    rows: jax.Array | jax.ShapeDtypeStruct, token_rows: jax.Array | jax.ShapeDtypeStruct, dtype: jnp.dtype
) -> str | None:
    """Why no kernel can add up these rows on this machine; None where one can."""
    if rows.dtype != jnp.bfloat16 or dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows are {rows.dtype} and sums {dtype}; the kernel takes bfloat16 and writes that or float32"
    if token_rows.dtype != jnp.int32:
        return f"token_rows is {token_rows.dtype}, the kernel takes int32"
    if not token_rows.size or not rows.size:
        return "there are no rows"
    if rows.shape[1] % 8 or token_rows.shape[1] > MAX_TOP_K:
        return (
            f"{token_rows.shape[1]} rows a token of {rows.shape[1]} features; the kernel takes up to {MAX_TOP_K} of "
            "multiples of 8"
        )
    return machine_unavailable()


def sort_rows(
    ids: jax.Array, weights: jax.Array, first_expert: jax.Array | int, num_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """row_token, group_sizes, row_weight and token_rows of `routing.ExpertRows`.

    Rows at and after the sum of group_sizes hold whatever the memory held before.
    """
    from cutlass.jax import cutlass_call

    problem = (*ids.shape, num_experts)
    pairs, chunks = ids.size, _sorter(*problem).chunks
    outputs = [
        jax.ShapeDtypeStruct((pairs,), jnp.int32),
        jax.ShapeDtypeStruct((num_experts,), jnp.int32),
        jax.ShapeDtypeStruct((pairs,), jnp.float32),
        jax.ShapeDtypeStruct(ids.shape, jnp.int32),
    ]
    if chunks > 1:
        outputs.append(jax.ShapeDtypeStruct((chunks, num_experts), jnp.int32))
    call = cutlass_call(
        _sort_launcher(*problem), output_shape_dtype=tuple(outputs), compile_key=("qwenjax sort_rows", *problem)
    )
    row_token, group_sizes, row_weight, token_rows, *_ = call(
        ids, weights, jnp.asarray(first_expert, jnp.int32).reshape(1)
    )
    return row_token, group_sizes, row_weight, token_rows


def sort_chunks(tokens: int, top_k: int, experts: int) -> int:
    """How many blocks sort these pairs."""
    chunks: int = _sorter(tokens, top_k, experts).chunks
    return chunks


def sum_rows(rows: jax.Array, token_rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Shapes as in the reference; dtype is bfloat16 or float32."""
    from cutlass.jax import cutlass_call

    tokens, top_k = token_rows.shape
    problem = (tokens, top_k, rows.shape[1], jnp.dtype(dtype).name)
    call = cutlass_call(
        _sum_launcher(*problem),
        output_shape_dtype=jax.ShapeDtypeStruct((tokens, rows.shape[1]), dtype),
        compile_key=("qwenjax sum_rows", *problem),
    )
    return call(rows, token_rows)


@functools.cache
def _sorter(tokens: int, top_k: int, experts: int) -> Any:
    from qwenjax_kernels.sort_rows import SortRows

    return SortRows(tokens=tokens, top_k=top_k, experts=experts)


@functools.cache
def _sort_launcher(tokens: int, top_k: int, experts: int) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass.cute as cute

    kernel = _sorter(tokens, top_k, experts)

    @cute.jit
    def one(stream, ids, weights, first_expert, row_token, group_sizes, row_weight, token_rows):  # type: ignore[no-untyped-def]
        kernel.launch(stream, ids, weights, first_expert, row_token, group_sizes, row_weight, token_rows, None)

    @cute.jit
    def two(  # type: ignore[no-untyped-def]
        stream, ids, weights, first_expert, row_token, group_sizes, row_weight, token_rows, chunk_counts
    ):
        kernel.launch(stream, ids, weights, first_expert, row_token, group_sizes, row_weight, token_rows, chunk_counts)

    return one if kernel.chunks == 1 else two


@functools.cache
def _sum_launcher(tokens: int, top_k: int, features: int, dtype: str) -> Any:
    """The `@cute.jit` function of one problem."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.sum_rows import SumRows

    out_dtype = {"bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}[dtype]
    kernel = SumRows(tokens=tokens, top_k=top_k, features=features, out_dtype=out_dtype)

    @cute.jit
    def launch(stream, rows, token_rows, out):  # type: ignore[no-untyped-def]
        kernel.launch(stream, rows, token_rows, out)

    return launch
