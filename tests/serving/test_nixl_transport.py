"""Reads between real processes: the bytes, and what happens when the other side dies or stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from qwenjax.kv_transfer import KVLayout, Pages, plan_transfer
from qwenjax_serving.protocol import messages
from qwenjax_serving.protocol.messages import Offer
from qwenjax_serving.transfer.device_staging import DeviceStagingBuffer
from qwenjax_serving.transfer.nixl_transport import NixlTransport, TransferError
from qwenjax_serving.transfer.reading import Reader
from qwenjax_serving.transfer.staging import StagingBuffer, StagingLayout, byte_ranges
from tests.serving.test_device_staging import HostDriver

pytest.importorskip("nixl")

SIZES = {"kv_heads": 4, "planes": 6, "head_dim": 8}
FROM, SLOTS = KVLayout(4, 64, 4), 8  # of the sources


class Source:
    """A process that is read from, and what its buffer holds."""

    layout: StagingLayout
    metadata: bytes

    def __init__(self, seed: int) -> None:
        given = json.dumps(SIZES | {"page_size": FROM.page_size, "ranks": FROM.ranks, "slots": SLOTS, "seed": seed})
        command = [sys.executable, str(Path(__file__).with_name("transfer_source.py")), given]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        shape = (FROM.ranks, SLOTS, FROM.heads_per_rank, SIZES["planes"], FROM.page_size, SIZES["head_dim"])
        self.pages = np.random.default_rng(seed).standard_normal(shape, np.float32)

    def wait(self) -> None:
        assert self.process.stdout is not None
        described = json.loads(self.process.stdout.readline())
        self.metadata = msgspec.convert(described["metadata"], bytes)
        self.layout = msgspec.convert(described["layout"], StagingLayout)


@pytest.fixture(scope="module")
def sources() -> Iterator[tuple[Source, Source]]:
    """The second is for the test that kills it."""
    found = Source(seed=1), Source(seed=2)
    try:
        for source in found:
            source.wait()
        yield found
    finally:
        for source in found:
            source.process.kill()
            source.process.communicate()


def run(test: Callable[[NixlTransport, StagingBuffer], Awaitable[None]], layout: KVLayout) -> None:
    """Runs a test with a transport and a buffer that it may read into."""

    async def whole() -> None:
        buffer = StagingBuffer(layout, SIZES["planes"], SIZES["head_dim"], np.float32, SLOTS)
        transport = NixlTransport(f"reader-{os.getpid()}")
        try:
            await transport.start(buffer)
            await test(transport, buffer)
        finally:
            await transport.aclose()

    asyncio.run(asyncio.wait_for(whole(), timeout=60))


def all_of(source: StagingLayout, target: StagingLayout) -> np.ndarray:
    """Ranges that fill the target's first slots with the source's."""
    tokens = min(side.num_slots * side.page_size for side in (source, target))
    pages = Pages(range(source.num_slots), range(target.num_slots), 0, tokens)
    return byte_ranges(plan_transfer(source.kv, target.kv, pages).copies, source, target, (0, source.planes))


def test_pages_between_processes_of_unequal_sharding_and_page_size(sources: tuple[Source, Source]) -> None:
    source, target = sources[0], KVLayout(4, 128, 2)

    async def test(transport: NixlTransport, buffer: StagingBuffer) -> None:
        peer = await transport.connect(source.metadata)
        assert await transport.connect(source.metadata) == peer
        # The planes of layers 1 and 2, of tokens 70 to 270.
        pages = Pages([3, 1, 7, 0, 4], [5, 2, 6], 70, 270)
        plan = plan_transfer(FROM, target, pages)
        expected = buffer.pages.copy()
        for position in range(70, 270):
            for head in range(4):
                row = source.pages[head, pages.source[position // 64], 0, 2:6, position % 64]
                expected[head // 2, pages.target[position // 128], head % 2, 2:6, position % 128] = row
        await transport.read(peer, byte_ranges(plan.copies, source.layout, buffer.layout, (2, 6)), timeout=10)
        np.testing.assert_array_equal(buffer.pages, expected)
        await transport.read(peer, np.zeros((0, 5), np.uint64), timeout=10)

    run(test, target)


def test_as_many_bytes_of_the_buffer_change_as_a_read_says(sources: tuple[Source, Source]) -> None:
    """Two poisons: a byte that comes is unlike one of them at least."""

    async def test(transport: NixlTransport, buffer: StagingBuffer) -> None:
        reader, memory = Reader(transport, buffer), buffer._memory.view(np.uint8)
        await reader.learn(messages.Source("source", sources[0].layout, (sources[0].metadata,)))
        offer, changed = Offer(1, "source", 0, 70, 270, 2, 6, (3, 1, 7, 0, 4), 0), np.zeros(memory.shape, np.bool_)
        for poison in (0, 255):
            memory[:] = poison
            num_bytes = await reader.read(offer, (5, 2, 6), 0, range(2), timeout=10)
            changed |= memory != poison
        assert changed.sum() == num_bytes == 200 * 4 * 4 * 32  # tokens, heads, planes, bytes of a row

    run(test, KVLayout(4, 128, 2))


def test_gpu_memory_that_ucx_does_not_know_ends_the_transport_and_says_why() -> None:
    async def start() -> None:
        [first, *_] = jax.devices()
        sizes = KVLayout(1, 4), 2, 8, np.float32, SLOTS
        buffer = DeviceStagingBuffer([[first]], *sizes, driver=HostDriver())  # of the host, and said to be a GPU's
        transport = NixlTransport("reader")
        with pytest.raises(TransferError, match=r"cannot register GPU memory.*UCX_TLS.*cuda_ipc"):
            await transport.start(buffer)
        await transport.aclose()

    asyncio.run(asyncio.wait_for(start(), timeout=60))


def test_memory_that_was_not_registered_is_refused(sources: tuple[Source, Source]) -> None:
    async def test(transport: NixlTransport, buffer: StagingBuffer) -> None:
        ranges = all_of(sources[0].layout, buffer.layout)
        ranges[0, 0] += 1 << 30
        with pytest.raises(TransferError):
            await transport.read(await transport.connect(sources[0].metadata), ranges, timeout=10)

    run(test, FROM)


def test_a_source_that_does_not_answer_is_given_up_at_the_deadline_and_read_from_later(
    sources: tuple[Source, Source],
) -> None:
    source = sources[0]

    async def test(transport: NixlTransport, buffer: StagingBuffer) -> None:
        ranges = all_of(source.layout, buffer.layout)
        source.process.send_signal(signal.SIGSTOP)  # before the first read: nobody answers the connection
        try:
            with pytest.raises(TransferError, match="not done within"):
                await transport.read(await transport.connect(source.metadata), ranges, timeout=0.5)
            peer = await transport.connect(source.metadata)
            waiting = asyncio.create_task(transport.read(peer, ranges, timeout=0.5))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not transport._reads
        finally:
            source.process.send_signal(signal.SIGCONT)
        await transport.read(await transport.connect(source.metadata), ranges, timeout=10)
        np.testing.assert_array_equal(buffer.pages, source.pages)

    run(test, FROM)


def test_a_source_that_dies_ends_its_reads_and_no_others(sources: tuple[Source, Source]) -> None:
    living, dying = sources

    async def test(transport: NixlTransport, buffer: StagingBuffer) -> None:
        peers = [await transport.connect(each.metadata) for each in sources]
        dying.process.send_signal(signal.SIGSTOP)  # so that the read is under way when it dies
        reading = asyncio.create_task(transport.read(peers[1], all_of(dying.layout, buffer.layout), timeout=30))
        await asyncio.sleep(0.2)
        assert not reading.done()
        dying.process.kill()
        dying.process.wait()
        with pytest.raises(TransferError, match=f"{peers[1]}(?!.*not done within)"):
            await reading
        assert not transport._reads
        with pytest.raises(TransferError, match=peers[1]):  # one that begins when it is dead
            await transport.read(peers[1], all_of(dying.layout, buffer.layout), timeout=10)
        await transport.disconnect(peers[1])
        with pytest.raises(TransferError, match="connecting"):
            await transport.read(await transport.connect(dying.metadata), all_of(dying.layout, buffer.layout), 10)
        await transport.read(peers[0], all_of(living.layout, buffer.layout), timeout=10)
        np.testing.assert_array_equal(buffer.pages, living.pages)

    run(test, FROM)
