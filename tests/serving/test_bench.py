"""`qwenjax bench serve`: what it sends, what it measures, and what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenjax_serving import cli
from qwenjax_serving.api.app import create_app
from qwenjax_serving.backend import Overloaded
from qwenjax_serving.bench.drive import Record, Run, drive
from qwenjax_serving.bench.report import Report
from qwenjax_serving.bench.sse_client import Target, events
from qwenjax_serving.bench.workload import Workload
from tests.serving.fake_backend import FakeBackend
from tests.serving.live_server import serving

SHORT = ["--input-len", "4", "--output-len", "4"]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(pace=0.002)


@pytest.fixture
def url(backend: FakeBackend) -> Iterator[str]:
    with serving(create_app(backend)) as url:
        yield url


def test_the_command_measures_every_request_and_writes_it_down(
    url: str, backend: FakeBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    sizes = ["--num-prompts", "6", "--warmup", "2", "--concurrency", "3", "--input-len", "5", "--output-len", "4"]
    extra = ["--ignore-eos", "--extra-body", '{"speculation": false}', "--vocab-size", "300"]
    assert cli.main(["bench", "serve", "--url", url, *sizes, *extra, "--json", str(out), "--plot", str(picture)]) == 0
    asked = backend.asked
    assert len(asked) == 8
    assert len({tuple(a.prompt_token_ids) for a in asked}) == 8
    assert all(len(a.prompt_token_ids) == 5 and min(a.prompt_token_ids) >= 256 for a in asked)
    assert all(a.params.ignore_eos and not a.params.speculation and a.params.max_tokens == 4 for a in asked)
    found = json.loads(out.read_text())
    assert (found["completed"], found["failed"], found["prompt_tokens"], found["completion_tokens"]) == (6, 0, 30, 24)
    assert len(found["requests"]) == 6
    assert found["options"]["concurrency"] == 3
    assert "api_key" not in found["options"]
    # Two events a request show text ("hello", " w"): of four tokens the last two are parts of a character.
    assert all(len(request["arrivals"]) == 2 for request in found["requests"])
    assert found["ttft"]["p50"] >= 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "6 requests in" in capsys.readouterr().out


def test_prompts_of_a_file_go_to_chats_too(url: str, backend: FakeBackend, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("th\n\nhe\n")
    options = [
        "--file",
        str(file),
        "--chat",
        "--num-prompts",
        "3",
        "--warmup",
        "0",
        "--rate",
        "500",
        "--output-len",
        "4",
    ]
    assert cli.main(["bench", "serve", "--url", url, *options]) == 0
    texts = [backend.model.tokenizer.apply_chat_template([{"role": "user", "content": c}]) for c in ("th", "he", "th")]
    assert sorted(a.prompt or "" for a in backend.asked) == sorted(texts)


def test_failed_requests_are_counted_and_make_the_status_1(
    url: str, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.refuse = Overloaded("full")
    assert cli.main(["bench", "serve", "--url", url, "--num-prompts", "3", "--warmup", "0", *SHORT]) == 1
    out = capsys.readouterr().out
    assert "0 requests in" in out
    assert "failed 3 x 503: " in out
    assert "none" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--rate", "0"], "--rate is 0.0"),
        (["--input-len", "0"], "--input-len"),
        (["--output-len", "0"], "--output-len is 0"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--file", "FILE", "--input-len", "5"], "--input-len has no effect with --file"),
        (["--json", "/nowhere/run.json"], "--json is /nowhere/run.json, and there is no folder /nowhere"),
        (["--plot", "/nowhere/run.png"], "--plot is /nowhere/run.png, and there is no folder /nowhere"),
        (["--plot", "run.tex"], "--plot is run.tex; a picture's name ends in one of "),
        (["--plot", "run"], "--plot is run; a picture's name ends in one of "),
        (["--chat"], "give --file"),
        (["--url", "ftp://x"], "--url is 'ftp://x'"),
        (["--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9: [Errno 111] Connect call failed"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_fixed_concurrency_keeps_that_many_running(url: str, backend: FakeBackend) -> None:
    most = 0

    def watch(count: int) -> None:
        nonlocal most
        most = max(most, len(backend.running))

    backend.on_token = watch
    workload = Workload(num_prompts=7, max_tokens=4, concurrency=3)
    found = asyncio.run(drive(Target(url), "small", [[256]] * 7, workload, chat=False, timeout=10))
    assert (len(found.records), most) == (7, 3)


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array([*Workload(num_prompts=4000, max_tokens=1, rate=50.0).arrivals()])
    waits = np.diff(times, prepend=0)
    assert waits.min() > 0
    # Of exponential waits the mean is 1/rate and the share below it 1 - 1/e; four standard errors either way.
    assert waits.mean() == pytest.approx(0.02, rel=4 / 4000**0.5)
    assert (waits < 0.02).mean() == pytest.approx(1 - np.exp(-1), abs=4 * (0.37 * 0.63 / 4000) ** 0.5)


def test_the_report_is_the_arithmetic_of_the_times() -> None:
    records = [
        Record(0.0, [0.1, 0.3, 0.5], 0.6, prompt_tokens=7, completion_tokens=5),
        Record(1.0, [1.3], 1.4, prompt_tokens=3, completion_tokens=1),
        Record(1.0, error="full", status=503),
    ]
    report = Report.of(Run(records, 2.0))
    assert (report.completed, report.failed, report.errors) == (2, 1, {"503: full": 1})
    assert report.completion_tokens_per_second == 3
    assert report.prompt_tokens_per_second == 5
    assert (report.ttft.mean, report.ttft.p50, report.ttft.max) == pytest.approx((200, 200, 300))
    assert (report.tpot.mean, report.itl.mean, report.itl.p99) == pytest.approx((100, 200, 200))
    assert report.latency.mean == pytest.approx(500)


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_a_stream_is_read_however_it_is_cut_and_whatever_frames_it(cut: int) -> None:
    stream = b'data: {"a": 1}\n\n: a comment\n\ndata:{"b":\xe2\x82\xac}\r\n\r\ndata: [DONE]\n\n'
    pieces = [stream[i : i + cut] for i in range(0, len(stream), cut)]
    chunked = b"".join(b"%x;x=y\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    bodies = {"transfer-encoding: chunked": chunked, f"content-length: {len(stream)}": stream, "x: y": stream}

    async def read(header: str, body: bytes) -> list[bytes]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{header}\r\n\r\n".encode() + body)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return [data async for data in events(Target(f"http://127.0.0.1:{port}"), "/x", b"")]

    for header, body in bodies.items():
        assert asyncio.run(read(header, body)) == [b'{"a": 1}', b'{"b":\xe2\x82\xac}'], header


def test_a_stream_that_breaks_off_is_a_failure(url: str, backend: FakeBackend) -> None:
    class Broken(RuntimeError):
        pass

    backend.fail = Broken()
    workload: Any = Workload(num_prompts=1, max_tokens=9, concurrency=1)
    found = asyncio.run(drive(Target(url), "small", ["th"], workload, chat=False, timeout=10))
    assert "log says why" in (found.records[0].error or "")
