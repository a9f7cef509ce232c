"""`qwenjax serve`: all roles by one command, as users start it, and options that have no effect."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from qwenjax import LLM
from qwenjax_serving import cli, launch
from tests.conftest import FAKE_CPU_DEVICES
from tests.generation import greedy
from tests.qwenjax.engine.test_handover import SIZES as ENGINE
from tests.serving.test_disaggregated import ONE_OF_EACH, metrics_of

openai = pytest.importorskip("openai")
pytest.importorskip("nixl")

PROMPT = "the hello world and all that is in it"


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`qwenjax serve` as a process."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "qwenjax_serving.cli", "serve", str(folder), *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    """Once it is ready."""
    assert process.stdout is not None
    found = re.fullmatch(r"qwenjax: serving small on (http://127\.0\.0\.1:\d+)/v1\n", process.stdout.readline())
    assert found, process.communicate()[1]
    return found[1]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


SIZES: dict[str, Any] = {"model": "small", "temperature": 0, "extra_body": {"ignore_eos": True}}


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("with_file", [True, False])
def test_all_roles_by_one_command_and_sigterm_drains(
    head_folder: Path, head_llm: LLM, tmp_path: Path, with_file: bool
) -> None:
    config = tmp_path / "deployment.toml"
    devices = f'env = {{ JAX_NUM_CPU_DEVICES = "{FAKE_CPU_DEVICES}" }}\n'  # for the programs that other tests compiled
    config.write_text(ONE_OF_EACH.replace("model_parallel = 2\n", "model_parallel = 2\n" + devices) + devices)
    options = ["--config", str(config)]
    if not with_file:
        sizes = {name: size for name, size in ENGINE.items() if name != "progress"}
        options = [word for name, size in sizes.items() for word in ("--" + name.replace("_", "-"), str(size))]
    with serving(head_folder, *options, "--port", "0", "--served-model-name", "small") as process:
        check_all_roles(process, head_llm)


def check_all_roles(process: subprocess.Popen[str], llm: LLM) -> None:
    url = url_of(process)
    client = client_of(url)
    expected = llm.generate([PROMPT], greedy(30))[0].outputs[0].text
    assert client.completions.create(prompt=PROMPT, max_tokens=30, **SIZES).choices[0].text == expected
    time.sleep(1.5)  # workers tell the router of themselves twice a second
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert 'qwenjax:workers{role="decode"} 1.0' in metrics
    assert re.search(r'qwenjax:kv_transfer_bytes_total{engine="decode-0"} [1-9]', metrics)
    assert re.search(r'qwenjax:prefill_calls_total{engine="decode-0"} 0.0', metrics)

    # A worker that is killed comes back, and the server with it.
    (first, *_) = workers = children(process.pid)
    assert len(workers) == 2
    os.kill(first, signal.SIGKILL)
    text = None
    for _ in range(600):
        time.sleep(0.1)
        with contextlib.suppress(openai.InternalServerError):  # 500 and 503
            text = client.completions.create(prompt=PROMPT, max_tokens=30, **SIZES).choices[0].text
            break
    assert text == expected

    # Told to end, it finishes what streams, and leaves no process behind.
    stream = client.completions.create(prompt=PROMPT, max_tokens=80, stream=True, **SIZES)
    chunks, begun = list[str](), threading.Event()

    def read() -> None:
        for chunk in stream:
            chunks.append(chunk.choices[0].text)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(timeout=30)
    workers = children(process.pid)
    process.send_signal(signal.SIGTERM)
    reader.join(timeout=30)
    assert "".join(chunks) == llm.generate([PROMPT], greedy(80))[0].outputs[0].text
    assert process.wait(timeout=30) == 0
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
def test_workers_outlive_a_router_that_is_killed_and_work_for_the_next(
    head_folder: Path, head_llm: LLM, tmp_path: Path
) -> None:
    """Each started by its role. What streams then is cut; workers let go of it within seconds."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free.getsockname()[1] for free in (one, other)]
    config = tmp_path / "deployment.toml"
    config.write_text(ONE_OF_EACH.replace("[router]", f'[router]\naddress = "tcp://127.0.0.1:{ports[0]}"'))
    shared = {"QWENJAX_SECRET": "a secret of the tests alone", "JAX_NUM_CPU_DEVICES": str(FAKE_CPU_DEVICES)}

    def role(name: str, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
        return serving(head_folder, "--config", str(config), "--role", name, *options, **shared)

    def router() -> AbstractContextManager[subprocess.Popen[str]]:
        return role("router", "--port", str(ports[1]), "--served-model-name", "small")

    expected = head_llm.generate([PROMPT], greedy(30))[0].outputs[0].text
    with role("prefill") as prefill, role("decode") as decode:
        with router() as killed:
            client = client_of(url_of(killed))
            assert client.completions.create(prompt=PROMPT, max_tokens=30, **SIZES).choices[0].text == expected
            streams = [client.completions.create(prompt=PROMPT, max_tokens=80, stream=True, **SIZES) for _ in range(4)]
            next(iter(streams[0]))
            killed.kill()
            with pytest.raises(openai.APIConnectionError):
                list(streams[0])
        with router() as second:
            url = url_of(second)
            results = [client_of(url).completions.create(prompt=PROMPT, max_tokens=30, **SIZES) for _ in range(3)]
            assert [result.choices[0].text for result in results] == [expected] * 3
            time.sleep(1.5)  # workers tell the router of themselves twice a second
            metrics = metrics_of(url)
            for name in "prefill-0", "decode-0":
                assert metrics[f'qwenjax:worker_outputs{{engine="{name}"}}'] == 0
                assert metrics[f'qwenjax:num_requests_running{{engine="{name}",model_name="small"}}'] == 0
                assert metrics[f'qwenjax:free_pages{{engine="{name}",model_name="small",rank="0"}}'] == 64
            assert metrics["qwenjax:router_lost_workers_total"] == 0
        assert (prefill.poll(), decode.poll()) == (None, None)


@pytest.mark.slow
def test_sigterm_while_workers_load_ends_them_with_status_0_and_leaves_nothing(
    head_folder: Path, tmp_path: Path
) -> None:
    with serving(head_folder, "--port", "0", TMPDIR=str(tmp_path)) as process:
        deadline = time.monotonic() + 60
        while len(workers := children(process.pid)) < 2 or not list(tmp_path.glob("qwenjax-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        assert not list(tmp_path.glob("qwenjax-*"))
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_sigterm_before_a_server_is_ready_removes_its_file_and_is_status_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = list[Path]()

    def run(arguments: argparse.Namespace) -> int:
        files.append(arguments.config)
        assert files[0].exists()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return 1

    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr(launch, "_default_deployment", lambda _: "")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "model"])
    assert ended.value.code == 0
    assert not files[0].exists()
    assert capsys.readouterr().err == "qwenjax: stopped\n"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--role", "router"], "--role needs --config, a deployment file"),
        (["--config", "FILE", "--page-size", "32"], "--page-size has no effect with --config: the file's [engine]"),
        # Also where it equals the default, which the file may have set aside.
        (["--config", "FILE", "--max-num-seqs", "32"], "--max-num-seqs has no effect with --config"),
        (["--config", "FILE", "--dtype", "auto"], "--dtype has no effect with --config"),
        (["--config", "FILE", "--max-queue", "256"], "--max-queue has no effect with --config"),
        (["--config", "FILE", "--max-queue", "9"], "--max-queue has no effect with --config: the file's [router]"),
        (["--config", "FILE", "--colocated"], "--colocated has no effect with --config: the file says"),
        (
            ["--config", "FILE", "--data-parallel", "1"],
            "--data-parallel has no effect with --config: the file's [engine]",
        ),
        (["--config", "FILE", "--role", "router"], "[router] needs an address that workers can be told"),
        (["--config", "FILE", "--role", "decode", "--name", "x"], "there is no worker 'x'"),
        (
            ["--config", "FILE", "--role", "decode", "--name", "prefill-0"],
            "makes it a prefill worker, not --role decode",
        ),
        (["--config", "FILE", "--role", "decode", "--grace", "5"], "share a secret: set QWENJAX_SECRET"),
        (
            ["--config", "FILE", "--role", "decode", "--api-key", "k"],
            "--api-key has no effect with --role decode: the router serves HTTP",
        ),
        (["--config", "FILE", "--role", "decode", "--port", "8000"], "--port has no effect with --role decode"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0; it must be at least 1"),
        (["--served-model-name", ""], "--served-model-name has an empty name"),
        (["--config", "FILE", "--role", "prefill"], "prefill-0: FILE says LEVEL=3; export it before you start it"),
        (["--config", "FILE", "--name", "decode-0"], "--name is for --role prefill, decode and both"),
        (["--config", "FILE", "--process", "1"], "--process is for --role prefill, decode and both"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("QWENJAX_SECRET", raising=False)
    own = 'model_parallel = 2\nenv = { LEVEL = "3" }\n'
    (tmp_path / "FILE").write_text(ONE_OF_EACH.replace("model_parallel = 2\n", own))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "model", *options]) == 2
    assert message in capsys.readouterr().err
