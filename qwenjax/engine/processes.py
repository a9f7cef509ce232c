"""An engine over several processes: the first one plans, and every call's program and table go to the others.

A message is a header and the table's int32 bytes, over a socket a follower; nothing in it is code. The processes find
each other through the coordinator of jax.distributed, and a follower is one that has read there what it has to say: who
reaches the coordinator is trusted, and the plans are neither encrypted nor authenticated beyond that.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

_HEADER = struct.Struct("!4sBIHII")  # magic, kind, number of the call, program, rows and width of the table
_MAGIC = b"qjp1"
_HELLO = struct.Struct("!32sI")  # what the first process published, and which process this is
_IDLE, _CALL, _END = range(3)
_HELLO_SECONDS = 5.0
_MEET_SECONDS = 300.0  # for all processes to have built their engine: they load and compile at their own pace
PLAN_SECONDS = 60.0

_engines = itertools.count()  # of this process; every process builds its engines in the same order


class PlanTimeoutError(TimeoutError):
    """The first process did not say in time what to run."""


@dataclass(frozen=True)
class PlannedCall:
    """A program, by its place in the engine's list, and its table, int32 [rows, width] of all data ranks."""

    program: int
    table: np.ndarray


class Leader:
    """The first process's end."""

    def __init__(self, followers: Sequence[socket.socket], seconds: float = PLAN_SECONDS) -> None:
        """seconds: as the followers', who are told four times as often that nothing is to be run."""
        self._followers, self._seconds = list(followers), seconds
        self._acknowledged = [0] * len(self._followers)
        self._lock = threading.Lock()
        self._count = 0
        self.failure: ConnectionError | None = None  # that one has left, noticed while nothing was to be run
        self._stepping = False
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._say_idle, args=(seconds / 4,), name="plans", daemon=True)
        self._beat.start()

    def send(self, program: int, table: np.ndarray) -> None:
        """Raises ConnectionError where a follower has left."""
        rows = np.ascontiguousarray(table, ">i4")
        with self._lock:
            self._send(_HEADER.pack(_MAGIC, _CALL, self._count, program, *table.shape) + rows.tobytes())
            self._count += 1

    def wait_for(self, count: int) -> None:
        """Until every follower has acknowledged `count` things in all. For one thread alone. Raises ConnectionError
        where one has left, PlanTimeoutError where it does not get there in time."""
        for place, follower in enumerate(self._followers):
            while self._acknowledged[place] < count:
                if not select.select([follower], [], [], self._seconds)[0]:
                    raise PlanTimeoutError(f"process {place + 1} has done nothing for {self._seconds:g} s")
                try:
                    found = follower.recv(4096)
                except OSError:  # reset
                    found = b""
                if not found:
                    raise ConnectionError(f"process {place + 1} has left")
                self._acknowledged[place] += len(found)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """While the engine is at work nobody is told that it is idle: a plan that does not come is late."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def close(self) -> None:
        """Ends the followers."""
        if self._ended.is_set():
            return
        self._ended.set()
        with self._lock:
            for follower in self._followers:
                with suppress(OSError):  # it may have left already
                    follower.sendall(_HEADER.pack(_MAGIC, _END, self._count, 0, 0, 0))
                follower.close()

    def _send(self, message: bytes) -> None:
        for place, follower in enumerate(self._followers):
            try:
                follower.sendall(message)
            except OSError as error:
                raise ConnectionError(f"process {place + 1} does not take call {self._count}: {error}") from error

    def _say_idle(self, every: float) -> None:
        while not self._ended.wait(every):
            with self._lock:
                if not self._stepping and not self._ended.is_set():
                    try:
                        self._send(_HEADER.pack(_MAGIC, _IDLE, self._count, 0, 0, 0))
                    except ConnectionError as error:
                        self.failure = error
                        return


class Follower:
    """Another process's end."""

    def __init__(self, leader: socket.socket, seconds: float = PLAN_SECONDS) -> None:
        """seconds: how long to wait for a word of the first process."""
        self._leader, self._seconds = leader, seconds
        self._count = 0
        leader.settimeout(seconds)

    def receive(self) -> PlannedCall | None:
        """The next call, None at the end. Raises PlanTimeoutError where nothing is heard of the first process for so
        long, ConnectionError where it has left or says something else."""
        while True:
            magic, kind, count, program, rows, width = _HEADER.unpack(self._read(_HEADER.size))
            if magic != _MAGIC or count != self._count:
                raise ConnectionError(f"process 0 sent {magic!r}, call {count}; call {self._count} was to come")
            if kind == _END:
                self._leader.close()
                return None
            if kind == _CALL:
                data = self._read(4 * rows * width)
                self._count += 1
                return PlannedCall(program, np.frombuffer(data, ">i4").astype(np.int32).reshape(rows, width))

    def acknowledge(self) -> None:
        """Tells the first process, which waits by `Leader.wait_for`, that one more of what it asked for is done."""
        self._leader.sendall(b"\1")

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._leader.recv(size - len(data))
            except TimeoutError:
                raise PlanTimeoutError(
                    f"waited {self._seconds:g} s for process 0 to send call {self._count}; it hangs or is cut off"
                ) from None
            if not part:
                raise ConnectionError(f"process 0 left before it sent call {self._count}")
            data += part
        return bytes(data)


def publish(key: str, value: str) -> None:
    """Tells all processes of jax.distributed something, which `look_up` finds."""
    _state().client.key_value_set(f"qwenjax/{key}", value)


def look_up(key: str) -> str:
    """What another process published; waits for it. Raises RuntimeError where that does not happen in time."""
    return str(_state().client.blocking_key_value_get(f"qwenjax/{key}", int(_MEET_SECONDS * 1000)))


def coordinator_host() -> str:
    """Where the first process is reached: an IP address, without brackets; an IPv4 one where its name has one."""
    host = str(_state().coordinator_address.rsplit(":", 1)[0]).strip("[]")
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return str(address[0])


def _state() -> Any:
    from jax._src import distributed  # JAX exports neither the store nor the address

    state = distributed.global_state
    if state.client is None or state.coordinator_address is None:
        raise RuntimeError("a mesh over several processes needs jax.distributed.initialize() first")
    return state


def meet() -> Leader | Follower:
    """This process's end, once all processes of jax.distributed have come. Raises TimeoutError where one does not."""
    host, key = coordinator_host(), f"plans/{next(_engines)}"
    if jax.process_index():
        port, said = look_up(key).split()
        leader = socket.create_connection((host, int(port)), _MEET_SECONDS)
        _without_delay(leader)
        leader.sendall(_HELLO.pack(bytes.fromhex(said), jax.process_index()))
        return Follower(leader)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        token = secrets.token_bytes(32)
        publish(key, f"{server.getsockname()[1]} {token.hex()}")
        return Leader(accept_followers(server, token, jax.process_count()))


def accept_followers(server: socket.socket, token: bytes, num_processes: int) -> list[socket.socket]:
    """The connections of processes 1 to num_processes - 1, in order. Who connects and does not say the token soon is
    let go, and nobody waits for it meanwhile. Raises TimeoutError where a process does not come."""
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + _MEET_SECONDS
    with selectors.DefaultSelector() as waiting:
        waiting.register(server, selectors.EVENT_READ)
        said: dict[socket.socket, tuple[bytes, float]] = {}  # by who has not said all, and until when it may
        while len(found) < num_processes - 1:
            now = time.monotonic()
            if now > until:
                missing = sorted(set(range(1, num_processes)) - set(found))
                raise TimeoutError(f"waited {_MEET_SECONDS:g} s for the engines of processes {missing}")
            late = [stranger for stranger, (_, last) in said.items() if now > last]
            ready = [key.fileobj for key, _ in waiting.select(min(_HELLO_SECONDS, until - now))]
            for one in {*late, *ready}:
                if one is server:
                    follower, _ = server.accept()
                    _without_delay(follower)
                    said[follower] = b"", now + _HELLO_SECONDS
                    waiting.register(follower, selectors.EVENT_READ)
                    continue
                assert isinstance(one, socket.socket)
                before, last = said.pop(one)
                part = b"" if one in late else _received(one, _HELLO.size - len(before))
                if part and len(before + part) < _HELLO.size:
                    said[one] = before + part, last
                    continue
                waiting.unregister(one)
                process = _process_of(before + part, token)
                if process in found or not 0 < process < num_processes:
                    one.close()
                else:
                    found[process] = one
        for stranger in said:
            stranger.close()
    return [found[process] for process in sorted(found)]


def _received(end: socket.socket, most: int) -> bytes:
    """What has come; nothing where the other end has left."""
    try:
        return end.recv(most)
    except OSError:  # reset
        return b""


def _process_of(said: bytes, token: bytes) -> int:
    """Which process said this; 0 where it is not the token and a number."""
    if len(said) != _HELLO.size:
        return 0
    its_token, process = _HELLO.unpack(said)
    return int(process) if hmac.compare_digest(its_token, token) else 0


def _without_delay(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
