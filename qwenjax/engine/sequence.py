"""One output of a request, on the host: where it stands, and what its tokens mean."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from qwenjax.engine.schedule import Job
from qwenjax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationStats,
)
from qwenjax.sampling import SamplingRow, TopLogprobs
from qwenjax.sampling_params import SamplingParams
from qwenjax.stop_strings import StopMatcher
from qwenjax.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(eq=False)
class Request:
    """A prompt with its parameters, and the outputs that it gets. seed: in [0, 2^64), drawn where it named none."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: tuple[int, ...]
    speculation: SpeculationStats
    arrival: float = field(default_factory=time.monotonic)
    cache_salt: str | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    latest_token: float | None = None
    finished_at: float | None = None
    num_tokens: int = 0  # drawn, of all outputs
    num_cached_tokens: int = 0
    handed_over: bool = False  # another engine goes on with it
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return self.handed_over or all(sequence.output.finished for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """What the request has so far, as a value of its own."""
        metrics = RequestMetrics(
            self.arrival,
            self.first_scheduled,
            self.first_token,
            self.finished_at,
            self.latest_token,
            self.num_tokens,
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.prompt_token_ids),
            [sequence.snapshot() for sequence in self.sequences],
            None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            self.finished,
            metrics,
            replace(self.speculation) if self.speculation.drafted else None,
            self.num_cached_tokens,
        )

    def saw_token(self, now: float) -> None:
        """Notes the time of a token that an output has just taken."""
        if self.first_token is None:
            self.first_token = now
        self.latest_token = now
        self.num_tokens += 1


class Sequence:
    """One of a request's n outputs: it takes tokens as they are drawn and says when it is done."""

    def __init__(self, request: Request, index: int, order: int, tokenizer: Tokenizer) -> None:
        """order: of arrival, see Job."""
        params = request.params
        self.request = request
        self.output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        if params.logprobs is not None:
            self.output.cumulative_logprob = 0.0
        leader: Job | None = request.sequences[0].job if request.sequences else None
        self.job: Job = Job(
            order,
            list(request.prompt_token_ids),
            self.prompt_len + request.max_tokens,
            self._max_cached(),
            request.cache_salt,
            leader,
            params.speculation,
        )
        self.sampling_row = SamplingRow(params, request.seed, index, self.prompt_len, request.end_ids)
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._stop = StopMatcher(params.stop_strings, params.include_stop_str_in_output)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that may still be drawn."""
        return self.request.max_tokens - len(self.output.token_ids)

    def _max_cached(self) -> int:
        """How many tokens need not be run. Log-probabilities of a prompt and the counts of penalties come from running
        it."""
        params = self.request.params
        if self.asks_prompt_logprobs or params.repetition_penalty != 1:
            return 0
        return self.prompt_len if params.has_penalties else self.prompt_len + self.request.max_tokens

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are wanted: of a request's outputs the first brings them."""
        return self.request.prompt_logprobs is not None and self.output.index == 0

    def append(self, token: int, logprobs: TopLogprobs | None) -> None:
        """Takes the next token; logprobs: of this one alone, NumPy scalars and [MAX_LOGPROBS] rows."""
        params, output = self.request.params, self.output
        output.token_ids.append(token)
        self.job.tokens.append(token)
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprob_entry(self._tokenizer, token, logprobs, params.logprobs or 0))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + float(logprobs.logprob)
        is_end = token in self.request.end_ids
        if not is_end or params.include_stop_str_in_output:
            # As vLLM: what ends within the first min_tokens does not stop.
            self._show(self._detokenizer.feed(token), may_stop=len(output.token_ids) > params.min_tokens)
        if self._stop.matched is not None:
            self._finish("stop", self._stop.matched)
        elif is_end:
            self._finish("stop", token if token in (params.stop_token_ids or ()) else None)
        elif self.num_left == 0:
            self._finish("length", None)

    def abort(self) -> None:
        """Ends the output as it is."""
        self._finish("abort", None)

    def snapshot(self) -> CompletionOutput:
        """The output so far, which later tokens do not change."""
        output = self.output
        return CompletionOutput(
            output.index,
            output.text,
            list(output.token_ids),
            None if output.logprobs is None else list(output.logprobs),
            output.cumulative_logprob,
            output.finish_reason,
            output.stop_reason,
        )

    def _show(self, text: str, may_stop: bool) -> None:
        self.output.text += self._stop.feed(text, may_stop)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        if self._stop.matched is None:
            self._show(self._detokenizer.finish(), may_stop=False)
            self.output.text += self._stop.finish()
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason


def logprob_entry(tokenizer: Tokenizer, token: int, found: TopLogprobs, top_n: int) -> dict[int, Logprob]:
    """{id: Logprob} of one position, the token itself first, then the top_n most likely."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False))

    entries = {token: entry(token, float(found.logprob), int(found.rank))}
    ids, values = np.asarray(found.top_ids), np.asarray(found.top_logprobs)
    for place, (top_id, value) in enumerate(zip(ids[:top_n].tolist(), values[:top_n].tolist(), strict=True)):
        # Ids of equal probability share a rank: that of the first among them.
        rank = 1 + int(np.argmax(values == value)) if place else 1
        entries.setdefault(top_id, entry(top_id, value, rank))
    return entries
