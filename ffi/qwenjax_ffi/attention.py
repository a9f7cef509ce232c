"""Attention over a paged KV cache, and writing to its pages. References in jnp.

A cache is a pair of arrays [layers, pages, kv_heads, page_size, head_dim] (HND pages: heads lead, tokens are
contiguous). Position p of a sequence lies in page page_table[p // page_size], at p % page_size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # far below any score, and finite: a row of padding has no key at all and must not become NaN


def write_pages(
    cache: jax.Array, values: jax.Array, page_table: jax.Array, positions: jax.Array, layer: jax.Array | int
) -> jax.Array:
    """The cache with `values` at their positions; in place where the cache is donated.

    cache: [layers, pages, kv_heads, page_size, head_dim]; values: [batch, tokens, kv_heads, head_dim]; page_table:
    int32 [batch, max_pages]; positions: int32 [batch, tokens], -1 for padding, which is not written.
    """
    num_pages, page_size = cache.shape[1], cache.shape[3]
    page = jnp.take_along_axis(page_table, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions >= 0, page, num_pages)  # out of range: dropped
    layer = jnp.asarray(layer, jnp.int32).reshape(())
    return cache.at[layer, page, :, positions % page_size].set(values.astype(cache.dtype), mode="drop")


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
) -> jax.Array:
    """Causal grouped-query attention of each query over the cached positions up to and with its own.

    q: [batch, tokens, q_heads, head_dim], q_heads a multiple of kv_heads; caches: [layers, pages, kv_heads, page_size,
    head_dim]; page_table: int32 [batch, max_pages]; positions: int32 [batch, tokens], -1 for padding (the result
    there is finite and means nothing). Scores are scaled by head_dim^-0.5; scores, softmax and sums in float32.
    Returns [batch, tokens, q_heads, head_dim] of q's dtype.
    """
    batch, head_dim = q.shape[0], q.shape[3]
    kv_heads, page_size = k_cache.shape[2], k_cache.shape[3]
    layer = jnp.asarray(layer, jnp.int32).reshape(())

    def gather(cache: jax.Array) -> jax.Array:
        pages = cache[layer, page_table]  # [batch, max_pages, kv_heads, page_size, head_dim]
        return pages.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)

    keys, values = gather(k_cache), gather(v_cache)
    position_of_key = jnp.arange(page_table.shape[1] * page_size)
    # What lies past the newest position was left by earlier sequences. It gets no weight, but 0 * NaN is NaN.
    written = position_of_key[None, :] <= jnp.max(positions, axis=1)[:, None]
    values = jnp.where(written[:, None, :, None], values, 0)
    return _attend(q, keys, values, position_of_key[None, None, :] <= positions[:, :, None])


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Causal grouped-query attention of each token over those of its own sequence, without a cache.

    q: [batch, tokens, q_heads, head_dim]; k, v: [batch, tokens, kv_heads, head_dim]; positions: int32 [batch, tokens],
    -1 for padding, which is attended to by none. Scaling, sums and result as paged_attention.
    """
    of_keys = positions[:, None, :]
    visible = (of_keys >= 0) & (of_keys <= positions[:, :, None])
    return _attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """keys, values: [batch, kv_heads, keys, head_dim]; visible: bool [batch, tokens, keys]."""
    batch, tokens, q_heads, head_dim = q.shape
    grouped = q.reshape(batch, tokens, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("btkgd,bksd->bkgts", grouped, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _MASKED), axis=-1)
    out = jnp.einsum("bkgts,bksd->btkgd", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
    return out.reshape(batch, tokens, q_heads, head_dim).astype(q.dtype)
