"""Engines that do half of the work: one runs prompts and gives their pages away, the other decodes from such pages.

A page travels as [heads, planes, page_size, head_dim]: plane 2 * layer holds the keys of a layer, the next one its
values, and the multi-token-prediction head's layer comes last.

Over several processes each has the pages of its own devices in a staging buffer of its own. The first says besides
which slots of the buffers a call's pages belong in, and the others acknowledge what they have put there or taken out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qwenjax.cache import CACHE_SPEC, KVCache
from qwenjax.engine.columns import Columns, get_sampling, put_sampling, sampling_widths
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.engine import Engine, Program
from qwenjax.engine.programs import Drawn, Programs, begin_prefill, finish_prefill, prefill_layers
from qwenjax.engine.schedule import Prefill, Row
from qwenjax.engine.sequence import Request, Sequence
from qwenjax.engine.slots import Slots, slots_specs
from qwenjax.kv_transfer import KVLayout
from qwenjax.mesh import BY_DATA, DATA, MODEL
from qwenjax.model import Qwen3Moe
from qwenjax.outputs import Logprob, RequestOutput
from qwenjax.sampling import TokenCounts, TopLogprobs
from qwenjax.sampling_params import SamplingParams
from qwenjax.sharded_model import ShardedModel, on_ranks
from qwenjax.tokenizer import Tokenizer

_MOST_GROUPS = 8  # of layers in a prefill: enough to hide sending, and each costs a program's launch
_PAGES_PER_COPY = (4, 16)  # that one program takes out of the cache, or puts into it: short prompts need few
_WHOLE = PartitionSpec()
_PAGES_OUT = PartitionSpec(None, MODEL)  # [pages, heads, planes, page_size, head_dim] of one data rank
_PAGES_IN = PartitionSpec(DATA, MODEL)


def kv_layout(engine: Engine) -> KVLayout:
    """How each data rank of an engine holds pages."""
    return KVLayout(engine.model.config.num_key_value_heads, engine.config.page_size, engine.model.mesh.shape[MODEL])


def num_processes(engine: Engine) -> int:
    """Over which the engine's mesh is spread."""
    return len({device.process_index for device in engine.model.mesh.devices.flat})


def ranks_here(engine: Engine) -> list[int]:
    """Model ranks that this process has devices of, whatever their data rank."""
    here = [place for place, device in np.ndenumerate(engine.model.mesh.devices) if _is_here(device)]
    return sorted({model_rank for _, model_rank in here})


def ranks_by_process(engine: Engine, data_rank: int) -> dict[int, list[int]]:
    """The model ranks of a data rank, by the process that has their devices."""
    found: dict[int, list[int]] = {}
    for model_rank, device in enumerate(engine.model.mesh.devices[data_rank]):
        found.setdefault(device.process_index, []).append(model_rank)
    return found


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()


def num_planes(engine: Engine) -> int:
    """Planes of a page: two for each layer, the head's included where the engine speculates."""
    return 2 * (engine.model.config.num_hidden_layers + (engine.config.num_speculative_tokens > 0))


@dataclass(frozen=True)
class StagedPart:
    """Tokens [start, stop) of a request, in the pages of `StagedPages` from place `first` on; page `first_page` of the
    sequence is the first of them."""

    request_id: str
    start: int
    stop: int
    first: int
    first_page: int


@dataclass(frozen=True)
class StagedPages:
    """What a group of layers has written for the requests of a prefill call.

    arrays: each [pages, heads, planes, page_size, head_dim], as many of them as hold the parts' pages one after
    another; on the device, possibly still being computed. first_plane: of the page, that their first plane is.
    slots: what `PrefillEngine.slots_of` said of each page, in the processes after the first, which know no parts.
    """

    arrays: SequenceOf[jax.Array]
    first_plane: int
    parts: SequenceOf[StagedPart]
    slots: SequenceOf[int] = ()

    @property
    def num_planes(self) -> int:
        return self.arrays[0].shape[2]

    def on_host(self) -> np.ndarray:
        """The pages, once they are computed: [model ranks of this process, pages, heads of a rank, planes, page_size,
        head_dim]."""
        found = []
        for array in self.arrays:
            shards = sorted(array.addressable_shards, key=lambda shard: shard.index[1].start or 0)
            found.append(np.stack([np.asarray(shard.data) for shard in shards]))
        return np.concatenate(found, axis=1)


class PrefillEngine(Engine):
    """Runs prompts and draws their first tokens; requests then leave it, with `finished` outputs that have no
    finish_reason unless that token was the last.

    A prefill call is a chain of programs over groups of layers. After each, `on_staged` is called, in the engine's
    thread, with the pages that the group has written; the next group runs meanwhile.
    """

    def __init__(self, model: ShardedModel, tokenizer: Tokenizer, config: EngineConfig) -> None:
        if model.mesh.shape[DATA] != 1:
            raise ValueError(f"data={model.mesh.shape[DATA]}: prefill has one data rank, give it all devices as model=")
        super().__init__(model, tokenizer, config)
        self.on_staged: Callable[[StagedPages], None] = lambda staged: None
        self.slots_of: Callable[[StagedPart], SequenceOf[int]] | None = None  # for several processes
        self._to_follow: tuple[int, np.ndarray] | None = None
        self.handovers: dict[str, tuple[np.ndarray, int]] = {}
        layers = model.config.num_hidden_layers
        bounds = np.linspace(0, layers, min(layers, _MOST_GROUPS) + 1).astype(int).tolist()
        self._groups = list(itertools.pairwise(bounds))
        self._wanted_from: dict[int, int] = {}  # by order of arrival: the first token to stage
        self._num_parts: dict[str, int] = {}

    def add_prompt(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        index: int = 0,
        wanted_from: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues a prompt for the output `index` of a request; pages of tokens from wanted_from on are staged.

        Raises ValueError as `add_request` does.
        """
        request = self._new_request(request_id, prompt_token_ids, params, [index], None, cache_salt)
        job = request.sequences[0].job
        job.end_length = len(prompt_token_ids) + 1  # for the scheduler and the device; the host knows more
        self._enter(request)
        self._wanted_from[job.order] = wanted_from
        self._num_parts[request_id] = 0
        self.scheduler.add(job)

    def take_handover(self, request_id: str) -> tuple[np.ndarray, int]:
        """The hidden state [hidden] that a request's first token was drawn from, and the number of its parts that were
        staged. Once, when its output is there; from any thread."""
        return self.handovers.pop(request_id)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        outputs = super().abort(ids := list(request_ids))
        for request_id in ids:
            self._num_parts.pop(request_id, None)
            self.handovers.pop(request_id, None)
        return outputs

    def _prefilled(self, sequence: Sequence, row: Row, found: dict[str, Any]) -> None:
        request = sequence.request
        self.handovers[request.request_id] = found["hidden"][row.place], self._num_parts.pop(request.request_id)
        if not sequence.output.finished:
            request.handed_over = True
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        super()._leave(sequence)
        del self._wanted_from[sequence.job.order]

    def _traced(self, programs: Programs) -> dict[Program, Any]:
        graphdef, mesh, slots = self.model.graphdef, self.model.mesh, slots_specs(self._slots.head is not None)
        state, traced = self.model.state, dict[Program, Any]()

        def traced_on_ranks(function: Any, in_specs: Any, out_specs: Any, *arguments: Any) -> Any:
            ranks = on_ranks(graphdef, mesh, function, (slots, *in_specs), (slots, *out_specs))
            return jax.jit(ranks, donate_argnums=1).trace(state, self._slots, *arguments)

        for length in self.config.chunk_lengths:
            table, number = self._idle_table(("prefill", length)), self._placed(np.int32(0), _WHOLE)
            begin = partial(begin_prefill, config=self.config, length=length)
            traced["begin", length] = traced_on_ranks(begin, (BY_DATA,), (BY_DATA,), table)
            shape = (self.config.rows_per_call(length), length, self.model.config.hidden_size)
            x = jax.ShapeDtypeStruct(shape, self.model.dtype, sharding=NamedSharding(mesh, BY_DATA))
            layers = partial(prefill_layers, config=self.config, length=length)
            specs = (BY_DATA, BY_DATA, _WHOLE, _WHOLE)
            traced["layers", length] = traced_on_ranks(layers, specs, (BY_DATA,), x, table, number, number)
            finish = partial(finish_prefill, config=self.config, length=length)
            outs = (BY_DATA, BY_DATA, BY_DATA)
            traced["finish", length] = traced_on_ranks(finish, (BY_DATA, BY_DATA), outs, x, table)
        for cache, sizes in self._gathers():
            for num_layers, num_pages in itertools.product(sizes, _PAGES_PER_COPY):
                gather = jax.shard_map(
                    partial(_gather, num_layers=num_layers),
                    mesh=mesh,
                    in_specs=(KVCache(CACHE_SPEC, CACHE_SPEC), _WHOLE, _WHOLE),  # type: ignore[arg-type]
                    out_specs=_PAGES_OUT,
                    check_vma=False,
                )
                program = "gather", (cache.keys.shape[0], num_layers, num_pages)
                pages = self._placed(np.zeros(num_pages, np.int32), _WHOLE)
                traced[program] = jax.jit(gather).trace(cache, pages, self._placed(np.int32(0), _WHOLE))
        return traced

    def _announceable(self, programs: list[Program]) -> list[Program]:
        return [*(("prefill", length) for length in self.config.chunk_lengths), ("pages", None)]

    def _shape(self, program: Program) -> tuple[int, int] | None:
        return None if program[0] == "pages" else super()._shape(program)

    def _follow(self, program: Program, table: np.ndarray) -> None:
        if program[0] == "prefill":  # the pages of the call come next
            self._to_follow = program[1], table
            return
        assert self._to_follow is not None
        length, rows = self._to_follow
        pages, slots = table.tolist()
        self._run_chain(length, self._placed(rows), pages, (), slots)

    def _gathers(self) -> list[tuple[KVCache, set[int]]]:
        """The caches, and how many of their layers are taken out at once."""
        found = [(self._slots.cache, {stop - start for start, stop in self._groups})]
        if self._slots.head is not None:
            found.append((self._slots.head.cache, {1}))
        return found

    def _run_prefill(self, call: Prefill, table: Any) -> tuple[Drawn, TopLogprobs, dict[str, Any]]:
        pages, parts = self._parts(call)
        if self._end is not None:
            assert self.slots_of is not None
            slots = [slot for part in parts for slot in self.slots_of(part)]
            self._announce(("pages", None), np.array([pages, slots], np.int32))
        drawn, prompt_logprobs, hidden = self._run_chain(call.length, table, pages, parts, ())
        return drawn, prompt_logprobs, {"hidden": hidden}

    def _run_chain(
        self, length: int, table: Any, pages: SequenceOf[int], parts: SequenceOf[StagedPart], slots: SequenceOf[int]
    ) -> tuple[Any, ...]:
        """The programs of a call, each group's pages staged behind it; what the last returns."""
        (x,) = self._run(("begin", length), table)
        for start, stop in self._groups:
            bounds = (self._placed(np.int32(bound), _WHOLE) for bound in (start, stop))
            (x,) = self._run(("layers", length), x, table, *bounds)
            self._stage(self._slots.cache, start, stop - start, 2 * start, pages, parts, slots)
        found = self._run(("finish", length), x, table)
        if self._slots.head is not None:
            first_plane = 2 * self.model.config.num_hidden_layers
            self._stage(self._slots.head.cache, 0, 1, first_plane, pages, parts, slots)
        return found

    def _parts(self, call: Prefill) -> tuple[list[int], list[StagedPart]]:
        """The pages that hold what a call runs, and what of its prompt is cached and wanted as well."""
        pages, parts = list[int](), list[StagedPart]()
        for job in call.jobs:
            rows = [row for row in call.rows if row.job is job]
            wanted, stop = self._wanted_from[job.order], rows[-1].start + rows[-1].count
            start = max(wanted, 0 if rows[0].first else rows[0].start)
            if start >= stop:
                continue
            first_page, size = start // self.config.page_size, self.config.page_size
            request_id = self._sequences[job.order].request.request_id
            parts.append(StagedPart(request_id, start, stop, len(pages), first_page))
            pages += rows[-1].pages[first_page : -(-stop // size)]
        return pages, parts

    def _stage(
        self,
        cache: KVCache,
        first_layer: int,
        num_layers: int,
        first_plane: int,
        pages: SequenceOf[int],
        parts: SequenceOf[StagedPart],
        slots: SequenceOf[int],
    ) -> None:
        if not pages:
            return
        arrays = []
        for start, stop, size in _copies_of(len(pages)):
            numbers = np.zeros(size, np.int32)
            numbers[: stop - start] = pages[start:stop]
            gather = self._compiled["gather", (cache.keys.shape[0], num_layers, size)]
            where = self._placed(numbers, _WHOLE), self._placed(np.int32(first_layer), _WHOLE)
            arrays.append(gather(cache, *where))
            arrays[-1].copy_to_host_async()
        for part in parts:
            self._num_parts[part.request_id] += 1
        self.on_staged(StagedPages(arrays, first_plane, parts, slots))


def _copies_of(num_pages: int) -> Iterator[tuple[int, int, int]]:
    """The copies that move so many pages, one at least: first, last + 1, and how many the program takes."""
    for start in range(0, max(num_pages, 1), _PAGES_PER_COPY[-1]):
        stop = min(start + _PAGES_PER_COPY[-1], num_pages)
        yield start, stop, next(size for size in _PAGES_PER_COPY if size >= stop - start)


def _gather(cache: KVCache, pages: jax.Array, first_layer: jax.Array, *, num_layers: int) -> jax.Array:
    """Pages (int32 [pages]) of some layers of a rank's cache, [pages, heads, 2 * num_layers, page_size, head_dim]."""
    layers = (first_layer + jnp.arange(num_layers))[:, None]
    both = jnp.stack([cache.keys[layers, pages], cache.values[layers, pages]], axis=1)
    _, _, count, heads, size, width = both.shape  # [layers, 2, pages, heads, page_size, head_dim]
    return both.transpose(2, 3, 0, 1, 4, 5).reshape(count, heads, 2 * num_layers, size, width)


@dataclass(frozen=True)
class Arrived:
    """What a request decodes from: its first token with the entry of its log-probabilities, the hidden state [hidden]
    that it was drawn from (None without a head), and the pages from that of token num_cached on, [model ranks of this
    process, pages, heads, planes, page_size, head_dim]. slots: of those pages in the other processes' buffers."""

    token: int
    logprobs: dict[int, Logprob] | None
    hidden: np.ndarray | None
    pages: np.ndarray
    slots: SequenceOf[int] = ()


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
        self.take_staged: Callable[[SequenceOf[int]], np.ndarray] | None = None  # after the first process: as `pages`
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
        if arrived.pages.shape[1] > len(numbers):
            raise ValueError(f"request {request_id!r}: {arrived.pages.shape[1]} pages arrived for {len(numbers)}")
        if arrived.hidden is None and self._slots.head is not None:
            raise ValueError(f"request {request_id!r}: no hidden state arrived for the multi-token-prediction head")
        sequence.append(arrived.token, None)
        if sequence.output.finished:
            raise ValueError(f"request {request_id!r} ended with its first token: there is nothing to decode")
        del self._reserved[request_id]
        self._enter(request)
        request.saw_token(time.monotonic())
        if arrived.logprobs is not None and sequence.output.logprobs is not None:
            sequence.output.logprobs.append(arrived.logprobs)
            sequence.output.cumulative_logprob = arrived.logprobs[arrived.token].logprob
        admission = self._admission_of(sequence, arrived, numbers[: arrived.pages.shape[1]])
        if self._end is not None:
            self._announce(("admission", None), admission.table())
        self._run_admission(admission, arrived.pages)
        self._num_admitted += 1
        self.wait_for_others(self._num_admitted)  # slots are free for the next pages when all have taken these
        self.scheduler.arrived(job)

    def data_rank(self, request_id: str) -> int:
        """Of a reserved request."""
        return self._reserved[request_id].sequences[0].job.rank

    def _announceable(self, programs: list[Program]) -> list[Program]:
        return [*(program for program in programs if program[0] == "decode"), ("admission", None)]

    def _shape(self, program: Program) -> tuple[int, int] | None:
        return None if program[0] == "admission" else super()._shape(program)

    def _follow(self, program: Program, table: np.ndarray) -> None:
        if program[0] != "admission":
            super()._follow(program, table)
            return
        assert self.take_staged is not None
        admission = _Admission.of(table)
        self._run_admission(admission, self.take_staged(admission.slots))
        self.acknowledge()

    def _run_admission(self, admission: _Admission, arrived: np.ndarray) -> None:
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
        self, rank: int, pages: SequenceOf[int], arrived: np.ndarray
    ) -> Iterator[tuple[int, jax.Array, np.ndarray]]:
        """Pages as programs take them: how many, the pages of all data ranks, and the pages' numbers in the caches."""
        mesh, ranks = self.model.mesh, ranks_here(self)
        layout, sharding = kv_layout(self), NamedSharding(mesh, _PAGES_IN)
        for start, stop, size in _copies_of(arrived.shape[1]):
            block = np.zeros((arrived.shape[0], size, *arrived.shape[2:]), arrived.dtype)
            block[:, : stop - start] = arrived[:, start:stop]
            numbers = np.full((self.ranks, size), self.config.num_pages, np.int32)  # out of range: dropped
            numbers[rank, : stop - start] = pages[start:stop]
            shards = []
            for (data_rank, model_rank), device in np.ndenumerate(mesh.devices):
                if not _is_here(device):
                    continue
                own = block[ranks.index(model_rank)]
                shards.append(jax.device_put(own, device) if data_rank == rank else self._idle(device, own))
            shape = (self.ranks * size, layout.heads_per_rank * layout.ranks, *arrived.shape[3:])
            yield size, jax.make_array_from_single_device_arrays(shape, sharding, shards), numbers.reshape(-1)

    def _idle(self, device: jax.Device, pages: np.ndarray) -> jax.Array:
        """Pages for a rank that gets none."""
        key = device, pages.shape[0]
        if key not in self._idle_pages:
            self._idle_pages[key] = jax.device_put(np.zeros_like(pages), device)
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
            ("decode", variant): function.trace(self.model.state, self._slots, self._idle_table(("decode", variant)))
            for variant, function in programs.decode.items()
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
        for size in _PAGES_PER_COPY:
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
