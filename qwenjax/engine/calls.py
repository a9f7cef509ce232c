"""What a device call takes besides the state: one table of int32, written by the host and read by the programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.engine.columns import Columns, get_sampling, put_sampling, sampling_widths
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.schedule import Decode, Prefill, Row
from qwenjax.sampling import SamplingArrays, SamplingRow


@dataclass(frozen=True)
class Chunk:
    """A prefill call's rows, of one data rank.

    tokens, next_tokens, positions: int32 [rows, length], the prompt's tokens, those after each (for prompt_logprobs and
    the head) and where they stand, -1 for padding. slot: int32 [rows], the number of slots for an empty row. first,
    last: bool [rows], whether the row begins its sequence's stay in the slot and whether it draws a token. prompt_len,
    end_lengths: int32 [rows]. page_table: int32 [rows, max_pages]. want_logprobs, want_prompt_logprobs: bool scalars.
    """

    tokens: jax.Array
    next_tokens: jax.Array
    positions: jax.Array
    slot: jax.Array
    first: jax.Array
    last: jax.Array
    prompt_len: jax.Array
    end_lengths: jax.Array
    speculates: jax.Array
    page_table: jax.Array
    sampling: SamplingArrays
    want_logprobs: jax.Array
    want_prompt_logprobs: jax.Array


@dataclass(frozen=True)
class Lanes:
    """A decode call's slots, of one data rank.

    keep: bool [batch], false for a slot that the host has ended. grown_from: int32 [batch], places in the page table
    from which `grown` int32 [batch, max_growth], -1 for none, is written. num_steps, want_logprobs: scalars.
    """

    keep: jax.Array
    grown_from: jax.Array
    grown: jax.Array
    num_steps: jax.Array
    want_logprobs: jax.Array


@cache
def chunk_columns(config: EngineConfig, length: int) -> Columns:
    own = ("start", "count", "slot", "first", "last", "prompt_tokens", "end_length", "speculates")
    several = {"tokens": length + 1, "page_table": config.max_pages}
    return Columns(dict.fromkeys((*own, "want", "want_prompt"), 1), several, sampling_widths())


@cache
def lane_columns(config: EngineConfig) -> Columns:
    return Columns({"keep": 1, "grown_from": 1, "num_steps": 1, "want": 1, "grown": config.max_growth})


def prefill_table(
    config: EngineConfig,
    ranks: int,
    call: Prefill,
    sampling_row: Callable[[Row], SamplingRow],
    want: bool,
    want_prompt: bool,
) -> np.ndarray:
    """int32 [ranks * rows, width]: a data rank's rows lie together."""
    columns = chunk_columns(config, call.length)
    num_rows = ranks * config.rows_per_call(call.length)
    table = columns.table(num_rows)
    sampling: list[SamplingRow | None] = [None] * num_rows
    columns.one(table, "slot")[:] = config.max_num_seqs
    columns.one(table, "want")[:] = want
    columns.one(table, "want_prompt")[:] = want_prompt
    tokens, page_table = columns.of(table, "tokens"), columns.of(table, "page_table")
    for row in call.rows:
        part = row.job.tokens[row.start : min(row.start + row.count + 1, row.job.target)]
        job, own = row.job, sampling_row(row)
        placed = (row.start, row.count, row.slot, row.first, row.last)
        values = (*placed, own.prompt_len, job.end_length, own.params.speculation)
        table[row.place, : len(values)] = values
        tokens[row.place, : len(part)] = part
        page_table[row.place, : len(row.pages)] = row.pages
        if row.first or row.last:
            sampling[row.place] = own
    put_sampling(columns, table, sampling)
    return table


def chunk_of(config: EngineConfig, length: int, table: jax.Array) -> Chunk:
    """A rank's rows of `prefill_table`, on the device."""
    columns = chunk_columns(config, length)

    def one(name: str) -> jax.Array:
        return columns.one(table, name)

    tokens = columns.of(table, "tokens")
    place = jnp.arange(length)
    return Chunk(
        tokens=tokens[:, :length],
        next_tokens=tokens[:, 1:],
        positions=jnp.where(place < one("count")[:, None], one("start")[:, None] + place, -1),
        slot=one("slot"),
        first=one("first") > 0,
        last=one("last") > 0,
        prompt_len=one("prompt_tokens"),
        end_lengths=one("end_length"),
        speculates=one("speculates") > 0,
        page_table=columns.of(table, "page_table"),
        sampling=get_sampling(columns, table),
        want_logprobs=one("want")[0] > 0,
        want_prompt_logprobs=one("want_prompt")[0] > 0,
    )


def decode_table(config: EngineConfig, ranks: int, call: Decode, want: bool) -> np.ndarray:
    """int32 [ranks * batch, width]."""
    columns = lane_columns(config)
    table = columns.table(ranks * call.batch)
    columns.one(table, "num_steps")[:] = call.num_steps
    columns.one(table, "want")[:] = want
    columns.one(table, "keep")[[lane.place for lane in call.lanes]] = 1
    grown = columns.of(table, "grown")
    grown[:] = -1
    grown_from = columns.one(table, "grown_from")
    for lane in call.lanes:
        if lane.grown:
            grown_from[lane.place] = lane.grown_from
            grown[lane.place, : len(lane.grown)] = lane.grown
    return table


def lanes_of(config: EngineConfig, table: jax.Array) -> Lanes:
    """A rank's rows of `decode_table`, on the device."""
    columns = lane_columns(config)
    return Lanes(
        columns.one(table, "keep") > 0,
        columns.one(table, "grown_from"),
        columns.of(table, "grown"),
        columns.one(table, "num_steps")[0],
        columns.one(table, "want")[0] > 0,
    )
