"""A request's outputs as choices of an answer: whole, or as what is new since the last event of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol, cast

from msgspec import UNSET

from qwenjax.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from qwenjax.tokenizer import IncrementalDetokenizer, Tokenizer
from qwenjax_serving.api.logprobs import CompletionLogprobsWriter, chat_logprobs
from qwenjax_serving.api.requests import ChatRequest, CompletionRequest
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


class Writer(Protocol):
    """Writes one output of one prompt as choices."""

    def write(self, result: RequestOutput, part: CompletionOutput, streaming: bool) -> Choice | None:
        """What is new since the last call; None where that is nothing to show."""
        ...


class _Progress:
    """What of an output has been written."""

    def __init__(self) -> None:
        self.begun = False
        self.num_tokens = 0
        self.num_characters = 0

    def take(self, part: CompletionOutput) -> tuple[str, list[int], slice]:
        """The new text, the new ids and where they lie among all ids."""
        if part.finish_reason == "abort":
            raise BackendError("the server ended this request before it was finished")
        text = part.text[self.num_characters :]
        new = slice(self.num_tokens, len(part.token_ids))
        self.num_characters, self.num_tokens = len(part.text), len(part.token_ids)
        return text, part.token_ids[new], new


def _without_tokens(part: CompletionOutput) -> CompletionOutput:
    logprobs = None if part.logprobs is None else list[dict[int, Logprob]]()
    reason: FinishReason | None = "length" if part.finish_reason in ("length", "stop") else part.finish_reason
    return replace(part, text="", token_ids=[], logprobs=logprobs, finish_reason=reason, stop_reason=None)


def _reason(part: CompletionOutput) -> Literal["stop", "length"] | None:
    return cast('Literal["stop", "length"] | None', part.finish_reason)  # take() let no "abort" through


class CompletionWriter:
    """One choice of /v1/completions."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest, index: int) -> None:
        self._tokenizer, self._request, self._index = tokenizer, request, index
        self._skip = request.skip_special_tokens is not False
        self._progress = _Progress()
        self._logprobs = CompletionLogprobsWriter(tokenizer, self._skip)

    def write(self, result: RequestOutput, part: CompletionOutput, streaming: bool) -> CompletionChoice | None:
        request, progress = self._request, self._progress
        if prompt_alone(request):
            part = _without_tokens(part)
        if not part.token_ids and not part.finished:
            return None  # the prompt is still being read
        first = not progress.begun
        text, ids, new = progress.take(part)
        logprob_ids, logprobs = ids, None if part.logprobs is None else [*part.logprobs[new]]
        if first and request.echo:
            text = self._prompt_text(result) + text
            if logprobs is not None and result.prompt_logprobs is not None:
                logprob_ids = [*result.prompt_token_ids, *ids]
                logprobs = [*result.prompt_logprobs, *logprobs]  # type: ignore[list-item]  # None for the first
        wanted = text or part.finished or (ids and (request.logprobs is not None or request.return_token_ids))
        if not wanted:
            return None
        progress.begun = True
        choice = CompletionChoice(index=self._index, text=text, finish_reason=_reason(part))
        choice.stop_reason = part.stop_reason
        if logprobs is not None:
            choice.logprobs = self._logprobs.write(logprob_ids, logprobs)
        _add_extras(choice, request, result, ids, first, streaming)
        return choice

    def _prompt_text(self, result: RequestOutput) -> str:
        if result.prompt is not None:
            return result.prompt
        # A character that the prompt leaves open is the output's.
        return IncrementalDetokenizer(self._tokenizer, (), self._skip).feed(result.prompt_token_ids)


class ChatWriter:
    """One choice of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer, request: ChatRequest, index: int) -> None:
        self._tokenizer, self._request, self._index = tokenizer, request, index
        self._progress = _Progress()

    def write(self, result: RequestOutput, part: CompletionOutput, streaming: bool) -> ChatChoice | None:
        if not part.token_ids and not part.finished:
            return None  # the prompt is still being read
        request, first = self._request, not self._progress.begun
        text, ids, new = self._progress.take(part)
        if not (text or first or part.finished or (ids and (request.logprobs or request.return_token_ids))):
            return None
        self._progress.begun = True
        role = "assistant" if first else UNSET
        message = Message(role, text)  # type: ignore[arg-type]
        choice = ChatChoice(index=self._index, finish_reason=_reason(part), stop_reason=part.stop_reason)
        if streaming:
            choice.delta = message
        else:
            choice.message = message
        if part.logprobs is not None:
            choice.logprobs = chat_logprobs(self._tokenizer, ids, part.logprobs[new], request.top_logprobs or 0)
        _add_extras(choice, request, result, ids, first, streaming)
        return choice


def _add_extras(
    choice: Choice,
    request: CompletionRequest | ChatRequest,
    result: RequestOutput,
    ids: list[int],
    first: bool,
    streaming: bool,
) -> None:
    if request.return_token_ids:
        choice.token_ids = ids
        if first:
            choice.prompt_token_ids = result.prompt_token_ids
    if request.prompt_logprobs is not None and not streaming:
        choice.prompt_logprobs = result.prompt_logprobs or []


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
