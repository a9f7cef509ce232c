"""The local experts of an MoE layer in a form that can be differentiated.

The inference form runs a loop whose length depends on the data, or kernels, and reverse-mode differentiation takes
neither. Both forms here compute the same function; which is cheaper depends on the shape (see `EVERY_EXPERT_UP_TO`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.packing import AnyWeight
from qwenjax_ffi.routing import sort_rows
from qwenjax_ffi.weights import select_layer

# Running every expert on every token multiplies the work by experts / top_k, but in large matmuls and without a gather.
# XLA's ragged_dot on a GPU does the same multiplication on rows * top_k instead of rows (its groups are masked), and
# sorts besides, so that it wins only where memory forbids [tokens, experts, width] or a ragged kernel takes it over.
EVERY_EXPERT_UP_TO = 8  # experts per chosen expert


def local_experts_training(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: AnyWeight,
    w2: AnyWeight,
    layer: jax.Array | int,
    first_expert: jax.Array | int,
) -> jax.Array:
    """What this rank's experts add to each token: float32 [tokens, hidden], as expert_parallel.local_experts.

    x: [tokens, hidden]; ids: int32 [tokens, top_k], -1 for none; weights: float32 [tokens, top_k]; w13: [layers, local
    experts, 2 * width, hidden], gate first; w2: [layers, local experts, hidden, width]. Differentiable in x, weights,
    w13 and w2. Weights are cast to x's dtype; results equal the inference form's up to its roundings. Raises ValueError
    for quantised weights.
    """
    up, down = select_layer(w13, layer), select_layer(w2, layer)
    if not isinstance(up, jax.Array) or not isinstance(down, jax.Array):
        raise ValueError("quantised experts cannot be differentiated; train on bf16, fp16 or fp32 weights")
    form = _every_expert if up.shape[0] <= EVERY_EXPERT_UP_TO * ids.shape[1] else _ragged
    return form(x, ids, weights, up.astype(x.dtype), down.astype(x.dtype), first_expert)


def _every_expert(
    x: jax.Array, ids: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array, first_expert: jax.Array | int
) -> jax.Array:
    """All local experts on all tokens; those not chosen are weighed with 0."""
    chosen = (ids - first_expert)[:, :, None] == jnp.arange(w13.shape[0])
    share = jnp.sum(jnp.where(chosen & (ids >= 0)[:, :, None], weights[:, :, None], 0.0), axis=1)
    gate, up = jnp.split(jnp.einsum("th,eoh->teo", x, w13), 2, axis=-1)
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32) * share[:, :, None]
    return jnp.einsum("tew,ehw->th", hidden.astype(x.dtype), w2, preferred_element_type=jnp.float32)


def _ragged(
    x: jax.Array, ids: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array, first_expert: jax.Array | int
) -> jax.Array:
    """Rows sorted by expert, through jax.lax.ragged_dot."""
    rows = sort_rows(ids, first_expert, w13.shape[0])
    gathered = x[rows.row_token]
    both = jax.lax.ragged_dot(gathered, w13.swapaxes(1, 2), rows.group_sizes, preferred_element_type=jnp.float32)
    gate, up = jnp.split(both, 2, axis=-1)
    hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
    out = jax.lax.ragged_dot(hidden, w2.swapaxes(1, 2), rows.group_sizes, preferred_element_type=jnp.float32)
    inside = jnp.arange(out.shape[0]) < jnp.sum(rows.group_sizes)
    row_weight = weights.reshape(-1)[rows.row_choice]
    return sum_rows(jnp.where(inside[:, None], out, 0.0) * row_weight[:, None], rows.token_rows)
