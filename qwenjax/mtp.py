"""The multi-token-prediction head: one decoder layer that guesses the token after the next, from what the model already
computed. Per-rank code, as qwenjax.model.

An entry of the head pairs the model's normalised hidden state at position i with the embedding of token i + 1, sits at
position i, and predicts token i + 2. Applied again to its own output and the embedding of the token it predicted, at
position i + 1, it predicts token i + 3, and so on. Embedding and lm_head are the model's. The structure and the order
(embedding first) are those of Qwen3-Next's head, as SGLang and vLLM run it.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from qwenjax.cache import AttentionContext
from qwenjax.config import ModelConfig, head_config
from qwenjax.model import Attention, Parameters, SparseExperts
from qwenjax.rope import cos_sin, inverse_frequencies
from qwenjax_ffi.linear import linear
from qwenjax_ffi.norm import rms_norm

Context = TypeVar("Context", bound=AttentionContext)

_LAYER = 0  # the only one of the head's stacks, which keep a layer axis for the sake of the modules they share


class MTPHead(nnx.Module):
    """The head's parameters and its forward pass.

    `config` is that of its one layer: create_cache(head.config, ...) makes its KV cache.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, make: Parameters) -> None:
        layer, hidden = head_config(config), config.hidden_size
        self.config = layer
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = make.ones(hidden), make.ones(hidden)
        self.fc = make.matrix((hidden, 2 * hidden))
        self.input_norm = make.ones(1, hidden)
        self.attention = Attention(layer, mesh, make)
        self.post_attention_norm = make.ones(1, hidden)
        self.experts = SparseExperts(layer, mesh, make)
        self.norm = make.ones(hidden)

    def __call__(
        self, embedding: jax.Array, hidden: jax.Array, context: Context, epochs: jax.Array
    ) -> tuple[jax.Array, Context, jax.Array]:
        """Runs entries at their context's positions.

        embedding: [batch, tokens, hidden] of the tokens after those that `hidden` [batch, tokens, hidden] was computed
        at, by the model or, from the second draft on, by this head; epochs: int32 [1], see qwenjax_ffi.collectives.
        Returns the normalised hidden states [batch, tokens, hidden], for Qwen3Moe.logits and the next draft, the
        context and the epochs.
        """
        config, layer = self.config, jnp.int32(_LAYER)
        rotary = cos_sin(
            context.positions, inverse_frequencies(config.rope, config.head_dim), config.rope.attention_factor
        )
        x = self.combine(embedding, hidden)
        normed = rms_norm(x, self.input_norm[_LAYER], config.rms_norm_eps)
        x, normed, context, epochs = self.attention.add_and_norm(
            x, normed, layer, rotary, context, self.post_attention_norm[...], epochs
        )
        valid = context.positions >= 0
        _, normed, epochs = self.experts.add_and_norm(x, normed, valid, layer, self.norm[None], layer, epochs)
        return normed, context, epochs

    def combine(self, embedding: jax.Array, hidden: jax.Array) -> jax.Array:
        """The layer's input [..., hidden]: both normalised, concatenated and projected to one width."""
        eps = self.config.rms_norm_eps
        parts = (
            rms_norm(embedding, self.pre_fc_norm_embedding[...], eps),
            rms_norm(hidden, self.pre_fc_norm_hidden[...], eps),
        )
        return linear(jnp.concatenate(parts, axis=-1), self.fc[...])
