"""A request's fields as SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from qwenjax.sampling_params import SamplingParams
from qwenjax_serving.api.errors import ApiError, bad_value
from qwenjax_serving.api.prompts import Prompt
from qwenjax_serving.api.requests import ChatRequest, CompletionRequest, Generation

_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; a chat may fill the context
_SAME_NAME = {field.name for field in fields(SamplingParams)} - {"logprobs", "max_tokens"}


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises ApiError, naming the field, its value and its limit."""
    max_tokens = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    changes: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": request.logprobs}
    if request.echo and request.max_tokens == 0:
        changes["max_tokens"] = 1  # the engine's least; prompt_alone() leaves it out of the answer
    if request.echo and request.logprobs is not None:
        changes["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, changes)


def prompt_alone(request: CompletionRequest) -> bool:
    """Whether the prompt is all that comes back."""
    return bool(request.echo) and request.max_tokens == 0


def chat_params(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises ApiError, naming the field, its value and its limit."""
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        message = f"max_tokens is {request.max_tokens} and max_completion_tokens {request.max_completion_tokens}"
        raise ApiError(400, f"{message}; give one of them", param="max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, defaults, {"max_tokens": limits.pop() if limits else None, "logprobs": logprobs})


def _params(request: Generation, defaults: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name, None)) is not None}
    try:
        return replace(defaults, **(given | changes))
    except ValueError as error:
        raise bad_value(error, request.__struct_fields__) from None


def fill_context(prompt: Prompt, params: SamplingParams, max_model_len: int) -> SamplingParams:
    """max_tokens, where it is None, as what the context holds after the prompt. Raises ApiError as check_context does,
    and where min_tokens is more than that."""
    check_context([prompt], params, max_model_len)
    if params.max_tokens is not None:
        return params
    try:
        return replace(params, max_tokens=max_model_len - len(prompt.ids))
    except ValueError as error:
        raise bad_value(error, ("min_tokens",)) from None


def check_context(prompts: Sequence[Prompt], params: SamplingParams, max_model_len: int) -> None:
    """Raises ApiError with OpenAI's code where a prompt and its output are longer than the context."""
    for prompt in prompts:
        room = max_model_len - len(prompt.ids)
        if room < (params.max_tokens or 1):
            wanted = f" and max_tokens is {params.max_tokens}" if params.max_tokens else ""
            raise ApiError(
                400,
                f"the prompt has {len(prompt.ids)} tokens{wanted}; the context holds {max_model_len} tokens",
                param="max_tokens" if room > 0 else None,
                code="context_length_exceeded",
            )
