"""Prompts of requests as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwenjax.chat_template import message_text
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.api.errors import ApiError

_MAX_PROMPTS = 1024  # of one request: a body has room for a million
_MESSAGE_KEYS = {"role", "content", "name", "reasoning_content"}


@dataclass(frozen=True)
class Prompt:
    """text: None where the request gave ids."""

    text: str | None
    ids: list[int]


def completion_prompts(tokenizer: Tokenizer, prompt: str | Sequence[Any]) -> list[Prompt]:
    """One prompt, of text or ids, or several. Raises ApiError for what is neither."""
    if isinstance(prompt, str):
        several: Sequence[Any] = [prompt]
    else:
        several = [prompt] if prompt and all(type(item) is int for item in prompt) else prompt
    if not several:
        raise ApiError(400, "prompt is empty; it is text, token ids, or a list of such", param="prompt")
    if len(several) > _MAX_PROMPTS:
        raise ApiError(400, f"prompt holds {len(several)} prompts; it holds at most {_MAX_PROMPTS}", param="prompt")
    return [_prompt(tokenizer, place, item) for place, item in enumerate(several)]


def _prompt(tokenizer: Tokenizer, place: int, item: Any) -> Prompt:
    if isinstance(item, str):
        return Prompt(item, tokenizer.encode(item))
    if isinstance(item, list) and all(type(token) is int for token in item):
        return Prompt(None, item)
    raise ApiError(400, f"prompt[{place}] is neither text nor a list of token ids", param="prompt")


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Prompt:
    """The conversation as the checkpoint's template renders it. Raises ApiError for what the template cannot take."""
    reserved = {"self", "messages", "tools", "add_generation_prompt"} & set(chat_template_kwargs or {})
    if reserved:
        name = min(reserved)
        raise ApiError(400, f"chat_template_kwargs holds {name}, which is no variable", param="chat_template_kwargs")
    plain = [_message(place, message) for place, message in enumerate(messages)]
    generation_prompt = True if add_generation_prompt is None else add_generation_prompt
    try:
        text = tokenizer.apply_chat_template(plain, None, generation_prompt, **(chat_template_kwargs or {}))
        return Prompt(text, tokenizer.encode(text, add_special_tokens=False))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, str(error), param="messages") from None


def _message(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one string."""
    where = f"messages[{place}]"
    given = {key: value for key, value in message.items() if value is not None and value != []}
    if not isinstance(given.get("role"), str):
        raise ApiError(400, f"{where}.role is {given.get('role')!r}; it is a string", param=where)
    if given["role"] in ("tool", "function") or {"tool_calls", "tool_call_id", "function_call"} & set(given):
        raise ApiError(400, f"{where}: tools are not supported", param=where, code="unsupported_parameter")
    for key in given:
        if key not in _MESSAGE_KEYS:
            raise ApiError(400, f"{where}.{key} is not part of a message", param=where, code="unknown_parameter")
    try:
        return given | {"content": message_text(given.get("content", ""))}
    except ValueError as error:
        raise ApiError(400, f"{where}.{error}", param=where) from None
