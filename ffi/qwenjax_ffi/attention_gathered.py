"""Attention over pages that are gathered into one run of keys per sequence, for dense attention kernels (cuDNN's)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

_SHORTEST_KEYS = 1024  # of a gathered run; longer ones double up to the longest sequence there may be
_FOLDED_ROWS = 128  # query rows of a kv head up to which a group's query heads become rows: its keys are read once


def unavailable(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> str | None:
    """Why cuDNN's attention cannot run here, or None."""
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, and cuDNN needs an NVIDIA GPU"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        return (
            f"queries are {q.dtype} and the caches {k_cache.dtype} and {v_cache.dtype}; "
            "cuDNN takes bfloat16 or float16, all alike"
        )
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"head_dim is {q.shape[-1]}; cuDNN takes multiples of 8 up to 128"
    return None


def run_lengths(max_pages: int, page_size: int) -> list[int]:
    """Numbers of pages that a program gathers, one of them chosen as it runs: powers of two and all."""
    counts = [max(1, _SHORTEST_KEYS // page_size)]
    while counts[-1] < max_pages:
        counts.append(2 * counts[-1])
    return [*(count for count in counts if count < max_pages), max_pages]


def gathered_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`qwenjax_ffi.attention.paged_attention` by copies of the pages and jax.nn.dot_product_attention.

    How many pages are copied follows the longest sequence of the call, in powers of two.
    """
    batch, tokens, q_heads, head_dim = q.shape
    layers, num_pages, kv_heads, page_size, _ = k_cache.shape
    group = q_heads // kv_heads
    newest = jnp.max(positions, axis=1)
    # One axis of pages over all layers: a layer's slice would be a copy of it.
    pages = page_table + jnp.asarray(layer, jnp.int32).reshape(()) * num_pages
    flat_keys, flat_values = (cache.reshape(layers * num_pages, *cache.shape[2:]) for cache in (k_cache, v_cache))
    fold = tokens * group <= _FOLDED_ROWS

    def attend(count: int) -> Callable[[], jax.Array]:
        def run() -> jax.Array:
            place = jnp.arange(count * page_size)
            # What lies past the newest position was left by earlier sequences and may be NaN.
            written = (place <= newest[:, None])[:, :, None, None]

            def gather(flat: jax.Array) -> jax.Array:
                rows = jnp.moveaxis(flat[pages[:, :count]], 2, 3)  # [batch, pages, page_size, kv_heads, head_dim]
                return jnp.where(written, rows.reshape(batch, -1, kv_heads, head_dim), 0)

            keys, values = gather(flat_keys), gather(flat_values)
            queries = q
            if fold:  # [batch, tokens * group, kv_heads, head_dim]
                queries = q.reshape(batch, tokens, kv_heads, group, head_dim).swapaxes(2, 3)
                queries = queries.reshape(batch, tokens * group, kv_heads, head_dim)
            if tokens == 1:
                lengths = jnp.maximum(newest + 1, 1)  # a row without any key would be NaN
                out = jax.nn.dot_product_attention(
                    queries, keys, values, key_value_seq_lengths=lengths, implementation=implementation
                )
            else:
                visible = place <= jnp.maximum(positions, 0)[:, :, None]
                mask = jnp.repeat(visible, group, axis=1) if fold else visible
                out = jax.nn.dot_product_attention(
                    queries, keys, values, mask=mask[:, None], implementation=implementation
                )
            if fold:
                out = out.reshape(batch, tokens, group, kv_heads, head_dim).swapaxes(2, 3)
            return out.reshape(q.shape).astype(q.dtype)

        return run

    counts = run_lengths(page_table.shape[1], page_size)
    needed = jnp.max(newest) // page_size + 1
    chosen = jnp.searchsorted(jnp.array(counts), needed)
    return jax.lax.switch(chosen, [attend(count) for count in counts])
