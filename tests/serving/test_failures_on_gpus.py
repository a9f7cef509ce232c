"""Workers whose staging buffers are GPU memory, and clients that leave and workers that are killed and stopped, all on
one GPU: three prefill and two decode workers as processes over NIXL, and one process for both. Run it with
XLA_PYTHON_CLIENT_PREALLOCATE=false: the engine that is compared with and all workers share the GPU."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from qwenjax import LLM, RequestOutput
from qwenjax_serving.backend import BackendError
from qwenjax_serving.protocol.messages import Offer, ToRouter
from qwenjax_serving.router.router import Output, State
from tests.generation import greedy, random_ids
from tests.qwenjax.test_engine_on_gpus import GREEDY
from tests.serving.cluster import Cluster, clusters_at_once
from tests.serving.test_disaggregated import leave_when, leave_while_a_read_hangs
from tests.serving.test_disaggregated_on_gpus import COMMON, SIZES, TINY, check_drawn, prompts_of

pytest.importorskip("nixl")
pytestmark = pytest.mark.gpu

ENGINES = COMMON.replace("worker_timeout = 20", "worker_timeout = 4")
SHARED = 'env = { CUDA_VISIBLE_DEVICES = "0" }\n'
DEPLOYMENTS = {
    "processes": ENGINES + 3 * f"[[prefill]]\n{SHARED}" + 2 * f"[[decode]]\n{SHARED}",
    "one process": ENGINES + f"[both]\nshare_device = true\n{SHARED}",
}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cluster]]:
    with clusters_at_once(TINY, tmp_path_factory.mktemp("deployments"), DEPLOYMENTS) as found:
        yield found


@pytest.fixture(scope="module")
def llm(clusters: dict[str, Cluster]) -> LLM:
    found = LLM(TINY, dtype="bfloat16", **SIZES)  # while the workers load
    for made in clusters.values():
        made.wait_for_workers()
    return found


@pytest.fixture(scope="module")
def processes(clusters: dict[str, Cluster], llm: LLM) -> Cluster:
    return clusters["processes"]


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompts_of(llm), GREEDY)


@pytest.fixture(scope="module")
def urls(clusters: dict[str, Cluster], llm: LLM) -> Iterator[dict[str, str]]:
    with clusters["processes"].serving() as apart, clusters["one process"].serving() as together:
        yield {"processes": apart, "one process": together}


async def all_of(made: Cluster, llm: LLM) -> list[RequestOutput]:
    return await asyncio.gather(*(made.generate(f"{place}", ids, GREEDY) for place, ids in enumerate(prompts_of(llm))))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_workers_that_share_a_gpu_draw_what_one_engine_draws(
    clusters: dict[str, Cluster], llm: LLM, wanted: list[RequestOutput], name: str
) -> None:
    made = clusters[name]
    assert {worker.hello.staging.memory for worker in made.workers} == {"VRAM"}
    check_drawn(name, made.run(all_of(made, llm), timeout=60), wanted)
    made.wait_until_idle(5)


@pytest.mark.parametrize("state", ["prefilling", "moving", "decoding"])
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_what_a_client_that_leaves_held_is_free_within_a_second(
    clusters: dict[str, Cluster], urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, state: State
) -> None:
    leave_when(clusters[name], urls[name], monkeypatch, state)


def test_pages_of_a_client_that_leaves_while_a_read_hangs_are_free_within_a_second_and_its_slots_once_that_is_over(
    processes: Cluster, urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_while_a_read_hangs(processes, urls["processes"], monkeypatch)


@pytest.mark.parametrize("when", ["with its first pages", "with its last pages"])
def test_what_a_prefill_worker_killed_in_a_transfer_had_is_drawn_from_another(
    processes: Cluster, llm: LLM, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It ends before the decode worker hears of the pages, or just after."""
    router, killed = processes.backend.router, list[str]()
    receive, enter, retries = router.receive, router._enter, router.num_retries

    def kill(name: str) -> None:
        if not killed:
            killed.append(name)
            processes.processes[name].send_signal(signal.SIGKILL)
            processes.processes[name].wait()

    def receiving(sender: bytes, message: ToRouter, now: float) -> None:
        if isinstance(message, Offer) and when == "with its first pages":
            kill(router.workers[sender].hello.name)
        receive(sender, message, now)

    def entering(output: Output, into: State, deadline: float) -> None:
        enter(output, into, deadline)
        if into == "moving" and output.prefill is not None and when == "with its last pages":
            kill(output.prefill.hello.name)

    monkeypatch.setattr(router, "receive", receiving)
    monkeypatch.setattr(router, "_enter", entering)
    results = processes.run(all_of(processes, llm), timeout=60)
    [name] = killed
    print(f"\n{name}: {router.num_retries - retries} outputs began again")
    assert router.num_retries > retries
    check_drawn(f"{name} killed {when}", results, wanted)
    processes.wait_until(lambda: name not in {worker.hello.name for worker in processes.workers}, 10)
    processes.wait_until_idle(20)


def test_streams_of_a_killed_decode_worker_end_and_others_go_on(processes: Cluster) -> None:
    router, killed = processes.backend.router, list[str]()

    async def one(place: int) -> RequestOutput | BackendError:
        results = list[RequestOutput]()
        try:
            async for output in await processes.stream(f"{place}", random_ids(20, place), greedy(400)):
                results.append(output)
                decoding = [each for each in router._tickets.values() if each.state == "decoding"]
                if not killed and len(decoding) == 4 and len({each.decode for each in decoding}) == 2:
                    assert decoding[0].decode is not None
                    killed.append(decoding[0].decode.hello.name)
                    processes.processes[killed[0]].send_signal(signal.SIGKILL)
                    processes.processes[killed[0]].wait()
            return results[-1]
        except BackendError as error:
            return error

    async def whole() -> list[RequestOutput | BackendError]:
        return await asyncio.gather(*(one(place) for place in range(4)))

    results = processes.run(whole(), timeout=60)
    errors = [result for result in results if isinstance(result, BackendError)]
    assert 1 <= len(errors) < 4
    assert all(killed[0] in str(error) for error in errors)
    assert {len(each.outputs[0].token_ids) for each in results if isinstance(each, RequestOutput)} == {400}
    processes.wait_until(lambda: killed[0] not in {worker.hello.name for worker in processes.workers}, 10)
    processes.wait_until_idle(5)


def test_workers_that_were_killed_join_again_beside_those_that_went_on(
    processes: Cluster, llm: LLM, wanted: list[RequestOutput]
) -> None:
    """Those that the tests before have killed."""
    ended = [name for name, process in processes.processes.items() if process.poll() is not None]
    assert ended
    processes.start(ended)
    processes.wait_for_workers()
    assert len(processes.workers) == 5
    check_drawn("all again", processes.run(all_of(processes, llm), timeout=60), wanted)
    processes.wait_until_idle(5)
