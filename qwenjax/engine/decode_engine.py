"""The engine that decodes from pages that it is given; see qwenjax.engine.handover."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qwenjax.cache import KVCache
from qwenjax.engine.columns import Columns, get_sampling, put_sampling, sampling_widths
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.engine import Engine, Program
from qwenjax.engine.handover import PAGES_PER_COPY, copies_of, is_here, kv_layout, num_planes, ranks_here
from qwenjax.engine.programs import Programs
from qwenjax.engine.schedule import Decode
from qwenjax.engine.sequence import Request, Sequence
from qwenjax.engine.slots import Slots, slots_specs
from qwenjax.mesh import BY_DATA, DATA, MODEL
from qwenjax.model import Qwen3Moe
from qwenjax.outputs import Logprob
from qwenjax.sampling import TokenCounts
from qwenjax.sampling_params import SamplingParams
from qwenjax.sharded_model import ShardedModel, on_ranks
from qwenjax.tokenizer import Tokenizer

_PAGES_IN = PartitionSpec(DATA, MODEL)


@dataclass(frozen=True)
class DevicePages:
    """Pages on the devices that they are for. blocks: for each of `copies_of(count)` an array [size, heads, planes,
    page_size, head_dim] of every model rank of this process, None where the data rank's device is another's."""

    count: int
    blocks: SequenceOf[SequenceOf[jax.Array | None]]


@dataclass(frozen=True)
class Arrived:
    """What a request decodes from: its first token with the entry of its log-probabilities, the hidden state [hidden]
    that it was drawn from (None without a head), and the pages from that of token num_cached on, [model ranks of this
    process, pages, heads, planes, page_size, head_dim] where they are on the host. slots: of those pages in the other
    processes' buffers."""

    token: int
    logprobs: dict[int, Logprob] | None
    hidden: np.ndarray | None
    pages: np.ndarray | DevicePages
    slots: SequenceOf[int] = ()

    @property
    def num_pages(self) -> int:
        return self.pages.count if isinstance(self.pages, DevicePages) else self.pages.shape[1]


@dataclass(frozen=True)
class _Admission:
    """What every process does an admission from. rank: data rank; slots: of the pages in staging buffers; numbers: of
    the pages in the rank's cache; row: of the admission's table; hidden: of the head, int32 of its bytes."""

    rank: int
    slots: SequenceOf[int]
    numbers: SequenceOf[int]
    row: np.ndarray
    prompt_token_ids: SequenceOf[int]
    hidden: np.ndarray

    def table(self) -> np.ndarray:
        """All of it, int32 [1, width]."""
        lists = self.slots, self.numbers, self.row, self.prompt_token_ids, self.hidden
        sizes = [len(each) for each in lists]
        return np.concatenate([np.asarray(each, np.int32) for each in ([self.rank], sizes, *lists)])[None]

    @classmethod
    def of(cls, table: np.ndarray) -> _Admission:
        (rank,), sizes, values = np.split(table[0], [1, 6])
        slots, numbers, row, prompt, hidden = np.split(values, np.cumsum(sizes)[:-1])
        return cls(int(rank), slots.tolist(), numbers.tolist(), row, prompt.tolist(), hidden)


class DecodeEngine(Engine):
    """Decodes from pages that it is given. It has no prefill program and never needs one: a request has all the pages
    it may come to need before it is admitted."""

    def __init__(self, model: ShardedModel, tokenizer: Tokenizer, config: EngineConfig) -> None:
        super().__init__(model, tokenizer, config)
        # After the first process: the pages in some slots, for a data rank.
        self.take_staged: Callable[[SequenceOf[int], int], np.ndarray | DevicePages] | None = None
        # Told, with the time, of the sequences on the fullest data rank, the tokens that each drew on average in a
        # call, and the seconds since the call before.
        self.on_decoded: Callable[[int, float, float, float], None] | None = None
        self._decoded_at: float | None = None  # None where the next call has none before it
        self._num_admitted = 0
        self._reserved: dict[str, Request] = {}
        self._admission = Columns(
            dict.fromkeys(("slot", "token", "prompt_tokens", "end_length", "speculates"), 1),
            {"page_table": config.max_pages},
            sampling_widths(),
        )
        self._idle_pages: dict[tuple[jax.Device, int], jax.Array] = {}

    def add_request(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a decode engine takes requests by reserve and admit")

    def reserve(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        index: int = 0,
        cache_salt: str | None = None,
    ) -> int | None:
        """Takes a slot and pages for the output `index` of a request. How many tokens of its prompt are cached and need
        not come, whole pages; None where there is no room. Raises ValueError as `Engine.add_request` does."""
        if request_id in self._reserved:
            raise ValueError(f"request_id {request_id!r} is in use")
        request = self._new_request(request_id, prompt_token_ids, params, [index], None, cache_salt)
        job = request.sequences[0].job
        if not self.scheduler.reserve(job):
            return None
        self._reserved[request_id] = request
        request.num_cached_tokens = job.num_cached
        return job.num_cached

    def cancel(self, request_id: str) -> None:
        """Gives back what `reserve` took; requests that are not reserved are passed over."""
        if (request := self._reserved.pop(request_id, None)) is not None:
            self.scheduler.remove(request.sequences[0].job)

    def admit(self, request_id: str, arrived: Arrived) -> None:
        """Puts a reserved request's pages into the cache and lets it decode. Raises KeyError for one that is not
        reserved, and ValueError, before it is taken, where what has arrived does not fit it."""
        request = self._reserved[request_id]
        sequence = request.sequences[0]
        job = sequence.job
        numbers = job.pages[job.num_cached // self.config.page_size :]
        if arrived.num_pages > len(numbers):
            raise ValueError(f"request {request_id!r}: {arrived.num_pages} pages arrived for {len(numbers)}")
        if not 0 <= arrived.token < self.model.config.vocab_size:
            raise ValueError(f"request {request_id!r}: token {arrived.token} arrived")
        if sequence.output.logprobs is not None and arrived.token not in (arrived.logprobs or ()):
            raise ValueError(f"request {request_id!r}: no log-probability of token {arrived.token} arrived")
        width, size = self.model.config.hidden_size, 0 if arrived.hidden is None else arrived.hidden.size
        if self._slots.head is not None and size != width:
            raise ValueError(
                f"request {request_id!r}: a hidden state of {size} arrived for the multi-token-prediction head, which "
                f"takes {width}"
            )
        sequence.append(arrived.token, None)
        if sequence.output.finished:
            raise ValueError(f"request {request_id!r} ended with its first token: there is nothing to decode")
        del self._reserved[request_id]
        if not self._requests:
            self._decoded_at = None
        self._enter(request)
        request.saw_token(time.monotonic())
        if arrived.logprobs is not None and sequence.output.logprobs is not None:
            sequence.output.logprobs.append(arrived.logprobs)
            sequence.output.cumulative_logprob = arrived.logprobs[arrived.token].logprob
        admission = self._admission_of(sequence, arrived, numbers[: arrived.num_pages])
        if self._end is not None:
            self._announce(("admission", None), admission.table())
        self._run_admission(admission, arrived.pages)
        self._num_admitted += 1
        self.wait_for_others(self._num_admitted)  # slots are free for the next pages when all have taken these
        self.scheduler.arrived(job)

    def data_rank(self, request_id: str) -> int:
        """Of a reserved request."""
        return self._reserved[request_id].sequences[0].job.rank

    def _take_decoded(self, call: Decode, found: dict[str, Any], now: float) -> dict[str, Request]:
        if self.on_decoded is None:
            return super()._take_decoded(call, found, now)
        sequences = [sequence for job in call.jobs if (sequence := self._sequences.get(job.order)) is not None]
        before = [len(sequence.output.token_ids) for sequence in sequences]
        changed = super()._take_decoded(call, found, now)
        # Those that ended may have ended within the call.
        drawn = [
            len(sequence.output.token_ids) - count
            for sequence, count in zip(sequences, before, strict=True)
            if not sequence.output.finished
        ]
        if self._decoded_at is not None and drawn:
            fullest = max(Counter(lane.place // call.batch for lane in call.lanes).values())
            self.on_decoded(fullest, sum(drawn) / len(drawn), now - self._decoded_at, now)
        self._decoded_at = now
        return changed

    def _announceable(self, programs: list[Program]) -> list[Program]:
        return [*(program for program in programs if program[0] in self.config.decode_kinds), ("admission", None)]

    def _shape(self, program: Program) -> tuple[int, int] | None:
        return None if program[0] == "admission" else super()._shape(program)

    def _follow(self, program: Program, table: np.ndarray) -> None:
        if program[0] != "admission":
            super()._follow(program, table)
            return
        assert self.take_staged is not None
        admission = _Admission.of(table)
        self._run_admission(admission, self.take_staged(admission.slots, admission.rank))
        self.acknowledge()

    def _run_admission(self, admission: _Admission, arrived: np.ndarray | DevicePages) -> None:
        """Puts a request's pages into the caches and the request into its slot."""
        columns, config = self._admission, self.model.config
        table = columns.table(self.ranks)
        columns.one(table, "slot")[:] = self.config.max_num_seqs  # none of the other data ranks
        table[admission.rank] = admission.row
        in_prompt = np.zeros((self.ranks, config.vocab_size), np.bool_)
        in_prompt[admission.rank, admission.prompt_token_ids] = True
        hidden = np.zeros((self.ranks, config.hidden_size), self.model.dtype)
        if len(admission.hidden):
            hidden[admission.rank] = np.ascontiguousarray(admission.hidden).view(hidden.dtype)
        *before, last = self._blocks(admission.rank, admission.numbers, arrived)
        for size, pages, numbers in before:
            self._run(("scatter", size), pages, self._placed(numbers))
        size, pages, numbers = last
        self._run(("admit", size), pages, *map(self._placed, (numbers, table, in_prompt, hidden)))

    def _blocks(
        self, rank: int, pages: SequenceOf[int], arrived: np.ndarray | DevicePages
    ) -> Iterator[tuple[int, jax.Array, np.ndarray]]:
        """Pages as programs take them: how many, the pages of all data ranks, and the pages' numbers in the caches."""
        mesh, ranks, planes = self.model.mesh, ranks_here(self), num_planes(self)
        layout, sharding = kv_layout(self), NamedSharding(mesh, _PAGES_IN)
        page = planes, layout.page_size, self.model.config.head_dim
        for place, (start, stop, size) in enumerate(copies_of(len(pages))):
            numbers = np.full((self.ranks, size), self.config.num_pages, np.int32)  # out of range: dropped
            numbers[rank, : stop - start] = pages[start:stop]
            shape = (size, layout.heads_per_rank, *page)
            block: Any
            if isinstance(arrived, DevicePages):
                block = arrived.blocks[place]
            else:
                block = np.zeros((len(ranks), *shape), self.model.dtype)
                block[:, : stop - start] = arrived[:, start:stop]
            shards = []
            for (data_rank, model_rank), device in np.ndenumerate(mesh.devices):
                if not is_here(device):
                    continue
                own = block[ranks.index(model_rank)] if data_rank == rank else None
                shards.append(self._idle(device, shape) if own is None else jax.device_put(own, device))
            whole = (self.ranks * size, layout.heads_per_rank * layout.ranks, *page)
            yield size, jax.make_array_from_single_device_arrays(whole, sharding, shards), numbers.reshape(-1)

    def _idle(self, device: jax.Device, shape: tuple[int, ...]) -> jax.Array:
        """Pages for a rank that gets none."""
        key = device, shape[0]
        if key not in self._idle_pages:
            self._idle_pages[key] = jax.device_put(np.zeros(shape, self.model.dtype), device)
        return self._idle_pages[key]

    def _admission_of(self, sequence: Sequence, arrived: Arrived, numbers: SequenceOf[int]) -> _Admission:
        columns, job = self._admission, sequence.job
        table = columns.table(1)
        table[0, :5] = (
            job.slot,
            arrived.token,
            sequence.prompt_len,
            job.end_length,
            sequence.request.params.speculation,
        )
        columns.of(table, "page_table")[0, : len(job.pages)] = job.pages
        put_sampling(columns, table, [sequence.sampling_row])
        hidden = np.zeros(0, np.int32)
        if arrived.hidden is not None and self._slots.head is not None:
            hidden = np.ascontiguousarray(arrived.hidden, self.model.dtype).view(np.int32)
        prompt = sequence.request.prompt_token_ids
        return _Admission(job.rank, arrived.slots, numbers, table[0], prompt, hidden)

    def _traced(self, programs: Programs) -> dict[Program, Any]:
        mesh, config, ranks = self.model.mesh, self.model.config, self.ranks
        slots = slots_specs(self._slots.head is not None)
        traced: dict[Program, Any] = {
            program: function.trace(self.model.state, self._slots, self._idle_table(program))
            for program, function in programs.decode.items()
        }

        def trace(function: Any, in_specs: Any, *arguments: Any) -> Any:
            whole = on_ranks(self.model.graphdef, mesh, function, (slots, *in_specs), (slots,))
            return jax.jit(whole, donate_argnums=1).trace(self.model.state, self._slots, *arguments)

        layout = kv_layout(self)
        heads = layout.heads_per_rank * layout.ranks
        table = self._placed(self._admission.table(ranks))
        in_prompt = self._placed(np.zeros((ranks, config.vocab_size), np.bool_))
        hidden = self._placed(np.zeros((ranks, config.hidden_size), self.model.dtype))
        admit, specs = partial(_admit, columns=self._admission), (_PAGES_IN, BY_DATA)
        for size in PAGES_PER_COPY:
            shape = (ranks * size, heads, num_planes(self), self.config.page_size, config.head_dim)
            pages = jax.ShapeDtypeStruct(shape, self.model.dtype, sharding=NamedSharding(mesh, _PAGES_IN))
            numbers = self._placed(np.zeros(ranks * size, np.int32))
            traced["admit", size] = trace(admit, (*specs, *(BY_DATA,) * 3), pages, numbers, table, in_prompt, hidden)
        traced["scatter", size] = trace(_scatter, specs, pages, numbers)  # of the largest size alone
        return traced


def _scatter(model: Qwen3Moe, slots: Slots, pages: jax.Array, numbers: jax.Array) -> tuple[Slots]:
    """Puts pages [pages, heads, planes, page_size, head_dim] into a rank's caches under their numbers, int32 [pages];
    one out of range is dropped."""
    count, heads, planes, size, width = pages.shape
    both = pages.reshape(count, heads, planes // 2, 2, size, width).transpose(2, 3, 0, 1, 4, 5)

    def put(cache: KVCache, values: jax.Array) -> KVCache:
        keys = cache.keys.at[:, numbers].set(values[:, 0], mode="drop")
        return KVCache(keys, cache.values.at[:, numbers].set(values[:, 1], mode="drop"))

    layers = slots.cache.keys.shape[0]
    slots = replace(slots, cache=put(slots.cache, both[:layers]))
    if slots.head is not None:
        slots = replace(slots, head=replace(slots.head, cache=put(slots.head.cache, both[layers:])))
    return (slots,)


def _admit(
    model: Qwen3Moe,
    slots: Slots,
    pages: jax.Array,
    numbers: jax.Array,
    table: jax.Array,
    in_prompt: jax.Array,
    hidden: jax.Array,
    *,
    columns: Columns,
) -> tuple[Slots]:
    """Puts pages into the caches as `_scatter` does, and the rank's row of an admission into its slot, as the last row
    of a prefill would have."""
    (slots,) = _scatter(model, slots, pages, numbers)
    slot, token, prompt_len, end_length, speculates = (
        columns.one(table, name) for name in ("slot", "token", "prompt_tokens", "end_length", "speculates")
    )

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return array.at[slot].set(values, mode="drop")

    counts = TokenCounts(put(slots.counts.in_prompt, in_prompt), put(slots.counts.in_output, jnp.int32(0)))
    counts = replace(counts, in_output=counts.in_output.at[slot, token].add(1, mode="drop"))
    slots = replace(
        slots,
        page_table=put(slots.page_table, columns.of(table, "page_table")),
        tokens=put(slots.tokens, token),
        lengths=put(slots.lengths, prompt_len),
        end_lengths=put(slots.end_lengths, end_length),
        active=put(slots.active, jnp.ones_like(slot, jnp.bool_)),
        speculates=put(slots.speculates, speculates > 0),
        sampling=jax.tree.map(put, slots.sampling, get_sampling(columns, table)),
        counts=counts,
    )
    if slots.head is not None:
        slots = replace(slots, head=slots.head.begin(slot, hidden, token, prompt_len - 1))
    return (slots,)
