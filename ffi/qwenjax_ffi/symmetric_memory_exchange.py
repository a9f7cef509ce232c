"""How the processes of a heap find each other and pass memory handles: a key-value store, unix sockets, pidfd_getfd.

Everything waits for a stated time and no longer. A process that fails says so under the key that the others wait for,
so that they fail at once, with its message; one that died, or never came, is named when the time is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

# Of the syscall table that all architectures share since Linux 5.1.
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
MAX_DESCRIPTORS = 64  # the kernel passes up to 253 in one message
TIMEOUT_VARIABLE = "QWENJAX_PEER_TIMEOUT"
DEFAULT_TIMEOUT_SECONDS = 60.0


class SymmetricMemoryError(RuntimeError):
    """Symmetric memory could not be made; the message says why and what to do."""


class SymmetricMemoryUnavailable(SymmetricMemoryError):
    """The ranks cannot map each other's memory here; collectives run without it."""


class PeerError(SymmetricMemoryError):
    """Another process failed, died or never came."""


class Store(Protocol):
    """The key-value store of a job, as jax.distributed's coordinator keeps one."""

    def set(self, key: str, value: str) -> None:
        """Sets a key that no one has set."""

    def get(self, key: str, seconds: float) -> str | None:
        """A key's value once someone has set it; None after `seconds`."""


class CoordinatorStore:
    """The store of jax.distributed's coordinator."""

    def __init__(self) -> None:
        from jax._src import distributed

        if distributed.global_state.client is None:
            raise SymmetricMemoryError("a mesh over several processes needs jax.distributed.initialize() first")
        self._client: Any = distributed.global_state.client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value)

    def get(self, key: str, seconds: float) -> str | None:
        try:
            return str(self._client.blocking_key_value_get(key, max(1, int(seconds * 1000))))
        except Exception as error:
            # JaxRuntimeError with an absl status; only the text tells which.
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise SymmetricMemoryError(f"the coordinator does not answer: {error}") from error


def timeout_seconds() -> float:
    """How long a rank waits for a peer, in a kernel and while a heap is made; QWENJAX_PEER_TIMEOUT, default 60.

    Raises ValueError where the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{TIMEOUT_VARIABLE} is {text!r}; it is a number of seconds above 0")
    return seconds


def host_identity() -> str:
    """The same for processes that share a kernel and its sockets, whatever their containers call the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Rendezvous:
    """One process's view of the others while they make something together, phase by phase.

    name: of what is made, the same in all processes and used once. seconds: how long a phase waits for the slowest.
    """

    def __init__(self, store: Store, name: str, process: int, processes: int, seconds: float) -> None:
        self.store, self.name, self.process, self.processes, self.seconds = store, name, process, processes, seconds

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """A phase that ends with `gather`: whatever fails in it is told to the others, under the phase's key."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            told = {"error": f"{error}", "unavailable": isinstance(error, SymmetricMemoryUnavailable)}
            with contextlib.suppress(Exception):  # the first error is the one to raise
                self.store.set(self._key(phase, self.process), json.dumps(told))
            raise

    def gather(self, phase: str, value: Any) -> list[Any]:
        """Every process's value of a phase, by process.

        Raises PeerError where one failed or does not come in time, and SymmetricMemoryUnavailable where one did.
        """
        self.store.set(self._key(phase, self.process), json.dumps({"value": value}))
        deadline = time.monotonic() + self.seconds
        values = []
        for process in range(self.processes):
            if process == self.process:
                values.append(value)
                continue
            text = self.store.get(self._key(phase, process), max(0.0, deadline - time.monotonic()))
            if text is None:
                raise PeerError(
                    f"{self.name}: process {process} of {self.processes} did not come to {phase!r} within "
                    f"{self.seconds:g} s; if it is only slow, raise {TIMEOUT_VARIABLE}"
                )
            found = json.loads(text)
            if "error" in found:
                kind = SymmetricMemoryUnavailable if found["unavailable"] else PeerError
                raise kind(f"{self.name}: process {process} failed in {phase!r}: {found['error']}")
            values.append(found["value"])
        return values

    def _key(self, phase: str, process: int) -> str:
        return f"qwenjax/{self.name}/{phase}/{process}"


class DescriptorServer:
    """Gives this process's descriptors to the processes that know its token, until it is closed.

    `address` is what they need: the socket's path, the token, and, for hosts where sockets are not shared but
    processes may be looked into, the process and its descriptors' numbers.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors; at most {MAX_DESCRIPTORS}")
        self._descriptors = list(descriptors)
        self._folder = tempfile.TemporaryDirectory(prefix="qwenjax-")  # readable by its owner only
        self._token = secrets.token_hex(16)
        path = os.path.join(self._folder.name, "handles")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        self._socket.listen(64)
        self.address = {"path": path, "token": self._token, "pid": os.getpid(), "descriptors": self._descriptors}
        self._thread = threading.Thread(target=self._serve, name="qwenjax descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving and closes the descriptors."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()
        self._thread.join(timeout=5)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        self._folder.cleanup()

    def __enter__(self) -> DescriptorServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                if connection.recv(len(self._token), socket.MSG_WAITALL).decode(errors="replace") == self._token:
                    socket.send_fds(connection, [b"handles"], self._descriptors)


def receive_descriptors(address: dict[str, Any], seconds: float) -> list[int]:
    """The descriptors of another process of this machine, which the caller closes; `address` is its server's.

    Over its unix socket, or, where that is not to be seen from here, with pidfd_getfd (Linux 5.6), which needs the
    right to trace the process. Raises SymmetricMemoryError where neither works.
    """
    expected = len(address["descriptors"])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(address["path"])
            connection.sendall(address["token"].encode())
            _, received, _, _ = socket.recv_fds(connection, 64, MAX_DESCRIPTORS)
    except OSError as error:
        over_socket = f"{type(error).__name__}: {error}"
    else:
        if len(received) == expected:
            return list(received)
        for descriptor in received:
            os.close(descriptor)
        over_socket = f"{len(received)} of {expected} descriptors came"
    try:
        return _take_descriptors(address["pid"], address["descriptors"])
    except OSError as error:
        raise SymmetricMemoryError(
            f"no memory handles from process {address['pid']}: over its socket {address['path']}: {over_socket}; "
            f"with pidfd_getfd: {error}. Processes of one host must share /tmp or a pid namespace with ptrace rights"
        ) from error


def _take_descriptors(pid: int, numbers: Sequence[int]) -> list[int]:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(*arguments: int) -> int:
        result = int(libc.syscall(*(ctypes.c_long(argument) for argument in arguments)))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    process = call(SYS_PIDFD_OPEN, pid, 0)
    taken: list[int] = []
    try:
        for number in numbers:
            taken.append(call(SYS_PIDFD_GETFD, process, number, 0))  # noqa: PERF401, closed if a later one fails
    except OSError:
        for descriptor in taken:
            os.close(descriptor)
        raise
    finally:
        os.close(process)
    return taken
