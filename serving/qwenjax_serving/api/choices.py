"""A request's outputs as choices of an answer: whole, or as what is new since the last event of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import UNSET

from qwenjax.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from qwenjax.tokenizer import IncrementalDetokenizer, Tokenizer
from qwenjax_serving.api.logprobs import CompletionLogprobsWriter, chat_logprobs
from qwenjax_serving.api.requests import ChatRequest, CompletionRequest, Generation
from qwenjax_serving.api.responses import (
    CachedTokens,
    ChatChoice,
    Choice,
    CompletionChoice,
    Message,
    Usage,
)
from qwenjax_serving.api.sampling import prompt_alone
from qwenjax_serving.backend import BackendError

Logprobs = Mapping[int, Logprob] | None  # of one token; None for a prompt's first


class Writer(ABC):
    """Writes one output of one prompt as choices: whole, or as it grows."""

    def __init__(self, tokenizer: Tokenizer, request: Generation, index: int) -> None:
        self._tokenizer, self._request, self._index = tokenizer, request, index
        self._num_tokens = self._num_characters = 0  # of what has been written
        self._begun = self._ended = False

    def write(self, result: RequestOutput, part: CompletionOutput, streaming: bool) -> Choice | None:
        """What is new since the last call; None where that is nothing to show.

        Raises BackendError for an output that was aborted.
        """
        if self._ended or not (part.token_ids or part.finished):
            return None  # others of the request go on; or the prompt is still being read
        if part.finish_reason == "abort":
            raise BackendError("the server ended this request before it was finished")
        new, first = slice(self._num_tokens, None), not self._begun
        text, ids = part.text[self._num_characters :], part.token_ids[new]
        logprobs = None if part.logprobs is None else part.logprobs[new]
        self._num_tokens, self._num_characters = len(part.token_ids), len(part.text)
        text = self._opening(result) + text if first else text
        if not (text or part.finished or (ids and (logprobs is not None or self._request.return_token_ids))):
            return None
        self._begun, self._ended = True, part.finished
        choice = self._choice(result, text, ids, logprobs, first, streaming)
        choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = ids
            choice.prompt_token_ids = result.prompt_token_ids if first else UNSET
        if self._request.prompt_logprobs is not None:  # which cannot be streamed
            choice.prompt_logprobs = result.prompt_logprobs or []
        return choice

    def _opening(self, result: RequestOutput) -> str:
        """Text before the output's own."""
        return ""

    @abstractmethod
    def _choice(
        self,
        result: RequestOutput,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[Logprobs] | None,
        first: bool,
        streaming: bool,
    ) -> Choice:
        """A choice of new text, ids and log-probabilities; first: the first one of this output."""


class CompletionWriter(Writer):
    """One choice of /v1/completions."""

    _request: CompletionRequest

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest, index: int) -> None:
        super().__init__(tokenizer, request, index)
        self._skip = request.skip_special_tokens is not False
        self._logprobs = CompletionLogprobsWriter(tokenizer, self._skip)

    def write(self, result: RequestOutput, part: CompletionOutput, streaming: bool) -> Choice | None:
        return super().write(result, _without_tokens(part) if prompt_alone(self._request) else part, streaming)

    def _opening(self, result: RequestOutput) -> str:
        if not self._request.echo:
            return ""
        if result.prompt is not None:
            return result.prompt
        # A character that the prompt leaves open is the output's.
        return IncrementalDetokenizer(self._tokenizer, (), self._skip).feed(result.prompt_token_ids)

    def _choice(
        self,
        result: RequestOutput,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[Logprobs] | None,
        first: bool,
        streaming: bool,
    ) -> CompletionChoice:
        choice = CompletionChoice(index=self._index, text=text)
        if logprobs is not None:
            if first and self._request.echo:
                ids, logprobs = [*result.prompt_token_ids, *ids], [*(result.prompt_logprobs or ()), *logprobs]
            choice.logprobs = self._logprobs.write(ids, logprobs)
        return choice


class ChatWriter(Writer):
    """One choice of /v1/chat/completions."""

    _request: ChatRequest

    def _choice(
        self,
        result: RequestOutput,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[Logprobs] | None,
        first: bool,
        streaming: bool,
    ) -> ChatChoice:
        message = Message("assistant" if first else UNSET, text)
        choice = ChatChoice(index=self._index)
        if streaming:
            choice.delta = message
        else:
            choice.message = message
        if logprobs is not None:
            choice.logprobs = chat_logprobs(self._tokenizer, ids, logprobs, self._request.top_logprobs or 0)
        return choice


def _without_tokens(part: CompletionOutput) -> CompletionOutput:
    logprobs = None if part.logprobs is None else list[dict[int, Logprob]]()
    reason: FinishReason | None = "length" if part.finish_reason in ("length", "stop") else part.finish_reason
    return replace(part, text="", token_ids=[], logprobs=logprobs, finish_reason=reason, stop_reason=None)


class Choices:
    """Every choice of a request: `n` for each of its prompts, in the prompts' order."""

    def __init__(self, n: int, make_writer: Callable[[int], Writer]) -> None:
        """make_writer: of the choice with an index."""
        self._n, self._make_writer = n, make_writer
        self._writers: dict[int, Writer] = {}

    def write(self, place: int, result: RequestOutput, streaming: bool) -> list[Choice]:
        """What is new in the outputs of the prompt at `place`."""
        found = []
        for part in result.outputs:
            index = place * self._n + part.index
            if index not in self._writers:
                self._writers[index] = self._make_writer(index)
            choice = self._writers[index].write(result, part, streaming)
            if choice is not None:
                found.append(choice)
        return found


def usage_of(results: Sequence[RequestOutput | None], none_drawn: bool = False) -> Usage:
    """The tokens of a request's prompts, and of their outputs so far. none_drawn: the outputs are not part of it."""
    found = [result for result in results if result is not None]
    read = sum(len(result.prompt_token_ids) for result in found)
    drawn = 0 if none_drawn else sum(len(part.token_ids) for result in found for part in result.outputs)
    cached = sum(result.num_cached_tokens for result in found)
    return Usage(read, drawn, read + drawn, CachedTokens(cached))
