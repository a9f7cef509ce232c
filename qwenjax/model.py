"""Qwen3-MoE in Flax NNX, as per-rank code: everything here runs under one shard_map over the (data, model) mesh.

Weights of all layers are stacked, [layers, ...], and one loop runs over them, so that a program's size does not grow
with depth and a kernel can take the stack and a layer index. Matrices are [out, in], as in checkpoints.
The model follows transformers' Qwen3MoeForCausalLM.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from qwenjax.cache import AttentionContext, PagedContext
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.mesh import DATA, MODEL, check_divides, say_where_collectives_are_references
from qwenjax.rope import cos_sin, inverse_frequencies
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.attention_chain_kernel import AttentionWeights
from qwenjax_ffi.attention_inputs import attention_inputs
from qwenjax_ffi.collectives import all_reduce, all_reduce_rms_norm
from qwenjax_ffi.expert_parallel import (
    ExpertWeights,
    moe_replicated_tokens,
    moe_replicated_tokens_rms_norm,
    moe_sharded_tokens,
    routed_experts_rms_norm,
)
from qwenjax_ffi.experts_kernel import Router
from qwenjax_ffi.linear import linear, linear_side_by_side
from qwenjax_ffi.norm import add_rms_norm, rms_norm
from qwenjax_ffi.routing import top_k_experts

Context = TypeVar("Context", bound=AttentionContext)

_INIT_STDDEV = 0.02  # transformers' initializer_range for Qwen3-MoE


def _layers_together() -> int | None:
    """Layers of a turn of the loop over them: four on a GPU; 8 to 24 were no faster (bench/results/engine-h200.md)."""
    return 4 if jax.default_backend() == "gpu" else None


class Parameters:
    """Makes the parameters of a module: random matrices and unit norms, each with the PartitionSpec of its axes.

    activation_format: what the linear layers that are quantised multiply (attention, experts, dense MLPs).
    """

    def __init__(self, rngs: nnx.Rngs, dtype: jnp.dtype, activation_format: ActivationFormat = "model") -> None:
        self.rngs, self.dtype, self.activation_format = rngs, dtype, activation_format

    def matrix(self, shape: tuple[int, ...], *spec: Any) -> nnx.Param:
        value = jax.random.normal(self.rngs.params(), shape, self.dtype) * jnp.asarray(_INIT_STDDEV, self.dtype)
        return nnx.Param(value, spec=PartitionSpec(*spec))

    def ones(self, *shape: int) -> nnx.Param:
        return nnx.Param(jnp.ones(shape, self.dtype), spec=PartitionSpec())

    def zeros(self, shape: tuple[int, ...], *spec: Any) -> nnx.Param:
        return nnx.Param(jnp.zeros(shape, self.dtype), spec=PartitionSpec(*spec))


class Attention(nnx.Module):
    """Grouped-query attention of all layers, query and output split by head over the model ranks.

    Where there are more model ranks than kv heads, k_proj and v_proj are on every rank and each computes the one head
    that its query heads share.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, make: Parameters) -> None:
        layers, hidden, head_dim = config.num_hidden_layers, config.hidden_size, config.head_dim
        q_width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        ranks = mesh.shape[MODEL]
        split_kv = MODEL if config.num_key_value_heads % ranks == 0 else None
        self.eps, self.head_dim, self.activation_format = config.rms_norm_eps, head_dim, make.activation_format
        self.model_ranks = ranks
        self.ranks_per_kv_head = 1 if split_kv else ranks // config.num_key_value_heads
        self.q_proj = make.matrix((layers, q_width, hidden), None, MODEL)
        self.k_proj = make.matrix((layers, kv_width, hidden), None, split_kv)
        self.v_proj = make.matrix((layers, kv_width, hidden), None, split_kv)
        self.o_proj = make.matrix((layers, hidden, q_width), None, None, MODEL)
        self.q_norm, self.k_norm = make.ones(layers, head_dim), make.ones(layers, head_dim)
        bias = config.attention_bias
        self.q_bias = make.zeros((layers, q_width), None, MODEL) if bias else nnx.data(None)
        self.k_bias = make.zeros((layers, kv_width), None, split_kv) if bias else nnx.data(None)
        self.v_bias = make.zeros((layers, kv_width), None, split_kv) if bias else nnx.data(None)
        self.o_bias = make.zeros((layers, hidden)) if bias else nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        layer: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        context: Context,
        epochs: jax.Array,
    ) -> tuple[jax.Array, Context, jax.Array]:
        out, context = self.local(x, layer, rotary, context)
        out, epochs = all_reduce(out, MODEL, epochs)
        return out if self.o_bias is None else out + self.o_bias[layer], context, epochs

    def local(
        self, x: jax.Array, layer: jax.Array, rotary: tuple[jax.Array, jax.Array], context: Context
    ) -> tuple[jax.Array, Context]:
        """What this rank's heads add to the layer's output, without the bias."""
        if found := self._chain(x, layer, rotary, context):
            (out,), context = found
            return out, context
        projections = [(self.q_proj, self.q_bias), (self.k_proj, self.k_bias), (self.v_proj, self.v_bias)]
        weights = [weight[...] for weight, _ in projections]
        if self.q_bias is None:
            qkv = linear_side_by_side(x, weights, layer, activation_format=self.activation_format)
        else:
            qkv = jnp.concatenate([self._linear(x, weight, layer, bias) for weight, bias in projections], axis=-1)
        kv_heads = weights[1].shape[-2] // self.head_dim
        norms = self.q_norm[...], self.k_norm[...]
        q, k, v = attention_inputs(qkv, *norms, layer, self.eps, *rotary, kv_heads)
        out, context = context.attend(q, self._shared_head(k), self._shared_head(v), layer)
        return self._linear(out.reshape(*x.shape[:2], -1), self.o_proj, layer), context

    def add_and_norm(
        self,
        x: jax.Array,
        normed: jax.Array,
        layer: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        context: Context,
        weights: jax.Array,
        epochs: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Context, jax.Array]:
        """x + attention's result for normed, its RMSNorm times weights[layer], the context and the epochs."""
        if (
            self.model_ranks == 1
            and self.o_bias is None
            and (found := self._chain(normed, layer, rotary, context, (x, weights)))
        ):
            (total, normed), context = found
            return total, normed, context, epochs
        out, context = self.local(normed, layer, rotary, context)
        if self.o_bias is None:
            x, normed, epochs = all_reduce_rms_norm(out, x, weights, self.eps, MODEL, epochs, layer)
        else:
            out, epochs = all_reduce(out, MODEL, epochs)
            x, normed = add_rms_norm(x, out + self.o_bias[layer], weights, self.eps, layer)
        return x, normed, context, epochs

    def _chain(
        self,
        x: jax.Array,
        layer: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        context: Context,
        norm: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[tuple[jax.Array, ...], Context] | None:
        """`PagedContext.attend_layer`, where it can run."""
        if not isinstance(context, PagedContext) or self.q_bias is not None or self.ranks_per_kv_head > 1:
            return None
        qkv = self.q_proj[...], self.k_proj[...], self.v_proj[...]
        weights = AttentionWeights(qkv, self.o_proj[...], (self.q_norm[...], self.k_norm[...]), self.eps, layer)
        return context.attend_layer(x, weights, rotary, self.activation_format, norm)

    def _linear(self, x: jax.Array, weight: nnx.Param, layer: jax.Array, bias: nnx.Param | None = None) -> jax.Array:
        return linear(x, weight[...], layer, _value(bias), activation_format=self.activation_format)

    def _shared_head(self, heads: jax.Array) -> jax.Array:
        """Of [batch, tokens, kv_heads, head_dim] on every rank, the one that this rank's query heads share."""
        if self.ranks_per_kv_head == 1:
            return heads
        return jax.lax.dynamic_slice_in_dim(heads, jax.lax.axis_index(MODEL) // self.ranks_per_kv_head, 1, axis=2)


class SparseExperts(nnx.Module):
    """The MoE layers: router on every rank, experts spread over all ranks of the mesh."""

    def __init__(self, config: ModelConfig, mesh: Mesh, make: Parameters) -> None:
        layers, hidden, width = len(config.sparse_layers), config.hidden_size, config.moe_intermediate_size
        experts, ranks = config.num_experts, (DATA, MODEL)
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.eps = config.rms_norm_eps
        self.data_ranks, self.model_ranks = mesh.shape[DATA], mesh.shape[MODEL]
        self.activation_format = make.activation_format
        self.router = make.matrix((layers, experts, hidden))
        self.w13 = make.matrix((layers, experts, 2 * width, hidden), None, ranks)
        self.w2 = make.matrix((layers, experts, hidden, width), None, ranks)

    def __call__(
        self, x: jax.Array, valid: jax.Array, index: jax.Array, epochs: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x: [batch, tokens, hidden]; valid: bool [batch, tokens], false for padding; index: among the MoE layers."""
        tokens, ids, weights, experts = self._routed(x, valid, index)
        ranks, kept_as = (DATA, MODEL), self.activation_format
        if self.data_ranks == 1:
            out, epochs = moe_replicated_tokens(tokens, ids, weights, experts, ranks, epochs, kept_as)
        elif self.model_ranks == 1:
            out, epochs = moe_sharded_tokens(tokens, ids, weights, experts, ranks, epochs, kept_as)
        else:
            all_x, all_ids, all_weights = jax.lax.all_gather((tokens, ids, weights), DATA, tiled=True)
            total, epochs = moe_replicated_tokens(all_x, all_ids, all_weights, experts, ranks, epochs, kept_as)
            start = jax.lax.axis_index(DATA) * tokens.shape[0]
            out = jax.lax.dynamic_slice_in_dim(total, start, tokens.shape[0])
        return out.reshape(x.shape), epochs

    def add_and_norm(
        self,
        x: jax.Array,
        normed: jax.Array,
        valid: jax.Array,
        index: jax.Array,
        norms: jax.Array,
        layer: jax.Array,
        epochs: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x + the experts' results for normed, its RMSNorm times norms[layer], and the epochs."""
        if self.data_ranks > 1:
            out, epochs = self(normed, valid, index, epochs)
            return *add_rms_norm(x, out, norms, self.eps, layer), epochs
        if self.model_ranks == 1:
            router = Router(self.router[...], valid.reshape(-1), self.top_k, self.norm_topk_prob)
            experts = ExpertWeights(self.w13[...], self.w2[...], index)
            rows, residual = (array.reshape(-1, x.shape[-1]) for array in (normed, x))
            found = routed_experts_rms_norm(
                rows, router, experts, residual, norms, layer, self.eps, self.activation_format
            )
            if found is not None:
                return found[0].reshape(x.shape), found[1].reshape(x.shape), epochs
        tokens, ids, weights, experts = self._routed(normed, valid, index)
        total, total_normed, epochs = moe_replicated_tokens_rms_norm(
            tokens, ids, weights, experts, (DATA, MODEL), x.reshape(tokens.shape), norms, self.eps, epochs,
            self.activation_format, layer,
        )  # fmt: skip
        return total.reshape(x.shape), total_normed.reshape(x.shape), epochs

    def _routed(
        self, x: jax.Array, valid: jax.Array, index: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, ExpertWeights]:
        """The tokens [batch * tokens, hidden], their experts and routing weights, and the experts of this rank."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = linear(tokens, self.router[...], index, out_dtype=jnp.float32)
        weights, ids = top_k_experts(logits, self.top_k, self.norm_topk_prob, valid.reshape(-1))
        return tokens, ids, weights, ExpertWeights(self.w13[...], self.w2[...], index)


class DenseMLP(nnx.Module):
    """The layers without experts: one SwiGLU MLP, its width split over the model ranks."""

    def __init__(self, config: ModelConfig, make: Parameters) -> None:
        layers, hidden, width = len(config.dense_layers), config.hidden_size, config.intermediate_size
        self.eps, self.activation_format = config.rms_norm_eps, make.activation_format
        self.gate_proj = make.matrix((layers, width, hidden), None, MODEL)
        self.up_proj = make.matrix((layers, width, hidden), None, MODEL)
        self.down_proj = make.matrix((layers, hidden, width), None, None, MODEL)

    def __call__(self, x: jax.Array, index: jax.Array, epochs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x: [batch, tokens, hidden]; index: among the dense layers."""
        return all_reduce(self._local(x, index), MODEL, epochs)

    def add_and_norm(
        self, x: jax.Array, normed: jax.Array, index: jax.Array, norms: jax.Array, layer: jax.Array, epochs: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x + the MLP's result for normed, its RMSNorm times norms[layer], and the epochs."""
        return all_reduce_rms_norm(self._local(normed, index), x, norms, self.eps, MODEL, epochs, layer)

    def _local(self, x: jax.Array, index: jax.Array) -> jax.Array:
        kept_as = self.activation_format
        weights = [self.gate_proj[...], self.up_proj[...]]
        both = linear_side_by_side(x, weights, index, out_dtype=jnp.float32, activation_format=kept_as)
        gate, up = jnp.split(both, 2, axis=-1)
        hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
        return linear(hidden, self.down_proj[...], index, activation_format=kept_as)


class Qwen3Moe(nnx.Module):
    """The whole model. Parameters have the shapes of the whole mesh outside shard_map and of one rank inside."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        activation_format: ActivationFormat = "model",
    ) -> None:
        """Random parameters of `dtype` (default: the config's). Raises MeshError where the mesh does not fit.

        activation_format: what the inputs of attention's, the experts' and the dense MLPs' projections are rounded to.
        """
        check_divides(config, mesh)
        say_where_collectives_are_references(mesh)
        make = Parameters(rngs, jnp.dtype(dtype or DTYPES[config.dtype]), activation_format)
        # A vocabulary that the model ranks do not divide is kept whole on each.
        self.split_vocab = mesh.shape[MODEL] > 1 and config.vocab_size % mesh.shape[MODEL] == 0
        vocab_axis = MODEL if self.split_vocab else None
        self.config = config
        self.embed_tokens = make.matrix((config.vocab_size, config.hidden_size), vocab_axis)
        self.input_norm = make.ones(config.num_hidden_layers, config.hidden_size)
        self.attention = Attention(config, mesh, make)
        self.post_attention_norm = make.ones(config.num_hidden_layers, config.hidden_size)
        self.experts = SparseExperts(config, mesh, make) if config.sparse_layers else nnx.data(None)
        self.mlp = DenseMLP(config, make) if config.dense_layers else nnx.data(None)
        self.norm = make.ones(config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else make.matrix((config.vocab_size, config.hidden_size), vocab_axis)
        if config.mtp_num_hidden_layers:
            from qwenjax.mtp import MTPHead  # here, since the head is built of this module's layers

            self.mtp: MTPHead | None = MTPHead(config, mesh, make)
        else:
            self.mtp = nnx.data(None)

    def __call__(self, tokens: jax.Array, context: Context, epochs: jax.Array) -> tuple[jax.Array, Context, jax.Array]:
        """Runs tokens at their context's positions.

        tokens: int32 [batch, tokens] of this data rank; epochs: int32 [words], see qwenjax_ffi.collectives.
        Returns the last layer's normalised hidden states [batch, tokens, hidden], the context and the epochs.
        """
        x, context, epochs = self.layers(self.embed(tokens), context, epochs, 0, self.config.num_hidden_layers)
        return self.normalised(x), context, epochs

    def layers(
        self, x: jax.Array, context: Context, epochs: jax.Array, start: jax.Array | int, count: int
    ) -> tuple[jax.Array, Context, jax.Array]:
        """Runs `count` layers from `start` on x [batch, tokens, hidden]; they return as much, not normalised."""
        config = self.config
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        rotary = cos_sin(context.positions, frequencies, config.rope.attention_factor)
        valid = context.positions >= 0
        is_sparse = np.isin(np.arange(config.num_hidden_layers), config.sparse_layers)
        index_in_stack = jnp.asarray(np.where(is_sparse, np.cumsum(is_sparse), np.cumsum(~is_sparse)) - 1, jnp.int32)

        # What a layer's sum is normalised with is the next layer's, so that one operation adds and normalises it.
        next_norms = jnp.concatenate([self.input_norm[1:], self.norm[None]])

        def feed_forward(
            x: jax.Array, normed: jax.Array, layer: jax.Array, epochs: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            experts, mlp = self.experts, self.mlp
            if experts is None:
                assert mlp is not None
                return mlp.add_and_norm(x, normed, layer, next_norms, layer, epochs)
            if mlp is None:
                return experts.add_and_norm(x, normed, valid, layer, next_norms, layer, epochs)
            index = index_in_stack[layer]
            return jax.lax.cond(
                jnp.asarray(is_sparse)[layer],
                lambda: experts.add_and_norm(x, normed, valid, index, next_norms, layer, epochs),
                lambda: mlp.add_and_norm(x, normed, index, next_norms, layer, epochs),
            )

        def block(
            place: jax.Array, carry: tuple[jax.Array, jax.Array, Context, jax.Array]
        ) -> tuple[jax.Array, jax.Array, Context, jax.Array]:
            layer = start + place
            x, normed, context, epochs = carry
            x, normed, context, epochs = self.attention.add_and_norm(
                x, normed, layer, rotary, context, self.post_attention_norm[...], epochs
            )
            x, normed, epochs = feed_forward(x, normed, layer, epochs)
            return x, normed, context, epochs

        normed = rms_norm(x, self.input_norm[start], config.rms_norm_eps)
        carry = x, normed, context, epochs
        x, _, context, epochs = jax.lax.fori_loop(0, count, block, carry, unroll=_layers_together())
        return x, context, epochs

    def normalised(self, x: jax.Array) -> jax.Array:
        """The hidden states that `logits` takes, of what the last layer returned."""
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., vocab] of normalised hidden states [..., hidden], the same on every model rank."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        local = linear(hidden, head[...], out_dtype=jnp.float32)
        return jax.lax.all_gather(local, MODEL, axis=local.ndim - 1, tiled=True) if self.split_vocab else local

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [..., hidden] of tokens int32 [...], the same on every model rank."""
        table = self.embed_tokens[...]
        if not self.split_vocab:
            return table[tokens]
        local = tokens - jax.lax.axis_index(MODEL) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        # One rank has the row and the others add zeros, which is exact.
        return jax.lax.psum(jnp.where(here[..., None], table[local], 0), MODEL)


def _value(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def abstract_model(
    config: ModelConfig,
    mesh: Mesh,
    dtype: jnp.dtype | None = None,
    activation_format: ActivationFormat = "model",
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and the shapes of its parameters, without making any; arguments as Qwen3Moe's."""
    model = nnx.eval_shape(
        lambda: Qwen3Moe(config, mesh, rngs=nnx.Rngs(0), dtype=dtype, activation_format=activation_format)
    )
    return nnx.split(model)


def partition_specs(state: nnx.State) -> Any:
    """The state's tree with a PartitionSpec in place of every parameter."""
    return jax.tree.map(lambda p: p.get_metadata("spec"), state, is_leaf=lambda p: isinstance(p, nnx.Variable))
