"""Reads from the staging buffers of other processes, over NIXL (UCX: shared memory, TCP, RDMA, or CUDA's between GPUs).

The reader starts a transfer and the owner of the source only keeps its memory as it is. A process that was stopped and
wakes up late can so spoil its own memory and no one else's, as a late writer could.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from qwenjax_serving.transfer.staging import MemoryKind, StagingBuffer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL = 0.001  # seconds between looks at what is under way: NIXL's own thread would spin on a core, and has no events
_SETTLE = 10.0  # seconds that reads may go on after their peer was disconnected


class TransferError(RuntimeError):
    """A transfer that did not happen; its bytes mean nothing."""


async def until_done(task: asyncio.Task[T], on_cancel: Callable[[], None] = lambda: None) -> T:
    """Waits for a task to its end, even where this is cancelled meanwhile. What it returns or raises. on_cancel: called
    then."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
            on_cancel()
    if cancelled:
        task.exception()
        raise asyncio.CancelledError
    return task.result()


class _Read:
    """One read under way; `settled` ends, well or with a TransferError, once nothing touches the memory any more."""

    handle: Any

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self, error: TransferError | None) -> None:
        if self.settled.done():  # the transport has failed
            return
        if error is None:
            self.settled.set_result(None)
        else:
            self.settled.set_exception(error)
            self.settled.exception()  # looked at: not everyone waits for a read that failed


class NixlTransport:
    """One NIXL agent, which runs in a thread of its own. Made and used on one asyncio loop; `aclose` ends it.

    metadata: what a peer needs in order to `connect`. Raises ImportError, with what to install, where NIXL is missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._agent: Any = None
        self._reads: list[_Read] = []  # the thread's
        self._registered: list[Any] = []
        self._memory: MemoryKind = "DRAM"
        self._peers: dict[bytes, str] = {}
        self._serving = 0
        self._failure: Exception | None = None
        self.metadata = b""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Exception | None:
        """What ended the transport, if anything did: nothing can be read any more, and what was being read may still
        arrive in memory."""
        return self._failure

    async def start(self, buffer: StagingBuffer) -> None:
        """Makes the agent and registers the memory that it may read into or be read from.

        Raises ImportError without NIXL, and TransferError where it cannot register GPU memory.
        """
        self._memory = buffer.memory

        def make() -> tuple[Any, list[Any], bytes]:
            os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
            try:
                from nixl import nixl_agent, nixl_agent_config
            except ImportError as error:
                raise ImportError(
                    f"transfers between processes need NIXL: pip install 'qwenjax[disagg]' ({error})"
                ) from error
            agent = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            regions = [(*region, "") for region in buffer.regions if region.num_bytes]
            try:
                descriptions = [agent.register_memory([region], buffer.memory) for region in regions]
            except Exception as error:
                if buffer.memory == "DRAM":
                    raise
                raise TransferError(
                    f"NIXL cannot register GPU memory ({error or type(error).__name__}): its UCX has to know CUDA "
                    "(nixl-cu12 or nixl-cu13, that of the driver), and UCX_TLS, where it is set, has to have cuda_copy "
                    "and cuda_ipc in it"
                ) from error
            return agent, descriptions, agent.get_agent_metadata()

        self._agent, self._registered, self.metadata = await self._call(make)

    async def connect(self, metadata: bytes) -> str:
        """The peer's name, for `read`. Connecting twice is once. Raises TransferError where the peer is gone."""
        if metadata not in self._peers:
            try:
                name = await self._call(self._agent.add_remote_agent, metadata)
            except Exception as error:
                raise TransferError(f"connecting: {error or type(error).__name__}") from error
            self._peers[metadata] = name if isinstance(name, str) else name.decode()
        return self._peers[metadata]

    def names_of(self, metadata: Collection[bytes]) -> list[str]:
        """Of those peers that it is connected to."""
        return [self._peers[each] for each in metadata if each in self._peers]

    async def disconnect(self, peer: str) -> None:
        """Ends what is being read from a peer, with errors. For one that died or does not answer."""
        self._peers = {metadata: name for metadata, name in self._peers.items() if name != peer}
        try:
            await self._call(self._agent.remove_remote_agent, peer)
        except Exception as error:
            logger.warning("%s: disconnecting from %s: %s", self.name, peer, error)

    async def read(self, peer: str, ranges: np.ndarray, timeout: float, memory: MemoryKind = "DRAM") -> None:
        """Copies ranges (see byte_ranges) from a peer, whose memory is of this kind.

        A read that takes longer than `timeout` seconds disconnects the peer. Raises TransferError where the bytes did
        not all come. However it ends, by cancellation too, nothing touches the memory any more, unless the transport
        has failed.
        """
        await until_done(asyncio.get_running_loop().create_task(self._read(peer, ranges, timeout, memory)))

    async def _read(self, peer: str, ranges: np.ndarray, timeout: float, memory: MemoryKind) -> None:
        if not len(ranges):
            return
        self._check()
        read = _Read(peer)

        def post() -> None:
            source, target, num_bytes, source_device, target_device = ranges.T
            local = np.stack([target, num_bytes, target_device], axis=1)
            remote = np.stack([source, num_bytes, source_device], axis=1)
            sides = (local, self._memory), (remote, memory)
            descriptions = (self._agent.get_xfer_descs(*side) for side in sides)
            read.handle = self._agent.initialize_xfer("READ", *descriptions, peer)
            self._agent.transfer(read.handle)
            self._reads.append(read)

        try:
            await self._call(post)
        except Exception as error:
            raise TransferError(f"reading from {peer}: {error or type(error).__name__}") from error
        self._check()
        await asyncio.wait([read.settled], timeout=timeout)
        if read.settled.done():
            return read.settled.result()
        await self.disconnect(peer)
        await asyncio.wait([read.settled], timeout=_SETTLE)
        if not read.settled.done():
            self._fail(TransferError(f"reading from {peer} does not end, {_SETTLE:g} s after it was disconnected"))
        raise TransferError(f"reading from {peer}: not done within {timeout:g} s")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While others may read from this process: a connection needs both sides to look after it."""
        self._serving += 1
        self._calls.put(lambda: None)  # the thread looks up
        try:
            yield
        finally:
            self._serving -= 1

    async def aclose(self) -> None:
        """Disconnects from every peer, and gives the memory back once nothing touches it."""
        for peer in list(self._peers.values()):
            await self.disconnect(peer)
        if settling := [read.settled for read in self._reads]:
            await asyncio.wait(settling, timeout=_SETTLE)
        for description in self._registered:
            await self._call(self._agent.deregister_memory, description)
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        self._agent = None

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """What a function of the agent returns or raises, called in the agent's thread."""
        result: Future[T] = Future()

        def call() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function(*args))
                except Exception as error:
                    result.set_exception(error)

        self._calls.put(call)
        return await asyncio.wrap_future(result)

    def _check(self) -> None:
        if self._failure is not None:
            raise TransferError(f"the transport failed: {self._failure}") from self._failure

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        logger.error("%s: the transport failed: %s", self.name, error)
        self._failure = error
        for read in list(self._reads):
            read.settle(TransferError(f"reading from {read.peer}: the transport failed: {error}"))

    def _run(self) -> None:
        """The agent's thread: makes calls, and while anything is under way looks after it between them."""
        works = True
        while True:
            busy = works and self._failure is None and self._agent is not None and (self._reads or self._serving)
            try:
                call = self._calls.get(timeout=_POLL if busy else None)
            except queue.Empty:
                pass
            else:
                if call is None:
                    return
                call()
            if busy:
                try:
                    ended = self._poll()
                except Exception as error:
                    works, ended = False, []
                    self._on_loop(self._fail, error)
                for read, failure in ended:
                    self._reads.remove(read)
                    self._on_loop(read.settle, failure)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(function, *args)

    def _poll(self) -> list[tuple[_Read, TransferError | None]]:
        """The reads that have ended."""
        self._agent.get_new_notifs()
        ended: list[tuple[_Read, TransferError | None]] = []
        for read in self._reads:
            error = None
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as reason:
                state, error = "ERR", TransferError(f"reading from {read.peer}: {reason or type(reason).__name__}")
            if state == "PROC":
                continue
            if state == "ERR" and error is None:
                error = TransferError(f"reading from {read.peer} failed")
            try:
                self._agent.release_xfer_handle(read.handle)
            except Exception:  # still busy: looked at again
                continue
            ended.append((read, error))
        return ended
