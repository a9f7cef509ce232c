"""Two prefill and two decode workers, of which some are killed, and many requests: each a matter of minutes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from qwenjax import LLM, RequestOutput, SamplingParams
from qwenjax_serving.backend import BackendError, Overloaded
from qwenjax_serving.metrics import EngineCollector
from qwenjax_serving.protocol.messages import VERSION, Admit, Grown, Handover, Ping, Prefilled, Taken, ToRouter
from qwenjax_serving.protocol.sockets import WorkerSocket
from qwenjax_serving.router.metrics import RouterCollector
from qwenjax_serving.router.router import Output
from tests.generation import greedy, random_ids
from tests.serving.cluster import SECRET, Cluster, cluster
from tests.serving.test_disaggregated import CONFIG, assert_equal, check_equal, mixed

pytest.importorskip("nixl")
pytestmark = pytest.mark.slow

TWO_OF_EACH = CONFIG.replace("[engine]", "absence_timeout = 4\n[engine]").replace(
    "max_num_seqs = 1", "max_num_seqs = 2"
)
TWO_OF_EACH += 2 * "[[prefill]]\nmodel_parallel = 2\n" + 2 * "[[decode]]\ndata_parallel = 2\npage_size = 32\n"
LAYOUTS = {
    "TP 2 to DP 2, larger pages": "[[prefill]]\nmodel_parallel = 2\n[[decode]]\ndata_parallel = 2\npage_size = 32\n",
    "TP 2 on both sides": "[[prefill]]\nmodel_parallel = 2\n[[decode]]\nmodel_parallel = 2\nmax_num_seqs = 2\n",
    "TP 1 to TP 4 of two heads": "[[prefill]]\n[[decode]]\nmodel_parallel = 4\nmax_num_seqs = 2\n",
}


@pytest.fixture(scope="module")
def two_of_each(head_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "deployment.toml"
    config.write_text(TWO_OF_EACH)
    with cluster(head_folder, config) as made:
        yield made


def kill(made: Cluster, name: str) -> None:
    made.processes[name].send_signal(signal.SIGKILL)
    made.processes[name].wait()


def bring_back(made: Cluster, *names: str) -> None:
    made.start(names)
    made.wait_for_workers()
    made.wait_until_idle(5)


@pytest.mark.parametrize("state", ["prefilling", "moving"])
def test_a_prefill_worker_killed_with_a_prompt_is_replaced(
    two_of_each: Cluster, head_llm: LLM, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    requests = [(random_ids(100, place), greedy(10)) for place in range(8)]
    router, kept = two_of_each.backend.router, list[tuple[bytes, Taken, float]]()
    killed = dict[int, Output]()  # by the ticket that it had
    receive = router.receive

    def keep_what_was_read(sender: bytes, message: ToRouter, now: float) -> None:
        """Until the worker is dead, so that pages are still under way for the router."""
        if isinstance(message, Taken) and (not killed or message.ticket in killed):
            kept.append((sender, message, now))
        else:
            receive(sender, message, now)

    monkeypatch.setattr(router, "receive", keep_what_was_read)

    async def whole() -> tuple[str, list[RequestOutput]]:
        tasks = [asyncio.create_task(two_of_each.generate(f"{i}", *request)) for i, request in enumerate(requests)]
        while True:
            await asyncio.sleep(0)
            for ticket, output in router._tickets.items():
                if output.state == state and output.prefill is not None:
                    killed[ticket] = output
                    name = output.prefill.hello.name
                    kill(two_of_each, name)
                    for each in kept:
                        if each[1].ticket != ticket:
                            receive(*each)
                    return name, await asyncio.gather(*tasks)

    name, results = two_of_each.run(whole())
    for got, (prompt, params) in zip(results, requests, strict=True):
        assert_equal(got, head_llm.generate([prompt], params)[0])
    assert all(output.attempts for output in killed.values())  # another by a read that fails before the silence counts
    bring_back(two_of_each, name)


def test_streams_of_a_killed_decode_worker_end_and_others_go_on(two_of_each: Cluster, head_llm: LLM) -> None:
    requests = [(random_ids(20, place), greedy(90)) for place in range(4)]
    killed = list[str]()

    async def one(place: int) -> RequestOutput | BackendError:
        try:
            async for output in await two_of_each.stream(f"{place}", *requests[place]):
                router = two_of_each.backend.router
                if not killed and len(router._tickets) == 4 and len(output.outputs[0].token_ids) >= 3:
                    decode = next(each.decode for each in router._tickets.values() if each.state == "decoding")
                    assert decode is not None
                    killed.append(decode.hello.name)
                    kill(two_of_each, killed[0])
            return output
        except BackendError as error:
            return error

    async def whole() -> list[RequestOutput | BackendError]:
        return await asyncio.gather(*(one(place) for place in range(4)))

    results = two_of_each.run(whole())
    errors = [result for result in results if isinstance(result, BackendError)]
    assert 1 <= len(errors) < 4
    assert all(killed[0] in str(error) for error in errors)
    for result, (prompt, params) in zip(results, requests, strict=True):
        if isinstance(result, RequestOutput):
            assert_equal(result, head_llm.generate([prompt], params)[0])
    bring_back(two_of_each, *killed)


def test_a_decode_worker_that_is_told_to_end_finishes_its_streams_and_others_take_the_rest(
    two_of_each: Cluster, head_llm: LLM
) -> None:
    requests = [(random_ids(20, place), greedy(90)) for place in range(8)]
    told = list[str]()

    async def one(place: int) -> RequestOutput:
        results = list[RequestOutput]()
        async for result in await two_of_each.stream(f"{place}", *requests[place]):
            results.append(result)
            decoding = [each for each in two_of_each.backend.router._tickets.values() if each.state == "decoding"]
            if not told and decoding:
                assert decoding[0].decode is not None
                told.append(decoding[0].decode.hello.name)
                two_of_each.processes[told[0]].send_signal(signal.SIGTERM)
        return results[-1]

    async def whole() -> list[RequestOutput]:
        return await asyncio.gather(*(one(place) for place in range(8)))

    results = two_of_each.run(whole())
    for got, (prompt, params) in zip(results, requests, strict=True):
        assert_equal(got, head_llm.generate([prompt], params)[0])
    assert two_of_each.processes[told[0]].wait(timeout=20) == 0
    bring_back(two_of_each, *told)


def test_without_prefill_workers_outputs_are_to_come_back_later(two_of_each: Cluster) -> None:
    kill(two_of_each, "prefill-0")
    kill(two_of_each, "prefill-1")
    with pytest.raises(Overloaded, match="there is no prefill worker"):
        two_of_each.run(two_of_each.generate("a", random_ids(20), greedy(5)), timeout=20)
    bring_back(two_of_each, "prefill-0", "prefill-1")


def test_corrupt_messages_between_good_ones_change_nothing(
    two_of_each: Cluster, head_llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    requests = mixed(12, seed=3)

    async def noise(stop: asyncio.Event) -> int:
        chance, count = random.Random(1), 0
        socket = WorkerSocket(two_of_each.backend.address, SECRET.encode(), "noise")
        while not stop.is_set():
            data = bytes([chance.choice([VERSION, 7])]) + chance.randbytes(chance.randint(0, 50))
            with suppress(zmq.Again):  # not connected yet
                socket._socket.send(data, zmq.DONTWAIT)
            socket.send(Ping((7,)))
            count += 2
            await asyncio.sleep(0.01)
        await socket.close()
        return count

    async def whole() -> tuple[int, list[RequestOutput]]:
        stop = asyncio.Event()
        noisy = asyncio.create_task(noise(stop))
        results = await asyncio.gather(
            *(two_of_each.generate(f"{place}", *request) for place, request in enumerate(requests))
        )
        stop.set()
        return await noisy, results

    count, results = two_of_each.run(whole())
    assert count > 10
    for got, (prompt, params) in zip(results, requests, strict=True):
        assert_equal(got, head_llm.generate([prompt], params)[0])
    assert len(two_of_each.workers) == 4
    refused = [record.getMessage() for record in caplog.records if "refused a message from b'noise'" in record.message]
    assert len(refused) > 10
    assert any("version 7" in line for line in refused)


def test_well_formed_nonsense_between_router_and_workers_costs_a_try_and_no_more(
    two_of_each: Cluster, head_llm: LLM
) -> None:
    (prompt, params), backend = (random_ids(100, 5), greedy(10)), two_of_each.backend
    retries, told = backend.router.num_retries, list[int]()

    async def whole() -> RequestOutput:
        running = asyncio.create_task(two_of_each.generate("a", prompt, params))
        while not running.done():
            await asyncio.sleep(0)
            for ticket, output in list(backend.router._tickets.items()):
                if output.state == "prefilling" and ticket not in told and len(told) < 2:
                    told.append(ticket)
                    assert output.prefill is not None
                    assert output.decode is not None
                    grown = Grown(0, (5,), "", None, None, None, None)
                    if len(told) == 1:
                        said = Prefilled(ticket, grown, 0, None, None, 0)
                        backend.router.receive(output.prefill.identity, said, time.monotonic())
                    else:
                        backend._socket.send(output.decode.identity, Admit(ticket, grown, Handover(5, b"odd")))
        return await running

    assert_equal(two_of_each.run(whole()), head_llm.generate([prompt], params)[0])
    assert backend.router.num_retries == retries + 2
    assert len(two_of_each.workers) == 4
    two_of_each.wait_until_idle(5)


def resources(made: Cluster) -> dict[str, int]:
    """Of every process: sockets, other descriptors, and mappings of shared memory; and all gauges."""
    found = dict[str, int]()
    processes = {name: process.pid for name, process in made.processes.items()} | {"router": os.getpid()}
    for name, pid in processes.items():
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
        sockets = sum(link.startswith("socket:") for link in links)
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        shared = sum(line.split()[1].endswith("s") or "/SYSV" in line for line in maps)
        found |= {f"{name}: sockets": sockets, f"{name}: files": len(links) - sockets, f"{name}: shared memory": shared}
    stats, router = made.backend.stats, made.backend.router
    for collector in EngineCollector("model", stats), RouterCollector(router):
        for family in collector.collect():
            if family.type == "gauge":
                found |= {f"{family.name} {sample.labels}": int(1e6 * sample.value) for sample in family.samples}
    return found


def resident(pid: int) -> int:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def left_in_shared_memory(since: float) -> list[str]:
    """Files there that are newer and that no process has open or mapped: nobody will remove them."""
    paths = [path for path in Path("/dev/shm").iterdir() if path.stat().st_mtime >= since]
    used = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            used |= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
            used |= {os.readlink(link) for link in (process / "fd").iterdir()}
    return [str(path) for path in paths if str(path) not in used]


async def complete(url: str, prompt: list[int], params: SamplingParams, leaves: bool) -> None:
    """A completion over HTTP, which streams, and ends with the first event where the client leaves."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    asked = {"model": "model", "prompt": prompt, "max_tokens": params.max_tokens, "n": params.n, "stream": True}
    body = json.dumps(asked | {"ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    if leaves:
        await reader.readuntil(b"data: ")
    else:
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


def test_1000_mixed_requests_with_aborts_leak_nothing(two_of_each: Cluster) -> None:
    requests, chance = mixed(1000, seed=5), random.Random(7)
    fates, begun = [chance.random() for _ in requests], time.time()

    async def one(url: str, place: int, room: asyncio.Semaphore) -> None:
        async with room:
            if fates[place] < 0.2:
                await complete(url, *requests[place], leaves=place % 2 == 0)
                return
            if fates[place] < 0.7:
                await two_of_each.generate(f"{place}", *requests[place])
                return
            stream = await two_of_each.stream(f"{place}", *requests[place])
            if fates[place] < 0.85:
                await asyncio.sleep(chance.random() * 0.3)
            else:
                await anext(stream)
            two_of_each.backend.abort(f"{place}")

    def memory() -> dict[str, int]:
        return {name: resident(process.pid) for name, process in two_of_each.processes.items()}

    with two_of_each.serving() as url:

        async def some(places: range) -> None:
            room = asyncio.Semaphore(24)
            await asyncio.gather(*(one(url, place, room) for place in places))

        def after(places: range) -> dict[str, int]:
            two_of_each.run(some(places), timeout=1200)
            two_of_each.wait_until_idle(5)
            return resources(two_of_each)

        start = after(range(0))
        connected = after(range(40))  # every worker with every other
        after(range(40, 200))
        before = memory()
        end = after(range(200, 1000))
    print("MiB", before, memory())
    print("\n".join(f"{name}: {start[name]} {connected[name]} {end.get(name)}" for name in start))
    assert {name for name in start if "free_pages" in name or "sockets" in name or "shared memory" in name}
    assert set(end) == set(start)
    assert [name for name in start if name.startswith("qwenjax:") and end[name] != start[name]] == []
    assert [name for name in start if end[name] > connected[name]] == []
    assert left_in_shared_memory(begun) == []
    assert [name for name, found in memory().items() if found > before[name] + 32] == []


def test_a_decode_worker_too_slow_for_its_users_takes_fewer_outputs_and_the_rest_wait_in_the_router(
    head_folder: Path, head_llm: LLM, tmp_path: Path
) -> None:
    """At a speed that no batch has: one output a rank is left."""
    config = CONFIG.replace("max_num_seqs = 1", "max_num_seqs = 2") + LAYOUTS["TP 2 to DP 2, larger pages"]
    (tmp_path / "deployment.toml").write_text(config + "min_tokens_per_second = 1e6\n")
    requests = [(random_ids(20, place), greedy(100)) for place in range(60)]
    with cluster(head_folder, tmp_path / "deployment.toml") as made:
        decode, seen = made.worker("decode-0"), list[tuple[int, int, int]]()
        assert decode.num_slots == 4

        async def watch() -> None:
            while True:
                seen.append((decode.num_slots, decode.load, len(made.backend.router.waiting)))
                await asyncio.sleep(0.05)

        async def whole() -> list[RequestOutput]:
            watching = asyncio.create_task(watch())
            results = await asyncio.gather(*(made.generate(f"{i}", *each) for i, each in enumerate(requests)))
            watching.cancel()
            return results

        results = made.run(whole())
        assert (4, 4) in {(slots, load) for slots, load, _ in seen}
        limited = [(load, waiting) for slots, load, waiting in seen if slots == 2]
        assert limited[-1] != limited[0]
        assert any(load == 2 and waiting for load, waiting in limited)
        for got, (prompt, params) in zip(results, requests, strict=True):
            assert_equal(got, head_llm.generate([prompt], params)[0])
        made.wait_until_idle(5)


@pytest.mark.parametrize("num_drafts", [2, 0], ids=["drafts", "no drafts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_200_mixed_requests_at_once_equal_one_engine_s(
    head_folder: Path, head_llm: LLM, tmp_path: Path, layout: str, num_drafts: int
) -> None:
    config = CONFIG.replace("num_speculative_tokens = 2", f"num_speculative_tokens = {num_drafts}") + LAYOUTS[layout]
    (tmp_path / "deployment.toml").write_text(config)
    with cluster(head_folder, tmp_path / "deployment.toml") as made:
        check_equal(made, head_llm, 200, speculates=num_drafts > 0)
