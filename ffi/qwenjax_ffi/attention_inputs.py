"""From the rows of attention's projections to its queries, keys and values: norms of heads and their rotation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax_ffi import token_kernels as kernels
from qwenjax_ffi.implementation import Implementation, choose, with_gradient
from qwenjax_ffi.norm import rms_norm
from qwenjax_ffi.weights import select_layer


def attention_inputs(
    qkv: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    layer: jax.Array | int,
    eps: float,
    cos: jax.Array,
    sin: jax.Array,
    kv_heads: int,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v [batch, tokens, heads, head_dim] of qkv [batch, tokens, features]; q and k by head normed and rotated.

    qkv: the features of all query heads, then of kv_heads key heads, then of as many value heads. q_norm, k_norm:
    [layers, head_dim], of which `layer` (int32 [1] or scalar) is taken; cos, sin: float32 [batch, tokens,
    head_dim / 2].
    A head is rounded to qkv's dtype after its norm and after its rotation, see `norm.rms_norm` and `rotate`.
    """
    head_dim = q_norm.shape[-1]
    q_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    if qkv.shape[-1] % head_dim or q_heads < 1:
        raise ValueError(f"{qkv.shape[-1]} features are not query heads and {2 * kv_heads} others of {head_dim}")

    def reference(
        qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array, layer: jax.Array | int, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Apart before they are heads: where qkv was put together of three, XLA takes the three.
        parts = jnp.split(qkv, [q_heads * head_dim, (q_heads + kv_heads) * head_dim], axis=-1)
        q, k, v = (part.reshape(*part.shape[:-1], -1, head_dim) for part in parts)
        q = rotate(rms_norm(q, select_layer(q_norm, layer), eps), cos, sin)
        k = rotate(rms_norm(k, select_layer(k_norm, layer), eps), cos, sin)
        return q, k, v

    unavailable = kernels.head_norms_unavailable(qkv, q_norm, k_norm)
    if choose("attention_inputs", implementation, unavailable) == "reference":
        return reference(qkv, q_norm, k_norm, layer, cos, sin)
    call = with_gradient(
        # The layer as an array: what is differentiated takes no Python numbers.
        lambda qkv, q_norm, k_norm, layer, cos, sin: kernels.head_norms(
            qkv, q_norm, k_norm, layer, eps, cos, sin, kv_heads
        ),
        reference,
    )
    heads: tuple[jax.Array, jax.Array, jax.Array] = call(qkv, q_norm, k_norm, jnp.asarray(layer, jnp.int32), cos, sin)
    return heads


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + head_dim / 2) of each head, in float32.

    x: [batch, tokens, heads, head_dim]; cos, sin: float32 [batch, tokens,
    head_dim / 2].
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
