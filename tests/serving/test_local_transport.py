"""Reads between workers of one process."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from qwenjax.kv_transfer import KVLayout, Pages, plan_transfer
from qwenjax_serving.transfer import local_transport
from qwenjax_serving.transfer.local_transport import LocalTransport
from qwenjax_serving.transfer.nixl_transport import TransferError
from qwenjax_serving.transfer.staging import StagingBuffer, byte_ranges


def buffers() -> tuple[StagingBuffer, StagingBuffer]:
    source, target = (StagingBuffer(KVLayout(2, 4), 4, 3, np.float32, num_slots=6) for _ in range(2))
    source.pages[:] = np.random.default_rng(0).standard_normal(source.pages.shape)
    return source, target


def ranges_of(source: StagingBuffer, target: StagingBuffer) -> np.ndarray:
    plan = plan_transfer(source.layout.kv, target.layout.kv, Pages([4, 1], [0, 5], 0, 8))
    return byte_ranges(plan.copies, source.layout, target.layout, (1, 3))


def transports(*names: str) -> list[LocalTransport]:
    """Of one process."""
    peers = dict[str, LocalTransport]()
    return [LocalTransport(name, peers) for name in names]


class Held:
    """A copy that begins and goes on when it is told to."""

    def __init__(self, buffer: StagingBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on, self.copies = threading.Event(), threading.Event(), 0
        self._copy = buffer.copy
        monkeypatch.setattr(buffer, "copy", self)

    def __call__(self, ranges: np.ndarray) -> None:
        self.begun.set()
        assert self.goes_on.wait(10)
        self._copy(ranges)
        self.copies += 1


async def reading(
    monkeypatch: pytest.MonkeyPatch, timeout: float
) -> tuple[asyncio.Task[None], Held, LocalTransport, LocalTransport]:
    """A read of several pieces whose first one is under way; reader and source."""
    monkeypatch.setattr(local_transport, "_PIECE", 1)
    (source, target), (here, there) = buffers(), transports("here", "there")
    held, ranges = Held(target, monkeypatch), ranges_of(source, target)
    assert len(ranges) > 1
    for transport, staging in ((here, target), (there, source)):
        await transport.start(staging)
    task = asyncio.create_task(here.read(await here.connect(there.metadata), ranges, timeout))
    await asyncio.to_thread(held.begun.wait, 10)
    return task, held, here, there


def test_a_plan_s_ranges_are_copied_from_who_is_known_and_from_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_transport, "_PIECE", 100)  # bytes: several pieces of several ranges

    async def test() -> None:
        (source, target), (here, there), [stranger] = buffers(), transports("a", "b"), transports("c")
        for transport, staging in ((here, target), (there, source), (stranger, source)):
            await transport.start(staging)
        with pytest.raises(TransferError, match="a reads within its process alone"):
            await here.connect(stranger.metadata)
        await here.read(await here.connect(there.metadata), ranges_of(source, target), timeout=5)
        np.testing.assert_array_equal(target.pages[0, [0, 5], :, 1:3], source.pages[0, [4, 1], :, 1:3])
        assert not target.pages[0, :, :, [0, 3]].any()
        await here.read(await here.connect(there.metadata), np.zeros((0, 5), np.uint64), timeout=5)
        peer = await here.connect(there.metadata)
        await there.aclose()
        assert here.names_of([there.metadata]) == []
        with pytest.raises(TransferError, match="has closed"):
            await here.connect(there.metadata)
        with pytest.raises(TransferError, match="has closed"):
            await here.read(peer, ranges_of(source, target), timeout=5)

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_read_that_is_cancelled_stops_and_ends_only_when_nothing_is_copied_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        task, held, here, _ = await reading(monkeypatch, timeout=5)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        held.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.copies == 1  # the pieces after it are left
        assert here.failure is None

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_read_beyond_its_deadline_stops_and_its_error_comes_when_nothing_is_copied_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        task, held, here, there = await reading(monkeypatch, timeout=0.02)
        await asyncio.sleep(0.1)
        assert not task.done()
        held.goes_on.set()
        with pytest.raises(TransferError, match=r"not done within 0.02 s"):
            await task
        assert held.copies == 1
        assert here.failure is None
        (source, target) = (each._buffer for each in (there, here))
        await here.read(await here.connect(there.metadata), ranges_of(source, target), timeout=5)  # and later ones come

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("reader_closes", [False, True])
def test_a_copy_that_does_not_end_fails_the_transports_of_both_its_ends(
    monkeypatch: pytest.MonkeyPatch, reader_closes: bool
) -> None:
    """Their workers end then, and the memory is not given back."""
    monkeypatch.setattr(local_transport, "_SETTLE", 0.05)

    async def test() -> None:
        task, held, here, there = await reading(monkeypatch, timeout=0.02)
        with pytest.raises(TransferError, match="not done within"):
            await task
        assert "does not end, 0.05 s after it was stopped" in str(here.failure)
        with pytest.raises(TransferError, match="the transport failed"):
            await here.read(await here.connect(there.metadata), np.zeros((0, 5), np.uint64), timeout=5)
        if reader_closes:
            await here.aclose()
            assert there.names_of([here.metadata]) == []
        await there.aclose()
        assert there.failure is not None  # its memory is read from
        held.goes_on.set()

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("end", ["the reader disconnects", "the source closes", "the reader closes"])
def test_who_is_disconnected_or_closes_is_no_longer_read_from(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    async def test() -> None:
        task, held, here, there = await reading(monkeypatch, timeout=5)
        if end == "the reader disconnects":
            await here.disconnect(await here.connect(there.metadata))
            held.goes_on.set()
        else:
            closing = asyncio.create_task((there if "source" in end else here).aclose())
            await asyncio.sleep(0.05)
            assert not closing.done()
            held.goes_on.set()
            await closing
        with pytest.raises(TransferError, match="stopped"):
            await task
        assert held.copies == 1

    asyncio.run(asyncio.wait_for(test(), 20))
