"""Offered pages come together from the buffers of several processes, and orders to other processes are answered."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np
import pytest

from qwenjax.kv_transfer import KVLayout
from qwenjax_serving.protocol.messages import Alive, Done, Joined, Offer, Read, Source, Stop, decode_to_follower
from qwenjax_serving.protocol.sockets import ConnectedSocket
from qwenjax_serving.transfer.nixl_transport import TransferError
from qwenjax_serving.transfer.reading import Reader
from qwenjax_serving.transfer.staging import StagingBuffer, joined
from qwenjax_serving.workers import peers as peers_module
from qwenjax_serving.workers.peers import Peers, PeerSilence

SIZES: dict[str, Any] = {"planes": 4, "head_dim": 2, "dtype": np.float32, "num_slots": 6}
OFFER = Offer(7, "prefill", 0, 3, 14, 1, 3, (4, 0, 2, 5), 0)  # tokens 3 to 14 of planes 1 and 2
SLOTS = (3, 1)
SECRET = b"of sixteen bytes or more"


class PlayedTransport:
    """Reads memory of this process, after a while; b"broken" is none to read from."""

    def __init__(self) -> None:
        self.under_way = 0

    async def connect(self, metadata: bytes) -> str:
        return metadata.decode()

    async def read(self, peer: str, ranges: np.ndarray, timeout: float, memory: str) -> None:
        self.under_way += 1
        try:
            await asyncio.sleep(0 if peer == "broken" else 0.02)
            if peer == "broken":
                raise TransferError("it is broken")
            for source, target, count in ranges[:, :3].tolist():
                ctypes.memmove(target, source, count)
        finally:
            self.under_way -= 1


def source_of(layout: KVLayout, ranks: list[list[int]], *metadata: bytes) -> tuple[Source, list[StagingBuffer]]:
    parts = [StagingBuffer(layout, **sizes_of(own, place)) for place, own in enumerate(ranks)]
    for part in parts:
        for rank, pages in zip(part.ranks, part.pages, strict=True):
            pages[:] = np.random.default_rng(rank).standard_normal(pages.shape)
    return Source("prefill", joined([part.layout for part in parts]), metadata), parts


def sizes_of(ranks: list[int], process: int) -> dict[str, Any]:
    return {**SIZES, "ranks": ranks, "process": process}


def test_each_process_gets_its_ranks_from_whichever_process_has_them() -> None:
    layout = KVLayout(4, 4, 4)
    source, parts = source_of(layout, [[0, 3], [1, 2]], b"one", b"two")
    whole = source_of(layout, [[0, 1, 2, 3]], b"all")
    wide = KVLayout(4, 8, 2)
    targets = [StagingBuffer(wide, **sizes_of([rank], rank)) for rank in range(2)]
    expected = StagingBuffer(wide, **SIZES)

    async def test() -> None:
        reader = Reader(PlayedTransport(), expected)
        await reader.learn(whole[0])
        total = await reader.read(OFFER, SLOTS, 0, [0, 1], 5)
        found = 0
        for rank, target in enumerate(targets):
            reader = Reader(PlayedTransport(), target)
            await reader.learn(source)
            found += await reader.read(OFFER, SLOTS, 0, [rank], 5)
        assert found == total == 11 * 4 * 2 * 8  # tokens, heads, planes and bytes of a row

    asyncio.run(test())
    assert expected.pages.any()
    for rank, target in enumerate(targets):
        np.testing.assert_array_equal(target.pages[0], expected.pages[rank])
    assert [part.ranks for part in parts] == [[0, 3], [1, 2]]


def test_a_part_that_fails_fails_the_whole_once_the_others_are_over() -> None:
    source, _ = source_of(KVLayout(4, 4, 2), [[0], [1]], b"broken", b"good")
    target = StagingBuffer(KVLayout(4, 8, 1), **SIZES)
    transport = PlayedTransport()

    async def test() -> None:
        reader = Reader(transport, target)
        with pytest.raises(TransferError, match="prefill is gone"):
            await reader.read(OFFER, SLOTS, 0, [0], 5)
        await reader.learn(source)
        with pytest.raises(TransferError, match="it is broken"):
            await reader.read(OFFER, SLOTS, 0, [0], 5)
        assert transport.under_way == 0

    asyncio.run(test())


def test_a_process_that_falls_silent_fails_the_worker_and_its_orders_and_one_that_speaks_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = dict[str, str]()
    monkeypatch.setattr(peers_module, "coordinator_host", lambda: "127.0.0.1")
    monkeypatch.setattr(peers_module, "publish", published.__setitem__)
    monkeypatch.setattr(peers_module, "BEAT", 0.02)
    layout = StagingBuffer(KVLayout(1, 4), **SIZES).layout

    async def test() -> None:
        failures = list[BaseException]()
        peers = Peers(SECRET, failures.append)
        followers = [ConnectedSocket(published["peers"], SECRET, f"{place}", decode_to_follower) for place in (1, 2)]
        for place, follower in enumerate(followers, 1):
            while not follower.send(Joined(place, layout, b"metadata")):
                await asyncio.sleep(0.01)
        await peers.meet(2)
        reading = asyncio.create_task(peers.read(2, OFFER, SLOTS, 0, [0], 5))
        for _ in range(30):
            for follower in followers:
                follower.send(Alive())
            await asyncio.sleep(0.02)
        assert not failures
        while not failures:
            followers[0].send(Alive())
            await asyncio.sleep(0.02)
        assert str(failures[0]) == "process 2 has been silent for 0.2 s"
        with pytest.raises(PeerSilence):
            await reading
        for socket in (*followers, peers):
            await socket.close()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_an_order_is_over_when_the_process_says_so_though_it_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    published = dict[str, str]()
    monkeypatch.setattr(peers_module, "coordinator_host", lambda: "127.0.0.1")
    monkeypatch.setattr(peers_module, "publish", published.__setitem__)
    layout = StagingBuffer(KVLayout(1, 4), **SIZES).layout

    async def test() -> None:
        peers = Peers(SECRET, lambda error: None)
        follower = ConnectedSocket(published["peers"], SECRET, "follower", decode_to_follower)
        while not follower.send(Joined(1, layout, b"metadata")):
            await asyncio.sleep(0.01)
        assert [one.metadata for one in await peers.meet(1)] == [b"metadata"]

        reading = asyncio.create_task(peers.read(1, OFFER, SLOTS, 0, [0], 5))
        order = await follower.receive()
        assert order == Read(0, OFFER, SLOTS, 0, (0,), 5)
        follower.send(Done(0, 99, None))
        assert await reading == 99

        reading = asyncio.create_task(peers.read(1, OFFER, SLOTS, 0, [0], 5))
        assert isinstance(await follower.receive(), Read)
        reading.cancel()
        assert await follower.receive() == Stop(1)
        await asyncio.sleep(0.05)
        assert not reading.done()  # its slots may still be written to
        follower.send(Done(1, 0, "given up"))
        with pytest.raises(asyncio.CancelledError):
            await reading

        reading = asyncio.create_task(peers.read(1, OFFER, SLOTS, 0, [0], 5))
        assert isinstance(await follower.receive(), Read)
        follower.send(Done(2, 0, "it is broken"))
        with pytest.raises(TransferError, match="process 1: it is broken"):
            await reading
        await follower.close()
        await peers.close()

    asyncio.run(asyncio.wait_for(test(), 20))
