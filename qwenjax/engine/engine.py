"""The engine: requests join and leave a running batch; each step plans a device call and takes what one drew."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from qwenjax.engine.calls import chunk_columns, decode_table, lane_columns, prefill_table
from qwenjax.engine.config import DecodeKind, EngineConfig, decode_kind
from qwenjax.engine.interrupts import uninterrupted
from qwenjax.engine.processes import Follower, Leader, meet
from qwenjax.engine.programs import Drawn, Programs, spans_processes
from qwenjax.engine.schedule import Decode, Prefill, Row, Scheduler
from qwenjax.engine.sequence import Request, Sequence, logprob_entry
from qwenjax.engine.slots import Slots, create_slots
from qwenjax.mesh import BY_DATA, DATA
from qwenjax.outputs import EngineStats, RequestOutput, SpeculationStats
from qwenjax.sampling import SamplingRow, TopLogprobs, new_seed
from qwenjax.sampling_params import SamplingParams, validate_for
from qwenjax.sharded_model import ShardedModel
from qwenjax.tokenizer import Tokenizer
from qwenjax_ffi.collectives import peer_failure, unarmed
from qwenjax_ffi.symmetric_memory import bytes_outside_xla
from qwenjax_ffi.symmetric_memory_exchange import PeerError

logger = logging.getLogger(__name__)

Program = tuple[str, Any]  # ("prefill", length) or (a DecodeKind, (batch, drafts))

_LOG_SECONDS = 10.0  # between two lines of a busy engine


@dataclass(frozen=True)
class InFlight:
    """A call that the device has been given and whose results the host has not taken.

    found: what the host will fetch: tokens, and log-probabilities where a sequence of the call asks for them.
    """

    call: Prefill | Decode
    found: dict[str, Any]


class Engine:
    """Runs requests on a model. `add_request`, then `step` until `has_unfinished` is false.

    A request's tokens depend on its prompt, parameters and seed alone: rows of a batch know nothing of each other,
    prompts are cut into the same chunks whatever else is there, and noise is keyed by seed and position.

    The device is given a call before the results of the call before it are taken: while it runs, the host turns those
    into text. Not for use by several threads at once.
    """

    def __init__(self, model: ShardedModel, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.ranks = model.mesh.shape[DATA]
        self._slots = self._idle_slots()
        self.speculation = SpeculationStats.of(config.num_speculative_tokens)
        self.scheduler = Scheduler(config, self.ranks)
        self._compiled: dict[Program, Any] = {}
        self._programs: list[Program] = []  # in the same order in every process
        self._end: Leader | Follower | None = None  # where the mesh has devices of several processes
        self._in_flight: deque[InFlight] = deque()
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}  # by order of arrival
        self._orders = itertools.count()
        self.num_prefill_calls = self.num_decode_calls = 0
        self._failure: BaseException | None = None
        self._prompt_tokens = self._cached_prompt_tokens = self._generated_tokens = self._num_aborts = 0
        self._decode_batch = (0,) * self.ranks
        self._logged = (time.monotonic(), 0, 0)
        if outside := bytes_outside_xla():
            logger.info("%s bytes of a GPU are in use beside XLA's pool", f"{outside:,}")

    def _idle_slots(self) -> Slots:
        config = self.config
        return create_slots(
            self.model.config,
            self.model.mesh,
            slots_per_rank=config.max_num_seqs,
            pages_per_rank=config.num_pages,
            max_pages=config.max_pages,
            page_size=config.page_size,
            dtype=self.model.dtype,
            num_drafts=config.num_speculative_tokens,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def has(self, request_id: str) -> bool:
        """Whether a request of this id runs."""
        return request_id in self._requests

    def check(self, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> None:
        """Raises ValueError, naming the field and its limit, for what this engine cannot run."""
        config = self.config
        validate_for(
            params,
            prompt_token_ids=prompt_token_ids,
            vocab_size=self.model.config.vocab_size,
            max_model_len=config.max_model_len,
            eos_ids=self.tokenizer.eos_ids,
        )
        prompt_len = len(prompt_token_ids)
        needed = config.pages_for(prompt_len + params.resolve_max_tokens(prompt_len, config.max_model_len))
        if needed > config.num_pages:
            raise ValueError(
                f"max_tokens: prompt and output need {needed} pages of {config.page_size} tokens, the cache has "
                f"{config.num_pages}; lower max_tokens or raise num_pages"
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        prompt: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queues a request. Raises ValueError as `check` does, and for an id that is in use.

        cache_salt: requests of different salts share no cached prompts.
        """
        request = self._new_request(request_id, prompt_token_ids, params, range(params.n), prompt, cache_salt)
        self._enter(request)
        for sequence in request.sequences:
            self.scheduler.add(sequence.job)

    def _new_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        indices: Iterable[int],
        prompt: str | None,
        cache_salt: str | None,
    ) -> Request:
        """A request with the outputs of these indices, checked and known to nobody."""
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        self.check(prompt_token_ids, params)
        ids = [int(token) for token in prompt_token_ids]
        request = Request(
            request_id,
            prompt,
            ids,
            params,
            new_seed(params),
            params.resolve_max_tokens(len(ids), self.config.max_model_len),
            params.end_ids(self.tokenizer.eos_ids),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            speculation=SpeculationStats.of(self.config.num_speculative_tokens if params.speculation else 0),
            cache_salt=cache_salt,
        )
        for index in indices:
            request.sequences.append(Sequence(request, index, next(self._orders), self.tokenizer))
        return request

    def _enter(self, request: Request) -> None:
        """Takes a request among those that run."""
        if not self._requests:  # figures of a busy engine begin anew
            self._logged = time.monotonic(), self._prompt_tokens, self._generated_tokens
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            self._sequences[sequence.job.order] = sequence

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests where they are and returns their last outputs; ids that are not running are passed over, since
        they may just have ended.

        Their pages are free for the next call: it runs after whatever still writes to them.
        """
        outputs = []
        with uninterrupted():
            for request_id in request_ids:
                if (request := self._requests.pop(request_id, None)) is None:
                    continue
                self._num_aborts += 1
                for sequence in request.sequences:
                    if not sequence.output.finished:
                        sequence.abort()
                        self._leave(sequence)
                request.finished_at = time.monotonic()
                outputs.append(request.output())
            if not self._requests:
                self._in_flight.clear()
        return outputs

    def step(self) -> list[RequestOutput]:
        """Gives the device its next call, takes the results of the one before, and returns the requests that these
        changed, as they now stand: none where no results were due.

        Ctrl-C while it waits for results leaves them to the next step. Any other failure of a call is final: the
        engine's state is gone, and every later step raises RuntimeError. A rank that did not come (PeerError) takes the
        process's CUDA context too.
        """
        if self._failure is not None:
            new = "start a new process" if isinstance(self._failure, PeerError) else "make a new one"
            raise RuntimeError(f"the engine failed ({self._failure}); {new}") from self._failure
        try:
            with self._end.stepping() if isinstance(self._end, Leader) else nullcontext():
                return self._step()
        except Exception as error:
            # A kernel that gave up waiting for a rank fails as a launch; the heap knows which rank.
            self._failure = peer_failure(self.model.mesh) or error
            if self._failure is error:
                raise
            raise self._failure from error

    def _step(self) -> list[RequestOutput]:
        with uninterrupted():
            begun = self._begin_call()
        if not self._in_flight or (begun and len(self._in_flight) == 1):
            return []
        found = jax.device_get(self._in_flight[0].found)
        with uninterrupted():
            return self._take_results(self._in_flight.popleft().call, found)

    def clear_prefix_cache(self) -> None:
        """Forgets all prompts that no running request uses."""
        for pool in self.scheduler.pools:
            pool.evict_all()

    def stats(self) -> EngineStats:
        """May be called from any thread."""
        waiting, prefilling = list(self.scheduler.waiting), list(self.scheduler.prefilling)
        unread = sum(len(job.tokens) for job in waiting) + sum(job.target - job.num_prefilled for job in prefilling)
        num_running = sum(len(table) - table.count(None) for table in self.scheduler.slots)
        return EngineStats(
            num_waiting=len(waiting),
            num_running=num_running,
            queued_prompt_tokens=unread,
            num_preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_aborts=self._num_aborts,
            free_pages=tuple(pool.num_available for pool in self.scheduler.pools),
            num_pages=self.config.num_pages,
            decode_batch=self._decode_batch if num_running else (0,) * self.ranks,
            speculation=replace(self.speculation),
        )

    def warm_up(self, progress: bool = True) -> None:
        """Compiles every program, several at a time, so that no request has to wait for one.

        Requests run the compiled programs themselves: nothing can compile after this. The processes of a mesh over
        several wait for each other here.
        """
        traced = self._traced(Programs(self.model.graphdef, self.model.mesh, self.config))
        self._programs = self._announceable(list(traced))
        with (
            ThreadPoolExecutor(min(len(traced), os.cpu_count() or 1)) as pool,
            tqdm(total=len(traced), desc="Compiling", unit="program", disable=not progress) as bar,
        ):
            waiting = {pool.submit(lambda t: t.lower().compile(), trace): program for program, trace in traced.items()}
            try:
                for future in as_completed(waiting):
                    self._compiled[waiting[future]] = future.result()
                    bar.update()
            except BaseException:  # Ctrl-C among them: what has not begun need not be waited for
                pool.shutdown(wait=False, cancel_futures=True)
                self._compiled.clear()
                raise
        # In the same order in every process: what communicates is run in it.
        self._compiled = {program: self._compiled[program] for program in traced}
        if len(self.model.mesh.local_devices) > 1:
            self._load_kernels()
        if spans_processes(self.model.mesh):
            self._end = meet()

    def _load_kernels(self) -> None:
        """Runs every program that communicates once over nothing, with collectives that return at once.

        Loading a kernel waits for what runs on the process's GPUs, which may wait for the kernel (docs/collectives.md):
        all have to be loaded before the first that waits. The slots are made anew, since the results mean nothing.
        """
        epochs = unarmed(self._slots.epochs, self.model.mesh.size)
        if epochs is self._slots.epochs:
            return
        self._slots = replace(self._slots, epochs=epochs)
        for name, size in self._compiled:
            if name in ("prefill", "begin"):
                prompts = Prefill(size, [])
                rows = prefill_table(self.config, self.ranks, prompts, _no_sampling, False, False)
                self._run_prefill(prompts, self._placed(rows))
            elif name in self.config.decode_kinds:
                # Slots that end with the first step: their limit is a length of 0, so that they write nothing.
                batch, num_drafts = size
                steps = 1 if name == "decode" else self.config.num_steps
                lanes = decode_table(self.config, self.ranks, Decode(batch, num_drafts, steps, []), False)
                lane_columns(self.config).one(lanes, "keep")[:] = 1
                self._slots = replace(self._slots, active=jnp.ones_like(self._slots.active))
                self._run((name, size), self._placed(lanes))
        jax.block_until_ready(self._slots)
        jax.tree.map(lambda leaf: leaf.delete(), self._slots)
        self._slots = self._idle_slots()

    def _announceable(self, programs: list[Program]) -> list[Program]:
        """What the first process tells the others to run, in an order that all have."""
        return programs

    def _traced(self, programs: Programs) -> dict[Program, Any]:
        """Every program that the engine runs, ready to be compiled."""
        functions: dict[Program, Any] = {("prefill", length): found for length, found in programs.prefill.items()}
        functions |= programs.decode
        return {
            program: function.trace(self.model.state, self._slots, self._idle_table(program))
            for program, function in functions.items()
        }

    def _idle_table(self, program: Program) -> Any:
        shape = self._shape(program)
        assert shape is not None
        return self._placed(np.zeros(shape, np.int32))

    def _begin_call(self) -> bool:
        """Plans a call and gives it to the device; false where there is nothing to run."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        now = time.monotonic()
        for job in plan.admitted:
            request = self._sequences[job.order].request
            if request.first_scheduled is None:
                request.first_scheduled, request.num_cached_tokens = now, job.num_cached
        call = plan.call
        sequences = [self._sequences[job.order] for job in call.jobs]
        want = any(sequence.request.params.logprobs is not None for sequence in sequences)
        if isinstance(call, Prefill):
            want_prompt = any(sequence.asks_prompt_logprobs for sequence in sequences)
            table = prefill_table(
                self.config,
                self.ranks,
                call,
                lambda row: self._sequences[row.job.order].sampling_row,
                want,
                want_prompt,
            )
            drawn, prompt_logprobs, found = self._run_prefill(call, self._announced(("prefill", call.length), table))
            self.num_prefill_calls += 1
        else:
            want_prompt, prompt_logprobs, found = False, None, {}
            table = decode_table(self.config, self.ranks, call, want)
            program = self._decode_program(call, [sequence.request.params for sequence in sequences])
            (drawn,) = self._run(program, self._announced(program, table))
            self.num_decode_calls += 1
            self._note_batch(call)
        found["tokens"] = drawn.tokens
        if want:
            found["logprobs"] = drawn.logprobs
        if want_prompt:
            found["prompt_logprobs"] = prompt_logprobs
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), found)
        self.scheduler.begun(call)
        self._in_flight.append(InFlight(call, found))
        return True

    def _decode_program(self, call: Decode, params: SequenceOf[SamplingParams]) -> Program:
        """params: of the call's sequences."""
        kind: DecodeKind = "decode"
        if self.config.programs_by_kind and call.num_steps == self.config.num_steps:
            kind = decode_kind(params)
        return kind, (call.batch, call.num_drafts)

    def _run_prefill(self, call: Prefill, table: Any) -> tuple[Drawn, TopLogprobs, dict[str, Any]]:
        """What the call draws, and what else its results are to hold."""
        drawn, prompt_logprobs = self._run(("prefill", call.length), table)
        return drawn, prompt_logprobs, {}

    def _run(self, program: Program, *arguments: Any) -> tuple[Any, ...]:
        """Runs a program on the model's state, the slots, which it returns anew, and the arguments."""
        if not self._compiled:
            self.warm_up(progress=False)
        self._slots, *results = self._compiled[program](self.model.state, self._slots, *arguments)
        return tuple(results)

    def _shape(self, program: Program) -> tuple[int, int] | None:
        """Of the table that is announced with it; None where that differs from call to call."""
        name, size = program
        if name == "prefill":
            return self.ranks * self.config.rows_per_call(size), chunk_columns(self.config, size).width
        return self.ranks * size[0], lane_columns(self.config).width

    def _announced(self, program: Program, table: np.ndarray) -> Any:
        """The table as the program takes it, once the other processes have been told to run it too."""
        self._announce(program, table)
        return self._placed(table)

    def _announce(self, program: Program, table: np.ndarray) -> None:
        if isinstance(self._end, Follower):
            raise RuntimeError("process 0 takes the requests; the others call follow()")
        if self._end is not None:
            self._end.send(self._programs.index(program), table)

    def follow(self) -> None:
        """What every process but the first does with an engine over several: it runs the calls that the first plans,
        until that one's `close`. Raises PlanTimeoutError or ConnectionError where the first is not heard any more."""
        if not isinstance(self._end, Follower):
            raise RuntimeError("follow() is for the processes after the first of an engine over several")
        while (call := self._end.receive()) is not None:
            program = self._programs[call.program]
            if self._shape(program) not in (None, call.table.shape):
                raise ConnectionError(
                    f"process 0 sent a table of {call.table.shape} for {program}, which takes {self._shape(program)}: "
                    "engines of all processes take the same options"
                )
            self._follow(program, call.table)

    def acknowledge(self) -> None:
        """Tells the first process that one thing more of those that it waits for is done."""
        assert isinstance(self._end, Follower)
        self._end.acknowledge()

    def wait_for_others(self, count: int) -> None:
        """Until every other process has acknowledged `count` things in all; see `Leader.wait_for`."""
        if isinstance(self._end, Leader):
            self._end.wait_for(count)

    @property
    def failure(self) -> ConnectionError | None:
        """Of another process that has left, once the first notices without a call; see `Leader.failure`."""
        return self._end.failure if isinstance(self._end, Leader) else None

    def _follow(self, program: Program, table: np.ndarray) -> None:
        """Does what the first process does after it has announced a program."""
        self._run(program, self._placed(table))

    def close(self) -> None:
        """Lets the other processes' `follow` return; nothing can run afterwards. Nothing to do for a single process."""
        if isinstance(self._end, Leader):
            self._end.close()

    def _placed(self, table: Any, spec: PartitionSpec = BY_DATA) -> Any:
        """A call's table as programs take it: a process gives its own devices' rows."""
        mesh = self.model.mesh
        if not spans_processes(mesh):
            return table
        return jax.make_array_from_callback(
            table.shape, NamedSharding(mesh, spec), lambda index: np.asarray(table[index])
        )

    def _take_results(self, call: Prefill | Decode, found: dict[str, Any]) -> list[RequestOutput]:
        now = time.monotonic()
        if isinstance(call, Prefill):
            changed = self._take_prefilled(call, found, now)
        else:
            changed = self._take_decoded(call, found, now)
        self.scheduler.done(call)
        outputs = []
        for request in changed.values():
            if request.finished:
                request.finished_at = now
                del self._requests[request.request_id]
            outputs.append(request.output())
        if not self._requests:  # what has been begun beyond them draws nothing
            self._in_flight.clear()
        self._log(now)
        return outputs

    def _take_prefilled(self, call: Prefill, found: dict[str, Any], now: float) -> dict[str, Request]:
        changed = dict[str, Request]()
        for row in call.rows:
            sequence = self._sequences.get(row.job.order)
            if sequence is None:  # aborted meanwhile
                continue
            request = sequence.request
            if sequence.asks_prompt_logprobs:
                self._add_prompt_logprobs(request, row.start, row.count, _at(found["prompt_logprobs"], row.place))
                changed[request.request_id] = request
            if row.last:
                if not sequence.output.token_ids:
                    self._prompt_tokens += sequence.prompt_len
                    self._cached_prompt_tokens += sequence.job.num_cached
                self._append(sequence, int(found["tokens"][row.place]), _logprobs_at(found, row.place), now)
                changed[request.request_id] = request
                self._prefilled(sequence, row, found)
        return changed

    def _prefilled(self, sequence: Sequence, row: Row, found: dict[str, Any]) -> None:
        """A sequence has drawn its first token, in a row of the results `found`."""

    def _take_decoded(self, call: Decode, found: dict[str, Any], now: float) -> dict[str, Request]:
        changed = dict[str, Request]()
        tokens = found["tokens"][: call.num_steps].transpose(2, 0, 1).tolist()  # by column, step and position
        for lane in call.lanes:
            sequence = self._sequences.get(lane.job.order)
            if sequence is None:  # ended by the call before, or aborted
                continue
            speculated = call.num_drafts > 0 and sequence.request.params.speculation
            steps = tokens[lane.place]
            if steps[0][0] < 0:  # would wait for ever
                request_id = sequence.request.request_id
                raise RuntimeError(f"request {request_id!r}: the device ended it and the host did not")
            for step, row in enumerate(steps):
                count = 0
                for position, token in enumerate(row):
                    if token < 0 or sequence.output.finished:
                        break
                    self._append(sequence, token, _logprobs_at(found, (step, position, lane.place)), now)
                    count += 1
                if count and speculated:
                    for stats in (self.speculation, sequence.request.speculation):
                        stats.add(count, sequence.output.finished)
                if sequence.output.finished:
                    break
            changed[sequence.request.request_id] = sequence.request
        return changed

    def _append(self, sequence: Sequence, token: int, logprobs: TopLogprobs | None, now: float) -> None:
        sequence.append(token, logprobs)
        sequence.request.saw_token(now)
        self._generated_tokens += 1
        if sequence.output.finished:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence.job)
        del self._sequences[sequence.job.order]

    def _add_prompt_logprobs(self, request: Request, start: int, count: int, found: TopLogprobs) -> None:
        top_n, table, prompt = request.params.prompt_logprobs or 0, request.prompt_logprobs, request.prompt_token_ids
        assert table is not None
        # After a preemption rows come again that were seen, and drawn tokens follow the prompt.
        for place in range(len(table) - 1 - start, min(count, len(prompt) - 1 - start)):
            table.append(logprob_entry(self.tokenizer, prompt[start + place + 1], _at(found, place), top_n))

    def _note_batch(self, call: Decode) -> None:
        ranks = [lane.job.rank for lane in call.lanes]
        self._decode_batch = tuple(ranks.count(rank) for rank in range(self.ranks))

    def _log(self, now: float) -> None:
        """A line of what the engine does, every ten seconds while it has work."""
        since, prompt_tokens, generated_tokens = self._logged
        if (seconds := now - since) < _LOG_SECONDS:
            return
        self._logged = now, self._prompt_tokens, self._generated_tokens
        stats = self.stats()
        held = [1 - free / stats.num_pages for free in stats.free_pages]
        drafts = ""
        if self.config.num_speculative_tokens:
            rates = ", ".join(f"{rate:.0%}" for rate in stats.speculation.acceptance)
            drafts = f", drafts accepted {rates} ({stats.speculation.mean_length:.2f} tokens a step)"
        logger.info(
            "%.1f prompt and %.1f generated tokens/s, %d running, %d waiting, pages held %s, %d preemptions, "
            "%d of %d prompt tokens cached%s",
            (stats.prompt_tokens - prompt_tokens) / seconds,
            (stats.generated_tokens - generated_tokens) / seconds,
            stats.num_running,
            stats.num_waiting,
            ", ".join(f"{share:.0%}" for share in held),
            stats.num_preemptions,
            stats.cached_prompt_tokens,
            stats.prompt_tokens,
            drafts,
        )


def _at(logprobs: TopLogprobs, index: int | tuple[int, ...]) -> TopLogprobs:
    return jax.tree.map(lambda table: table[index], logprobs)


def _logprobs_at(found: dict[str, Any], index: int | tuple[int, ...]) -> TopLogprobs | None:
    return _at(found["logprobs"], index) if "logprobs" in found else None


def _no_sampling(row: Row) -> SamplingRow:
    raise AssertionError(f"a call over nothing has a row: {row}")
