"""The local experts of an MoE layer in a form that can be differentiated.

The inference form runs a loop whose length depends on the data, or kernels, and reverse-mode differentiation takes
neither. Both forms here compute the same function; which is cheaper depends on the shape (see `EVERY_EXPERT_UP_TO`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.packing import AnyWeight
from qwenjax_ffi.routing import ExpertRows, sort_rows
from qwenjax_ffi.row_blocks import RowBlocks
from qwenjax_ffi.weights import select_layer

# Running every expert on every token multiplies the work by experts / top_k, but in few, large matmuls and without a
# gather.
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
    """What this rank's experts add to each token: expert_parallel.local_experts in float32 [tokens, hidden].

    x: [tokens, hidden]; ids: int32 [tokens, top_k], -1 for none; weights: float32 [tokens, top_k]; w13: [layers, local
    experts, 2 * width, hidden], gate first; w2: [layers, local experts, hidden, width]. Differentiable in x, weights,
    w13 and w2. Weights are cast to x's dtype; results equal the inference form's up to its roundings. Raises ValueError
    for quantised weights.
    """
    up, down = select_layer(w13, layer), select_layer(w2, layer)
    if not isinstance(up, jax.Array) or not isinstance(down, jax.Array):
        raise ValueError("quantised experts cannot be differentiated; train on bf16, fp16 or fp32 weights")
    form = _every_expert if up.shape[0] <= EVERY_EXPERT_UP_TO * ids.shape[1] else _by_expert
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


@jax.custom_vjp
def _by_expert(
    x: jax.Array, ids: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array, first_expert: jax.Array | int
) -> jax.Array:
    """Rows sorted by expert, in blocks of one expert each, forwards and back.

    Keeps nothing for the gradient but its inputs: the rest is computed again. `jax.lax.ragged_dot` would do, but XLA's
    form of its gradient on a GPU masks every group, 64 GiB at 65,536 rows and 128 experts of Qwen3-30B's width.
    """
    rows = _sort(ids, weights, first_expert, w13.shape[0])
    blocks = RowBlocks(rows.group_sizes, ids.size)

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        block = blocks.at(index)
        up = _up(x[rows.row_token[block.rows]], w13[block.group])
        made = _times(up.hidden, w2[block.group].T) * rows.row_weight[block.rows][:, None]
        # What lies past a group's end is written over by the next group's first block, or is no token's.
        return jax.lax.dynamic_update_slice(out, made, (block.start, 0))

    out = jnp.zeros((ids.size + blocks.size, x.shape[1]), jnp.float32)
    return sum_rows(jax.lax.fori_loop(0, blocks.count, step, out), rows.token_rows)


def _sort(ids: jax.Array, weights: jax.Array, first_expert: jax.Array | int, num_experts: int) -> ExpertRows:
    # The gradient multiplies rows of padding by zero, which only the reference's are finite for.
    return sort_rows(ids, weights, first_expert, num_experts, implementation="reference")


class _Up(NamedTuple):
    """gate and up, float32 [rows, width], and what the down projection takes, of x's dtype."""

    gate: jax.Array
    up: jax.Array
    hidden: jax.Array


def _up(x: jax.Array, w13: jax.Array) -> _Up:
    gate, up = jnp.split(_times(x, w13.T), 2, axis=-1)
    return _Up(gate, up, (jax.nn.silu(gate) * up).astype(x.dtype))


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _forward(*inputs: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _by_expert(*inputs), inputs


def _backward(inputs: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    x, ids, weights, w13, w2, first_expert = inputs
    rows = _sort(ids, weights, first_expert, w13.shape[0])
    blocks = RowBlocks(rows.group_sizes, ids.size)

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_rows, d_row_weight, d_w13, d_w2 = carry
        block = blocks.at(index)
        token = rows.row_token[block.rows]
        row_x, first, second = x[token], w13[block.group], w2[block.group]
        up = _up(row_x, first)
        d_made = jnp.where(block.inside[:, None], d_out[token], 0.0)
        d_weight = jnp.sum(d_made * _times(up.hidden, second.T), axis=-1)
        d_made = (d_made * rows.row_weight[block.rows][:, None]).astype(x.dtype)
        d_hidden = _times(d_made, second)
        _, swiglu_gradient = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, up.gate, up.up)
        d_both = jnp.concatenate(swiglu_gradient(d_hidden), axis=-1).astype(x.dtype)
        return (
            jax.lax.dynamic_update_slice(d_rows, _times(d_both, first), (block.start, 0)),
            jax.lax.dynamic_update_slice(d_row_weight, d_weight, (block.start,)),
            d_w13.at[block.group].add(_times(d_both.T, row_x)),
            d_w2.at[block.group].add(_times(d_made.T, up.hidden)),
        )

    padded = ids.size + blocks.size
    zeros = (
        jnp.zeros((padded, x.shape[1]), jnp.float32),
        jnp.zeros(padded, jnp.float32),
        jnp.zeros(w13.shape, jnp.float32),
        jnp.zeros(w2.shape, jnp.float32),
    )
    d_rows, d_row_weight, d_w13, d_w2 = jax.lax.fori_loop(0, blocks.count, step, zeros)
    d_weights = jnp.where(rows.token_rows >= 0, d_row_weight[rows.token_rows], 0.0)
    d_x = sum_rows(d_rows, rows.token_rows).astype(x.dtype)
    return d_x, None, d_weights.astype(weights.dtype), d_w13.astype(w13.dtype), d_w2.astype(w2.dtype), None


_by_expert.defvjp(_forward, _backward)
