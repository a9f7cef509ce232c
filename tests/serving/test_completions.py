"""/v1/completions: what the backend is asked, and the shapes of what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp

from qwenjax_serving.api.app import create_app
from tests.serving.asgi import Reply, post
from tests.serving.fake_backend import DEFAULTS, FakeBackend

PATH = "/v1/completions"
# "hello w€" is 7 tokens: hello, Ġw, the euro sign's three bytes, and the end of the turn.
TOKENS = 6


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def app(backend: FakeBackend) -> ASGIApp:
    return create_app(backend)


def complete(app: ASGIApp, **body: Any) -> Reply:
    return post(app, PATH, {"model": "small", "prompt": "th a", **body})


def test_the_whole_answer_is_openais(app: ASGIApp, backend: FakeBackend) -> None:
    backend.cached = 2
    reply = complete(app, max_tokens=20)
    answer = reply.json
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    choice = {"index": 0, "text": "hello w€", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    usage = {"prompt_tokens": 2, "completion_tokens": TOKENS, "total_tokens": TOKENS + 2}
    assert answer == {
        "object": "text_completion",
        "model": "small",
        "choices": [choice],
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 2}},
    }


def test_a_stream_is_the_whole_answer_in_parts(app: ASGIApp) -> None:
    events = complete(app, stream=True, max_tokens=20).events
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"text_completion"}
    assert all("usage" not in event for event in events)
    [*parts, last] = [event["choices"][0] for event in events]
    # A token that shows nothing, part of a character, is no event.
    assert [part["text"] for part in parts] == ["hello", " w", "€"]
    assert all(part["finish_reason"] is None for part in parts)
    assert (last["text"], last["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
def test_usage_comes_last_and_where_asked_for_with_every_event(app: ASGIApp, options: dict[str, bool]) -> None:
    [*parts, last] = complete(app, stream=True, max_tokens=2, stream_options=options).events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    counts = [part["usage"] and part["usage"]["completion_tokens"] for part in parts]
    assert counts == ([1, 2] if options.get("continuous_usage_stats") else [None, None])


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("th", ["th"], [[263]]),
        ([5, 6], [None], [[5, 6]]),
        (["th", "he"], ["th", "he"], [[263], [259]]),
        ([[5], [6, 7]], [None, None], [[5], [6, 7]]),
        (["th", [6, 7]], ["th", None], [[263], [6, 7]]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(
    app: ASGIApp, backend: FakeBackend, prompt: Any, texts: list[str | None], ids: list[list[int]]
) -> None:
    assert complete(app, prompt=prompt).status == 200
    assert [asked.prompt for asked in backend.asked] == texts
    assert [asked.prompt_token_ids for asked in backend.asked] == ids


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_prompt_by_prompt(app: ASGIApp, stream: bool) -> None:
    reply = complete(app, prompt=["th", "he"], n=2, echo=True, max_tokens=1, stream=stream)
    choices = [c for event in reply.events for c in event["choices"]] if stream else reply.json["choices"]
    found = {choice["index"]: choice["text"] for choice in choices}
    assert found == {0: "thhello", 1: "thhello", 2: "hehello", 3: "hehello"}
    if not stream:
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert reply.json["usage"]["completion_tokens"] == 4


def test_an_output_that_ends_early_ends_once_while_others_go_on() -> None:
    class Uneven(FakeBackend):
        def _result(self, asked: Any, ids: list[int], reason: str | None) -> Any:
            result = super()._result(asked, ids, reason)
            if len(ids) > 1:
                result.outputs[1] = super()._result(asked, ids[:2], "length").outputs[1]
            return result

    events = complete(create_app(Uneven()), n=2, stream=True).events
    parts = {index: [e["choices"][0] for e in events if e["choices"][0]["index"] == index] for index in (0, 1)}
    assert [part["text"] for part in parts[0]] == ["hello", " w", "€", ""]
    assert [part["finish_reason"] for part in parts[0]] == [None, None, None, "stop"]
    assert [(part["text"], part["finish_reason"]) for part in parts[1]] == [("hello", None), (" w", "length")]


def test_the_request_says_how_to_sample_and_the_checkpoint_the_rest(app: ASGIApp, backend: FakeBackend) -> None:
    assert complete(app).status == 200
    given: dict[str, Any] = {
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "temperature": 1.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 2**63,
        "stop": ["x", "yy"],
        "stop_token_ids": [9, 8],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 3,
        "logprobs": 4,
        "prompt_logprobs": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "speculation": False,
    }
    assert complete(app, **given, logit_bias={"17": -3}, cache_salt="mine").status == 200
    [plain, full] = backend.asked
    assert plain.params == replace(DEFAULTS, max_tokens=16)
    assert (plain.cache_salt, full.cache_salt) == (None, "mine")
    assert full.params == replace(DEFAULTS, **given, logit_bias={17: -3.0})


def test_null_is_not_given(app: ASGIApp, backend: FakeBackend) -> None:
    nulls = dict.fromkeys(("max_tokens", "temperature", "stop", "logprobs", "seed", "tools", "suffix", "best_of"))
    assert complete(app, **nulls).status == 200
    assert backend.asked[0].params == replace(DEFAULTS, max_tokens=16)


def test_logprobs_have_every_token_and_its_place_in_the_text(app: ASGIApp) -> None:
    reply = complete(app, logprobs=3, max_tokens=20)
    found = reply.json["choices"][0]["logprobs"]
    euro = [f"bytes:\\x{byte:02x}" for byte in "€".encode()]
    assert found["tokens"] == ["hello", " w", *euro, "<|im_end|>"]
    assert found["token_logprobs"] == [-2.0] * TOKENS
    # The drawn token, though it is none of the likeliest, and -inf as OpenAI writes it.
    assert set(found["top_logprobs"][0].values()) == {-2.0, -0.5, -1.0, -9999.0}
    assert found["text_offset"] == [0, 5, 7, 7, 7, 8]
    parts = [event["choices"][0]["logprobs"] for event in complete(app, logprobs=3, max_tokens=20, stream=True).events]
    assert {name: [item for part in parts for item in part[name]] for name in found} == found


def test_echo_puts_the_prompt_before_the_output_and_into_the_logprobs(app: ASGIApp, backend: FakeBackend) -> None:
    choice = complete(app, echo=True, logprobs=0, max_tokens=1).json["choices"][0]
    assert choice["text"] == "th ahello"
    assert choice["logprobs"]["tokens"] == ["th", " a", "hello"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 2, 4]
    assert backend.asked[0].params.prompt_logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_comes_back_with_its_logprobs(app: ASGIApp, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = complete(app, prompt=[263, 264], echo=True, logprobs=1, max_tokens=0, stream=stream, **options)
    [first, *rest] = reply.events if stream else [reply.json]
    [choice] = first["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("th a", "length")
    assert choice["logprobs"]["tokens"] == ["th", " a"]
    assert (rest[0] if stream else first)["usage"]["completion_tokens"] == 0


def test_ids_and_prompt_logprobs_come_where_asked_for(app: ASGIApp, backend: FakeBackend) -> None:
    choice = complete(app, return_token_ids=True, prompt_logprobs=1, max_tokens=2).json["choices"][0]
    assert choice["prompt_token_ids"] == [263, 264]
    assert choice["token_ids"] == backend.model.tokenizer.encode("hello w")
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["264"]["logprob"] == -2.0
    parts = [event["choices"][0] for event in complete(app, return_token_ids=True, max_tokens=5, stream=True).events]
    assert [part.get("prompt_token_ids") for part in parts] == [[263, 264], *[None] * 4]
    assert [token for part in parts for token in part["token_ids"]] == backend.model.tokenizer.encode("hello w€")
