"""Attention over a paged KV cache, and writing to its pages. References in jnp.

Four forms attend to pages: our kernels, for decode steps (`attention_kernel`) and for chunks of prompts
(`prefill_attention_kernel`); cuDNN's over copies of the pages (`attention_gathered`); the reference, anywhere.

A cache is a pair of arrays [layers, pages, kv_heads, page_size, head_dim] (HND pages: heads lead, tokens are
contiguous). Position p of a sequence lies in page page_table[p // page_size], at p % page_size.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from qwenjax_ffi import attention_gathered, attention_kernel, prefill_attention_kernel
from qwenjax_ffi.implementation import Implementation, KernelUnavailableError, choose

Form = Literal["kernel", "prefill_kernel", "cudnn", "reference"]

_MASKED = -1e30  # far below any score, and finite: a row of padding has no key at all and must not become NaN


def write_pages(
    cache: jax.Array, values: jax.Array, page_table: jax.Array, positions: jax.Array, layer: jax.Array | int
) -> jax.Array:
    """The cache with `values` at their positions; in place where the cache is donated.

    cache: [layers, pages, kv_heads, page_size, head_dim]; values: [batch, tokens, kv_heads, head_dim]; page_table:
    int32 [batch, max_pages]; positions: int32 [batch, tokens], -1 for padding, which is not written, nor is what has no
    page of the cache.
    """
    num_pages, page_size = cache.shape[1], cache.shape[3]
    page = jnp.take_along_axis(page_table, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where((positions >= 0) & (page >= 0), page, num_pages)  # out of range: dropped
    layer = jnp.asarray(layer, jnp.int32).reshape(())
    return cache.at[layer, page, :, positions % page_size].set(values.astype(cache.dtype), mode="drop")


def write_keys_and_values(
    key_cache: jax.Array,
    value_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Both caches, as `write_pages` makes them; by a kernel in one launch."""
    k, v = k.astype(key_cache.dtype), v.astype(value_cache.dtype)
    why = attention_kernel.writes_unavailable(k, v, key_cache, value_cache)
    if choose("write_keys_and_values", implementation, why) == "kernel":
        return attention_kernel.write_pages(key_cache, value_cache, k, v, page_table, positions, layer)
    keys = write_pages(key_cache, k, page_table, positions, layer)
    return keys, write_pages(value_cache, v, page_table, positions, layer)


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`paged_attention` over the caches that `write_keys_and_values` returns, and these; one call where both run in
    kernels of ours."""
    k, v = k.astype(key_cache.dtype), v.astype(value_cache.dtype)
    unwritten = attention_kernel.writes_unavailable(k, v, key_cache, value_cache)
    if unwritten is None and choose_form(q, key_cache, value_cache, "auto") == "kernel":
        return attention_kernel.write_and_attend(q, k, v, key_cache, value_cache, page_table, positions, layer)
    keys, values = write_keys_and_values(key_cache, value_cache, k, v, page_table, positions, layer)
    return paged_attention(q, keys, values, page_table, positions, layer), keys, values


def unavailable_forms(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> dict[Form, str]:
    """Why each form that cannot run with these arguments on this machine cannot."""
    reasons: dict[Form, str | None] = {
        "kernel": attention_kernel.unavailable(q, k_cache, v_cache),
        "prefill_kernel": prefill_attention_kernel.unavailable(q, k_cache, v_cache),
        "cudnn": attention_gathered.unavailable(q, k_cache, v_cache),
    }
    return {form: reason for form, reason in reasons.items() if reason}


def choose_form(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, implementation: Form | Literal["auto"]) -> Form:
    """The form that is asked for; "auto": the first that can run of our kernels, cuDNN and the reference.

    Raises KernelUnavailableError where that form cannot run, ValueError for another word.
    """
    forms: tuple[Form, ...] = ("kernel", "prefill_kernel", "cudnn", "reference")
    unavailable = unavailable_forms(q, k_cache, v_cache)
    if implementation == "auto":
        return next(form for form in forms if form not in unavailable)
    if implementation not in forms:
        raise ValueError(f"paged_attention: implementation is {implementation!r}; it is 'auto' or one of {forms}")
    if implementation in unavailable:
        raise KernelUnavailableError(
            f"paged_attention: no {implementation} here: {unavailable[implementation]}; use implementation='auto'"
        )
    return implementation


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
    *,
    implementation: Form | Literal["auto"] = "auto",
) -> jax.Array:
    """Causal grouped-query attention of each query over the cached positions up to and with its own.

    q: [batch, tokens, q_heads, head_dim], q_heads a multiple of kv_heads; caches: [layers, pages, kv_heads, page_size,
    head_dim]; page_table: int32 [batch, max_pages]; positions: int32 [batch, tokens], -1 for padding (the result
    there is finite and means nothing). Scores are scaled by head_dim^-0.5; scores, softmax and sums in float32.
    Returns [batch, tokens, q_heads, head_dim] of q's dtype. A sequence's bits depend on its own values and on shapes,
    not on its neighbours (cuDNN's form: on the longest of them, too). `choose_form` says what runs and
    `unavailable_forms` why not.
    """
    form = choose_form(q, k_cache, v_cache, implementation)
    if form == "kernel":
        return attention_kernel.paged_attention(q, k_cache, v_cache, page_table, positions, layer)
    if form == "prefill_kernel":
        return prefill_attention_kernel.prefill_attention(q, k_cache, v_cache, page_table, positions, layer)
    if form == "cudnn":
        return attention_gathered.gathered_attention(q, k_cache, v_cache, page_table, positions, layer)
    batch, tokens, q_heads, head_dim = q.shape
    kv_heads, page_size = k_cache.shape[2], k_cache.shape[3]
    layer = jnp.asarray(layer, jnp.int32).reshape(())
    newest = jnp.max(positions, axis=1)
    grouped = q.reshape(batch, tokens, kv_heads, q_heads // kv_heads, head_dim)

    # One page of every sequence at a time, with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867):
    # work and memory follow the longest sequence there is rather than the longest there may be. Pages past a
    # sequence's own end change nothing in its row, so that its bits do not depend on its neighbours.
    def add_page(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        page = jax.lax.dynamic_index_in_dim(page_table, index, axis=1, keepdims=False)
        keys, values = k_cache[layer, page], v_cache[layer, page]  # [batch, kv_heads, page_size, head_dim]
        position_of_key = index * page_size + jnp.arange(page_size)
        # What lies past the newest position was left by earlier sequences. It gets no weight, but 0 * NaN is NaN.
        written = position_of_key[None, :] <= newest[:, None]
        values = jnp.where(written[:, None, :, None], values, 0)
        scores = jnp.einsum("btkgd,bksd->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        visible = position_of_key[None, None, :] <= positions[:, :, None]
        scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(visible[:, None, None], jnp.exp(scores - new_top), 0)
        scale = jnp.exp(top - new_top)
        total = total * scale + jnp.sum(weights, axis=-1, keepdims=True)
        added = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return new_top, total, out * scale + added

    rows = (batch, kv_heads, q_heads // kv_heads, tokens)
    start = (
        jnp.full((*rows, 1), _MASKED, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        jnp.zeros((*rows, head_dim), jnp.float32),
    )
    num_pages = jnp.max(newest) // page_size + 1  # 0 where all is padding: -1 // page_size is -1
    _, total, out = jax.lax.fori_loop(0, num_pages, add_page, start)
    out = out / jnp.where(total > 0, total, 1)
    return jnp.moveaxis(out, 3, 1).reshape(batch, tokens, q_heads, head_dim).astype(q.dtype)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Causal grouped-query attention of each token over those of its own sequence, without a cache.

    q: [batch, tokens, q_heads, head_dim]; k, v: [batch, tokens, kv_heads, head_dim]; positions: int32 [batch, tokens],
    -1 for padding, which is attended to by none. Scaling, sums and result as paged_attention.
    """
    v = jnp.where((positions >= 0)[:, :, None, None], v, 0)  # padding gets no weight, but 0 * NaN is NaN
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
