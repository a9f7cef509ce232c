"""Reads between the staging buffers of workers that share a process: plain copies, without NIXL."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from qwenjax_serving.transfer.nixl_transport import TransferError, until_done
from qwenjax_serving.transfer.staging import MemoryKind, StagingBuffer

logger = logging.getLogger(__name__)

# Between two looks at whether a read is to go on: 0.3 ms within an H200 (bench/results/kv-transfer-h200.txt, 753 GB/s).
_PIECE = 256 << 20  # bytes
_SETTLE = 10.0  # seconds that the piece under way has once a read is to stop


@dataclass(eq=False)
class _Read:
    """One read under way. copied: whether all of it, once nothing touches the memory any more."""

    peer: str
    stop: threading.Event = field(default_factory=threading.Event)
    copied: Future[bool] = field(default_factory=Future)


class LocalTransport:
    """As NixlTransport is used, with the same deadlines: a read stops between two pieces, and one whose piece does not
    end fails the transport."""

    def __init__(self, name: str, peers: dict[str, LocalTransport]) -> None:
        """peers: all open transports of the process by name, one dict for all of them."""
        self.name, self._peers = name, peers
        self.metadata = f"process-local:{name}".encode()
        self.failure: Exception | None = None  # as NixlTransport's
        self._reads: set[_Read] = set()
        self._closed = False

    async def start(self, buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self._peers[self.metadata.decode()] = self

    async def connect(self, metadata: bytes) -> str:
        if not self.names_of([metadata]):
            raise TransferError(
                f"{self.name} reads within its process alone, and the source is in another or has closed"
            )
        return metadata.decode()

    def names_of(self, metadata: Collection[bytes]) -> list[str]:
        names = [each.decode() for each in metadata]
        return [name for name in names if name in self._peers and not self._peers[name]._closed]

    async def disconnect(self, peer: str) -> None:
        """Stops what is being read from a peer, which then ends with errors."""
        for read in self._reads:
            if read.peer == peer:
                read.stop.set()

    async def read(self, peer: str, ranges: np.ndarray, timeout: float, memory: MemoryKind = "DRAM") -> None:
        """Copies ranges (see byte_ranges). Raises TransferError where that takes longer than `timeout` seconds, or is
        stopped by `disconnect`. However it ends, by cancellation too, nothing touches the memory any more, unless the
        transport has failed."""
        if self.failure is not None:
            raise TransferError(f"the transport failed: {self.failure}") from self.failure
        await self.connect(peer.encode())  # it may have closed meanwhile
        read = _Read(peer)
        self._reads.add(read)
        threading.Thread(target=self._copy, args=(read, ranges), name="copy", daemon=True).start()
        await until_done(asyncio.create_task(self._end(read, timeout)), on_cancel=read.stop.set)

    async def _end(self, read: _Read, timeout: float) -> None:
        copied = asyncio.wrap_future(read.copied)
        try:
            await asyncio.wait([copied], timeout=timeout)
            if not copied.done():
                await self._settle([read])
                raise TransferError(f"reading from {read.peer}: not done within {timeout:g} s")
            if not copied.result():
                raise TransferError(f"reading from {read.peer}: stopped")
        finally:
            if read.copied.done():
                self._reads.discard(read)

    async def _settle(self, reads: Collection[_Read]) -> None:
        """Stops reads, and returns once nothing touches the memory any more or the transport has failed."""
        for read in reads:
            read.stop.set()
        if not reads:
            return
        _, going = await asyncio.wait([asyncio.wrap_future(read.copied) for read in reads], timeout=_SETTLE)
        if going and self.failure is None:
            self.failure = TransferError(f"a copy within the process does not end, {_SETTLE:g} s after it was stopped")
            logger.error("%s: the transport failed: %s", self.name, self.failure)

    def _copy(self, read: _Read, ranges: np.ndarray) -> None:
        """In a thread of its own, which the process does not wait for when it ends."""
        try:
            for piece in _pieces(ranges):
                if read.stop.is_set():
                    read.copied.set_result(False)
                    return
                self._buffer.copy(piece)
            read.copied.set_result(True)
        except Exception as error:
            read.copied.set_exception(error)

    @contextmanager
    def serving(self) -> Iterator[None]:
        yield

    async def aclose(self) -> None:
        """Lets nobody begin to read from it, and stops what it reads and what is being read from it."""
        self._closed, own = True, self.metadata.decode()
        others = [read for other in self._peers.values() for read in other._reads if read.peer == own]
        await self._settle([*self._reads, *others])
        if self.failure is None:  # else a source that closes later is still to see who copies from it
            self._peers.pop(own, None)


def _pieces(ranges: np.ndarray) -> Iterator[np.ndarray]:
    """Of _PIECE bytes and one range at most."""
    before = np.cumsum(ranges[:, 2]) - ranges[:, 2]
    yield from np.split(ranges, np.flatnonzero(np.diff(before // np.uint64(_PIECE))) + 1)
