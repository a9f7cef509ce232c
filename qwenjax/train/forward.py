"""The forward pass of training: the model's own modules, layer by layer, with the routers' balance on the side.

It computes what Qwen3Moe and MTPHead compute (a test holds them together). The layers are unrolled, so that the
gradient of a stack's slice needs no loop over the whole stack. Per-rank code, as qwenjax.model.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from qwenjax.cache import AttentionContext
from qwenjax.mesh import DATA
from qwenjax.model import Qwen3Moe, SparseExperts
from qwenjax.mtp import MTPHead
from qwenjax.rope import cos_sin, inverse_frequencies
from qwenjax_ffi.linear import linear
from qwenjax_ffi.norm import rms_norm
from qwenjax_ffi.routing import top_k_experts

Context = TypeVar("Context", bound=AttentionContext)


def model_forward(
    qwen: Qwen3Moe, tokens: jax.Array, context: Context, epochs: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, Context, jax.Array, jax.Array]:
    """Normalised hidden states [batch, tokens, hidden] of `dtype`, the context, the mean balance loss (see
    `balance_loss`) over the layers with experts, and the epochs.

    Parameters may be of another dtype than the activations: each is cast where it is used, so that gradients add up in
    the parameters' own.
    """
    return layers_forward(qwen, qwen.embed(tokens).astype(dtype), context, epochs)


def layers_forward(
    qwen: Qwen3Moe, x: jax.Array, context: Context, epochs: jax.Array
) -> tuple[jax.Array, Context, jax.Array, jax.Array]:
    """model_forward from the embeddings x [batch, tokens, hidden] on."""
    x, context, balances, epochs = first_layers(qwen, x, context, epochs, qwen.config.num_hidden_layers)
    balance = jnp.mean(jnp.stack(balances)) if balances else jnp.float32(0)
    return rms_norm(x, qwen.norm[...], qwen.config.rms_norm_eps), context, balance, epochs


def first_layers(
    qwen: Qwen3Moe, x: jax.Array, context: Context, epochs: jax.Array, count: int
) -> tuple[jax.Array, Context, list[jax.Array], jax.Array]:
    """The residual stream [batch, tokens, hidden] after `count` layers, and the balance loss of each with experts."""
    config = qwen.config
    balances = []
    for layer in range(count):
        x, normed, context, epochs = _attention(qwen, layer, x, context, epochs)
        if layer in config.sparse_layers:
            assert qwen.experts is not None
            index = config.sparse_layers.index(layer)
            balances.append(balance_loss(qwen.experts, normed, index))
            out, epochs = qwen.experts(normed, context.positions >= 0, jnp.int32(index), epochs)
        else:
            assert qwen.mlp is not None
            out, epochs = qwen.mlp(normed, jnp.int32(config.dense_layers.index(layer)), epochs)
        x = x + out
    return x, context, balances, epochs


def head_forward(
    head: MTPHead, embedding: jax.Array, hidden: jax.Array, context: Context, epochs: jax.Array
) -> tuple[jax.Array, Context, jax.Array, jax.Array]:
    """As MTPHead.__call__, with the balance loss of its layer before the epochs."""
    x = head.combine(embedding, hidden)
    x, normed, context, epochs = _attention(head, 0, x, context, epochs)
    balance = balance_loss(head.experts, normed, 0)
    out, epochs = head.experts(normed, context.positions >= 0, jnp.int32(0), epochs)
    return rms_norm(x + out, head.norm[...], head.config.rms_norm_eps), context, balance, epochs


def balance_loss(experts: SparseExperts, normed: jax.Array, index: int) -> jax.Array:
    """experts * sum over experts of (share of choices * mean probability): 1 where tokens spread evenly, up to
    experts / top_k where they do not (Fedus et al. 2021, arXiv:2101.03961, equation 4). Over all data ranks' tokens.
    """
    tokens = normed.reshape(-1, normed.shape[-1])
    logits = linear(tokens, experts.router[...], index, out_dtype=jnp.float32)
    _, ids = top_k_experts(logits, experts.top_k, experts.norm_topk_prob)
    count = logits.shape[-1]
    chosen = jnp.sum(ids[:, :, None] == jnp.arange(count), axis=(0, 1)) / ids.size
    probability = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=0)
    chosen, probability = jax.lax.pmean((chosen, probability), DATA)
    return count * jnp.sum(chosen * probability)


def _attention(
    module: Qwen3Moe | MTPHead, layer: int, x: jax.Array, context: Context, epochs: jax.Array
) -> tuple[jax.Array, jax.Array, Context, jax.Array]:
    """The first half of a decoder layer, and the normalised input of the second."""
    config = module.config
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    rotary = cos_sin(context.positions, frequencies, config.rope.attention_factor)
    normed = rms_norm(x, module.input_norm[layer], config.rms_norm_eps)
    out, context, epochs = module.attention(normed, jnp.int32(layer), rotary, context, epochs)
    x = x + out
    return x, rms_norm(x, module.post_attention_norm[layer], config.rms_norm_eps), context, epochs
