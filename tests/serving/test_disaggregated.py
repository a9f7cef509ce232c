"""Requests through a router, prefill and decode workers that are processes of their own, and what happens when those
are killed, stopped and started again. What `LLM.generate` gives is what must come."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qwenjax import LLM, RequestOutput, SamplingParams
from qwenjax.kv_transfer import KVLayout, Pages, plan_transfer
from qwenjax_serving.backend import BackendError, Overloaded
from qwenjax_serving.protocol.messages import Message, Offer, Prefilled, Reserved, Status, Taken, ToRouter
from qwenjax_serving.router.fleet import Worker
from qwenjax_serving.router.router import Output, State
from tests.generation import greedy, random_ids
from tests.serving.cluster import Cluster, cluster

pytest.importorskip("nixl")

# The engines of tests/qwenjax/engine/test_handover.py, so that their programs are compiled once for both.
CONFIG = """
[router]
worker_timeout = 1.5
[engine]
max_num_seqs = 1
max_num_batched_tokens = 64
page_size = 16
num_pages = 64
max_model_len = 128
num_speculative_tokens = 2
"""
ONE_OF_EACH = CONFIG + "[[prefill]]\nmodel_parallel = 2\n[[decode]]\ndata_parallel = 2\npage_size = 32\n"


@pytest.fixture(scope="module")
def one_of_each(head_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "deployment.toml"
    config.write_text(ONE_OF_EACH)
    with cluster(head_folder, config) as made:
        yield made


@pytest.fixture(scope="module")
def url(one_of_each: Cluster) -> Iterator[str]:
    with one_of_each.serving() as found:
        yield found


def mixed(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, some beginning alike; greedy and seeded, with log-probabilities or several outputs."""
    chance, requests = random.Random(seed), list[tuple[list[int], SamplingParams]]()
    beginning = random_ids(64, seed=99)
    for place in range(count):
        prompt = random_ids(chance.randint(1, 40), place)
        if place % 3 == 0:
            prompt = beginning[: chance.choice([16, 64])] + prompt
        length = chance.randint(1, 120 - len(prompt)) if place % 5 == 0 else chance.randint(1, 12)
        params = greedy(length, logprobs=1 if place % 4 == 0 else None, speculation=place % 7 != 0)
        if place % 6 == 1:
            params = SamplingParams(temperature=0.9, seed=place, n=2, max_tokens=length, presence_penalty=0.3)
        requests.append((prompt, params))
    return requests


def assert_equal(got: RequestOutput, want: RequestOutput) -> None:
    assert [part.token_ids for part in got.outputs] == [part.token_ids for part in want.outputs]
    for one, other in zip(got.outputs, want.outputs, strict=True):
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        assert (one.logprobs is None) == (other.logprobs is None)
        for entry, expected in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert {key: value.rank for key, value in entry.items()} == {
                key: value.rank for key, value in expected.items()
            }


def run_all(made: Cluster, requests: list[tuple[list[int], SamplingParams]], timeout: float) -> list[RequestOutput]:
    """All at once."""

    async def whole() -> list[RequestOutput]:
        return await asyncio.gather(
            *(made.generate(f"{place}", prompt, params) for place, (prompt, params) in enumerate(requests))
        )

    return made.run(whole(), timeout)


def check_equal(made: Cluster, llm: LLM, count: int, speculates: bool = True) -> None:
    requests = mixed(count)
    results = run_all(made, requests, timeout=1200)
    wanted = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for got, want in zip(results, wanted, strict=True):
        assert_equal(got, want)
        # The head's cache and its pending entry came over: drafts are accepted as in one engine.
        if speculates:
            assert (got.speculation and got.speculation.accepted) == (want.speculation and want.speculation.accepted)
    assert any(result.num_cached_tokens for result in results)
    (first, *_) = made.deployment.workers
    options = (first.parts or [first])[0].options
    assert any(len(prompt) > options["max_num_batched_tokens"] for prompt, _ in requests)
    made.wait_until_idle(5)
    decode = next(worker for worker in made.workers if worker.hello.role == "decode")
    assert decode.status is not None
    assert decode.status.num_prefill_calls == 0
    assert decode.status.bytes_read > 0
    assert bool(decode.status.stats.speculation.steps) == speculates


def test_24_mixed_requests_at_once_equal_one_engine_s(one_of_each: Cluster, head_llm: LLM) -> None:
    check_equal(one_of_each, head_llm, 24)


def listening(pid: int) -> set[str]:
    """Addresses that a process listens on, in hexadecimal as the kernel writes them."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *fields = line.split()
            if state == "0A" and fields[5] in sockets:
                found.add(local.split(":")[0])
    return found


def test_workers_listen_on_loopback_alone(one_of_each: Cluster) -> None:
    for process in one_of_each.processes.values():
        assert listening(process.pid) == {"0100007F"}


def leave_when(made: Cluster, url: str, monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    """A client's connection closes once an output of its request is in a state, which the router does not learn the end
    of until then."""
    router, reached, cancelled = made.backend.router, threading.Event(), list[State]()
    enter, cancel, receive = router._enter, router.cancel, router.receive
    ends: dict[State, type[Message] | tuple[()]] = {"prefilling": Prefilled, "moving": Taken}

    def entering(output: Output, into: State, deadline: float) -> None:
        enter(output, into, deadline)
        if into == state:
            reached.set()

    def receiving(sender: bytes, message: ToRouter, now: float) -> None:
        if not isinstance(message, ends.get(state, ())):
            receive(sender, message, now)

    def cancelling(output: Output, now: float) -> None:
        cancelled.append(output.state)
        cancel(output, now)

    with monkeypatch.context() as patch:
        for name, function in (("_enter", entering), ("receive", receiving), ("cancel", cancelling)):
            patch.setattr(router, name, function)
        body = {"model": "model", "prompt": random_ids(90, 5), "max_tokens": 38, "n": 4, "ignore_eos": True}
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": state == "decoding"}))
        assert reached.wait(30)
        connection.close()
        made.wait_until_idle(1.0 + 0.5)  # a second, and what passes until the next status
    assert len(cancelled) == 4
    assert state in cancelled


@pytest.mark.parametrize("state", ["prefilling", "moving", "decoding"])
def test_what_a_client_that_leaves_held_is_free_within_a_second(
    one_of_each: Cluster, url: str, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    leave_when(one_of_each, url, monkeypatch, state)


def leave_while_a_read_hangs(made: Cluster, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker is stopped when its first pages are offered, and not connected to by then: nothing comes. Then
    the client's connection closes, and after that the worker goes on."""
    router, stopped, receive = made.backend.router, list[str](), made.backend.router.receive
    offered = threading.Event()

    def receiving(sender: bytes, message: ToRouter, now: float) -> None:
        if isinstance(message, Offer) and not stopped:
            stopped.append(router.workers[sender].hello.name)
            made.processes[stopped[0]].send_signal(signal.SIGSTOP)
            offered.set()
        receive(sender, message, now)

    def holders() -> list[Worker]:
        return [worker for worker in router.of_role("decode") if status_of(worker).held]

    async def introduce_anew() -> None:
        for source in router.of_role("prefill"):
            for reader in router.of_role("decode"):
                for gone in True, False:
                    router._introduce(source, reader, gone)

    made.run(introduce_anew())
    made.wait_until_idle(5)
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    body = {"model": "model", "prompt": random_ids(90, 6), "max_tokens": 20, "stream": True}
    with monkeypatch.context() as patch:
        patch.setattr(router, "settings", replace(router.settings, worker_timeout=60))
        patch.setattr(router, "receive", receiving)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            assert offered.wait(30)
            made.wait_until(lambda: bool(holders()), 10)
            [decode] = holders()
            before = decode.status
            connection.close()

            def free() -> bool:
                stats = status_of(decode).stats
                return decode.status is not before and set(stats.free_pages) == {stats.num_pages}

            made.wait_until(free, 4)  # a second on a machine that is not busy; a read may hang for 10
            held = status_of(decode)
            assert (held.held, held.stats.num_running) == (1, 0)
            assert held.staging_free < decode.hello.staging.num_slots  # the read may still write there
        finally:
            for name in stopped:
                made.processes[name].send_signal(signal.SIGCONT)
        made.wait_until_idle(15)  # beyond the `transfer_timeout` of the read


def test_pages_of_a_client_that_leaves_while_a_read_hangs_are_free_before_that_ends_and_its_slots_after(
    one_of_each: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_while_a_read_hangs(one_of_each, url, monkeypatch)


def test_pages_that_a_stopped_decode_worker_may_read_stay_while_the_cache_s_are_free(
    one_of_each: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped when pages are offered to it; then the client leaves, and after that it goes on."""
    router, offered, receive = one_of_each.backend.router, threading.Event(), one_of_each.backend.router.receive
    prefill, process = one_of_each.worker("prefill-0"), one_of_each.processes["decode-0"]

    def receiving(sender: bytes, message: ToRouter, now: float) -> None:
        if isinstance(message, Offer) and not offered.is_set():
            process.send_signal(signal.SIGSTOP)
            offered.set()
        receive(sender, message, now)

    one_of_each.wait_until_idle(5)
    monkeypatch.setattr(router, "settings", replace(router.settings, worker_timeout=60))
    monkeypatch.setattr(router, "receive", receiving)
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    body = {"model": "model", "prompt": random_ids(90, 7), "max_tokens": 20, "stream": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert offered.wait(30)
        connection.close()
        one_of_each.wait_until(lambda: not router.num_running, 10)
        before, slots = prefill.status, prefill.hello.staging.num_slots
        one_of_each.wait_until(lambda: prefill.status is not before, 10)
        found = status_of(prefill)
        assert (found.stats.num_running, set(found.stats.free_pages)) == (0, {found.stats.num_pages})
        assert (found.held, found.staging_free < slots) == (1, True)
    finally:
        process.send_signal(signal.SIGCONT)
    one_of_each.wait_until_idle(5)


def status_of(worker: Worker) -> Status:
    assert worker.status is not None
    return worker.status


def test_as_many_bytes_are_read_as_the_plans_say(
    one_of_each: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, num_cached, num_taken = one_of_each.backend.router, list[int](), 0
    receive = router.receive

    def receiving(sender: bytes, message: ToRouter, now: float) -> None:
        nonlocal num_taken
        if isinstance(message, Reserved):
            num_cached.append(message.num_cached)
        num_taken += isinstance(message, Taken)
        receive(sender, message, now)

    monkeypatch.setattr(router, "receive", receiving)
    beginning = random_ids(64, seed=77)
    long = beginning + random_ids(36)
    prompts = [long, long, long[:65], [*beginning, (long[64] + 1) % 256], [9], random_ids(40, seed=78)]
    one_of_each.wait_until_idle(5)
    before = metrics_of(url)
    for place, prompt in enumerate(prompts):  # one after the other: each finds what those before have left
        one_of_each.run(one_of_each.generate(f"bytes-{place}", prompt, greedy(3)))
    one_of_each.wait_until_idle(5)
    after = metrics_of(url)
    assert num_cached == [0, 96, 64, 32, 0, 0]  # the head's keys of a page depend on the token after it

    source, target = (one_of_each.worker(name).hello.staging for name in ("prefill-0", "decode-0"))
    assert (source.kv, target.kv) == (KVLayout(2, 16, 2), KVLayout(2, 32, 1))
    planned = 0
    for prompt, start in zip(prompts, num_cached, strict=True):
        pages = [range(-(-len(prompt) // side.page_size)) for side in (source, target)]
        plan = plan_transfer(source.kv, target.kv, Pages(*pages, start, len(prompt)))
        planned += plan.num_bytes(target.planes, target.row_bytes)
    num_tokens = sum(map(len, prompts)) - sum(num_cached)
    assert planned == num_tokens * 2 * 6 * 4 * 16  # heads, planes of two layers and the head's, bytes of a row

    def grown(name: str) -> float:
        key = f'qwenjax:{name}{{engine="decode-0"}}'
        return after[key] - before[key]

    assert grown("kv_transfer_bytes_total") == planned
    assert grown("kv_transfer_seconds_count") == num_taken > 0
    assert grown("kv_transfer_seconds_sum") > 0


def test_requests_beyond_max_waiting_are_told_to_come_back(
    one_of_each: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, backend = one_of_each.backend.router, one_of_each.backend
    monkeypatch.setattr(backend, "settings", replace(backend.settings, max_waiting=2))
    monkeypatch.setattr(router, "_advance", lambda *_: None)  # nothing ends
    connections = [http.client.HTTPConnection(url.removeprefix("http://"), timeout=30) for _ in range(3)]
    body = {"model": "model", "prompt": [9], "max_tokens": 5, "ignore_eos": True}
    for connection, num_waiting in zip(connections, (0, 2, 2), strict=True):  # two outputs have workers, two wait
        n = 1 if connection is connections[-1] else 2
        connection.request("POST", "/v1/completions", json.dumps(body | {"n": n}))
        one_of_each.wait_until(lambda count=num_waiting: (router.num_running, len(router.waiting)) == (2, count), 10)
    answer = connections[-1].getresponse()
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert json.loads(answer.read())["error"]["message"] == "2 outputs wait, of at most 2"
    monkeypatch.undo()
    for connection in connections:
        connection.close()
    one_of_each.wait_until_idle(5)


def metrics_of(url: str) -> dict[str, float]:
    lines = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_streams_show_the_first_token_and_then_all(one_of_each: Cluster, head_llm: LLM) -> None:
    async def lengths() -> list[int]:
        stream = await one_of_each.stream("stream", random_ids(30), greedy(20))
        return [len(output.outputs[0].token_ids) async for output in stream]

    found = one_of_each.run(lengths())
    assert found[-1] == 20
    assert found == sorted(found)
    assert found[0] == 1


async def stop_at(made: Cluster, request_id: str, name: str, num_tokens: int) -> list[int]:
    """Stops a worker once an output has so many tokens; what came of it in the end."""
    tokens: list[int] = []
    async for output in await made.stream(request_id, random_ids(20), greedy(100)):
        tokens = output.outputs[0].token_ids
        if len(tokens) >= num_tokens:
            made.processes[name].send_signal(signal.SIGSTOP)
    return tokens


def test_streams_of_a_stopped_decode_worker_end_within_its_time_and_it_comes_back(one_of_each: Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(BackendError, match="decode worker decode-0 has been silent"):
        one_of_each.run(stop_at(one_of_each, "stopped", "decode-0", 3))
    assert time.monotonic() - began < 1.5 + 2
    one_of_each.processes["decode-0"].send_signal(signal.SIGCONT)
    one_of_each.wait_for_workers()
    result = one_of_each.run(one_of_each.generate("after", random_ids(20), greedy(5)))
    assert len(result.outputs[0].token_ids) == 5
    one_of_each.wait_until_idle(5)


def test_an_output_whose_prefill_worker_is_stopped_goes_on_when_it_is_back(one_of_each: Cluster, head_llm: LLM) -> None:
    one_of_each.processes["prefill-0"].send_signal(signal.SIGSTOP)

    async def generate() -> RequestOutput:
        waiting = asyncio.create_task(one_of_each.generate("waits", random_ids(50), greedy(9)))
        while one_of_each.backend.router.of_role("prefill"):
            await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="workers are missing"):
            await one_of_each.stream("refused", [1], greedy(1))
        one_of_each.processes["prefill-0"].send_signal(signal.SIGCONT)
        return await waiting

    try:
        got = one_of_each.run(generate())
    finally:
        one_of_each.processes["prefill-0"].send_signal(signal.SIGCONT)
    assert_equal(got, head_llm.generate([random_ids(50)], greedy(9))[0])
    one_of_each.wait_until_idle(5)


def test_workers_join_a_router_that_was_restarted(one_of_each: Cluster) -> None:
    async def begin() -> None:
        stream = await one_of_each.stream("old", random_ids(20), greedy(100))
        await anext(stream)

    one_of_each.run(begin())
    one_of_each.restart_router()
    result = one_of_each.run(one_of_each.generate("new", random_ids(20), greedy(5)))
    assert len(result.outputs[0].token_ids) == 5
    one_of_each.wait_until_idle(5)
