"""/v1/chat/completions: how the template is used, and the shapes of what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp

from qwenjax_serving.api.app import create_app
from tests.serving.asgi import Reply, post
from tests.serving.fake_backend import DEFAULTS, FakeBackend

MESSAGES = [{"role": "user", "content": "th"}]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def app(backend: FakeBackend) -> ASGIApp:
    return create_app(backend)


def chat(app: ASGIApp, **body: Any) -> Reply:
    return post(app, "/v1/chat/completions", {"model": "small", "messages": MESSAGES, **body})


def test_the_whole_answer_is_openais(app: ASGIApp, backend: FakeBackend) -> None:
    reply = chat(app)
    answer = reply.json
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    read = len(backend.asked[0].prompt_token_ids)
    message = {"role": "assistant", "content": "hello w€"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    usage = {"prompt_tokens": read, "completion_tokens": 6, "total_tokens": read + 6}
    assert answer == {
        "object": "chat.completion",
        "model": "small",
        "choices": [choice],
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}},
    }


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(app: ASGIApp) -> None:
    events = chat(app, stream=True, n=2).events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for index in range(2):
        [first, *rest] = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": "hello"}
        assert all("role" not in part["delta"] and "message" not in part for part in rest)
        assert [part["delta"]["content"] for part in rest] == [" w", "€", ""]
        assert [part["finish_reason"] for part in rest] == [None, None, "stop"]


def test_the_prompt_is_what_the_template_makes_of_the_messages(app: ASGIApp, backend: FakeBackend) -> None:
    model = backend.model
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "th"}]
    messages = [{"role": "system", "content": "th", "name": None}, {"role": "user", "content": parts}]
    plain = [messages[0], {"role": "user", "content": "he\nth"}]
    for extra, arguments in (
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ):
        assert chat(app, messages=messages, **extra).status == 200
        text = model.tokenizer.apply_chat_template(plain, **arguments)
        assert backend.asked[-1].prompt == text
        assert backend.asked[-1].prompt_token_ids == model.tokenizer.encode(text, add_special_tokens=False)
    assert len({asked.prompt for asked in backend.asked}) == 3


def test_a_chat_may_fill_the_context_unless_it_says_otherwise(app: ASGIApp, backend: FakeBackend) -> None:
    for given in {}, {"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}:
        assert chat(app, **given).status == 200
    room = backend.max_model_len - len(backend.asked[0].prompt_token_ids)
    assert [asked.params.max_tokens for asked in backend.asked] == [room, 7, 7, 7]
    assert backend.asked[0].params == replace(DEFAULTS, max_tokens=room)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_token_its_bytes_and_the_likeliest(app: ASGIApp, stream: bool) -> None:
    reply = chat(app, logprobs=True, top_logprobs=2, stream=stream)
    answers = reply.events if stream else [reply.json]
    content = [item for answer in answers for item in answer["choices"][0]["logprobs"]["content"]]
    assert [item["token"] for item in content] == [
        "hello",
        " w",
        "bytes:\\xe2",
        "bytes:\\x82",
        "bytes:\\xac",
        "<|im_end|>",
    ]
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == "hello w€<|im_end|>"
    assert {item["logprob"] for item in content} == {-2.0}
    # The two likeliest, the drawn token being none of them.
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.0]
    assert [len(item["top_logprobs"]) for item in chat_logprobs(app, {"logprobs": True})] == [0] * 6


def chat_logprobs(app: ASGIApp, body: dict[str, Any]) -> list[Any]:
    found: list[Any] = chat(app, **body).json["choices"][0]["logprobs"]["content"]
    return found
