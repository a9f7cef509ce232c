"""What the device knows of the sequences it decodes: one slot each, arrays that every program takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from qwenjax.cache import CACHE_SPEC, KVCache, create_cache
from qwenjax.config import ModelConfig
from qwenjax.engine.speculate import HeadState, create_head_state, head_specs
from qwenjax.mesh import BY_DATA, DATA, MODEL
from qwenjax.sampling import SamplingArrays, TokenCounts, build_arrays
from qwenjax.sharded_model import EPOCHS_SPEC
from qwenjax_ffi.collectives import fresh_epochs


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

    def fill(self, slot: jax.Array, rows: SlotRows, first: jax.Array) -> Slots:
        """Puts rows into the slots whose first chunk this is. slot: int32 [rows]; first: bool [rows]."""
        slot = jnp.where(first, slot, self.tokens.shape[0])  # out of range: dropped

        def put(table: jax.Array, values: jax.Array) -> jax.Array:
            return table.at[slot].set(values, mode="drop")

        return replace(
            self,
            page_table=put(self.page_table, rows.page_table),
            end_lengths=put(self.end_lengths, rows.end_lengths),
            active=put(self.active, jnp.zeros_like(first)),
            speculates=put(self.speculates, rows.speculates),
            sampling=jax.tree.map(put, self.sampling, rows.sampling),
            counts=jax.tree.map(lambda table: table.at[slot].set(jnp.zeros((), table.dtype), mode="drop"), self.counts),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotRows:
    """What the host says of sequences that enter slots; fields as Slots, one row a sequence."""

    page_table: Any
    end_lengths: Any
    speculates: Any
    sampling: SamplingArrays


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
        sampling=jax.device_put(build_arrays([None] * num_slots), by_slot),
        counts=TokenCounts(zeros(jnp.bool_, config.vocab_size), zeros(jnp.int32, config.vocab_size)),
        epochs=fresh_epochs(mesh, MODEL),
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
