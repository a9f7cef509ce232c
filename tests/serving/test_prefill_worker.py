"""A prefill worker whose router is played: what it offers, and when."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from qwenjax.engine.build import build_engine
from qwenjax.engine.prefill_engine import PrefillEngine
from qwenjax.kv_transfer import Pages, plan_transfer
from qwenjax_serving.protocol.messages import (
    Failed,
    Halt,
    Hello,
    Message,
    MessageError,
    Offer,
    Ping,
    Prefill,
    Prefilled,
    Release,
    Status,
    ToWorker,
    Welcome,
    Work,
)
from qwenjax_serving.transfer.nixl_transport import NixlTransport
from qwenjax_serving.transfer.staging import StagingBuffer, byte_ranges
from qwenjax_serving.workers import worker as worker_module
from qwenjax_serving.workers.prefill import PrefillWorker
from tests.generation import greedy, random_ids
from tests.qwenjax.engine.test_handover import SIZES
from tests.qwenjax.engine.test_speculation import with_head

pytest.importorskip("nixl")

LAST_GROUP = 1  # of the two layers, each a group


class PlayedRouter:
    """Stands in for a worker's socket: what the worker sends, and what it is told."""

    def __init__(self, *_: Any) -> None:
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.tell: asyncio.Queue[ToWorker] = asyncio.Queue()

    refused: type[Message] | None = None

    def send(self, message: Message) -> bool:
        if type(message) is self.refused:
            raise MessageError("too large")
        if not isinstance(message, Status):
            self.said.put_nowait(message)
        return True

    async def receive(self) -> ToWorker:
        return await self.tell.get()

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PrefillEngine:
    sizes = {**SIZES, "max_num_seqs": 1, "model_parallel": 2}
    return build_engine(with_head(tmp_path_factory.mktemp("model")), PrefillEngine, **sizes)


def test_pages_are_read_before_the_last_group_of_layers_has_run(
    engine: PrefillEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last group waits until the pages of the first have been read: if those came later, it would wait in vain."""
    router, read, run_program = PlayedRouter(), threading.Event(), engine._run
    in_time = list[bool]()

    def run(program: tuple[str, Any], *arguments: Any) -> tuple[Any, ...]:
        if program[0] == "layers" and arguments[2] == LAST_GROUP:
            in_time.append(read.wait(timeout=30))
        return run_program(program, *arguments)

    monkeypatch.setattr(engine, "_run", run)
    monkeypatch.setattr(worker_module, "WorkerSocket", lambda *_: router)

    def refuse(*_: Any) -> None:
        raise ValueError("as if it did not fit")

    async def whole() -> None:
        worker = PrefillWorker("prefill", engine, "fingerprint", "address", b"secret")
        running = asyncio.create_task(worker.run())
        hello = await router.said.get()
        assert isinstance(hello, Hello)
        router.tell.put_nowait(Welcome(hello.number, 10))
        own = StagingBuffer(hello.staging.kv, hello.staging.planes, engine.model.config.head_dim, np.float32, 4)
        reader = NixlTransport("reader")
        await reader.start(own)
        peer = await reader.connect(*hello.metadata)

        prompt = random_ids(60)
        router.tell.put_nowait(Prefill(7, Work(tuple(prompt), greedy(5), 0, None), 0))
        offers = list[Offer]()
        while isinstance(said := await router.said.get(), Offer):
            offers.append(said)
            assert (said.ticket, said.source, said.start, said.stop) == (7, hello.instance, 0, 60)
            plan = plan_transfer(hello.staging.kv, own.layout.kv, Pages(said.slots, range(4), 0, 60, said.first))
            ranges = byte_ranges(plan.copies, hello.staging, own.layout, (said.first_plane, said.end_plane))
            await reader.read(peer, ranges, timeout=20)
            assert own.pages[:, :3, :, said.first_plane : said.end_plane].any()
            read.set()
        assert in_time == [True]
        assert [(offer.part, offer.first_plane, offer.end_plane) for offer in offers] == [
            (0, 0, 2),
            (1, 2, 4),
            (2, 4, 6),
        ]
        np.testing.assert_array_equal(own.pages[:, :3], worker.staging.pages[:, list(offers[0].slots[:3])])
        assert isinstance(said, Prefilled)
        assert said.num_parts == 3
        assert said.handover is not None
        assert len(said.handover.hidden) == engine.model.config.hidden_size * 4
        assert said.grown.finish_reason is None

        # Nothing is given back before the router says so, or shows that its word was lost.
        router.tell.put_nowait(Ping((7,)))
        await asyncio.sleep(0.05)
        assert worker.staging.num_free == worker.staging.layout.num_slots - 4
        router.tell.put_nowait(Ping((8,)))
        while worker.num_held:
            await asyncio.sleep(0.01)
        assert worker.staging.num_free == worker.staging.layout.num_slots

        # What the engine refuses when it is to enter, though the worker had taken it, ends alone.
        monkeypatch.setattr(engine, "add_prompt", refuse)
        router.tell.put_nowait(Prefill(8, Work((1, 2), greedy(5), 0, None), 0))
        assert await router.said.get() == Failed(8, "as if it did not fit", refused=True)
        monkeypatch.undo()

        # What it has to say of a prompt may be more than a message holds.
        monkeypatch.setattr(router, "refused", Prefilled)
        router.tell.put_nowait(Prefill(9, Work((1, 2), greedy(5), 0, None), 0))
        while isinstance(said := await router.said.get(), Offer):
            pass
        assert said == Failed(9, "too large: ask for fewer prompt_logprobs, or of fewer tokens", refused=True)
        router.tell.put_nowait(Halt(9))
        await asyncio.sleep(0.05)
        assert worker.staging.num_free < worker.staging.layout.num_slots  # the decode worker may be reading
        router.tell.put_nowait(Release(9))
        while worker.num_held:
            await asyncio.sleep(0.01)
        assert worker.staging.num_free == worker.staging.layout.num_slots
        assert not running.done()
        await reader.aclose()
        worker.leave()
        await running

    asyncio.run(asyncio.wait_for(whole(), timeout=90))


def test_a_small_staging_buffer_is_refused(engine: PrefillEngine) -> None:
    async def make() -> None:
        PrefillWorker("prefill", engine, "fingerprint", "address", b"secret", 7)

    with pytest.raises(ValueError, match="staging_pages is 7; the longest sequence has 8 pages of 16"):
        asyncio.run(make())


def test_a_worker_whose_engine_fails_ends_with_an_error(engine: PrefillEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    router = PlayedRouter()

    def fail(*_: Any) -> Any:
        raise MemoryError("as if out of memory")

    monkeypatch.setattr(engine, "_run", fail)
    monkeypatch.setattr(worker_module, "WorkerSocket", lambda *_: router)

    async def whole() -> None:
        running = asyncio.create_task(PrefillWorker("prefill", engine, "fingerprint", "address", b"secret").run())
        hello = await router.said.get()
        assert isinstance(hello, Hello)
        router.tell.put_nowait(Welcome(hello.number, 10))
        router.tell.put_nowait(Prefill(1, Work((1, 2), greedy(5), 0, None), 0))
        with pytest.raises(RuntimeError, match="the engine failed: as if out of memory"):
            await running

    asyncio.run(asyncio.wait_for(whole(), timeout=30))
