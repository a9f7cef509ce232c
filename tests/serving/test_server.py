"""The front end over sockets: the official client, and clients that hang up."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from qwenjax_serving.api.app import Settings, create_app
from qwenjax_serving.api.server import bind
from qwenjax_serving.backend import BackendError, Overloaded
from tests.serving.fake_backend import FakeBackend
from tests.serving.live_server import serving

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def url(backend: FakeBackend) -> Iterator[str]:
    with serving(create_app(backend, Settings(api_key="right"))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0, timeout=10)


def test_the_official_client_completes(client: Any) -> None:
    whole = client.completions.create(model="small", prompt="th", logprobs=1, max_tokens=20)
    assert whole.choices[0].text == "hello w€"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs.tokens[0] == "hello"
    assert whole.usage.total_tokens == 7
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    options = {"include_usage": True}
    parts = list(client.completions.create(model="small", prompt="th", stream=True, stream_options=options))
    assert "".join(part.choices[0].text for part in parts[:-1]) == "hello w€"
    assert (parts[-1].choices, parts[-1].usage.completion_tokens) == ([], 6)


def test_the_official_client_chats(client: Any, backend: FakeBackend) -> None:
    messages = [{"role": "user", "content": "th"}]
    whole = client.chat.completions.create(model="small", messages=messages, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in whole.choices] == ["hello w€"] * 2
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5
    extra = {"top_k": 3, "chat_template_kwargs": {"enable_thinking": False}}
    of_no_effect = {"metadata": {"team": "a"}, "prompt_cache_key": "b", "safety_identifier": "c", "user": "d"}
    stream = client.chat.completions.create(
        model="small",
        messages=messages,
        stream=True,
        extra_body=extra,
        store=False,
        service_tier="auto",
        **of_no_effect,
    )
    assert "".join(part.choices[0].delta.content or "" for part in stream) == "hello w€"
    assert backend.asked[-1].params.top_k == 3
    assert (backend.asked[-1].prompt or "").endswith("</think>\n\n")


def test_the_official_client_lists_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["small", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_the_official_client_raises_its_own_errors(client: Any, url: str, backend: FakeBackend) -> None:
    create = client.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="small", prompt="th", extra_body={"temprature": 1})
    assert (bad.value.param, bad.value.code) == ("temprature", "unknown_parameter")
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        create(model="other", prompt="th")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    backend.refuse = Overloaded("full")
    try:
        with pytest.raises(openai.InternalServerError) as full:
            create(model="small", prompt="th")
    finally:
        backend.refuse = None
    assert (full.value.status_code, full.value.response.headers["retry-after"]) == (503, "1")
    backend.fail = BackendError("worker died")
    try:
        with pytest.raises(openai.APIError, match="worker died"):
            list(create(model="small", prompt="th", stream=True))
    finally:
        backend.fail = None


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("stream", [True, False])
def test_a_socket_that_closes_ends_its_request_within_a_second(stream: bool) -> None:
    backend = FakeBackend(text="hello w" * 4, pace=0.5)
    with serving(create_app(backend)) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "th", "max_tokens": 40, "stream": stream}).encode()
        with socket.create_connection((host, int(port)), timeout=5) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            if stream:
                assert b"200 OK" in client.recv(4096)
            assert wait_until(lambda: bool(backend.running), 5)
        assert wait_until(lambda: not backend.running, 1.0)
    assert backend.aborted == [backend.asked[0].request_id]


def test_beyond_the_limit_of_connections_clients_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwenjax_serving.api.server._SPARE_CONNECTIONS", 2 - 64)  # two of live_server's
    with serving(create_app(FakeBackend())) as url:
        held = [http.client.HTTPConnection(url.removeprefix("http://"), timeout=5) for _ in range(3)]
        answers = list[http.client.HTTPResponse]()
        for connection in held:
            connection.request("GET", "/v1/models")
            answers.append(connection.getresponse())
            body = answers[-1].read()
        assert [answer.status for answer in answers] == [200, 200, 503]
        assert answers[-1].headers["retry-after"] == "1"
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert answers[-1].will_close
        held[0].close()

        def served() -> bool:
            with suppress(urllib.error.HTTPError):
                return urllib.request.urlopen(f"{url}/v1/models", timeout=5).status == 200
            return False

        assert wait_until(served, 10)
        for connection in held:
            connection.close()


def test_a_port_that_is_taken_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--port {port}: Address already in use"):
            bind("127.0.0.1", port)
