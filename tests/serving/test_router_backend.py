"""Requests as the front end sends them, with workers that are played over real sockets: no engine, no pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from qwenjax import RequestOutput, SamplingParams
from qwenjax.outputs import EngineStats, Logprob, SpeculationStats
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.backend import BackendError, Overloaded, ServedModel
from qwenjax_serving.protocol.messages import (
    Admit,
    Failed,
    Goodbye,
    Grown,
    Handover,
    Hello,
    LetGo,
    Prefill,
    Prefilled,
    Release,
    Reserve,
    Reserved,
    Role,
    Status,
    Tokens,
    Welcome,
    Work,
)
from qwenjax_serving.protocol.sockets import WorkerSocket
from qwenjax_serving.router.backend import RouterBackend, _sum
from qwenjax_serving.router.metrics import RouterCollector
from qwenjax_serving.router.router import RouterSettings
from qwenjax_serving.transfer.staging import StagingLayout
from tests.generation import VOCABULARY, add_tokenizer, greedy

SECRET = b"of sixteen bytes or more"
STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, (8,), 8, (0,), SpeculationStats.of(0))
LOGPROB = {9: Logprob(-0.5, 1, "x")}


class Played:
    """A worker that draws 100, 101, … plus the output's index, and holds back what comes after `stops_at` tokens."""

    def __init__(self, role: Role, address: str) -> None:
        self.role: Role = role
        self.socket = WorkerSocket(address, SECRET, role)
        self.works: dict[int, Work] = {}
        self.released: list[int] = []
        self.holds = False
        self.refuses: str | None = None

    async def run(self) -> None:
        layout = StagingLayout(1, 4, (0, 2), 8, 8, (0,), (0,), (0,))
        while not self.socket.send(
            Hello(self.role, self.role, 1, self.role, {"dtype": "d"}, 2, 100, layout, (b"metadata",))
        ):
            await asyncio.sleep(0.01)
        while True:
            match await self.socket.receive():
                case Welcome():
                    self.socket.send(Status(STATS, 2, 5, 1.0, (0, 2, *(0,) * 11, 1), 8, 0, 0, 0))
                case Release(ticket=ticket):
                    self.released.append(ticket)
                    if self.role == "decode":
                        self.socket.send(LetGo(ticket))
                case Reserve(ticket=ticket, work=work):
                    self.works[ticket] = work
                    self.socket.send(Failed(ticket, self.refuses, True) if self.refuses else Reserved(ticket, 0))
                case Prefill(ticket=ticket, work=work):
                    if not self.holds:
                        logprobs = None if work.params.logprobs is None else (LOGPROB,)
                        grown = Grown(0, (100 + work.index,), "a", logprobs, -0.5 if logprobs else None, None, None)
                        table = None if work.params.prompt_logprobs is None else (None, LOGPROB)
                        self.socket.send(Prefilled(ticket, grown, 0, Handover(100 + work.index, b""), table, 3))
                case Admit(ticket=ticket):
                    work = self.works[ticket]
                    for place in range(1, work.params.max_tokens or 0):
                        end = "length" if place == (work.params.max_tokens or 0) - 1 else None
                        logprobs = None if work.params.logprobs is None else (LOGPROB,)
                        stats = SpeculationStats(place, place, [place], [1])
                        token = 100 + place + work.index
                        grown = Grown(place, (token,), "b", logprobs, None, end, None, stats)
                        self.socket.send(Tokens(((ticket, grown),)))


def run(
    test: Callable[[RouterBackend, Played, Played], Awaitable[None]],
    folder: Path,
    settings: RouterSettings | None = None,
) -> None:
    async def whole() -> None:
        backend = RouterBackend("tcp://127.0.0.1:0", SECRET, VOCABULARY, settings)
        prefill, decode = Played("prefill", backend.address), Played("decode", backend.address)
        tasks = [asyncio.create_task(worker.run()) for worker in (prefill, decode)]
        try:
            longest = await backend.wait_for(["prefill", "decode"])
            backend.model = ServedModel(("m",), Tokenizer.from_folder(folder), longest, SamplingParams(), 0)
            await test(backend, prefill, decode)
        finally:
            for task in tasks:
                task.cancel()
            await backend.aclose()
            for worker in (prefill, decode):
                await worker.socket.close()

    asyncio.run(asyncio.wait_for(whole(), timeout=30))


async def collect(backend: RouterBackend, params: SamplingParams, request_id: str = "a") -> list[RequestOutput]:
    return [output async for output in await backend.generate(request_id, [5, 6], "text", params, None)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(tmp_path_factory.mktemp("model"))


def test_outputs_are_put_together_from_what_workers_say(folder: Path) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        params = SamplingParams(temperature=1, n=2, max_tokens=4, logprobs=1, prompt_logprobs=0)
        outputs = await collect(backend, params)
        last = outputs[-1]
        assert [output.finished for output in outputs].count(True) == 1
        assert [part.token_ids for part in last.outputs] == [[100, 101, 102, 103], [101, 102, 103, 104]]
        assert [part.text for part in last.outputs] == ["abbb", "abbb"]
        assert [part.logprobs for part in last.outputs] == [[LOGPROB] * 4] * 2
        assert last.prompt_logprobs == [None, LOGPROB]
        assert (last.prompt, last.num_cached_tokens) == ("text", 3)
        assert last.speculation == SpeculationStats(6, 6, [6], [2])
        assert last.metrics is not None
        assert last.metrics.num_tokens == 8
        assert last.metrics.queue_time is not None
        # Both draw with one seed, which another try elsewhere would use again.
        works = list(decode.works.values())
        assert [work.index for work in works] == [0, 1]
        assert len({work.params.seed for work in works}) == 1
        assert works[0].params.seed is not None
        assert {work.params.n for work in works} == {1}
        assert not backend._requests

    run(test, folder)


def test_an_abort_releases_every_worker(folder: Path) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        prefill.holds = True
        task = asyncio.create_task(collect(backend, greedy(4)))
        while not decode.works or backend.router.num_running == 0:
            await asyncio.sleep(0.01)
        backend.abort("a")
        while not (prefill.released and decode.released):
            await asyncio.sleep(0.01)
        task.cancel()
        assert backend.router.num_running == 0

    run(test, folder)


def test_beyond_the_queue_requests_are_told_to_come_back(folder: Path) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        prefill.holds = True  # two run at the decode worker, two wait, and that is all
        for place in range(4):
            await backend.generate(f"{place}", [5, 6], None, greedy(4), None)
        with pytest.raises(Overloaded, match="2 outputs wait, of at most 2"):
            await backend.generate("more", [5, 6], None, greedy(4), None)
        with pytest.raises(ValueError, match="n is 3; at most 2 outputs wait at a time"):
            await backend.generate("many", [5, 6], None, SamplingParams(n=3), None)
        backend.abort("3")
        await backend.generate("room again", [5, 6], None, greedy(4), None)

    run(test, folder, RouterSettings(max_waiting=2))


def test_what_can_never_run_is_refused_and_what_a_worker_refuses_is_an_error(folder: Path) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        with pytest.raises(ValueError, match="max_tokens"):
            await backend.generate("a", [5, 6], None, greedy(99), None)
        with pytest.raises(ValueError, match=f"{VOCABULARY}"):
            await backend.generate("a", [VOCABULARY], None, greedy(1), None)
        decode.refuses = "too much for this worker"
        with pytest.raises(BackendError, match="too much for this worker"):
            await collect(backend, greedy(4))

    run(test, folder)


def test_outputs_that_waited_for_a_worker_in_vain_are_told_to_come_back(folder: Path) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        prefill.holds = True
        asking = asyncio.create_task(collect(backend, greedy(4)))
        while not decode.works:
            await asyncio.sleep(0.01)
        decode.socket.send(Goodbye())
        with pytest.raises(Overloaded, match="there is no decode worker; it is expected back") as error:
            await asking
        assert error.value.retry_after == 5

    run(test, folder, RouterSettings(absence_timeout=0.3))


def test_figures_of_workers_are_shown(folder: Path) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        while len(backend.stats()) < 2:
            await asyncio.sleep(0.01)
        assert backend.healthy()
        assert backend.stats() == {"prefill": STATS, "decode": STATS}
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in RouterCollector(backend.router).collect()
            for sample in family.samples
        }
        assert found["qwenjax:workers", "decode"] == 1
        assert found["qwenjax:worker_slots", "decode"] == 2
        assert found["qwenjax:kv_transfer_bytes_total", "decode"] == 5
        assert found["qwenjax:kv_transfer_seconds_count", "decode"] == 3
        assert found["qwenjax:kv_transfer_seconds_sum", "decode"] == 1
        times = [found["qwenjax:kv_transfer_seconds_bucket", "decode", bound] for bound in ("0.0005", "0.001", "+Inf")]
        assert times == [0, 2, 3]
        assert found["qwenjax:router_retries_total",] == 0

    run(test, folder)


def test_a_failure_of_the_router_ends_all_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        prefill.holds = True
        running = asyncio.create_task(collect(backend, greedy(4)))
        while not prefill.works and not decode.works:
            await asyncio.sleep(0.01)

        def fail(_: float) -> None:
            raise ZeroDivisionError("as if by mistake")

        monkeypatch.setattr(backend.router, "tick", fail)
        with pytest.raises(BackendError, match="the router failed: as if by mistake"):
            await running
        assert not backend.healthy()
        with pytest.raises(BackendError, match="the router failed: as if by mistake"):
            await collect(backend, greedy(4), "b")

    run(test, folder)


def test_an_error_of_who_starts_the_workers_is_the_backend_s(folder: Path) -> None:
    async def test(backend: RouterBackend, prefill: Played, decode: Played) -> None:
        async def supervise() -> None:
            raise ChildProcessError("prefill-0 does not start")

        backend.fail_with(asyncio.create_task(supervise()))
        while backend.failure is None:
            await asyncio.sleep(0.01)
        assert not backend.healthy()
        with pytest.raises(BackendError, match="prefill-0 does not start"):
            await backend.wait_for(["there is none"])

    run(test, folder)


def test_outputs_of_workers_that_speculate_by_unequal_numbers_add_up() -> None:
    found = [SpeculationStats(2, 3, [2], [1]), None, SpeculationStats(1, 3, [1, 1], [1, 1])]
    assert _sum(found) == SpeculationStats(3, 6, [3, 1], [2, 1])
