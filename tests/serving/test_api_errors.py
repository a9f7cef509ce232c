"""What is refused, and how: OpenAI's shape, the right status, the field by its name."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.sampling_params import SamplingParams
from qwenjax_serving import api
from qwenjax_serving.api.app import Settings, create_app
from qwenjax_serving.api.requests import _WITHOUT_EFFECT, ChatRequest, CompletionRequest
from qwenjax_serving.backend import BackendError, Overloaded
from tests.serving.asgi import Reply, call, get, post
from tests.serving.fake_backend import FakeBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "th"}]}


def refused(path: str, body: Any, **changes: Any) -> Reply:
    backend = FakeBackend(**changes)
    reply = post(create_app(backend), path, body)
    assert not backend.running
    return reply


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {}, "prompt", None),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "unknown_parameter"),
        (COMPLETIONS, {"prompt": "a", "messages": []}, "messages", "unknown_parameter"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", None),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", None),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", None),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", None),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop[0]", None),
        (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed", None),
        (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "n", None),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", None),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs", None),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "unsupported_parameter"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "b"}, "guided_regex", "unsupported_parameter"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", None),
        (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", None),
        (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", None),
        (COMPLETIONS, {"prompt": []}, "prompt", None),
        (COMPLETIONS, {"prompt": [[]], "x": 1}, "x", "unknown_parameter"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", None),
        (COMPLETIONS, {"prompt": [True]}, "prompt", None),
        (COMPLETIONS, {"prompt": [[1]] * 1025}, "prompt", None),
        (COMPLETIONS, {"prompt": [1] * 64}, None, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [1] * 60, "max_tokens": 5}, "max_tokens", "context_length_exceeded"),
        (CHAT, {}, "messages", None),
        (CHAT, {"messages": []}, "messages", None),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0]", None),
        (CHAT, {"messages": [{"role": "user", "content": "a", "cached": 1}]}, "messages[0]", "unknown_parameter"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", None),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0]", "unsupported_parameter"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]", "unsupported_parameter"),
        (CHAT, SAY | {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        (CHAT, SAY | {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        (CHAT, SAY | {"top_logprobs": 3}, "top_logprobs", None),
        (CHAT, SAY | {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", None),
        (CHAT, SAY | {"min_tokens": 60}, "min_tokens", None),
        (CHAT, SAY | {"echo": True}, "echo", "unknown_parameter"),
        (CHAT, SAY | {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", None),
        (CHAT, SAY | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", None),
        ("/tokenize", {}, "prompt", None),
        ("/tokenize", SAY | {"add_special_tokens": True}, "add_special_tokens", None),
    ],
)
def test_a_bad_field_is_named_with_status_400(path: str, body: Any, param: str | None, code: str | None) -> None:
    reply = refused(path, body)
    assert reply.status == 400, reply.body
    assert (reply.error["type"], reply.error["param"], reply.error["code"]) == ("invalid_request_error", param, code)
    assert reply.error["message"]


def test_what_asks_for_nothing_is_no_error() -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False}
    assert post(create_app(FakeBackend()), CHAT, SAY | nothing | {"parallel_tool_calls": True}).status == 200
    assert post(create_app(FakeBackend()), COMPLETIONS, {"prompt": "a", "best_of": 1, "suffix": ""}).status == 200


def test_every_accepted_field_does_something() -> None:
    """A field that the structs accept is one of SamplingParams' or is read by name somewhere in the front end."""
    source = "".join(path.read_text() for path in Path(api.__path__[0]).glob("*.py") if path.name != "requests.py")
    sampling = {field.name for field in fields(SamplingParams)}
    inert = {"user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention"}
    for kind in CompletionRequest, ChatRequest:
        unread = {name for name in kind.__struct_fields__ if f"request.{name}" not in source}
        assert unread - sampling == inert


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(
    extra=st.dictionaries(
        st.sampled_from(sorted({*ChatRequest.__struct_fields__, *_WITHOUT_EFFECT})), JSON, max_size=3
    ),
    prompt=JSON,
    chat=st.booleans(),
)
def test_no_request_makes_the_server_fail(extra: dict[str, Any], prompt: Any, chat: bool) -> None:
    what = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    reply = refused(CHAT if chat else COMPLETIONS, {**what, **extra})
    assert reply.status in (200, 400, 404), reply.body
    if reply.status != 200:
        assert reply.error["message"]


def test_a_body_deeper_than_can_be_read_is_status_400() -> None:
    for depth in 900, 100_000:
        deep = b"[" * depth + b"]" * depth
        assert refused(COMPLETIONS, b'{"prompt": ' + deep + b"}").status == 400
        chat = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ' + deep + b"}}"
        assert refused(CHAT, chat).status in (200, 400)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"null", b'"a"', b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_status_400(body: bytes) -> None:
    reply = refused(COMPLETIONS, body)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


def test_an_unknown_model_is_status_404() -> None:
    reply = refused(COMPLETIONS, {"model": "other", "prompt": "a"})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (404, "model", "model_not_found")
    assert "'small', 'alias'" in reply.error["message"]
    assert post(create_app(FakeBackend()), COMPLETIONS, {"model": "alias", "prompt": "a"}).json["model"] == "small"
    assert get(create_app(FakeBackend()), "/v1/models/other").status == 404


@pytest.mark.parametrize(
    ("method_path", "status"), [(("GET", COMPLETIONS), 405), (("POST", "/v1/models"), 405), (("GET", "/v2"), 404)]
)
def test_an_unknown_path_or_method_has_the_same_shape(method_path: tuple[str, str], status: int) -> None:
    reply = asyncio.run(call(create_app(FakeBackend()), *method_path))
    assert reply.status == status
    assert method_path[1] in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refuse", "status", "kind", "code"),
    [
        (Overloaded("9 wait", 2.5), 503, "overloaded_error", "overloaded"),
        (BackendError("no worker"), 500, "server_error", "backend_error"),
        (ValueError("top_k is 9; it is not"), 400, "invalid_request_error", None),
    ],
)
def test_what_the_backend_refuses_is_an_error_before_anything_is_sent(
    stream: bool, refuse: Exception, status: int, kind: str, code: str | None
) -> None:
    reply = refused(COMPLETIONS, {"prompt": "a", "stream": stream}, refuse=refuse)
    assert (reply.status, reply.error["type"], reply.error["code"]) == (status, kind, code)
    assert reply.error["message"] == str(refuse)
    assert reply.headers.get("retry-after") == ("3" if status == 503 else None)
    assert reply.error["param"] == ("top_k" if status == 400 else None)


def test_one_refused_prompt_of_several_ends_those_before_it() -> None:
    class Once(FakeBackend):
        async def generate(self, request_id: str, *rest: Any) -> Any:
            if self.asked:
                raise Overloaded("full")
            return await super().generate(request_id, *rest)

    backend = Once()
    assert post(create_app(backend), COMPLETIONS, {"prompt": ["a", "b", "c"]}).status == 503
    assert len(backend.asked) == 1
    assert not backend.running


def test_a_failure_later_is_status_500_or_the_streams_last_event() -> None:
    reply = refused(COMPLETIONS, {"prompt": "a"}, fail=BackendError("worker died"))
    assert (reply.status, reply.error["message"], reply.error["code"]) == (500, "worker died", "backend_error")
    for prompt in "a", ["a", "b"]:
        reply = refused(COMPLETIONS, {"prompt": prompt, "stream": True}, fail=BackendError("worker died"))
        assert reply.status == 200
        assert reply.events[0]["choices"][0]["text"] == "hello"
        assert reply.events[-1]["error"]["message"] == "worker died"


def test_an_unforeseen_failure_keeps_its_words_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reply = refused(COMPLETIONS, {"prompt": "a", "stream": True}, fail=RuntimeError("secret"))
    assert reply.events[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in reply.body
    assert "secret" in caplog.text
    caplog.clear()
    reply = refused(COMPLETIONS, {"prompt": "a"}, fail=RuntimeError("secret"))
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert "secret" in caplog.text


def test_an_output_that_the_server_ended_is_an_error() -> None:
    class Ending(FakeBackend):
        def _result(self, asked: Any, ids: list[int], reason: str | None) -> Any:
            return super()._result(asked, ids, "abort" if reason else None)

    for body in ({"prompt": "a"}, {"prompt": "a", "echo": True, "max_tokens": 0}):
        reply = post(create_app(Ending()), COMPLETIONS, body)
        assert (reply.status, reply.error["code"]) == (500, "backend_error")


def test_a_body_beyond_the_limit_is_status_413_whether_it_says_its_length_or_not() -> None:
    app = create_app(FakeBackend(), Settings(max_body_bytes=100))
    large = json.dumps({"prompt": "a" * 100}).encode()
    for headers in {"content-length": str(len(large))}, {}:
        reply = post(app, COMPLETIONS, large, headers=headers)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert reply.headers["connection"] == "close"
    assert post(app, COMPLETIONS, json.dumps({"prompt": "a", "user": "b" * 60}).encode()).status == 200


def test_a_body_that_never_ends_is_status_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwenjax_serving.api.app._BODY_SECONDS", 0.02)
    reply = post(create_app(FakeBackend()), COMPLETIONS, b"{", body_ends=False)
    assert (reply.status, reply.error["type"]) == (408, "timeout_error")


def test_a_key_is_asked_for_where_there_is_one() -> None:
    app = create_app(FakeBackend(), Settings(api_key="right"))
    for headers in {}, {"authorization": "Bearer wrong"}, {"authorization": "right"}:
        reply = get(app, "/v1/models", headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert post(app, COMPLETIONS, {"prompt": "a"}, headers=headers).status == 401
    assert get(app, "/v1/models", headers={"authorization": "Bearer right"}).status == 200
    assert {get(app, path).status for path in ("/health", "/metrics", "/version")} == {200}
