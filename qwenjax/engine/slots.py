"""What the device knows of the sequences it decodes: one slot each, arrays that every program takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from qwenjax.cache import CACHE_SPEC, KVCache, create_cache
from qwenjax.config import ModelConfig
from qwenjax.engine.calls import Chunk, Lanes
from qwenjax.engine.speculate import HeadState, create_head_state, head_specs, put_first
from qwenjax.mesh import BY_DATA, DATA
from qwenjax.sampling import SamplingArrays, TokenCounts, build_arrays
from qwenjax.sharded_model import EPOCHS_SPEC, mesh_epochs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """State of `slots` sequences on each data rank, and the cache that holds their tokens.

    tokens: int32 [slots], the newest token, drawn and not yet run. lengths: int32 [slots], how many tokens came before
    it, which is its position. end_lengths: int32 [slots], at how many tokens, prompt included, the output is full.
    active: bool [slots], whether to go on. speculates: bool [slots], whether to accept drafts. page_table: int32
    [slots, max_pages], page numbers of the own data rank.
    counts: for penalties, of every slot: 5 bytes an id and slot (195 MB at 256 slots of Qwen3's vocabulary) in
    return for one program whether or not a request has penalties. head: of an engine that speculates, else None.
    """

    cache: KVCache
    page_table: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    end_lengths: jax.Array
    active: jax.Array
    speculates: jax.Array
    sampling: SamplingArrays
    counts: TokenCounts
    epochs: jax.Array
    head: HeadState | None

    def fill(self, chunk: Chunk) -> Slots:
        """Puts sequences into the slots whose first row this is, and the pages of those whose last row it is."""
        none = self.tokens.shape[0]  # out of range: dropped
        slot, written = jnp.where(chunk.first, chunk.slot, none), jnp.where(chunk.last, chunk.slot, none)

        def put(table: jax.Array, values: jax.Array) -> jax.Array:
            return table.at[slot].set(values, mode="drop")

        return replace(
            self,
            page_table=self.page_table.at[written].set(chunk.page_table, mode="drop"),
            end_lengths=put(self.end_lengths, chunk.end_lengths),
            active=put(self.active, jnp.zeros_like(chunk.first)),
            speculates=put(self.speculates, chunk.speculates),
            sampling=jax.tree.map(put, self.sampling, chunk.sampling),
            counts=jax.tree.map(lambda table: table.at[slot].set(jnp.zeros((), table.dtype), mode="drop"), self.counts),
        )

    def count(self, chunk: Chunk) -> Slots:
        """Counts the chunk's tokens, those of the prompt and those that were drawn before a preemption."""
        valid, vocab_size = chunk.positions >= 0, self.counts.in_prompt.shape[1]
        of_prompt = chunk.positions < chunk.prompt_len[:, None]
        slot = chunk.slot[:, None]
        # The vocabulary's size drops the pair.
        in_prompt = self.counts.in_prompt.at[slot, jnp.where(valid & of_prompt, chunk.tokens, vocab_size)]
        in_output = self.counts.in_output.at[slot, jnp.where(valid & ~of_prompt, chunk.tokens, vocab_size)]
        return replace(self, counts=TokenCounts(in_prompt.set(True, mode="drop"), in_output.add(1, mode="drop")))

    def keep(self, lanes: Lanes) -> Slots:
        """Ends the slots of a batch that are not to go on, and gives the others their new pages."""
        batch, width = lanes.grown.shape
        places = jnp.where(lanes.grown >= 0, lanes.grown_from[:, None] + jnp.arange(width), self.page_table.shape[1])
        return replace(
            self,
            page_table=self.page_table.at[jnp.arange(batch)[:, None], places].set(lanes.grown, mode="drop"),
            active=put_first(self.active, self.active[:batch] & lanes.keep),
        )


def slots_specs(with_head: bool) -> Any:
    """PartitionSpecs in the shape of Slots."""
    by_slot = {field.name: BY_DATA for field in fields(Slots)}
    specs: Any = by_slot | {"cache": CACHE_SPEC, "epochs": EPOCHS_SPEC, "head": head_specs() if with_head else None}
    return Slots(**specs)


def create_slots(
    config: ModelConfig,
    mesh: Mesh,
    *,
    slots_per_rank: int,
    pages_per_rank: int,
    max_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    num_drafts: int,
) -> Slots:
    """Idle slots over a zeroed cache. max_pages: of one sequence; num_drafts: of a decode step, 0 for none."""
    num_slots = slots_per_rank * mesh.shape[DATA]
    by_slot = NamedSharding(mesh, BY_DATA)

    def zeros(dtype: Any, *shape: int) -> jax.Array:
        return jax.jit(lambda: jnp.zeros((num_slots, *shape), dtype), out_shardings=by_slot)()

    return Slots(
        cache=create_cache(config, mesh, pages_per_rank, dtype, page_size),
        page_table=zeros(jnp.int32, max_pages),
        tokens=zeros(jnp.int32),
        lengths=zeros(jnp.int32),
        end_lengths=zeros(jnp.int32),
        active=zeros(jnp.bool_),
        speculates=zeros(jnp.bool_),
        sampling=jax.jit(
            lambda: jax.tree.map(lambda row: jnp.repeat(row, num_slots, axis=0), build_arrays([None])),
            out_shardings=by_slot,
        )(),
        counts=TokenCounts(zeros(jnp.bool_, config.vocab_size), zeros(jnp.int32, config.vocab_size)),
        epochs=mesh_epochs(config, mesh, dtype, tokens=slots_per_rank * (1 + num_drafts)),
        head=create_head_state(
            config,
            mesh,
            num_slots=num_slots,
            num_drafts=num_drafts,
            pages_per_rank=pages_per_rank,
            page_size=page_size,
            dtype=dtype,
        )
        if num_drafts
        else None,
    )
