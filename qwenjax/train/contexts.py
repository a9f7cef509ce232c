"""What tokens attend to in training: whole windows without padding, and the drafts of several depths over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp

from qwenjax_ffi.attention import causal_attention

KeysAndValues = tuple[jax.Array, jax.Array]

_MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowContext:
    """Causal attention over the call's own tokens, every row a full window; through cuDNN on a GPU in bf16.

    cuDNN keeps no scores: at 64 windows of 1,024 tokens and 8 heads those would be 2 GB a layer in float32, several
    times over. positions: int32 [batch, tokens], 0 to tokens - 1 in each row.
    """

    positions: jax.Array

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> tuple[jax.Array, Self]:
        return _window_attention(q, k, v, self.positions), self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftContext:
    """Attention of the multi-token-prediction head at one depth after another, as it will be when it drafts.

    The draft of depth d that sets out from window position i sits at position i + d - 1. It attends to the head's
    entries of depth 1 at positions 0 to i, which were computed from the model's own hidden states, then to its own
    drafts' of depths 2 to d: what the head's cache holds while it drafts. (Attention within one depth, as in
    DeepSeek-V3's training, would show it entries of depth d at every earlier position, which it never has then.)

    positions: int32 [batch, tokens], those of the current depth. entries: keys and values [batch, tokens, kv_heads,
    head_dim] of the depths so far.
    """

    positions: jax.Array
    entries: tuple[KeysAndValues, ...] = ()

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> tuple[jax.Array, Self]:
        entries = (*self.entries, (k, v))
        out = _window_attention(q, k, v, self.positions) if len(entries) == 1 else _draft_attention(q, entries)
        return out, replace(self, entries=entries)

    def deeper(self) -> Self:
        """The context of the next depth."""
        return replace(self, positions=self.positions + 1)


def _window_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return causal_attention(q, k, v, positions)


def _draft_attention(q: jax.Array, entries: tuple[KeysAndValues, ...]) -> jax.Array:
    """q: [batch, tokens, q_heads, head_dim], at the depth of the last entries. Sums in float32."""
    batch, tokens, _, head_dim = q.shape
    (first_keys, first_values), *later = entries
    grouped = q.reshape(batch, tokens, first_keys.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, first_keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, _MASKED)
    own = [
        jnp.einsum("btkgd,btkd->bkgt", grouped, keys, preferred_element_type=jnp.float32)[..., None]
        for keys, _ in later
    ]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1) * head_dim**-0.5, axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights[..., :tokens], first_values, preferred_element_type=jnp.float32)
    for depth, (_, values) in enumerate(later):
        share = jnp.moveaxis(weights[..., tokens + depth], -1, 1)[..., None]
        out += share.astype(jnp.float32) * values[:, :, :, None].astype(jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)
