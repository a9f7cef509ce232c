"""Reads from the staging buffers of other processes, over NIXL (UCX: shared memory, TCP or RDMA).

The reader starts a transfer and the owner of the source only keeps its memory as it is. A process that was stopped and
wakes up late can so spoil its own memory and no one else's, as a late writer could.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL = 0.001  # seconds between looks at what is under way; NIXL's own thread for it would spin on a core
_MEMORY = "DRAM"
_SETTLE = 10.0  # seconds that reads may go on after their peer was disconnected


class TransferError(RuntimeError):
    """A transfer that did not happen; its bytes mean nothing."""


class _Read:
    """One read under way; `settled` ends, well or with a TransferError, once nothing touches the memory any more."""

    def __init__(self, peer: str, handle: Any) -> None:
        self.peer, self.handle = peer, handle
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class NixlTransport:
    """One NIXL agent, which runs in a thread of its own. Made and used on one asyncio loop; `aclose` ends it.

    metadata: what a peer needs in order to `connect`. Raises ImportError, with what to install, where NIXL is missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")
        self._agent: Any = None
        self._reads: list[_Read] = []
        self._registered: list[Any] = []
        self._peers: dict[bytes, str] = {}
        self._serving = 0
        self._wake = asyncio.Event()
        self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._failure: Exception | None = None
        self.metadata = b""

    @property
    def failure(self) -> Exception | None:
        """What ended the transport, if anything did: nothing can be read any more, and what was being read may still
        arrive in memory."""
        return self._failure

    async def start(self, *buffers: np.ndarray) -> None:
        """Makes the agent and registers the memory that it may read into or be read from."""

        def make() -> tuple[Any, list[Any], bytes]:
            os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
            try:
                from nixl import nixl_agent, nixl_agent_config
            except ImportError as error:
                raise ImportError(
                    f"transfers between processes need NIXL: pip install 'qwenjax[disagg]' ({error})"
                ) from error
            agent = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            descriptions = [
                agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], _MEMORY)
                for buffer in buffers
                if buffer.nbytes
            ]
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

    async def disconnect(self, peer: str) -> None:
        """Ends what is being read from a peer, with errors. For one that died or does not answer."""
        self._peers = {metadata: name for metadata, name in self._peers.items() if name != peer}
        try:
            await self._call(self._agent.remove_remote_agent, peer)
        except Exception as error:
            logger.warning("%s: disconnecting from %s: %s", self.name, peer, error)
        self._wake.set()

    async def read(self, peer: str, ranges: np.ndarray, timeout: float) -> None:
        """Copies ranges, uint64 [ranges, 3] of source address, target address and bytes, from a peer.

        A read that takes longer than `timeout` seconds disconnects the peer. Raises TransferError where the bytes did
        not all come. However it ends, by cancellation too, nothing touches the memory any more, unless the transport
        has failed.
        """
        task = asyncio.get_running_loop().create_task(self._read(peer, ranges, timeout))
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            task.exception()
            raise asyncio.CancelledError
        task.result()

    async def _read(self, peer: str, ranges: np.ndarray, timeout: float) -> None:
        def post() -> Any:
            device = np.zeros(len(ranges), np.uint64)
            local = np.stack([ranges[:, 1], ranges[:, 2], device], axis=1)
            remote = np.stack([ranges[:, 0], ranges[:, 2], device], axis=1)
            descriptions = (self._agent.get_xfer_descs(side, _MEMORY) for side in (local, remote))
            handle = self._agent.initialize_xfer("READ", *descriptions, peer)
            self._agent.transfer(handle)
            return handle

        if not len(ranges):
            return
        self._check()
        try:
            read = _Read(peer, await self._call(post))
        except Exception as error:
            raise TransferError(f"reading from {peer}: {error or type(error).__name__}") from error
        self._check()
        self._reads.append(read)
        self._wake.set()
        await asyncio.wait([read.settled], timeout=timeout)
        if read.settled.done():
            return read.settled.result()
        await self.disconnect(peer)
        await asyncio.wait([read.settled], timeout=_SETTLE)
        if not read.settled.done():
            self._fail(TransferError(f"reading from {peer} does not end, {_SETTLE:g} s after it was disconnected"))
            self._driver.cancel()
        raise TransferError(f"reading from {peer}: not done within {timeout:g} s")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While others may read from this process: a connection needs both sides to look after it."""
        self._serving += 1
        self._wake.set()
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
        self._driver.cancel()
        for description in self._registered:
            await self._call(self._agent.deregister_memory, description)
        self._agent = None
        self._thread.shutdown()

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args))

    def _check(self) -> None:
        if self._failure is not None:
            raise TransferError(f"the transport failed: {self._failure}") from self._failure

    def _fail(self, error: Exception) -> None:
        logger.error("%s: the transport failed: %s", self.name, error)
        self._failure = error
        for read in self._reads:
            read.settled.set_exception(TransferError(f"reading from {read.peer}: the transport failed: {error}"))
            read.settled.exception()  # looked at: not everyone waits for a read that failed
        self._reads.clear()

    async def _drive(self) -> None:
        try:
            await self._look()
        except Exception as error:
            self._fail(error)

    async def _look(self) -> None:
        while True:
            if not self._reads and not self._serving:
                await self._wake.wait()
            self._wake.clear()
            if self._agent is not None:
                for read, error in await self._call(self._poll, list(self._reads)):
                    self._reads.remove(read)
                    if error is None:
                        read.settled.set_result(None)
                    else:
                        read.settled.set_exception(error)
                        read.settled.exception()  # looked at: not everyone waits for a read that failed
            await asyncio.sleep(_POLL)

    def _poll(self, reads: list[_Read]) -> list[tuple[_Read, TransferError | None]]:
        """The reads that have ended. In the agent's thread."""
        self._agent.get_new_notifs()
        ended: list[tuple[_Read, TransferError | None]] = []
        for read in reads:
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
