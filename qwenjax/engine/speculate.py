"""Speculative decoding: the multi-token-prediction head drafts, the model verifies. Per-rank code.

Lossless by construction: verification draws the model's own token at every position, with the noise that plain decoding
uses there, and keeps going while the drafts equal what was drawn. Drafts are drawn with the same noise, which makes
equal draws likelier when sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from qwenjax.cache import CACHE_SPEC, KVCache, PagedContext, create_cache
from qwenjax.config import ModelConfig, head_config
from qwenjax.mesh import BY_DATA
from qwenjax.model import Qwen3Moe
from qwenjax.sampling import SamplingArrays, TokenCounts, sample


def put_first(table: jax.Array, rows: jax.Array) -> jax.Array:
    """The table with its first rows replaced, all of them or some.

    `table.at[:n].set(rows)` of a whole table is a scatter at an index without elements. Where a loop carries an array
    without elements, XLA's partitioner in JAX 0.11.2 ends in a segmentation fault.
    """
    return jax.lax.dynamic_update_slice_in_dim(table, rows, 0, axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadState:
    """The head's cache, on the pages of the model's, and the entries that it has yet to run for each slot.

    hidden: [slots, drafts + 1, hidden], the model's states at `positions` int32 [slots, drafts + 1], -1 where there is
    none; tokens: int32 [slots, drafts + 1], those that came after. Valid entries lead.
    """

    cache: KVCache
    hidden: jax.Array
    tokens: jax.Array
    positions: jax.Array

    def begin(self, slot: jax.Array, hidden: jax.Array, tokens: jax.Array, positions: jax.Array) -> HeadState:
        """Slots (int32 [rows], out of range for none) whose prompt has just drawn its first token.

        hidden: [rows, hidden] at the prompt's last position, int32 [rows]; tokens: int32 [rows], the ones drawn.
        """
        none = jnp.full((slot.shape[0], self.positions.shape[1]), -1, jnp.int32)
        return replace(
            self,
            hidden=self.hidden.at[slot, 0].set(hidden, mode="drop"),
            tokens=self.tokens.at[slot, 0].set(tokens, mode="drop"),
            positions=self.positions.at[slot].set(none.at[:, 0].set(positions), mode="drop"),
        )

    def wait(self, hidden: jax.Array, tokens: jax.Array, start: jax.Array) -> HeadState:
        """What a step verified, for the next draft to run.

        hidden: [batch, rows, hidden] at positions start (int32 [batch]) and up; tokens: int32 [batch, rows], those
        drawn after each, -1 from the first that was not. rows may be fewer than the entries.
        """
        batch, rows = tokens.shape
        positions = jnp.where(tokens >= 0, start[:, None] + jnp.arange(rows), -1)
        # A slot that drew nothing is idle, or stays as it was: its entries still wait.
        drew = (tokens[:, 0] >= 0)[:, None]

        def put(table: jax.Array, values: jax.Array, rest: int) -> jax.Array:
            padding = [(0, 0), (0, table.shape[1] - rows), *[(0, 0)] * (table.ndim - 2)]
            whole = jnp.pad(values.astype(table.dtype), padding, constant_values=rest)
            keep = jnp.where(drew.reshape(batch, *[1] * (table.ndim - 1)), whole, table[:batch])
            return put_first(table, keep)

        return replace(
            self,
            hidden=put(self.hidden, hidden, 0),
            tokens=put(self.tokens, jnp.maximum(tokens, 0), 0),
            positions=put(self.positions, positions, -1),
        )


def head_specs() -> Any:
    """PartitionSpecs in the shape of HeadState."""
    return HeadState(CACHE_SPEC, BY_DATA, BY_DATA, BY_DATA)  # type: ignore[arg-type]


def create_head_state(
    config: ModelConfig,
    mesh: Mesh,
    *,
    num_slots: int,
    num_drafts: int,
    pages_per_rank: int,
    page_size: int,
    dtype: jnp.dtype,
) -> HeadState:
    """Nothing to run yet. num_slots: of all data ranks; num_drafts: of a step."""
    entries = (num_slots, num_drafts + 1)

    def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden = jnp.zeros((*entries, config.hidden_size), dtype)
        return hidden, jnp.zeros(entries, jnp.int32), jnp.full(entries, -1, jnp.int32)

    made = jax.jit(arrays, out_shardings=NamedSharding(mesh, BY_DATA))()
    return HeadState(create_cache(head_config(config), mesh, pages_per_rank, dtype, page_size), *made)


def draft(
    model: Qwen3Moe,
    head: HeadState,
    active: jax.Array,
    lengths: jax.Array,
    end_lengths: jax.Array,
    page_table: jax.Array,
    sampling: SamplingArrays,
    counts: TokenCounts,
    epochs: jax.Array,
    num_drafts: int,
    draw: Callable[..., jax.Array] = sample,
) -> tuple[HeadState, jax.Array, jax.Array]:
    """Runs the entries that wait, then guesses the tokens at positions lengths + 1 to lengths + num_drafts.

    Arguments as Slots', of the batch that decodes; draw: `sample`, or what gives the same for these rows. Returns the
    head's state, the drafts int32 [slots, num_drafts] and the epochs. With num_drafts 0 the head only keeps up, so that
    drafting may start again later.
    """
    mtp, batch = model.mtp, active.shape[0]
    assert mtp is not None
    positions = jnp.where(active[:, None], head.positions[:batch], -1)
    context = PagedContext(head.cache, page_table, positions)
    out, context, epochs = mtp(model.embed(head.tokens[:batch]), head.hidden[:batch], context, epochs)
    last = jnp.maximum(jnp.sum(positions >= 0, axis=1) - 1, 0)
    hidden = jnp.take_along_axis(out, last[:, None, None], axis=1)  # [slots, 1, hidden]
    drafts = jnp.zeros((batch, num_drafts), jnp.int32)
    if num_drafts == 0:
        return replace(head, cache=context.cache), drafts, epochs

    def guess(index: jax.Array | int, drafts: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = draw(model.logits(hidden[:, 0]), sampling, lengths + 1 + index, counts)
        return token, drafts.at[:, index].set(token)

    def guess_and_run(index: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        drafts, hidden, cache, epochs = carry
        token, drafts = guess(index, drafts, hidden)
        # This draft's entry sits one before the token that it would be the draft of, as the first does.
        position = lengths + index
        runs = active & (position < end_lengths - 1)
        context = PagedContext(cache, page_table, jnp.where(runs, position, -1)[:, None])
        hidden, context, epochs = mtp(model.embed(token)[:, None], hidden, context, epochs)
        return drafts, hidden, context.cache, epochs

    carry = (drafts, hidden, context.cache, epochs)
    if num_drafts > 1:
        carry = jax.lax.fori_loop(0, num_drafts - 1, guess_and_run, carry)
    drafts, hidden, cache, epochs = carry
    _, drafts = guess(num_drafts - 1, drafts, hidden)
    return replace(head, cache=cache), drafts, epochs
