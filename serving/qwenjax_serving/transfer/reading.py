"""Reading offered pages from all the processes that have parts of them into one process's staging buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from qwenjax.kv_transfer import Pages, plan_transfer
from qwenjax_serving.protocol.messages import Offer, Source
from qwenjax_serving.transfer.local_transport import LocalTransport
from qwenjax_serving.transfer.nixl_transport import NixlTransport, TransferError
from qwenjax_serving.transfer.staging import StagingBuffer, StagingLayout, byte_ranges


class Reader:
    """Knows the prefill workers that it may read from."""

    def __init__(self, transport: NixlTransport | LocalTransport, staging: StagingBuffer) -> None:
        self._transport, self._staging = transport, staging
        self._sources: dict[str, Source] = {}

    async def learn(self, source: Source) -> None:
        """Of a source that is there, or gone."""
        if not source.gone:
            self._sources[source.worker] = source
        elif (known := self._sources.pop(source.worker, None)) is not None:
            for peer in self._transport.names_of(known.metadata):
                await self._transport.disconnect(peer)

    @property
    def sources(self) -> list[Source]:
        """Those that are there."""
        return list(self._sources.values())

    async def read(self, offer: Offer, slots: Sequence[int], first: int, ranks: Collection[int], timeout: float) -> int:
        """Reads the pages of an offer that are for some model ranks of this process into slots, of which the first
        holds positions from `first` on, within `timeout` seconds. The bytes read.

        Raises TransferError where they did not all come, ValueError for an offer that does not fit. However it ends,
        nothing touches the slots any more.
        """
        source, own = self._sources.get(offer.source), self._staging.layout
        if source is None:
            raise TransferError(f"{offer.source} is gone")
        try:
            planned = list(_plan(offer, source, own, slots, first, ranks))
        except Exception as misfit:  # of sizes and addresses that others say; nothing has been touched
            raise ValueError(f"an offer of {offer.source} does not fit: {misfit or type(misfit).__name__}") from misfit
        parts = [(await self._transport.connect(metadata), ranges) for metadata, ranges in planned]
        reads = (self._transport.read(peer, ranges, timeout, source.staging.memory) for peer, ranges in parts)
        for error in await asyncio.gather(*reads, return_exceptions=True):  # all of them, whatever comes of one
            if error is not None:
                raise error
        return sum(int(ranges[:, 2].sum()) for _, ranges in parts)


def _plan(
    offer: Offer, source: Source, own: StagingLayout, slots: Sequence[int], first: int, ranks: Collection[int]
) -> Iterator[tuple[bytes, np.ndarray]]:
    """What is to be read from each of a source's processes, by its metadata: byte_ranges."""
    pages = Pages(offer.slots, slots, offer.start, offer.stop, offer.first, first)
    plan = plan_transfer(source.staging.kv, own.kv, pages)
    for process, metadata in enumerate(source.metadata):
        copies = [
            copy
            for copy in plan.copies
            if copy.target_rank in ranks and source.staging.processes[copy.source_rank] == process
        ]
        if copies:
            yield metadata, byte_ranges(copies, source.staging, own, (offer.first_plane, offer.end_plane))
