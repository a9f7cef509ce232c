"""The bodies of requests, with OpenAI's names and, for what OpenAI lacks, vLLM's. Null means "not given"."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from qwenjax_serving.api.errors import ApiError


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: a last event with the usage of the whole request. continuous_usage_stats: usage so far in each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chats have in common. Names of SamplingParams mean what they mean there.

    speculation: false to draft nothing for this request. cache_salt: requests share cached prefixes only with those of
    the same salt. return_token_ids: adds the ids of prompt and output to the answer. user, safety_identifier,
    metadata, prompt_cache_key, prompt_cache_retention: taken from clients that send them; they change nothing: prompts
    are cached by what they begin with.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    speculation: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(Generation, forbid_unknown_fields=True, kw_only=True):
    """prompt: text, ids, or a list of either. logprobs: how many of the most likely tokens to report. echo: the prompt
    comes back before its output; with max_tokens 0 it comes alone."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(Generation, forbid_unknown_fields=True, kw_only=True):
    """logprobs: whether to report each token's; top_logprobs: and how many of the most likely beside it."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """prompt, or messages to be rendered by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


# What other servers have and this one lacks, with the values that ask for nothing; those are passed over.
_NO_TOOLS: tuple[Any, ...] = ("none", "auto", [], True, False)
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": _NO_TOOLS,
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": _NO_TOOLS,
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

Request = TypeVar("Request", bound=Struct)


def parse(body: bytes, kind: type[Request]) -> Request:
    """A request's body as `kind`. Raises ApiError (400), naming the field, for what is not one."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is a JSON {type(raw).__name__}; it is an object")
    for name, values in _WITHOUT_EFFECT.items():
        if name in raw and (value := raw.pop(name)) is not None and not any(_same(value, v) for v in values):
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    for name in raw:
        if name not in kind.__struct_fields__:
            raise ApiError(400, f"{name} is not a parameter of this request", param=name, code="unknown_parameter")
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message = str(error)  # "Expected `int`, got `str` - at `$.max_tokens`", or "… required field `prompt`"
        found = re.search(r" - at .*`\$\.?(.*)`$", message) or re.search("required field `(.*?)`", message)
        field = found[1] if found else ""
        message = message.partition(" - at ")[0]
        raise ApiError(400, f"{field}: {message}" if field else message, param=field or None) from None


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
