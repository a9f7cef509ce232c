"""What a request returns, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """One id's natural-log probability under the model's unprocessed logits.

    rank: 1 for the most likely id; ids of equal probability share a rank.
    decoded_token: the id's text by itself; bytes that make no whole character are shown as U+FFFD.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One of a request's `n` outputs, complete or so far.

    index: which of the n.
    text: the output's text, without the prompt.
    token_ids: every id drawn, the one that ended the output included.
    logprobs: per output token, {id: Logprob} with the drawn id first; None where not asked for.
    cumulative_logprob: the sum of the drawn ids' log-probabilities; None where logprobs were not asked for.
    finish_reason: "stop" (EOS, stop id or stop string), "length" (max_tokens or the context's end), "abort", or
        None while the output grows.
    stop_reason: the stop string or stop id that ended it; None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """A request's times in seconds on the monotonic clock; None for what has not happened yet.

    arrival: accepted. first_scheduled: its prefill began. first_token, latest_token: the host saw its first token and
    its newest; num_tokens: drawn until then, of all its outputs. finished: its last output ended.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    latest_token: float | None = None
    num_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the beginning of the prefill."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def inter_token_time(self) -> float | None:
        """Mean seconds from one token to the next after the first; None before the second.

        Tokens of one device call arrive together: between two of a stream's outputs lie the difference of their
        latest_token and as many tokens as num_tokens grew by.
        """
        if self.first_token is None or self.latest_token is None or self.num_tokens < 2:
            return None
        return (self.latest_token - self.first_token) / (self.num_tokens - 1)


@dataclass
class SpeculationStats:
    """How drafts fared. steps: decode steps that drafted; tokens: drawn in them. drafted, accepted: per draft position,
    in how many steps it was tried (an output's end cuts a step short) and equalled the model's own token."""

    steps: int
    tokens: int
    drafted: list[int]
    accepted: list[int]

    @classmethod
    def of(cls, num_drafts: int) -> SpeculationStats:
        """Of no step yet."""
        return cls(0, 0, [0] * num_drafts, [0] * num_drafts)

    def add(self, num_tokens: int, finished: bool) -> None:
        """One step that drew num_tokens, the last of which ended the output where `finished`."""
        self.steps, self.tokens = self.steps + 1, self.tokens + num_tokens
        tried = num_tokens - 1 if finished else len(self.drafted)
        self.drafted = [count + (place < tried) for place, count in enumerate(self.drafted)]
        self.accepted = [count + (place < num_tokens - 1) for place, count in enumerate(self.accepted)]

    @property
    def acceptance(self) -> list[float]:
        """The share of steps in which the draft at each position was accepted; NaN where none was tried."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [accepted / drafted if drafted else float("nan") for accepted, drafted in pairs]

    @property
    def mean_length(self) -> float:
        """Tokens that a step drew on average, accepted drafts and the one after them; NaN without steps."""
        return self.tokens / self.steps if self.steps else float("nan")


@dataclass
class RequestOutput:
    """A request's outputs, complete or so far.

    prompt: the text, or None where ids were given.
    prompt_logprobs: per prompt token, {id: Logprob} with the prompt's id first, and None for the first token,
        which nothing precedes; None where not asked for.
    speculation: how this request's drafts fared; None where it had none.
    num_cached_tokens: prompt tokens that came from the prefix cache and were not run.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
    speculation: SpeculationStats | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class EngineStats:
    """What an engine has to do and has done. Counters are totals since its start.

    num_waiting, num_running: sequences without and with a slot (a request has n of them). queued_prompt_tokens: of
    prompts, still to be run. num_preemptions: sequences that gave up their pages and are run anew. prompt_tokens: of
    prompts that were run; cached_prompt_tokens of them came from the prefix cache. generated_tokens: drawn.
    num_aborts: requests. free_pages: pages that no sequence holds, of each data rank; num_pages: of a data rank.
    decode_batch: sequences of the newest decode call, of each data rank. speculation: how drafts have fared.
    """

    num_waiting: int
    num_running: int
    queued_prompt_tokens: int
    num_preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_aborts: int
    free_pages: tuple[int, ...]
    num_pages: int
    decode_batch: tuple[int, ...]
    speculation: SpeculationStats
