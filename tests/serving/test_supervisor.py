"""The supervisor and processes that do nothing: who is started, and what happens when one ends."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from qwenjax_serving import supervisor as supervisor_module
from qwenjax_serving.deployment import Deployment, WorkerPlan
from qwenjax_serving.router.router import RouterSettings
from qwenjax_serving.supervisor import Supervisor
from qwenjax_serving.workers.process import COORDINATOR_VARIABLE, LOCAL_DEVICES_VARIABLE

PLANS = (
    WorkerPlan("prefill-0", "prefill", {"model_parallel": 4}, processes=2),
    WorkerPlan("decode-0", "decode", {}),
)


def test_when_a_process_of_a_worker_ends_all_of_that_worker_and_no_others_start_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in "_FIRST_PAUSE", "_LOOK":
        monkeypatch.setattr(supervisor_module, name, 0.05)
    names = COORDINATOR_VARIABLE, LOCAL_DEVICES_VARIABLE, "JAX_NUM_CPU_DEVICES"
    program = (
        "import os, sys, time\n"
        f"said = [*sys.argv[1:], *(os.environ.get(name, '') for name in {names})]\n"
        f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').write(' '.join(said))\n"
        "time.sleep(60)"
    )

    def of(pid: int) -> list[str]:
        """What a process was told, once it says so."""
        path = tmp_path / str(pid)
        text = path.read_text() if path.exists() else ""  # empty while it is written
        return text.split(" ") if text else []

    async def test() -> None:
        supervisor = Supervisor("model", Path("file"), Deployment(PLANS), "address", b"secret")
        supervisor._command = [sys.executable, "-c", program]
        known = {"prefill-0", "decode-0"}
        running = asyncio.create_task(supervisor.run(lambda name: name in known))
        try:

            async def pids() -> dict[str, list[int]]:
                found: dict[str, list[int]] = {}
                while sum(map(len, found.values())) < 3 or not all(of(pid) for each in found.values() for pid in each):
                    await asyncio.sleep(0.02)
                    living = {
                        name: [process.pid for process in processes if process.returncode is None]
                        for name, processes in supervisor.processes.items()
                    }
                    found = {name: each for name, each in living.items() if each}
                return found

            first = await pids()
            told = [of(pid) for pid in first["prefill-0"]]
            assert [each[:4] for each in told] == [["--name", "prefill-0", "--process", place] for place in "01"]
            assert told[0][4] == told[1][4] != ""  # where they meet
            assert [each[5:] for each in told] == [["0,1", "2"], ["2,3", "2"]]
            assert of(first["decode-0"][0])[4:] == ["", "", "1"]

            await asyncio.sleep(0.3)  # until it has seen that they joined
            os.kill(first["prefill-0"][1], 9)
            known.remove("prefill-0")
            second = first
            while len(second["prefill-0"]) < 2 or set(second["prefill-0"]) & set(first["prefill-0"]):
                second = await pids()
            assert second["decode-0"] == first["decode-0"]
        finally:
            await supervisor.stop()
            running.cancel()

    asyncio.run(asyncio.wait_for(test(), 40))


DECODE_ALONE = Deployment(PLANS[1:], settings=RouterSettings(transfer_timeout=0.125))
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def set_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_GONE": 0.1, "_FIRST_PAUSE": 0.05, "_LOOK": 0.05, "_STOP": 0.1}.items():
        monkeypatch.setattr(supervisor_module, name, seconds)


def test_a_worker_that_the_router_has_lost_is_started_again_and_one_that_has_not_joined_yet_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_times(monkeypatch)

    async def test() -> None:
        supervisor = Supervisor("model", Path("file"), DECODE_ALONE, "address", b"secret")
        supervisor._command = [sys.executable, "-c", STUBBORN]
        known = False
        running = asyncio.create_task(supervisor.run(lambda name: known))
        try:
            await asyncio.sleep(1.0)  # more than 0.225
            (first,) = supervisor.processes["decode-0"]
            assert first.returncode is None
            known = True
            await asyncio.sleep(0.2)
            known = False
            while supervisor.processes["decode-0"] == [first]:
                await asyncio.sleep(0.02)
            assert first.returncode == -9
            assert "decode-0 has been lost to the router for 0.225 s: it is ended" in caplog.text
        finally:
            await supervisor.stop()
            running.cancel()

    asyncio.run(asyncio.wait_for(test(), 40))


def test_a_worker_whose_process_was_killed_starts_once_the_router_has_lost_it_and_may_then_load_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_times(monkeypatch)

    async def test() -> None:
        supervisor = Supervisor("model", Path("file"), DECODE_ALONE, "address", b"secret")
        supervisor._command = [sys.executable, "-c", STUBBORN]
        known = True
        running = asyncio.create_task(supervisor.run(lambda name: known))
        try:
            await asyncio.sleep(0.3)
            (first,) = supervisor.processes["decode-0"]
            first.kill()
            await asyncio.sleep(0.3)  # the router waits for `worker_timeout` before it gives a silent worker up
            assert supervisor.processes["decode-0"] == [first]
            known = False
            while (found := supervisor.processes["decode-0"]) == [first]:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)  # more than 0.225
            assert supervisor.processes["decode-0"] == found
            assert found[0].returncode is None
        finally:
            await supervisor.stop()
            running.cancel()

    asyncio.run(asyncio.wait_for(test(), 40))
