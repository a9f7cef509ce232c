"""Reads between the staging buffers of workers that share a process: plain copies, without NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np

from qwenjax_serving.transfer.nixl_transport import TransferError, until_done
from qwenjax_serving.transfer.staging import MemoryKind, StagingBuffer


class LocalTransport:
    """As NixlTransport is used. A copy ends by itself, so that nothing has to be looked after, ended or given up."""

    failure: Exception | None = None

    def __init__(self, name: str, peers: set[bytes]) -> None:
        """peers: metadata of all transports of the process, one set for all of them."""
        self.name, self._peers = name, peers
        self.metadata = f"process-local:{name}".encode()

    async def start(self, buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self._peers.add(self.metadata)

    async def connect(self, metadata: bytes) -> str:
        if metadata not in self._peers:
            raise TransferError(
                f"{self.name} reads within its process alone, and the source is in another or has closed"
            )
        return metadata.decode()

    def names_of(self, metadata: Collection[bytes]) -> list[str]:
        return [each.decode() for each in metadata if each in self._peers]

    async def disconnect(self, peer: str) -> None:
        pass

    async def read(self, peer: str, ranges: np.ndarray, timeout: float, memory: MemoryKind = "DRAM") -> None:
        """Copies ranges (see byte_ranges), in a thread. However it ends, nothing touches the memory any more: a copy is
        waited for, beyond `timeout` and where this is cancelled."""
        await until_done(asyncio.create_task(asyncio.to_thread(self._buffer.copy, ranges)))

    @contextmanager
    def serving(self) -> Iterator[None]:
        yield

    async def aclose(self) -> None:
        self._peers.discard(self.metadata)
