"""The engine: requests join and leave a running batch; each step runs one prefill or one decode call."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from qwenjax.engine.pages import PagePool
from qwenjax.engine.programs import Chunk, Drawn, Programs
from qwenjax.engine.sequence import Request, Sequence, logprob_entry
from qwenjax.engine.slots import SlotRows, create_slots
from qwenjax.mesh import DATA
from qwenjax.outputs import RequestOutput, SpeculationStats
from qwenjax.sampling import TopLogprobs, build_arrays, new_seed
from qwenjax.sampling_params import SamplingParams, validate_for
from qwenjax.sharded_model import ShardedModel
from qwenjax.tokenizer import Tokenizer

_SHORTEST_CHUNK = 16  # tokens; shorter prompts are padded to it


@dataclass(frozen=True)
class EngineConfig:
    """Sizes that the engine's programs are compiled for.

    max_model_len: tokens of prompt and output together. max_num_seqs: slots of a data rank. num_pages: pages of
    page_size tokens, of a data rank. max_num_batched_tokens: of one prefill call and data rank; longer prompts run in
    several calls. num_steps: of a decode call, each of which draws a token for each slot, or several with speculation.
    num_speculative_tokens: drafts of a step, 0 for none. speculation_max_batch: with more sequences than this on a data
    rank a call does without drafts.
    """

    max_model_len: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    max_num_batched_tokens: int
    num_steps: int
    num_speculative_tokens: int = 0
    speculation_max_batch: int = 32

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "num_pages", "page_size", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < _SHORTEST_CHUNK:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least {_SHORTEST_CHUNK}"
            )
        for name in ("num_speculative_tokens", "speculation_max_batch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    @property
    def chunk_lengths(self) -> list[int]:
        """Row lengths that prefill is compiled for, ascending: the budget and its quarters."""
        lengths = [self.max_num_batched_tokens]
        while lengths[-1] // 4 >= _SHORTEST_CHUNK:
            lengths.append(lengths[-1] // 4)
        return lengths[::-1]

    @property
    def decode_batches(self) -> list[int]:
        """Numbers of slots that decode is compiled for: one sequence alone need not pay for a full batch."""
        return sorted({batch for batch in (1, 8, 64) if batch < self.max_num_seqs} | {self.max_num_seqs})

    @property
    def decode_variants(self) -> list[tuple[int, int]]:
        """Batch and number of drafts of every decode program. Requests may go without drafts at any batch."""
        plain = [(batch, 0) for batch in self.decode_batches]
        if not self.num_speculative_tokens or not self.speculation_max_batch:
            return plain
        # At every batch: a few sequences may be left in high slots, and those are to keep their drafts.
        return plain + [(batch, self.num_speculative_tokens) for batch in self.decode_batches]


class Engine:
    """Runs requests on a model. `add_request`, then `step` until `has_unfinished` is false.

    A request's tokens depend on its prompt, parameters and seed alone: rows of a batch know nothing of each other,
    prompts are cut into the same chunks whatever else is there, and noise is keyed by seed and position.
    """

    def __init__(self, model: ShardedModel, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.ranks = model.mesh.shape[DATA]
        self._slots = create_slots(
            model.config,
            model.mesh,
            slots_per_rank=config.max_num_seqs,
            pages_per_rank=config.num_pages,
            max_pages=config.max_pages,
            page_size=config.page_size,
            dtype=model.dtype,
            num_drafts=config.num_speculative_tokens,
        )
        self.speculation = SpeculationStats.of(config.num_speculative_tokens)
        self._compiled: dict[tuple[str, Any], Any] = {}
        self._pools = [PagePool(config.num_pages) for _ in range(self.ranks)]
        self._table: list[list[Sequence | None]] = [[None] * config.max_num_seqs for _ in range(self.ranks)]
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._requests: dict[str, Request] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

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
        needed = self._pages_needed(len(prompt_token_ids), params)
        if needed > config.num_pages:
            raise ValueError(
                f"max_tokens: prompt and output need {needed} pages of {config.page_size} tokens, the cache has "
                f"{config.num_pages}; lower max_tokens or raise num_pages"
            )

    def add_request(
        self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams, prompt: str | None = None
    ) -> None:
        """Queues a request. Raises ValueError as `check` does, and for an id that is in use."""
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
        )
        request.sequences = [Sequence(request, index, self.tokenizer) for index in range(params.n)]
        self._requests[request_id] = request
        self._waiting.extend(request.sequences)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests where they are; ids that are not running are passed over, since they may just have ended."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            for sequence in request.sequences if request else ():
                if not sequence.output.finished:
                    sequence.abort()
                    self._leave(sequence)

    def step(self) -> list[RequestOutput]:
        """Runs one device call and returns the requests that it changed, as they now stand."""
        self._admit()
        changed = self._prefill() if self._prefilling else self._decode()
        now = time.monotonic()
        for request in changed:
            if request.first_token is None and any(s.output.token_ids for s in request.sequences):
                request.first_token = now
            if request.finished:
                request.finished_at = now
                del self._requests[request.request_id]
        return [request.output() for request in changed]

    def warm_up(self, progress: bool = True) -> None:
        """Compiles every program, several at a time, so that no request has to wait for one.

        Requests run the compiled programs themselves: nothing can compile after this.
        """
        lengths, variants = self.config.chunk_lengths, self.config.decode_variants
        with_head = self.config.num_speculative_tokens > 0
        programs = Programs(self.model.graphdef, self.model.mesh, variants, self.config.num_steps, with_head)
        no = np.bool_(False)
        traced: dict[tuple[str, Any], Any] = {}
        state, slots = self.model.state, self._slots
        for length in lengths:
            traced["prefill", length] = programs.prefill.trace(state, slots, self._chunk([], length), no, no)
        for variant in variants:
            traced["decode", variant] = programs.decode[variant].trace(state, slots, self._keep(), np.int32(0), no)
        with (
            ThreadPoolExecutor(min(len(traced), os.cpu_count() or 1)) as pool,
            tqdm(total=len(traced), desc="Compiling", unit="program", disable=not progress) as bar,
        ):
            waiting = {pool.submit(lambda t: t.lower().compile(), trace): key for key, trace in traced.items()}
            try:
                for future in as_completed(waiting):
                    self._compiled[waiting[future]] = future.result()
                    bar.update()
            except BaseException:  # Ctrl-C among them: what has not begun need not be waited for
                pool.shutdown(wait=False, cancel_futures=True)
                self._compiled.clear()
                raise

    def _pages_needed(self, prompt_len: int, params: SamplingParams) -> int:
        longest = prompt_len + params.resolve_max_tokens(prompt_len, self.config.max_model_len)
        return -(-longest // self.config.page_size)

    def _admit(self) -> None:
        """Waiting sequences enter free slots in order; the first that finds no room keeps the rest behind it."""
        while self._waiting:
            sequence = self._waiting[0]
            needed = self._pages_needed(sequence.prompt_len, sequence.request.params)
            free = [(table.count(None), rank) for rank, table in enumerate(self._table)]
            roomy = [pair for pair in free if pair[0] and self._pools[pair[1]].num_free >= needed]
            if not roomy:
                return
            rank = max(roomy, key=lambda pair: (pair[0], -pair[1]))[1]
            self._waiting.popleft()
            sequence.rank, sequence.slot = rank, self._table[rank].index(None)
            sequence.pages = self._pools[rank].take(needed)
            self._table[rank][sequence.slot] = sequence
            self._prefilling.append(sequence)
            if sequence.request.first_scheduled is None:
                sequence.request.first_scheduled = time.monotonic()

    def _leave(self, sequence: Sequence) -> None:
        if sequence.rank < 0:
            self._waiting.remove(sequence)
            return
        if not sequence.prefilled:
            self._prefilling.remove(sequence)
        self._table[sequence.rank][sequence.slot] = None
        self._pools[sequence.rank].give_back(sequence.pages)
        sequence.pages = []

    def _length_for(self, sequence: Sequence) -> int:
        left = min(sequence.prompt_len - sequence.num_prefilled, self.config.max_num_batched_tokens)
        return next(length for length in self.config.chunk_lengths if length >= left)

    def _prefill(self) -> list[Request]:
        """One call over the oldest prompt and those whose next chunk has the same length as compiled."""
        length = self._length_for(self._prefilling[0])
        room = [self.config.max_num_batched_tokens // length] * self.ranks
        batch = []
        for sequence in self._prefilling:
            if self._length_for(sequence) == length and room[sequence.rank]:
                room[sequence.rank] -= 1
                batch.append(sequence)
        chunk = self._chunk(batch, length)
        want = any(s.request.params.logprobs is not None for s in batch)
        want_prompt = any(s.request.prompt_logprobs is not None for s in batch)
        drawn, prompt_logprobs = jax.device_get(self._run_prefill(chunk, want, want_prompt))
        for row, sequence in zip(self._rows_of(batch, length), batch, strict=True):
            start, count = sequence.num_prefilled, int(np.sum(chunk.positions[row] >= 0))
            sequence.num_prefilled += count
            if sequence.request.prompt_logprobs is not None and sequence.output.index == 0:
                self._add_prompt_logprobs(sequence.request, start, count, _at(prompt_logprobs, row))
            if sequence.prefilled:
                self._prefilling.remove(sequence)
                self._append(sequence, int(drawn.tokens[row]), _at(drawn.logprobs, row))
        return _distinct(sequence.request for sequence in batch)

    def _decode(self) -> list[Request]:
        running = [sequence for table in self._table for sequence in table if sequence is not None]
        if not running:
            return []
        num_steps = min(self.config.num_steps, max(sequence.num_left for sequence in running))
        highest = max(sequence.slot for sequence in running)
        batch = next(size for size in self.config.decode_batches if size > highest)
        num_drafts = self._num_drafts(running)
        want = any(sequence.request.params.logprobs is not None for sequence in running)
        drawn = jax.device_get(self._run_decode((batch, num_drafts), num_steps, want))
        for sequence in running:
            self._take(sequence, drawn, sequence.rank * batch + sequence.slot, num_steps, want)
        return _distinct(sequence.request for sequence in running)

    def _num_drafts(self, running: SequenceOf[Sequence]) -> int:
        busiest = max(sum(sequence is not None for sequence in table) for table in self._table)
        wanted = any(sequence.request.params.speculation for sequence in running)
        fits = busiest <= self.config.speculation_max_batch
        return self.config.num_speculative_tokens if wanted and fits else 0

    def _take(self, sequence: Sequence, drawn: Drawn, column: int, num_steps: int, want_logprobs: bool) -> None:
        """Hands a sequence what a decode call drew for it."""
        if drawn.tokens[0, 0, column] < 0:  # would wait for ever
            raise RuntimeError(f"request {sequence.request.request_id!r}: the device ended it and the host did not")
        speculated = drawn.tokens.shape[1] > 1 and sequence.request.params.speculation
        for step, row_tokens in enumerate(drawn.tokens[:num_steps, :, column].tolist()):
            count = 0
            for row, token in enumerate(row_tokens):
                if token < 0 or sequence.output.finished:
                    break
                logprobs = _at(drawn.logprobs, (step, row, column)) if want_logprobs else None
                self._append(sequence, token, logprobs)
                count += 1
            if count and speculated:
                for stats in (self.speculation, sequence.request.speculation):
                    stats.add(count, sequence.output.finished)
            if sequence.output.finished:
                return

    def _append(self, sequence: Sequence, token: int, logprobs: TopLogprobs | None) -> None:
        sequence.append(token, logprobs)
        if sequence.output.finished:
            self._leave(sequence)

    def _run_prefill(self, chunk: Chunk, want: bool, want_prompt: bool) -> tuple[Drawn, TopLogprobs]:
        program = self._program("prefill", chunk.tokens.shape[1])
        self._slots, drawn, prompt_logprobs = program(
            self.model.state, self._slots, chunk, np.bool_(want), np.bool_(want_prompt)
        )
        return drawn, prompt_logprobs

    def _run_decode(self, variant: tuple[int, int], num_steps: int, want: bool) -> Drawn:
        program = self._program("decode", variant)
        self._slots, drawn = program(self.model.state, self._slots, self._keep(), np.int32(num_steps), np.bool_(want))
        return drawn

    def _program(self, name: str, size: Any) -> Any:
        if not self._compiled:
            self.warm_up(progress=False)
        return self._compiled[name, size]

    def _keep(self) -> np.ndarray:
        """bool [slots]: whether the slot holds a sequence that decodes."""
        slots = [sequence for table in self._table for sequence in table]
        return np.array([sequence is not None and sequence.prefilled for sequence in slots])

    def _rows_of(self, batch: SequenceOf[Sequence], length: int) -> list[int]:
        """The row of each sequence in a chunk: a data rank's rows lie together."""
        rows_per_rank = self.config.max_num_batched_tokens // length
        used = [0] * self.ranks
        rows = []
        for sequence in batch:
            rows.append(sequence.rank * rows_per_rank + used[sequence.rank])
            used[sequence.rank] += 1
        return rows

    def _chunk(self, batch: SequenceOf[Sequence], length: int) -> Chunk:
        config = self.config
        num_rows = self.ranks * (config.max_num_batched_tokens // length)
        tokens, next_tokens = np.zeros((num_rows, length), np.int32), np.zeros((num_rows, length), np.int32)
        positions = np.full((num_rows, length), -1, np.int32)
        slot = np.full(num_rows, config.max_num_seqs, np.int32)
        first, last = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
        page_table = np.zeros((num_rows, config.max_pages), np.int32)
        end_lengths, speculates = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.bool_)
        sampling: list[Any] = [None] * num_rows
        for row, sequence in zip(self._rows_of(batch, length), batch, strict=True):
            ids, start = sequence.request.prompt_token_ids, sequence.num_prefilled
            part, following = ids[start : start + length], ids[start + 1 : start + length + 1]
            tokens[row, : len(part)] = part
            next_tokens[row, : len(following)] = following
            positions[row, : len(part)] = np.arange(start, start + len(part))
            slot[row] = sequence.slot
            first[row], last[row] = start == 0, start + len(part) == len(ids)
            page_table[row, : len(sequence.pages)] = sequence.pages
            end_lengths[row] = len(ids) + sequence.request.max_tokens
            speculates[row] = sequence.request.params.speculation
            sampling[row] = sequence.sampling_row()
        rows = SlotRows(page_table, end_lengths, speculates, build_arrays(sampling))
        return Chunk(tokens, positions, next_tokens, slot, first, last, rows)

    def _add_prompt_logprobs(self, request: Request, start: int, count: int, found: TopLogprobs) -> None:
        top_n, table = request.params.prompt_logprobs or 0, request.prompt_logprobs
        assert table is not None
        following = request.prompt_token_ids[start + 1 : start + count + 1]
        table.extend(
            logprob_entry(self.tokenizer, token, _at(found, place), top_n) for place, token in enumerate(following)
        )


def _at(logprobs: TopLogprobs, index: int | tuple[int, ...]) -> TopLogprobs:
    return jax.tree.map(lambda table: table[index], logprobs)


def _distinct(requests: Iterable[Request]) -> list[Request]:
    return list({id(request): request for request in requests}.values())
