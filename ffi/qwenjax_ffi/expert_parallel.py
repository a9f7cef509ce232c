"""The experts of an MoE layer spread over the ranks of a mesh: two ways, with one local part. References in jnp.

Both run under shard_map; the experts are split evenly over the ranks of `axis_name`, in rank order, and each rank
passes its own share of w13 and w2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi import experts_kernel, token_kernels
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.collectives import AxisName, adds_up_rows, all_reduce, all_reduce_rms_norm
from qwenjax_ffi.experts_kernel import Router
from qwenjax_ffi.experts_training import local_experts_training
from qwenjax_ffi.grouped_gemm import moe_down, moe_gate_up, sum_rows
from qwenjax_ffi.implementation import with_gradient
from qwenjax_ffi.linear import linear
from qwenjax_ffi.norm import add_rms_norm
from qwenjax_ffi.packing import AnyWeight
from qwenjax_ffi.routing import sort_rows, top_k_experts
from qwenjax_ffi.token_exchange import RowFormat, combine, dispatch


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
    if experts_kernel.unavailable(x, ids, weights, experts.w13, experts.w2, activation_format) is None:
        return experts_kernel.local_experts(x, ids, weights, *experts, first_expert)
    out, token_rows = _expert_rows(x, ids, weights, experts, first_expert, activation_format)
    return sum_rows(out, token_rows, x.dtype)


def _expert_rows(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    first_expert: jax.Array | int,
    activation_format: ActivationFormat,
) -> tuple[jax.Array, jax.Array]:
    """What `local_experts` adds up: rows [tokens * top_k, hidden] of x's dtype; token_rows int32 [tokens, top_k]."""
    rows = sort_rows(ids, weights, first_expert, experts.w13.shape[1])
    hidden = moe_gate_up(
        x, rows.row_token, rows.group_sizes, experts.w13, experts.layer, activation_format=activation_format
    )
    out = moe_down(
        hidden, rows.group_sizes, experts.w2, rows.row_weight, experts.layer, activation_format=activation_format
    )
    return out, rows.token_rows


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

    def reduce(x: jax.Array, token_rows: jax.Array | None, epochs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return all_reduce(x, axis_name, epochs, token_rows=token_rows)

    return _reduced(reduce, (x, ids, weights, experts), axis_name, activation_format, epochs)


def moe_replicated_tokens_rms_norm(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    axis_name: AxisName,
    residual: jax.Array,
    norm_weight: jax.Array,
    eps: float,
    epochs: jax.Array,
    activation_format: ActivationFormat = "model",
    norm_layer: jax.Array | int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """residual + what `moe_replicated_tokens` returns, its RMSNorm times norm_weight, and the advanced epochs.

    residual: [tokens, hidden]; norm_weight: [hidden], or a stack of which norm_layer is taken, as
    `collectives.all_reduce_rms_norm` takes them.
    """
    if (
        jax.lax.axis_size(axis_name) > 1
        or norm_layer is None
        or experts_kernel.unavailable(x, ids, weights, experts.w13, experts.w2, activation_format)
        or token_kernels.add_rms_norm_unavailable(residual, x, norm_weight)
    ):

        def reduce(x: jax.Array, token_rows: jax.Array | None, *others: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            residual, weight, layer, epochs = others
            return all_reduce_rms_norm(x, residual, weight, eps, axis_name, epochs, layer, token_rows=token_rows)

        operands, layer = (x, ids, weights, experts), norm_layer
        if layer is not None:
            layer = jnp.asarray(layer, jnp.int32)
        return _reduced(reduce, operands, axis_name, activation_format, residual, norm_weight, layer, epochs)

    def apart(
        x: jax.Array, ids: jax.Array, weights: jax.Array, experts: ExpertWeights, norm: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        added = local_experts(x, ids, weights, experts, 0, activation_format)
        return add_rms_norm(norm[0], added, norm[1], eps, norm[2], implementation="reference")

    def chain(
        x: jax.Array, ids: jax.Array, weights: jax.Array, experts: ExpertWeights, norm: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        return experts_kernel.local_experts_add_rms_norm(x, ids, weights, *experts, 0, norm, eps)

    index = jnp.asarray(norm_layer, jnp.int32)
    experts = experts._replace(layer=jnp.asarray(experts.layer, jnp.int32))
    both = with_gradient(chain, apart)(x, ids, weights, experts, (residual, norm_weight, index))
    return *both, epochs


def routed_experts_rms_norm(
    x: jax.Array,
    router: Router,
    experts: ExpertWeights,
    residual: jax.Array,
    norm_weight: jax.Array,
    norm_layer: jax.Array | int,
    eps: float,
    activation_format: ActivationFormat = "model",
) -> tuple[jax.Array, jax.Array] | None:
    """`moe_replicated_tokens_rms_norm` on a single rank from before the router's choice, in one call of kernels; None
    where these cannot run. x: [tokens, hidden]; the router's layer is the experts'."""
    matrices = experts.w13, experts.w2
    if experts_kernel.routed_unavailable(x, router, *matrices, activation_format) or (
        token_kernels.add_rms_norm_unavailable(residual, x, norm_weight)
    ):
        return None

    def apart(
        x: jax.Array, weight: jax.Array, valid: jax.Array, experts: ExpertWeights, norm: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        logits = linear(x, weight, experts.layer, out_dtype=jnp.float32)
        weights, ids = top_k_experts(logits, router.top_k, router.normalise, valid)
        added = local_experts(x, ids, weights, experts, 0, activation_format)
        return add_rms_norm(norm[0], added, norm[1], eps, norm[2], implementation="reference")

    def chain(
        x: jax.Array, weight: jax.Array, valid: jax.Array, experts: ExpertWeights, norm: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        chooses = router._replace(weight=weight, valid=valid)
        return experts_kernel.routed_experts_add_rms_norm(x, chooses, *experts, norm, eps)

    experts = experts._replace(layer=jnp.asarray(experts.layer, jnp.int32))
    norm = residual, norm_weight, jnp.asarray(norm_layer, jnp.int32)
    both: tuple[jax.Array, jax.Array] = with_gradient(chain, apart)(x, router.weight, router.valid, experts, norm)
    return both


def _reduced(
    reduce: Callable[..., Any],
    operands: tuple[jax.Array, jax.Array, jax.Array, ExpertWeights],
    axis_name: AxisName,
    activation_format: ActivationFormat,
    *others: jax.Array | None,
) -> Any:
    """reduce(what this rank's experts add, None, *others), or reduce(their rows, the rows of each token, *others) where
    its kernel adds them up. operands: x, ids, weights and experts of `local_experts`; others: the epochs last."""
    x, ids, _, experts = operands

    # What is differentiated may not close over values of the trace around it.
    def of_sums(*arguments: Any) -> Any:
        x, ids, weights, experts, *others = arguments
        first = jax.lax.axis_index(axis_name) * experts.w13.shape[1]
        return reduce(local_experts(x, ids, weights, experts, first, activation_format), None, *others)

    def of_rows(*arguments: Any) -> Any:
        x, ids, weights, experts, *others = arguments
        first = jax.lax.axis_index(axis_name) * experts.w13.shape[1]
        return reduce(*_expert_rows(x, ids, weights, experts, first, activation_format), *others)

    rows = jax.ShapeDtypeStruct((ids.size, x.shape[1]), x.dtype)
    epochs = others[-1]
    assert epochs is not None
    if not adds_up_rows(rows, ids, axis_name, epochs):
        return of_sums(*operands, *others)
    experts = experts._replace(layer=jnp.asarray(experts.layer, jnp.int32))
    return with_gradient(of_rows, of_sums)(*operands[:3], experts, *others)


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
    Rows that the experts round to MXFP8 travel so: rounding them once more changes nothing. Returns ([max_tokens,
    hidden] of x's dtype and the advanced epochs).
    """
    experts_per_rank = experts.w13.shape[1]
    row_format: RowFormat = "mxfp8" if activation_format == "mxfp8" else "model"
    there, epochs = dispatch(x, ids, weights, experts_per_rank, axis_name, epochs, row_format=row_format)
    first = jax.lax.axis_index(axis_name) * experts_per_rank
    flat_x, flat_ids, flat_weights = (leaf.reshape(-1, leaf.shape[-1]) for leaf in (there.x, there.ids, there.weights))
    partial = local_experts(flat_x, flat_ids, flat_weights, experts, first, activation_format)
    return combine(partial.reshape(there.x.shape), there.counts, there.slots, axis_name, epochs)
