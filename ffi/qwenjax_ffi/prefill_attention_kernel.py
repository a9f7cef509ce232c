"""Our kernel of attention for chunks of prompts, `prefill_attention` of `qwenjax_kernels`, as a JAX function.

The reference in `attention` defines the results, `unavailable` says why the kernel cannot run with some arguments.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.attention_kernel import machine_unavailable, pages_unsupported
from qwenjax_kernels.prefill_attention_limits import HEAD_DIM, PAGE_SIZES


def unavailable(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> str | None:
    """Why the kernel cannot run with these arguments on this machine; None where it can."""
    return machine_unavailable() or unsupported(q, k_cache, v_cache)


def unsupported(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> str | None:
    """Why the kernel does not take these arguments on any machine; None where it does."""
    return pages_unsupported(q, k_cache, v_cache, (HEAD_DIM,), PAGE_SIZES)


def prefill_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
) -> jax.Array:
    """`qwenjax_ffi.attention.paged_attention` for what `unsupported` lets pass. Raises ValueError for anything else."""
    if reason := unsupported(q, k_cache, v_cache):
        raise ValueError(f"prefill_attention: {reason}")
    batch, tokens, q_heads, _ = q.shape
    layers, num_pages, kv_heads, page_size, _ = k_cache.shape
    sizes = (batch, tokens, q_heads, kv_heads, layers, num_pages, page_size, page_table.shape[1])
    problem = (q.dtype.name, *sizes)
    from cutlass.jax import cutlass_call

    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compile_key=("qwenjax prefill_attention", *problem),
    )
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    return call(q, k_cache, v_cache, page_table.astype(jnp.int32), positions.astype(jnp.int32), index)


@functools.cache
def _launcher(
    dtype: str,
    batch: int,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    layers: int,
    num_pages: int,
    page_size: int,
    max_pages: int,
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.prefill_attention import PrefillAttention

    kernel = PrefillAttention(
        dtype={"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype],
        batch=batch,
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        layers=layers,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
    )

    @cute.jit
    def launch(stream, q, k_cache, v_cache, page_table, positions, layer, out):  # type: ignore[no-untyped-def]
        kernel.launch(stream, q, k_cache, v_cache, page_table, positions, layer, out)

    return launch
