"""An engine over several processes: what goes between them, and two of them on a CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qwenjax.engine import processes
from qwenjax.engine.processes import Follower, Leader, PlanTimeoutError
from tests.qwenjax.engine.two_processes import engine_on, generate

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 240


def test_plans_arrive_as_they_were_sent_until_the_end() -> None:
    ours, theirs = socket.socketpair()
    leader, follower = Leader([ours]), Follower(theirs)
    # The second is larger than what a socket holds: it is read while it is sent.
    tables = [np.arange(6, dtype=np.int32).reshape(2, 3) - 3, np.full((300, 900), 2**31 - 1, np.int32)]

    def send() -> None:
        for index, table in enumerate(tables):
            leader.send(index, table)
        leader.close()

    sender = threading.Thread(target=send)
    sender.start()
    for index, table in enumerate(tables):
        call = follower.receive()
        assert call is not None
        assert call.program == index
        np.testing.assert_array_equal(call.table, table)
    assert follower.receive() is None
    sender.join(10)
    assert not sender.is_alive()


def test_a_late_plan_is_an_error_that_names_the_wait_and_an_idle_leader_is_not() -> None:
    ours, theirs = socket.socketpair()
    leader, follower = Leader([ours], seconds=0.4), Follower(theirs, seconds=0.4)
    leader.send(0, np.zeros((1, 1), np.int32))
    assert follower.receive() is not None
    # Idle words are said every 0.1 s while it does nothing, and none while it is at work on a call.
    time.sleep(1)
    leader.send(0, np.zeros((1, 1), np.int32))
    assert follower.receive() is not None
    with leader.stepping(), pytest.raises(PlanTimeoutError, match=r"waited 0.4 s for process 0 to send call 2"):
        follower.receive()
    leader.close()


def test_a_process_that_left_is_noticed_by_the_other() -> None:
    ours, theirs = socket.socketpair()
    follower = Follower(theirs)
    ours.close()
    with pytest.raises(ConnectionError, match="process 0 left before it sent call 0"):
        follower.receive()
    ours, theirs = socket.socketpair()
    leader = Leader([ours])
    theirs.close()
    with pytest.raises(ConnectionError, match="process 1 does not take call 0"):
        leader.send(0, np.zeros((1, 1), np.int32))
    leader.close()


def test_a_process_that_left_while_nothing_was_run_is_kept_as_the_leaders_failure() -> None:
    ours, theirs = socket.socketpair()
    leader = Leader([ours], seconds=0.04)
    assert leader.failure is None
    theirs.close()
    leader._beat.join(5)
    assert "process 1 does not take call 0" in str(leader.failure)
    leader.close()


def test_followers_join_past_strangers_that_are_silent_wrong_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    token = b"t" * 32
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = list[socket.socket]()

        def connect(*said: bytes) -> socket.socket:
            end = socket.create_connection(server.getsockname())
            ends.append(end)
            for part in said:
                end.sendall(part)
                time.sleep(0.01)
            return end

        strangers = [connect(), connect(b"\1"), connect(b"u" * 32, (1).to_bytes(4)), connect(token, (3).to_bytes(4))]
        connect(b"\1").close()
        followers = [connect(token, (2).to_bytes(4)), connect(token[:5], token[5:], (1).to_bytes(4))]
        strangers.append(connect(token, (1).to_bytes(4)))  # there is one already
        began = time.monotonic()
        found = processes.accept_followers(server, token, 3)
        assert time.monotonic() - began < processes._HELLO_SECONDS  # the silent one is not waited for
        for ours, theirs in zip(found, reversed(followers), strict=True):
            ours.sendall(b"hello")
            assert theirs.recv(5) == b"hello"

        monkeypatch.setattr(processes, "_HELLO_SECONDS", 0.05)
        monkeypatch.setattr(processes, "_MEET_SECONDS", 0.3)
        silent = connect()
        with pytest.raises(TimeoutError, match=r"waited 0.3 s for the engines of processes \[1\]"):
            processes.accept_followers(server, token, 2)
        silent.settimeout(5)
        assert silent.recv(1) == b""  # it was let go
        for end in (*ends, *found):
            end.close()


@pytest.mark.parametrize(
    ("address", "expected"), [("[::1]:5", "::1"), ("localhost:5", "127.0.0.1"), ("10.0.0.1:5", "10.0.0.1")]
)
def test_the_coordinators_host_is_an_address_of_either_family(
    monkeypatch: pytest.MonkeyPatch, address: str, expected: str
) -> None:
    monkeypatch.setattr(processes, "_state", lambda: SimpleNamespace(coordinator_address=address))
    assert processes.coordinator_host() == expected


def test_the_leader_waits_for_every_follower_and_notices_one_that_hangs_or_leaves() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    leader = Leader([ours for ours, _ in pairs], seconds=0.4)
    followers = [Follower(theirs) for _, theirs in pairs]
    for follower in followers:
        follower.acknowledge()
        follower.acknowledge()
    leader.wait_for(1)
    leader.wait_for(2)
    followers[0].acknowledge()
    with pytest.raises(PlanTimeoutError, match=r"process 2 has done nothing for 0.4 s"):
        leader.wait_for(3)
    pairs[1][1].close()
    with pytest.raises(ConnectionError, match="process 2 has left"):
        leader.wait_for(3)
    leader.close()


@pytest.mark.parametrize(("data", "model"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_two_processes_draw_what_one_does(data: int, model: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.qwenjax.engine.two_processes"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), port, str(data), str(model)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        expected = generate(engine_on(1, 1))
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert json.loads(printed[0].splitlines()[-1]) == expected
