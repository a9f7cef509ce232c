"""Reads between workers of one process."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from qwenjax.kv_transfer import KVLayout, Pages, plan_transfer
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


def test_a_plan_s_ranges_are_copied_from_who_is_known_and_from_no_other() -> None:
    async def test() -> None:
        (source, target), peers = buffers(), set[bytes]()
        here, there, stranger = (
            LocalTransport(name, each) for name, each in zip("abc", (peers, peers, set()), strict=True)
        )
        for transport, staging in ((here, target), (there, source), (stranger, source)):
            await transport.start(staging)
        with pytest.raises(TransferError, match="a reads within its process alone"):
            await here.connect(stranger.metadata)
        await here.read(await here.connect(there.metadata), ranges_of(source, target), timeout=5)
        np.testing.assert_array_equal(target.pages[0, [0, 5], :, 1:3], source.pages[0, [4, 1], :, 1:3])
        assert not target.pages[0, :, :, [0, 3]].any()
        await there.aclose()
        assert here.names_of([there.metadata]) == []
        with pytest.raises(TransferError, match="has closed"):
            await here.connect(there.metadata)

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_read_that_is_cancelled_ends_only_when_nothing_is_copied_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, copied = threading.Event(), list[bool]()

    def copy(ranges: np.ndarray) -> None:
        copied.append(goes_on.wait(10))

    async def test() -> None:
        (source, target), transport = buffers(), LocalTransport("a", set())
        monkeypatch.setattr(target, "copy", copy)
        await transport.start(target)
        reading = asyncio.create_task(transport.read("a", ranges_of(source, target), timeout=5))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.sleep(0.05)
        assert not reading.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert copied == [True]

    asyncio.run(asyncio.wait_for(test(), 20))
