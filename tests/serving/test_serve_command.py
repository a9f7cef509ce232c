"""`qwenjax serve --colocated` as users start it: a process of its own, a small model, clients over sockets."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qwenjax import LLM
from qwenjax_serving import cli
from qwenjax_serving.api.server import bind
from qwenjax_serving.backend import BackendError
from qwenjax_serving.commands import serve
from tests.conftest import FAKE_CPU_DEVICES
from tests.generation import greedy, random_ids, small_llm, write_folder
from tests.serving.fake_backend import FakeBackend

openai = pytest.importorskip("openai")

SLOTS, QUEUE = 8, 4
SIZES = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 64, "page_size": 16, "num_pages": 512}
LONG = 100_000  # tokens of the context, for outputs that no test waits for the end of


def start(*command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "QWENJAX_API_KEY": "right"}
    # As many as the tests have: compiled programs are kept by the number of devices, and the library runs the same.
    environment["JAX_NUM_CPU_DEVICES"] = str(FAKE_CPU_DEVICES)
    environment.pop("PYTEST_CURRENT_TEST", None)
    return subprocess.Popen(
        [sys.executable, "-P", *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def url_when_ready(process: subprocess.Popen[str]) -> str:
    """The address in a server's first line, which it prints when it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"qwenjax: serving small on (http://127\.0\.0\.1:\d+)/v1\n", line)
    if found is None:
        process.kill()
        pytest.fail(f"{line!r}, {process.communicate()[1]}")
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("serve"), max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    options = [word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))]
    own = ["--port", "0", "--served-model-name", "small", "--max-queue", str(QUEUE), "--max-model-len", "8000"]
    process = start("-m", "qwenjax_serving.cli", "serve", str(folder), "--colocated", *options, *own)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def url(process: subprocess.Popen[str]) -> str:
    return url_when_ready(process)


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return small_llm(folder, **SIZES, max_model_len=8000)


def post(url: str, **body: Any) -> http.client.HTTPResponse:
    """The answer to a completion, which has begun."""
    headers = {"authorization": "Bearer right"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=20)
    return answer


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    values = re.findall(rf"^qwenjax:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert values, name
    return sum(map(float, values))


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def endless(client: Any) -> Any:
    """A stream that has begun, of almost 8,000 tokens."""
    stream = client.completions.create(
        model="small", prompt="th", max_tokens=7000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    return stream


def test_greedy_output_equals_the_librarys(client: Any, llm: LLM) -> None:
    prompts = [random_ids(length, seed=1) for length in (1, 3, 17, 40, 64, 65, 130, 200, 5, 90)]
    lengths = [20, 1, 33, 9, 16, 8, 7, 24, 40, 12]

    def complete(prompt: list[int], max_tokens: int) -> list[int]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        stream = client.completions.create(
            model="small", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body=extra
        )
        return [token for part in stream for token in part.choices[0].token_ids]

    with ThreadPoolExecutor(len(prompts)) as pool:
        found = [*pool.map(complete, prompts, lengths)]
    results = llm.generate(prompts, [greedy(length) for length in lengths])
    assert found == [result.outputs[0].token_ids for result in results]


def test_a_chat_equals_the_librarys_and_says_what_was_cached(client: Any, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello a w th " * 8}]
    params = greedy(12)
    expected = llm.chat(messages, params)[0]
    extra = {"ignore_eos": True}
    for cached in (False, True):
        answer = client.chat.completions.create(
            model="small", messages=messages, max_tokens=12, temperature=0, extra_body=extra
        )
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert (answer.usage.prompt_tokens_details.cached_tokens > 0) is cached


def test_sampled_outputs_depend_on_the_seed_alone(client: Any) -> None:
    def draw(seed: int) -> list[str]:
        answer = client.completions.create(
            model="small", prompt="th", max_tokens=12, temperature=1.2, seed=seed, n=2, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in answer.choices]

    first, again, other = draw(3), draw(3), draw(4)
    assert first == again
    assert len({*first, *other}) == 4


def test_a_client_that_hangs_up_frees_its_pages_within_a_second(client: Any, url: str) -> None:
    assert wait_until(lambda: metric(url, "num_requests_running") == 0, 5)
    free, aborts = metric(url, "free_pages"), metric(url, "num_aborts_total")
    streams = [endless(client) for _ in range(3)]
    assert metric(url, "free_pages") < free
    for stream in streams:
        stream.close()
    assert wait_until(lambda: metric(url, "num_requests_running") == 0, 1.0)
    assert metric(url, "free_pages") == free
    assert metric(url, "num_aborts_total") == aborts + 3


def test_a_client_that_hangs_up_while_its_prompt_is_read_frees_its_pages_within_a_second(client: Any, url: str) -> None:
    assert wait_until(lambda: metric(url, "num_requests_running") == 0, 5)
    free, drawn = metric(url, "free_pages"), metric(url, "generation_tokens_total")
    answers = [post(url, prompt=random_ids(7900, seed=seed), max_tokens=50, stream=True) for seed in (5, 6)]
    assert wait_until(lambda: metric(url, "num_requests_running") > 0, 5)
    for answer in answers:
        answer.close()
    assert wait_until(lambda: metric(url, "num_requests_running") + metric(url, "num_requests_waiting") == 0, 1.0)
    assert metric(url, "free_pages") == free
    assert metric(url, "generation_tokens_total") == drawn


def test_beyond_the_queue_a_client_is_told_to_come_back(client: Any, url: str) -> None:
    body = {"prompt": "th", "max_tokens": 7000, "temperature": 0, "ignore_eos": True, "stream": True}
    held = [post(url, **body) for _ in range(SLOTS + QUEUE)]
    try:
        with pytest.raises(openai.InternalServerError) as full:
            client.completions.create(model="small", prompt="th")
        assert (full.value.status_code, full.value.code) == (503, "overloaded")
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert metric(url, "num_requests_waiting") <= QUEUE
    finally:
        for answer in held:
            answer.close()
    assert wait_until(lambda: metric(url, "num_requests_running") == 0, 5)
    assert client.completions.create(model="small", prompt="th").choices


def test_what_only_the_engine_can_refuse_is_status_400(client: Any) -> None:
    for given, param in ({"prompt": [320]}, None), ({"prompt": ""}, "prompt"), ({"logprobs": 21}, "logprobs"):
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(**{"model": "small", "prompt": "th", **given})
        assert bad.value.param == param


# The last test of the process that the others share.
def test_sigterm_lets_streams_finish_and_ends_with_status_0(
    process: subprocess.Popen[str], client: Any, url: str
) -> None:
    stream = client.completions.create(
        model="small", prompt="th", max_tokens=1500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    parts = iter(stream)
    next(parts)
    process.send_signal(signal.SIGTERM)
    host, port = url.removeprefix("http://").split(":")

    def refused() -> bool:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except ConnectionRefusedError:
            return True
        return False

    assert wait_until(refused, 5)
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert process.wait(timeout=20) == 0
    assert process.stderr is not None
    assert process.stderr.read().endswith("qwenjax: stopped\n")


SLOW = """
import argparse, asyncio
from qwenjax_serving.api.server import bind
from qwenjax_serving.backend import BackendError
from qwenjax_serving.commands import serve
from tests.serving.fake_backend import FakeBackend

parser = argparse.ArgumentParser()
serve.add_http_arguments(parser)
arguments = parser.parse_args(["--grace", "1"])
serve.fill_http_arguments(arguments)
with bind("127.0.0.1", 0) as bound:
    backend = FakeBackend(text="hello w" * 20, pace=0.5)
    asyncio.run(serve.serve_backend(arguments, backend, bound))
assert len(backend.aborted) == 1
"""


def test_a_stream_beyond_the_grace_is_cut_and_the_status_is_0() -> None:
    process = start("-c", SLOW)
    try:
        url = url_when_ready(process)
        answer = post(url, prompt="th", max_tokens=40, stream=True)
        assert answer.readline().startswith(b"data: {")
        threading.Timer(0.1, process.send_signal, [signal.SIGTERM]).start()
        begun = time.monotonic()
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        assert 0.5 < time.monotonic() - begun < 10
        assert process.wait(timeout=20) == 0, process.communicate()[1]
    finally:
        process.kill()
        process.communicate()


def test_an_empty_key_of_the_environment_is_not_taken_for_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qwenjax_serving.commands.serve.build_engine", None)
    monkeypatch.setenv("QWENJAX_API_KEY", "")
    assert cli.main(["serve", str(folder), "--colocated", "--port", "0"]) == 2
    assert "QWENJAX_API_KEY is empty" in capsys.readouterr().err


def test_a_server_whose_backend_has_failed_ends() -> None:
    parser = argparse.ArgumentParser()
    serve.add_http_arguments(parser)
    arguments = parser.parse_args(["--grace", "1"])
    serve.fill_http_arguments(arguments)

    async def whole() -> None:
        backend = FakeBackend()
        asyncio.get_running_loop().call_later(0.1, setattr, backend, "failure", OSError("as if by mistake"))
        await serve.serve_backend(arguments, backend, bound)

    with bind("127.0.0.1", 0) as bound, pytest.raises(BackendError, match="can run any more: as if by mistake"):
        asyncio.run(asyncio.wait_for(whole(), 20))


def test_a_failed_backend_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise BackendError("as if by mistake")

    monkeypatch.setattr(serve, "_run", fail)
    assert cli.main(["serve", "model"]) == 1
    assert capsys.readouterr().err == "qwenjax serve: error: as if by mistake\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--grace", "-1"], "--grace is -1"),
        (["--port", "65536"], "--port is 65536"),
        (["--max-body-mib", "0"], "--max-body-mib is 0"),
        (["--api-key", ""], "QWENJAX_API_KEY is empty"),
        (["--host", "127.0.0.1", "--port", "TAKEN"], "Address already in use"),
    ],
)
def test_bad_input_is_one_line_and_status_2_before_the_weights_are_read(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("qwenjax_serving.commands.serve.build_engine", None)
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        own = [port if word == "TAKEN" else word for word in arguments]
        assert cli.main(["serve", str(folder), "--colocated", *own]) == 2
    err = capsys.readouterr().err
    assert err.startswith("qwenjax serve: error: ")
    assert message in err
    assert err.count("\n") == 1
