"""A prefill and a decode worker in one process, which move pages within it: what `LLM.generate` gives is what comes,
and what happens when the process is killed, stopped, told to end and started again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwenjax import LLM, RequestOutput
from qwenjax_serving.backend import BackendError, Overloaded
from qwenjax_serving.router.router import State
from tests.generation import greedy, random_ids
from tests.serving.cluster import Cluster, cluster
from tests.serving.test_disaggregated import CONFIG, assert_equal, check_equal, leave_when

pytestmark = pytest.mark.slow

BOTH = CONFIG + "[both]\n[both.decode]\npage_size = 32\n"
WORKERS = {"both-0-prefill", "both-0-decode"}  # as the router knows them


@pytest.fixture(scope="module", params=["share_device = true\n", "share_device = false\n"], ids=["shared", "apart"])
def made(
    head_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "deployment.toml"
    config.write_text(BOTH.replace("[both]\n", "[both]\n" + request.param))
    with cluster(head_folder, config) as found:
        yield found


@pytest.fixture(scope="module")
def url(made: Cluster) -> Iterator[str]:
    with made.serving() as found:
        yield found


def names(made: Cluster) -> set[str]:
    return {worker.hello.name for worker in made.workers}


def check_serves(made: Cluster, llm: LLM) -> None:
    prompt, params = random_ids(50), greedy(9)
    assert_equal(made.run(made.generate("serves", prompt, params)), llm.generate([prompt], params)[0])
    made.wait_until_idle(5)


def test_24_mixed_requests_at_once_equal_one_engine_s(made: Cluster, head_llm: LLM) -> None:
    check_equal(made, head_llm, 24)
    [process] = made.processes.values()
    assert not any("nixl" in line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines())


@pytest.mark.parametrize("state", ["prefilling", "moving", "decoding"])
def test_what_a_client_that_leaves_held_is_free_within_a_second(
    made: Cluster, url: str, head_llm: LLM, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    leave_when(made, url, monkeypatch, state)
    check_serves(made, head_llm)


def test_when_the_process_is_killed_streams_end_with_an_error_and_what_has_not_begun_goes_on_in_the_next(
    made: Cluster, head_llm: LLM
) -> None:
    """The router lives on, and refuses new requests until the process is back."""
    prompt, params = random_ids(40, 3), greedy(9)

    async def killed() -> tuple[str, asyncio.Task[RequestOutput]]:
        stream = await made.stream("decoding", random_ids(20), greedy(100))
        await anext(stream)
        await anext(stream)
        waiting = asyncio.create_task(made.generate("waiting", prompt, params))  # there is one slot
        await asyncio.sleep(0.05)
        made.processes["both-0"].send_signal(signal.SIGKILL)
        with pytest.raises(BackendError) as raised:
            async for _ in stream:
                pass
        while made.workers:  # both of them
            await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="workers are missing"):
            await made.stream("refused", [1], greedy(1))
        return str(raised.value), waiting

    error, waiting = made.run(killed())
    assert "both-0-decode has been silent for" in error
    made.processes["both-0"].wait()
    made.start(["both-0"])
    made.wait_for_workers()
    assert names(made) == WORKERS

    async def result() -> RequestOutput:
        return await waiting

    assert_equal(made.run(result()), head_llm.generate([prompt], params)[0])
    check_serves(made, head_llm)


def test_a_stopped_process_is_given_up_within_worker_timeout_and_joins_again(made: Cluster, head_llm: LLM) -> None:
    stopped_at = list[float]()

    async def stopped() -> None:
        async for output in await made.stream("stopped", random_ids(20), greedy(100)):
            if len(output.outputs[0].token_ids) >= 3 and not stopped_at:
                stopped_at.append(time.monotonic())
                made.processes["both-0"].send_signal(signal.SIGSTOP)

    try:
        with pytest.raises(BackendError, match="decode worker both-0-decode has been silent"):
            made.run(stopped())
        assert time.monotonic() - stopped_at[0] < 1.5 + 2
        made.wait_until(lambda: not made.workers, 2)
    finally:
        made.processes["both-0"].send_signal(signal.SIGCONT)
    made.wait_until(lambda: names(made) == WORKERS, 10)
    check_serves(made, head_llm)


def test_a_process_that_is_told_to_end_finishes_its_streams_and_then_ends(made: Cluster, head_llm: LLM) -> None:
    """The last of these tests to use the process: started again, it would serve."""
    prompt, params = random_ids(20), greedy(100)

    async def told() -> list[RequestOutput]:
        results = list[RequestOutput]()
        async for output in await made.stream("drains", prompt, params):
            results.append(output)
            if len(output.outputs[0].token_ids) >= 3 and made.workers and not any(w.leaving for w in made.workers):
                made.processes["both-0"].send_signal(signal.SIGTERM)
                while not all(worker.leaving for worker in made.workers):
                    await asyncio.sleep(0.001)
                with pytest.raises(Overloaded, match="workers are missing"):
                    await made.stream("refused", [1], greedy(1))
        return results

    assert_equal(made.run(told())[-1], head_llm.generate([prompt], params)[0])
    assert made.processes["both-0"].wait(timeout=20) == 0
    made.wait_until(lambda: not made.workers, 5)  # both have said that they end
