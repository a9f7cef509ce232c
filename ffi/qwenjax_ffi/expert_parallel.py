"""The experts of an MoE layer spread over the ranks of a mesh: two ways, with one local part. References in jnp.

Both run under shard_map; the experts are split evenly over the ranks of `axis_name`, in rank order, and each rank
passes its own share of w13 and w2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.collectives import AxisName, advance, all_reduce
from qwenjax_ffi.experts_training import local_experts_training
from qwenjax_ffi.grouped_gemm import moe_down, moe_gate_up, sum_rows
from qwenjax_ffi.packing import AnyWeight
from qwenjax_ffi.routing import sort_rows


class ExpertWeights(NamedTuple):
    """A rank's experts. w13: [layers, local experts, 2 * width, hidden], gate first; w2: [layers, local experts,
    hidden, width]; layer: int32 scalar or [1], the layer of both stacks to use."""

    w13: AnyWeight
    w2: AnyWeight
    layer: jax.Array | int


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def local_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    first_expert: jax.Array | int,
    activation_format: ActivationFormat = "model",
) -> jax.Array:
    """What this rank's experts add to each token: [tokens, hidden] of x's dtype, zeros where none was chosen.

    x: [tokens, hidden]; ids: int32 [tokens, top_k], -1 for none; weights: float32 [tokens, top_k]. Rows are added in
    float32 and rounded once. Where it is
    differentiated (in x, weights and plain expert weights), qwenjax_ffi.experts_training's form runs instead.
    """
    rows = sort_rows(ids, weights, first_expert, experts.w13.shape[1])
    hidden = moe_gate_up(
        x, rows.row_token, rows.group_sizes, experts.w13, experts.layer, activation_format=activation_format
    )
    out = moe_down(
        hidden, rows.group_sizes, experts.w2, rows.row_weight, experts.layer, activation_format=activation_format
    )
    return sum_rows(out, rows.token_rows, x.dtype)


def _local_experts_forward(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    first_expert: jax.Array | int,
    activation_format: ActivationFormat,
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    if activation_format != "model":
        raise ValueError(f"activation_format {activation_format!r} cannot be differentiated; train with 'model'")

    def form(x: jax.Array, weights: jax.Array, w13: AnyWeight, w2: AnyWeight) -> jax.Array:
        return local_experts_training(x, ids, weights, w13, w2, experts.layer, first_expert).astype(x.dtype)

    return jax.vjp(form, x, weights, experts.w13, experts.w2)


def _local_experts_backward(
    activation_format: ActivationFormat,
    pullback: Callable[[jax.Array], tuple[jax.Array, ...]],
    cotangent: jax.Array,
) -> tuple[jax.Array, None, jax.Array, ExpertWeights, None]:
    dx, dweights, dw13, dw2 = pullback(cotangent)
    return dx, None, dweights, ExpertWeights(dw13, dw2, None), None  # type: ignore[arg-type]


local_experts.defvjp(_local_experts_forward, _local_experts_backward)


def moe_replicated_tokens(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    axis_name: AxisName,
    epochs: jax.Array,
    activation_format: ActivationFormat = "model",
) -> tuple[jax.Array, jax.Array]:
    """Every rank has all tokens: each runs its own experts' rows, and the results are summed over the ranks.

    x: [tokens, hidden], ids int32 and weights float32 [tokens, top_k]: the same on every rank of `axis_name`.
    Returns ([tokens, hidden] of x's dtype, the same on every rank, and the advanced epochs).
    """
    first = jax.lax.axis_index(axis_name) * experts.w13.shape[1]
    partial = local_experts(x, ids, weights, experts, first, activation_format)
    return all_reduce(partial, axis_name, epochs)


class Dispatched(NamedTuple):
    """What a rank received. x: [ranks, max_tokens, hidden]; ids int32 and weights float32 [ranks, max_tokens, top_k],
    ids -1 in unused slots; counts: int32 [ranks], tokens from each rank. slots: int32 [tokens, ranks], where each of
    this rank's own tokens lies at each rank, -1 where it was not sent."""

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    counts: jax.Array
    slots: jax.Array


def dispatch(
    x: jax.Array, ids: jax.Array, weights: jax.Array, experts_per_rank: int, axis_name: AxisName, epochs: jax.Array
) -> tuple[Dispatched, jax.Array]:
    """Sends each token once to every rank that has one of its experts.

    x: [max_tokens, hidden], this rank's own tokens; ids: int32 [max_tokens, top_k], -1 for padding; weights: float32
    [max_tokens, top_k]. Slots are given out in token order. Nothing is dropped: each rank has a slot for every token
    of every other.
    """
    ranks = jax.lax.axis_size(axis_name)
    max_tokens = x.shape[0]
    # goes[t, r]: token t has an expert at rank r.
    goes = jnp.any((ids // experts_per_rank)[:, :, None] == jnp.arange(ranks), axis=1, where=ids[:, :, None] >= 0)
    slot = jnp.where(goes, jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1, max_tokens)
    # token[r, s]: the token in slot s of rank r; max_tokens where the slot is unused.
    token = jnp.full((ranks, max_tokens), max_tokens, jnp.int32)
    token = token.at[jnp.arange(ranks)[None, :], slot].set(
        jnp.arange(max_tokens, dtype=jnp.int32)[:, None], mode="drop"
    )
    counts = jnp.sum(goes, axis=0, dtype=jnp.int32)

    def send(values: jax.Array, fill: float) -> jax.Array:
        packed = values.at[token].get(mode="fill", fill_value=fill)
        return jax.lax.all_to_all(packed, axis_name, 0, 0)

    x, epochs = jax.lax.optimization_barrier((x, epochs))
    sent_x, sent_ids, sent_weights = send(x, 0), send(ids, -1), send(weights, 0)
    received = jax.lax.all_to_all(counts[:, None], axis_name, 0, 0)[:, 0]
    there = Dispatched(sent_x, sent_ids, sent_weights, received, jnp.where(goes, slot, -1))
    return jax.lax.optimization_barrier((there, advance(epochs)))


def combine(
    partial: jax.Array, slots: jax.Array, axis_name: AxisName, epochs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Brings the experts' sums home and adds them, in float32 and in rank order.

    partial: [ranks, max_tokens, hidden], in the slots of `dispatch`; slots: int32 [tokens, ranks].
    Returns ([tokens, hidden] of partial's dtype, zeros for a token that went nowhere, and the advanced epochs).
    """
    partial, epochs = jax.lax.optimization_barrier((partial, epochs))
    home = jax.lax.all_to_all(partial, axis_name, 0, 0)  # home[r, s]: what rank r made of the token in its slot s
    ranks, _, hidden = home.shape
    rows = jnp.where(slots >= 0, jnp.arange(ranks) * home.shape[1] + slots, -1)
    total = sum_rows(home.reshape(-1, hidden), rows, partial.dtype)
    return jax.lax.optimization_barrier((total, advance(epochs)))


def moe_sharded_tokens(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    axis_name: AxisName,
    epochs: jax.Array,
    activation_format: ActivationFormat = "model",
) -> tuple[jax.Array, jax.Array]:
    """Every rank has its own tokens: they travel to their experts' ranks and the weighted sums travel back.

    x: [max_tokens, hidden]; ids: int32 [max_tokens, top_k], -1 for padding; weights: float32 [max_tokens, top_k].
    Returns ([max_tokens, hidden] of x's dtype and the advanced epochs).
    """
    experts_per_rank = experts.w13.shape[1]
    there, epochs = dispatch(x, ids, weights, experts_per_rank, axis_name, epochs)
    first = jax.lax.axis_index(axis_name) * experts_per_rank
    flat_x, flat_ids, flat_weights = (leaf.reshape(-1, leaf.shape[-1]) for leaf in (there.x, there.ids, there.weights))
    partial = local_experts(flat_x, flat_ids, flat_weights, experts, first, activation_format)
    return combine(partial.reshape(there.x.shape), there.slots, axis_name, epochs)
