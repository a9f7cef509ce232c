"""A checkpoint's Jinja chat template, rendered as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that Jinja reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Templates come with checkpoints, from strangers: they run in Jinja's immutable sandbox and see nothing but
    plain data. Errors of the template, `raise_exception` among them, are ValueErrors.
    """

    def __init__(self, source: str) -> None:
        """Raises ValueError where `source` is not a Jinja template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text. `variables` are what else the template may read (`enable_thinking`,
        `eos_token`).

        A message's keys whose value is None are dropped, as transformers does: clients send `"content": null`
        beside tool calls, and a template would print None.

        Raises ValueError for no messages, for values that are not JSON's, and for the template's own errors.
        """
        if isinstance(messages, Mapping | str) or not messages:
            raise ValueError(f"messages is {messages!r}; it is a list of at least one message")
        for message in messages:
            if not isinstance(message, Mapping):
                raise ValueError(f"messages holds {message!r}; a message is a dict with role and content")
        plain = [{k: _plain("messages", v) for k, v in message.items() if v is not None} for message in messages]
        visible = _plain("chat_template_kwargs", variables)
        visible |= {"messages": plain, "tools": _plain("tools", tools), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(visible)
        except Exception as error:  # a template can raise whatever its expressions can
            raise ValueError(f"chat template: {error}") from error


def message_text(content: Any) -> str:
    """A message's content as one string: the text parts of a list, a line each, as vLLM joins them.

    Raises ValueError for parts that are no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("content is neither text nor a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"content has a part of type {kind!r}; parts are text")
        texts.append(part["text"])
    return "\n".join(texts)


def _plain(name: str, value: Any) -> Any:
    """A copy of `value` in JSON's types: objects of others have methods that the sandbox knows nothing of."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise ValueError(f"{name} holds a {type(value).__name__}; it holds strings, numbers, lists, dicts and None")


# Jinja's own tojson escapes HTML and sorts keys, which would change what a model was trained on.
def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
