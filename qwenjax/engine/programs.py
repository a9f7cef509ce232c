"""The two programs of the engine, prefill and decode, as per-rank code and compiled for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from qwenjax.cache import PagedContext
from qwenjax.engine.calls import chunk_of, lanes_of
from qwenjax.engine.config import DecodeKind, EngineConfig
from qwenjax.engine.slots import Slots, slots_specs
from qwenjax.engine.speculate import draft, put_first
from qwenjax.mesh import BY_DATA, DATA
from qwenjax.model import Qwen3Moe
from qwenjax.sampling import TopLogprobs, likeliest, sample, token_logprobs, truncated
from qwenjax.sampling_params import MAX_LOGPROBS
from qwenjax.sharded_model import on_ranks

_BY_STEP = PartitionSpec(None, None, DATA)  # [steps, positions, slots, …]
_WHOLE = PartitionSpec()
_DRAWS: dict[DecodeKind, Callable[..., jax.Array]] = {"decode": sample, "greedy": likeliest, "truncated": truncated}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Tokens drawn: int32 [..., rows], and their log-probabilities, zeros where no row asked for any."""

    tokens: jax.Array
    logprobs: TopLogprobs


def prefill(
    model: Qwen3Moe, slots: Slots, table: jax.Array, *, config: EngineConfig, length: int, gather: bool
) -> tuple[Slots, Drawn, TopLogprobs]:
    """Runs a chunk of each row's prompt; rows at their prompt's end draw their first token and become active.

    Several rows may be of one sequence: each layer writes all rows' keys and values before any attends. table: the
    rank's rows of `prefill_table`. Returns the slots, what the rows drew (meaningless where not `last`), and the
    log-probabilities [rows, length, …] of next_tokens.
    """
    slots, x = begin_prefill(model, slots, table, config=config, length=length)
    layers = model.config.num_hidden_layers
    slots, x = prefill_layers(model, slots, x, table, 0, count=layers, config=config, length=length)
    slots, drawn, prompt_logprobs, _ = finish_prefill(model, slots, x, table, config=config, length=length)
    if gather:
        chunk = chunk_of(config, length, table)
        drawn = _gathered(drawn, chunk.want_logprobs, axis=0)
        prompt_logprobs = _gathered_if(chunk.want_prompt_logprobs, prompt_logprobs, axis=0)
    return slots, drawn, prompt_logprobs


def begin_prefill(
    model: Qwen3Moe, slots: Slots, table: jax.Array, *, config: EngineConfig, length: int
) -> tuple[Slots, jax.Array]:
    """The first part of `prefill`: the slots with the rows in them, and what the first layer takes."""
    chunk = chunk_of(config, length, table)
    return slots.fill(chunk).count(chunk), model.embed(chunk.tokens)


def prefill_layers(
    model: Qwen3Moe,
    slots: Slots,
    x: jax.Array,
    table: jax.Array,
    start: jax.Array | int,
    *,
    count: int,
    config: EngineConfig,
    length: int,
) -> tuple[Slots, jax.Array]:
    """The middle of `prefill`: `count` layers from `start`, an int32 scalar, on x [rows, length, hidden]."""
    chunk = chunk_of(config, length, table)
    context = PagedContext(slots.cache, chunk.page_table, chunk.positions)
    x, context, epochs = model.layers(x, context, slots.epochs, start, count)
    return replace(slots, cache=context.cache, epochs=epochs), x


def finish_prefill(
    model: Qwen3Moe, slots: Slots, x: jax.Array, table: jax.Array, *, config: EngineConfig, length: int
) -> tuple[Slots, Drawn, TopLogprobs, jax.Array]:
    """The last part of `prefill`; returns besides the hidden states [rows, hidden] that rows drew from."""
    chunk = chunk_of(config, length, table)
    hidden, valid = model.normalised(x), chunk.positions >= 0
    last_index = jnp.maximum(jnp.sum(valid, axis=1) - 1, 0)
    rows = jnp.arange(chunk.slot.shape[0])
    logits = model.logits(hidden[rows, last_index])
    position = chunk.positions[rows, last_index] + 1
    tokens = sample(logits, chunk.sampling, position, slots.counts, jnp.minimum(chunk.slot, slots.tokens.shape[0] - 1))
    drawn = Drawn(tokens, _logprobs_if(chunk.want_logprobs, logits, tokens))
    prompt_logprobs = _prompt_logprobs_if(chunk.want_prompt_logprobs, model, hidden, chunk.next_tokens)

    slot = jnp.where(chunk.last, chunk.slot, slots.tokens.shape[0])
    if slots.head is not None:
        assert model.mtp is not None
        # The head runs where the next token is known; at the prompt's end it is the one just drawn.
        known = valid & ~(chunk.last[:, None] & (jnp.arange(valid.shape[1]) == last_index[:, None]))
        positions = jnp.where(known, chunk.positions, -1)
        context = PagedContext(slots.head.cache, chunk.page_table, positions)
        _, context, epochs = model.mtp(model.embed(chunk.next_tokens), hidden, context, slots.epochs)
        head = replace(slots.head, cache=context.cache)
        head = head.begin(slot, hidden[rows, last_index], tokens, position - 1)
        slots = replace(slots, head=head, epochs=epochs)
    goes_on = ~chunk.sampling.is_end(tokens) & (position + 1 < chunk.end_lengths)
    in_output = slots.counts.in_output.at[slot, tokens].add(1, mode="drop")
    slots = replace(
        slots,
        tokens=slots.tokens.at[slot].set(tokens, mode="drop"),
        lengths=slots.lengths.at[slot].set(position, mode="drop"),
        active=slots.active.at[slot].set(goes_on, mode="drop"),
        counts=replace(slots.counts, in_output=in_output),
    )
    return slots, drawn, prompt_logprobs, hidden[rows, last_index]


def decode(
    model: Qwen3Moe,
    slots: Slots,
    table: jax.Array,
    *,
    config: EngineConfig,
    batch: int,
    num_drafts: int,
    gather: bool,
    kind: DecodeKind = "decode",
) -> tuple[Slots, Drawn]:
    """Runs steps of the first `batch` slots, all on the device; each draws 1 to num_drafts + 1 tokens.

    table: the rank's rows of `decode_table`, which says how many steps. Returns the slots and the tokens
    [config.num_steps, num_drafts + 1, batch], -1 where none was drawn.

    kind: other than "decode", what all rows ask for (`decode_kind`), of config.num_steps steps or none. Then
    nothing in a step is decided on the device: on a GPU the host would read every branch and every end of a loop there,
    and launch what follows while nothing runs.
    """
    lanes = lanes_of(config, table)
    slots = slots.keep(lanes)
    page_table, sampling, end_lengths, speculates = jax.tree.map(
        lambda table: table[:batch], (slots.page_table, slots.sampling, slots.end_lengths, slots.speculates)
    )
    num_rows, draw_one = num_drafts + 1, _DRAWS[kind]
    # The host plans a call before it has seen which sequences the call before ended: there may be nothing to do. All
    # ranks run as many steps, since a layer's experts are everywhere.
    any_active = jax.lax.psum(jnp.any(slots.active[:batch]).astype(jnp.int32), DATA) > 0
    num_steps = jnp.where(any_active, lanes.num_steps, 0)

    def verify(
        slots: Slots, drawn: Drawn, index: jax.Array, hidden: jax.Array, drafts: jax.Array
    ) -> tuple[Slots, Drawn]:
        """Draws the model's own tokens from hidden [batch, positions, hidden] while the drafts equal them."""
        logits = model.logits(hidden)
        start = slots.lengths[:batch]
        expected = jnp.concatenate([drafts, jnp.full((batch, 1), -1, jnp.int32)], axis=1)  # -1: no draft to accept

        def draw(row: jax.Array, carry: tuple[Slots, Drawn, jax.Array]) -> tuple[Slots, Drawn, jax.Array]:
            slots, drawn, drawing = carry
            position = start + 1 + row
            own = jax.lax.dynamic_index_in_dim(logits, row, axis=1, keepdims=False)
            new = draw_one(own, sampling, position, slots.counts)
            logprobs = _logprobs_if(lanes.want_logprobs, own, new) if kind == "decode" else _no_logprobs(new.shape)
            now = Drawn(jnp.where(drawing, new, -1), logprobs)
            drawn = jax.tree.map(lambda table, values: table.at[index, row].set(values), drawn, now)
            goes_on = ~sampling.is_end(new) & (position + 1 < end_lengths)
            slots = replace(
                slots,
                counts=slots.counts.add(new, drawing),
                tokens=put_first(slots.tokens, jnp.where(drawing, new, slots.tokens[:batch])),
                lengths=put_first(slots.lengths, jnp.where(drawing, position, slots.lengths[:batch])),
                active=put_first(slots.active, jnp.where(drawing, goes_on, slots.active[:batch])),
            )
            accepted = jax.lax.dynamic_index_in_dim(expected, row, axis=1, keepdims=False) == new
            return slots, drawn, drawing & goes_on & accepted & speculates

        slots, drawn, _ = jax.lax.fori_loop(0, num_rows, draw, (slots, drawn, slots.active[:batch]))
        if slots.head is not None:
            slots = replace(slots, head=slots.head.wait(hidden, drawn.tokens[index].T, start))
        return slots, drawn

    def step(index: jax.Array, carry: tuple[Slots, Drawn]) -> tuple[Slots, Drawn]:
        slots, drawn = carry
        tokens, lengths, active = slots.tokens[:batch], slots.lengths[:batch], slots.active[:batch]
        head, epochs, drafts = slots.head, slots.epochs, jnp.zeros((batch, 0), jnp.int32)
        if head is not None:
            head, drafts, epochs = draft(
                model,
                head,
                active,
                lengths,
                end_lengths,
                page_table,
                sampling,
                slots.counts,
                epochs,
                num_drafts,
                draw_one,
            )
        positions = lengths[:, None] + jnp.arange(num_rows)
        # The last token of an output is never run, nor is what would follow it: its page may not be ours.
        runs = active[:, None] & (positions < end_lengths[:, None] - 1)
        context = PagedContext(slots.cache, page_table, jnp.where(runs, positions, -1))
        hidden, context, epochs = model(jnp.concatenate([tokens[:, None], drafts], axis=1), context, epochs)
        slots = replace(slots, cache=context.cache, epochs=epochs, head=head)
        return verify(slots, drawn, index, hidden, drafts)

    shape = (config.num_steps, num_rows, batch)
    nothing = Drawn(jnp.full(shape, -1, jnp.int32), _no_logprobs(shape))

    def all_steps(_: jax.Array, carry: tuple[Slots, Drawn]) -> tuple[Slots, Drawn]:
        return jax.lax.fori_loop(0, config.num_steps, step, carry)

    turns, turn = (num_steps, step) if kind == "decode" else (num_steps // config.num_steps, all_steps)
    slots, drawn = jax.lax.fori_loop(0, turns, turn, (slots, nothing))
    return slots, _gathered(drawn, lanes.want_logprobs, axis=2) if gather else drawn


def _gathered(drawn: Drawn, want_logprobs: jax.Array, axis: int) -> Drawn:
    """What all data ranks drew, on every rank: a process can read its own devices only."""
    tokens = jax.lax.all_gather(drawn.tokens, DATA, axis=axis, tiled=True)
    return Drawn(tokens, _gathered_if(want_logprobs, drawn.logprobs, axis))


def _gathered_if(wanted: jax.Array, found: TopLogprobs, axis: int) -> TopLogprobs:
    def gather() -> TopLogprobs:
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, DATA, axis=axis, tiled=True), found)

    shapes = jax.eval_shape(gather)
    return jax.lax.cond(wanted, gather, lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))


def _no_logprobs(shape: tuple[int, ...]) -> TopLogprobs:
    ids, values = jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32), jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32)
    return TopLogprobs(values[..., 0], ids[..., 0], ids, values)


def _top_logprobs(logits: jax.Array, ids: jax.Array) -> TopLogprobs:
    """token_logprobs with MAX_LOGPROBS entries, padded with zeros where the vocabulary is smaller."""
    found = token_logprobs(logits, ids, min(MAX_LOGPROBS, logits.shape[1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - found.top_ids.shape[1]))
    return replace(found, top_ids=jnp.pad(found.top_ids, missing), top_logprobs=jnp.pad(found.top_logprobs, missing))


def _logprobs_if(wanted: jax.Array, logits: jax.Array, ids: jax.Array) -> TopLogprobs:
    return jax.lax.cond(wanted, lambda: _top_logprobs(logits, ids), lambda: _no_logprobs(ids.shape))


def _prompt_logprobs_if(wanted: jax.Array, model: Qwen3Moe, hidden: jax.Array, ids: jax.Array) -> TopLogprobs:
    # A row at a time: logits of a whole batch of Qwen3's vocabulary would be 600 kB a token.
    def all_rows() -> TopLogprobs:
        return jax.lax.map(lambda row: _top_logprobs(model.logits(row[0]), row[1]), (hidden, ids))

    return jax.lax.cond(wanted, all_rows, lambda: _no_logprobs(ids.shape))


class Programs:
    """prefill and decode over a mesh, jitted and not yet compiled: functions of the model's state, the slots, which are
    donated and gone after a call, and the call's table.

    prefill: by the length of its rows; decode: by kind, and batch size, in slots of a data rank, with number of drafts.
    """

    def __init__(self, graphdef: nnx.GraphDef, mesh: Mesh, config: EngineConfig) -> None:
        slots = slots_specs(config.num_speculative_tokens > 0)
        gather = spans_processes(mesh)
        rows, by_step = (_WHOLE, _WHOLE) if gather else (BY_DATA, _BY_STEP)

        def jitted(function: Callable[..., Any], out_specs: Any) -> Any:
            return jax.jit(on_ranks(graphdef, mesh, function, (slots, BY_DATA), out_specs), donate_argnums=1)

        self.prefill = {
            length: jitted(partial(prefill, config=config, length=length, gather=gather), (slots, rows, rows))
            for length in config.chunk_lengths
        }
        self.decode: dict[tuple[str, tuple[int, int]], Any] = {
            (kind, variant): jitted(
                partial(decode, config=config, batch=variant[0], num_drafts=variant[1], gather=gather, kind=kind),
                (slots, by_step),
            )
            for kind in config.decode_kinds
            for variant in config.decode_variants
        }


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1
