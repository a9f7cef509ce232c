"""The bodies of answers, with OpenAI's names. A field that is UNSET is left out."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from qwenjax.outputs import FinishReason, Logprob

PromptLogprobs = list[dict[int, Logprob] | None]


class CachedTokens(Struct):
    cached_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Struct):
    """A place a token. token_logprobs and top_logprobs: None for a prompt's first token, which nothing precedes.
    text_offset: where the token begins in the choice's text, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]


class CompletionChoice(Struct, kw_only=True):
    """A whole choice, or in a stream what has come since the last. stop_reason: vLLM's: the stop string or id."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Message(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """message: of a whole choice; delta: in a stream, what has come since the last."""

    index: int
    message: Message | UnsetType = UNSET
    delta: Message | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


Choice = CompletionChoice | ChatChoice


class Answer(Struct, kw_only=True):
    """A whole answer, or one event of a stream. created: Unix time, seconds."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[Choice]
    usage: Usage | UnsetType | None = UNSET


encode = msgspec.json.Encoder().encode
