"""The engine that runs prompts and gives their pages away; see qwenjax.engine.handover."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qwenjax.cache import CACHE_SPEC, KVCache
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.engine import Engine, Program
from qwenjax.engine.handover import PAGES_PER_COPY, copies_of, layer_groups
from qwenjax.engine.programs import Drawn, Programs, begin_prefill, finish_prefill, prefill_layers
from qwenjax.engine.schedule import Prefill, Row
from qwenjax.engine.sequence import Sequence
from qwenjax.engine.slots import slots_specs
from qwenjax.mesh import BY_DATA, DATA, MODEL
from qwenjax.outputs import RequestOutput
from qwenjax.sampling import TopLogprobs
from qwenjax.sampling_params import SamplingParams
from qwenjax.sharded_model import ShardedModel, on_ranks
from qwenjax.tokenizer import Tokenizer

_WHOLE = PartitionSpec()
_PAGES_OUT = PartitionSpec(None, MODEL)  # [pages, heads, planes, page_size, head_dim] of one data rank


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
        self._groups = layer_groups(model.config.num_hidden_layers)
        self._layers: dict[int, jax.Array] = {}
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
            table = self._idle_table(("prefill", length))
            begin = partial(begin_prefill, config=self.config, length=length)
            traced["begin", length] = traced_on_ranks(begin, (BY_DATA,), (BY_DATA,), table)
            shape = (self.config.rows_per_call(length), length, self.model.config.hidden_size)
            x = jax.ShapeDtypeStruct(shape, self.model.dtype, sharding=NamedSharding(mesh, BY_DATA))
            for count in sorted({stop - start for start, stop in self._groups}):
                layers = partial(prefill_layers, count=count, config=self.config, length=length)
                specs = (BY_DATA, BY_DATA, _WHOLE)
                run = traced_on_ranks(layers, specs, (BY_DATA,), x, table, self._layer(0))
                traced["layers", (length, count)] = run
            finish = partial(finish_prefill, config=self.config, length=length)
            outs = (BY_DATA, BY_DATA, BY_DATA)
            traced["finish", length] = traced_on_ranks(finish, (BY_DATA, BY_DATA), outs, x, table)
        for cache, sizes in self._gathers():
            for num_layers, num_pages in itertools.product(sizes, PAGES_PER_COPY):
                gather = jax.shard_map(
                    partial(_gather, num_layers=num_layers),
                    mesh=mesh,
                    in_specs=(KVCache(CACHE_SPEC, CACHE_SPEC), _WHOLE, _WHOLE),  # type: ignore[arg-type]
                    out_specs=_PAGES_OUT,
                    check_vma=False,
                )
                program = "gather", (cache.keys.shape[0], num_layers, num_pages)
                pages = self._placed(np.zeros(num_pages, np.int32), _WHOLE)
                traced[program] = jax.jit(gather).trace(cache, pages, self._layer(0))
        return traced

    def _announceable(self, programs: list[Program]) -> list[Program]:
        return [*(("prefill", length) for length in self.config.chunk_lengths), ("pages", None)]

    def _layer(self, number: int) -> jax.Array:
        """A layer's number as programs take it."""
        if number not in self._layers:
            whole = NamedSharding(self.model.mesh, _WHOLE)
            self._layers[number] = jax.make_array_from_callback((), whole, lambda _: np.int32(number))
        return self._layers[number]

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
            (x,) = self._run(("layers", (length, stop - start)), x, table, self._layer(start))
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
        for start, stop, size in copies_of(len(pages)):
            numbers = np.zeros(size, np.int32)
            numbers[: stop - start] = pages[start:stop]
            gather = self._compiled["gather", (cache.keys.shape[0], num_layers, size)]
            arrays.append(gather(cache, self._placed(numbers, _WHOLE), self._layer(first_layer)))
        for part in parts:
            self._num_parts[part.request_id] += 1
        self.on_staged(StagedPages(arrays, first_plane, parts, slots))


def _gather(cache: KVCache, pages: jax.Array, first_layer: jax.Array, *, num_layers: int) -> jax.Array:
    """Pages (int32 [pages]) of some layers of a rank's cache, [pages, heads, 2 * num_layers, page_size, head_dim]."""
    layers = (first_layer + jnp.arange(num_layers))[:, None]
    both = jnp.stack([cache.keys[layers, pages], cache.values[layers, pages]], axis=1)
    _, _, count, heads, size, width = both.shape  # [layers, 2, pages, heads, page_size, head_dim]
    return both.transpose(2, 3, 0, 1, 4, 5).reshape(count, heads, 2 * num_layers, size, width)
