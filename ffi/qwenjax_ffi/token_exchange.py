"""Dispatch and combine: every rank's own tokens travel to their experts' ranks, and the weighted sums travel back.

Both run under shard_map; the experts are split evenly over the ranks of `axis_name`, in rank order. The references go
through XLA's all_to_all; the kernels (`token_exchange_kernel`) are one launch each over a symmetric heap that was made
with room for them (`collectives.fresh_epochs`). "auto" takes the reference for more tokens than that, and says so.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi import token_exchange_kernel as kernels
from qwenjax_ffi.activations import quantise_activations
from qwenjax_ffi.collectives import KERNEL_DTYPES, AxisName, Heap, advance, heap_behind
from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.implementation import Implementation, choose, with_gradient
from qwenjax_kernels.heap_layout import VECTOR
from qwenjax_kernels.token_exchange_layout import MAX_ROW_BYTES, MAX_TOKENS, UNIT, mxfp8_bytes, row_bytes

logger = logging.getLogger(__name__)

RowFormat = Literal["model", "mxfp8"]


class Dispatched(NamedTuple):
    """What a rank received. x: [ranks, max_tokens, hidden]; ids int32 and weights float32 [ranks, max_tokens, top_k];
    counts: int32 [ranks], tokens from each rank, which lie in its first slots. Slots behind them have ids -1, weights
    0 and any x. slots: int32 [tokens, ranks], where each of this rank's own tokens lies at each rank, -1 where it was
    not sent."""

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    counts: jax.Array
    slots: jax.Array


def dispatch(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts_per_rank: int,
    axis_name: AxisName,
    epochs: jax.Array,
    *,
    row_format: RowFormat = "model",
    implementation: Implementation = "auto",
) -> tuple[Dispatched, jax.Array]:
    """Sends each token once to every rank that has one of its experts.

    x: [max_tokens, hidden], this rank's own tokens; ids: int32 [max_tokens, top_k], -1 for padding; weights: float32
    [max_tokens, top_k]. Slots are given out in token order. Nothing is dropped: each rank has a slot for every token
    of every other. row_format "mxfp8": what arrives of x, also at this rank, is what quantise_activations makes of it:
    NaN of a block with NaN or an infinity. It travels as such (kernel: bfloat16 x). Returns also the advanced epochs.
    """
    mxfp8 = row_format == "mxfp8"
    sent_bytes = mxfp8_bytes(x.shape[1]) if mxfp8 else x.shape[1] * x.dtype.itemsize
    heap, why = _room(x, row_bytes(sent_bytes, ids.shape[1]), axis_name, epochs)
    if mxfp8 and why is None and x.dtype != jnp.bfloat16:
        why = f"x is {x.dtype}, the kernel makes MXFP8 rows of bfloat16"
    reference = functools.partial(_dispatch_reference, experts_per_rank, axis_name, row_format)
    if _choose("dispatch", implementation, why, heap) == "reference":
        return reference(x, ids, weights, epochs)
    assert heap is not None
    ranks, units = heap.ranks, heap.units

    def kernel(x: jax.Array, ids: jax.Array, weights: jax.Array, epochs: jax.Array) -> tuple[Dispatched, jax.Array]:
        *there, epochs = kernels.dispatch(x, ids, weights, epochs, ranks, units, experts_per_rank, mxfp8)
        return Dispatched(*there), epochs

    sent: tuple[Dispatched, jax.Array] = with_gradient(kernel, reference)(x, ids, weights, epochs)
    return sent


def combine(
    partial: jax.Array,
    counts: jax.Array,
    slots: jax.Array,
    axis_name: AxisName,
    epochs: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Brings the experts' sums home and adds them, in float32 and in rank order.

    partial: [ranks, max_tokens, hidden], in the slots of `dispatch`, anything behind the counts; counts, slots: the
    dispatch's. Returns ([tokens, hidden] of partial's dtype, zeros for a token that went nowhere, and the advanced
    epochs).
    """
    heap, why = _room(partial[0], partial.shape[2] * partial.dtype.itemsize, axis_name, epochs)
    reference = functools.partial(_combine_reference, axis_name)
    if _choose("combine", implementation, why, heap) == "reference":
        return reference(partial, counts, slots, epochs)
    assert heap is not None
    ranks, units = heap.ranks, heap.units
    home: tuple[jax.Array, jax.Array] = with_gradient(
        lambda partial, counts, slots, epochs: kernels.combine(partial, counts, slots, epochs, ranks, units), reference
    )(partial, counts, slots, epochs)
    return home


def _room(x: jax.Array, slot_bytes: int, axis_name: AxisName, epochs: jax.Array) -> tuple[Heap | None, str | None]:
    """The heap that the kernel would use for the rows of x, or why there can be none; both where they do not fit."""
    heap, why = heap_behind(axis_name, epochs)
    if heap is None:
        return None, why
    tokens, hidden_bytes = x.shape[0], x.shape[1] * x.dtype.itemsize
    if heap.units == 0:
        return None, "the heap has no room for dispatch and combine (qwenjax_ffi.collectives.fresh_epochs: exchange)"
    if x.dtype not in KERNEL_DTYPES:
        return None, f"rows are {x.dtype}, the kernel takes bfloat16, float16 and float32"
    if hidden_bytes % VECTOR or x.size == 0:
        return None, f"x is {list(x.shape)}: rows of {hidden_bytes} bytes; the kernel takes multiples of {VECTOR}"
    if hidden_bytes > MAX_ROW_BYTES:
        return heap, f"rows are {hidden_bytes:,} bytes; the kernel takes up to {MAX_ROW_BYTES:,}"
    room = min(MAX_TOKENS, heap.units * UNIT // slot_bytes)
    if tokens > room:
        return heap, (
            f"{tokens} tokens a rank of {slot_bytes} bytes each; the heap holds {room}. It is made with room for more "
            f"(qwenjax_ffi.collectives.fresh_epochs: exchange), up to {MAX_TOKENS:,}"
        )
    return heap, None


def _choose(op: str, implementation: Implementation, why: str | None, heap: Heap | None) -> str:
    chosen = choose(op, implementation, why)
    if chosen == "reference" and implementation == "auto" and heap is not None:
        _say_once(f"{op} runs through XLA's all_to_all: {why}")
    return chosen


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _dispatch_reference(
    experts_per_rank: int,
    axis_name: AxisName,
    row_format: RowFormat,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    epochs: jax.Array,
) -> tuple[Dispatched, jax.Array]:
    x = quantise_activations(x, row_format)
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


def _combine_reference(
    axis_name: AxisName, partial: jax.Array, counts: jax.Array, slots: jax.Array, epochs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    partial, epochs = jax.lax.optimization_barrier((partial, epochs))
    home = jax.lax.all_to_all(partial, axis_name, 0, 0)  # home[r, s]: what rank r made of the token in its slot s
    ranks, _, hidden = home.shape
    rows = jnp.where(slots >= 0, jnp.arange(ranks) * home.shape[1] + slots, -1)
    total = sum_rows(home.reshape(-1, hidden), rows, partial.dtype, implementation="reference")
    return jax.lax.optimization_barrier((total, advance(epochs)))
