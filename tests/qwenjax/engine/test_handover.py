"""A prompt run by one engine and decoded by another gives what one engine gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenjax import RequestOutput, SamplingParams
from qwenjax.engine import engine as engine_module
from qwenjax.engine.build import build_engine
from qwenjax.engine.decode_engine import Arrived, DecodeEngine
from qwenjax.engine.engine import Engine
from qwenjax.engine.handover import devices_for, kv_layout, layer_groups, num_planes, plane_bounds
from qwenjax.engine.prefill_engine import PrefillEngine, StagedPages
from qwenjax.kv_transfer import Pages, plan_transfer
from qwenjax.outputs import Logprob
from qwenjax_serving.transfer.device_staging import DeviceStagingBuffer
from qwenjax_serving.transfer.staging import byte_ranges
from tests.generation import greedy, random_ids, small_llm
from tests.qwenjax.engine.test_speculation import with_head
from tests.serving.test_device_staging import HostDriver

NUM_DRAFTS = 2
SIZES: dict[str, Any] = {
    "max_num_seqs": 1,  # a single size of decode batch: what costs here is compiling
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "num_pages": 64,
    "max_model_len": 128,
    "num_speculative_tokens": NUM_DRAFTS,
    "progress": False,
}
REQUESTS = {
    "greedy": (random_ids(45), greedy(20)),
    "long": (random_ids(110), greedy(12)),
    "sampled": (random_ids(33, 1), SamplingParams(temperature=0.8, seed=7, max_tokens=15, ignore_eos=True, logprobs=2)),
    "penalised": (
        [5, 6, 7, 8] * 6,
        SamplingParams(temperature=0, max_tokens=15, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5),
    ),
    "one token": (random_ids(20, 2), greedy(1)),
    "one long of the same beginning": (random_ids(110), greedy(9)),
    "prompt of one": ([9], greedy(5)),
}


# What differs between the prefill and the decode engine.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TP 2 to DP 2 with larger pages": ({"model_parallel": 2}, {"data_parallel": 2, "page_size": 32}),
    "equal": ({}, {"max_num_seqs": 4}),
    "TP 4 to TP 1": ({"model_parallel": 4, "page_size": 32}, {}),
    "TP 1 to TP 4": ({}, {"model_parallel": 4}),
}


class Pair:
    """A prefill and a decode engine, whose pages NumPy carries as the plan says."""

    def __init__(self, folder: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        self.prefill = build_engine(folder, PrefillEngine, **{**SIZES, **prefill})
        self.decode = build_engine(folder, DecodeEngine, **{**SIZES, **decode})
        self.prefill.on_staged = self.take
        self.staged: dict[str, np.ndarray] = {}
        self.taken: list[tuple[str, int, int, int]] = []
        self.spoil: Callable[[np.ndarray], None] = lambda pages: None

    def empty(self, engine: Engine, num_pages: int) -> np.ndarray:
        layout = kv_layout(engine)
        sizes = (num_planes(engine), layout.page_size, engine.model.config.head_dim)
        return np.full((layout.ranks, num_pages, layout.heads_per_rank, *sizes), np.nan, engine.model.dtype)

    def take(self, staged: StagedPages) -> None:
        ranks = kv_layout(self.prefill).ranks
        pages = np.concatenate([np.asarray(array) for array in staged.arrays])
        by_rank = np.stack(np.split(pages, ranks, axis=1))
        planes = slice(staged.first_plane, staged.first_plane + staged.num_planes)
        for part in staged.parts:
            size = self.prefill.config.page_size
            for place in range(part.first_page, -(-part.stop // size)):
                own = by_rank[:, part.first + place - part.first_page]
                lo, hi = max(part.start - place * size, 0), min(part.stop - place * size, size)
                self.staged[part.request_id][:, place, :, planes, lo:hi] = own[:, :, :, lo:hi]
            self.taken.append((part.request_id, part.start, part.stop, staged.first_plane))

    def moved(self, request_id: str, num_cached: int, prompt_len: int) -> np.ndarray:
        """The request's pages as the decode engine wants them."""
        layouts = kv_layout(self.prefill), kv_layout(self.decode)
        source = self.staged.pop(request_id)
        first = num_cached // layouts[1].page_size
        target = self.empty(self.decode, -(-prompt_len // layouts[1].page_size) - first)
        pages = Pages(range(source.shape[1]), range(target.shape[1]), num_cached, prompt_len, 0, num_cached)
        for c in plan_transfer(*layouts, pages).copies:
            block = source[c.source_rank, c.source_page, c.source_head : c.source_head + c.heads]
            block = block[:, :, c.source_token : c.source_token + c.tokens]
            place = np.s_[c.target_head : c.target_head + c.heads, :, c.target_token : c.target_token + c.tokens]
            target[(c.target_rank, c.target_page, *place)] = block
        # What no token wrote is whatever was there: it must not matter.
        self.spoil(target)
        return target

    def generate(self, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, RequestOutput]:
        """As many at a time as the decode engine has room for."""
        cached, results = dict[str, int](), dict[str, RequestOutput]()
        for request_id, (prompt, params) in requests.items():
            found = self.decode.reserve(request_id, prompt, params)
            if found is None:
                results |= self.run(requests, cached)
                found = self.decode.reserve(request_id, prompt, params)
            assert found is not None
            cached[request_id] = found
            self.staged[request_id] = self.empty(self.prefill, -(-len(prompt) // self.prefill.config.page_size))
            self.prefill.add_prompt(request_id, prompt, params, wanted_from=found)
        return results | self.run(requests, cached)

    def run(
        self, requests: dict[str, tuple[list[int], SamplingParams]], cached: dict[str, int]
    ) -> dict[str, RequestOutput]:
        results = {}
        while self.prefill.has_unfinished:
            for output in self.prefill.step():
                assert output.finished
                prompt, _ = requests[output.request_id]
                hidden, num_parts = self.prefill.take_handover(output.request_id)
                assert num_parts == sum(taken[0] == output.request_id for taken in self.taken)
                (first,) = output.outputs
                if first.finished:
                    self.decode.cancel(output.request_id)
                    results[output.request_id] = output
                    continue
                (token,) = first.token_ids
                logprobs = first.logprobs[0] if first.logprobs else None
                pages = self.moved(output.request_id, cached[output.request_id], len(prompt))
                self.decode.admit(output.request_id, Arrived(token, logprobs, hidden, pages))
        while self.decode.has_unfinished:
            results |= {output.request_id: output for output in self.decode.step()}
        return results


def assert_idle(pair: Pair) -> None:
    assert not pair.prefill.handovers
    assert not pair.prefill._wanted_from
    assert not pair.prefill._num_parts
    assert not pair.decode._reserved
    for engine in (pair.prefill, pair.decode):
        assert all(job is None for table in engine.scheduler.slots for job in table)
        assert all(pool.num_available == pool.num_pages for pool in engine.scheduler.pools)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, RequestOutput]:
    llm = small_llm(folder, **{**SIZES, "num_pages": 256})
    return {name: llm.generate([prompt], params)[0] for name, (prompt, params) in REQUESTS.items()}


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return Pair(folder, *LAYOUTS["TP 2 to DP 2 with larger pages"])


@pytest.mark.parametrize(
    "layouts",
    ["TP 2 to DP 2 with larger pages", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:])],
)
def test_outputs_equal_those_of_one_engine(
    folder: Path, pair: Pair, expected: dict[str, RequestOutput], layouts: str
) -> None:
    if layouts != "TP 2 to DP 2 with larger pages":
        pair = Pair(folder, *LAYOUTS[layouts])
    results = pair.generate(REQUESTS)
    for name, output in results.items():
        got, want = output.outputs[0], expected[name].outputs[0]
        assert got.token_ids == want.token_ids, name
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        if want.logprobs:
            assert got.logprobs
            assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
            assert [list(entry) for entry in got.logprobs] == [list(entry) for entry in want.logprobs]
    # Drafts are accepted as they are in one engine: the head's cache and its pending entry came over.
    speculation = expected["greedy"].speculation
    assert speculation is not None
    assert results["greedy"].speculation == speculation
    assert results["one long of the same beginning"].num_cached_tokens > 0
    assert pair.decode.num_prefill_calls == 0
    assert pair.prefill.num_decode_calls == 0
    assert not any(name == "prefill" for name, _ in pair.decode._compiled)
    assert_idle(pair)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": 2**31 - 1}, "token 2147483647 arrived"),
        ({"hidden": None}, "a hidden state of 0 arrived"),
        ({"hidden": np.zeros(3, np.float32)}, "a hidden state of 3 arrived"),
        ({"logprobs": None}, "no log-probability of token 5 arrived"),
        ({"logprobs": {6: Logprob(-1.0, 1, "")}}, "no log-probability of token 5 arrived"),
    ],
)
def test_what_does_not_fit_a_request_is_refused_before_it_is_taken(
    pair: Pair, change: dict[str, Any], message: str
) -> None:
    config = pair.decode.model.config
    good = Arrived(5, {5: Logprob(-1.0, 1, "")}, np.zeros(config.hidden_size, np.float32), pair.empty(pair.decode, 1))
    assert pair.decode.reserve("misfit", [7], greedy(4, logprobs=1)) == 0
    try:
        with pytest.raises(ValueError, match=message):
            pair.decode.admit("misfit", replace(good, **change))
        assert not pair.decode.has_unfinished
    finally:
        pair.decode.cancel("misfit")
    assert_idle(pair)


class ThroughGpuMemory(Pair):
    """A pair whose pages go through staging buffers in GPU memory, which a stand-in for the driver has on the host."""

    def __init__(self, pair: Pair) -> None:
        vars(self).update(vars(pair) | {"taken": []})
        self.source, self.target = map(self.buffer, (pair.prefill, pair.decode))
        self.slots: dict[str, list[int]] = {}

    def buffer(self, engine: Engine) -> DeviceStagingBuffer:
        devices = [devices_for(engine, rank) for rank in range(engine.ranks)]
        sizes = num_planes(engine), engine.model.config.head_dim, engine.model.dtype, 64
        return DeviceStagingBuffer(devices, kv_layout(engine), *sizes, bounds=plane_bounds(engine), driver=HostDriver())

    def take(self, staged: StagedPages) -> None:
        fetched, planes = self.source.fetch(staged), (staged.first_plane, staged.first_plane + staged.num_planes)
        for part in staged.parts:
            if part.request_id not in self.slots:
                self.slots[part.request_id] = self.source.take(128 // SIZES["page_size"]) or []
            stop = -(-part.stop // SIZES["page_size"])
            self.source.put(fetched, part.first, self.slots[part.request_id][part.first_page : stop], planes)
            self.taken.append((part.request_id, part.start, part.stop, staged.first_plane))

    def moved(self, request_id: str, num_cached: int, prompt_len: int) -> Any:
        source, target = self.source.layout, self.target.layout
        slots = self.target.take(-(-(prompt_len - num_cached) // target.page_size)) or []
        pages = Pages(self.slots.get(request_id, []), slots, num_cached, prompt_len, 0, num_cached)
        plan = plan_transfer(source.kv, target.kv, pages)
        self.target.copy(byte_ranges(plan.copies, source, target, (0, source.planes)))
        taken = self.target.take_out(slots, self.decode.data_rank(request_id))
        self.target.give_back(slots)
        self.source.give_back(self.slots.pop(request_id, []))
        return taken


def test_pages_through_gpu_memory_are_the_same(pair: Pair, expected: dict[str, RequestOutput]) -> None:
    for engine in (pair.prefill, pair.decode):
        engine.clear_prefix_cache()
    through = ThroughGpuMemory(pair)
    pair.prefill.on_staged = through.take
    try:
        results = through.generate(REQUESTS)
    finally:
        pair.prefill.on_staged = pair.take
    for name, output in results.items():
        assert output.outputs[0].token_ids == expected[name].outputs[0].token_ids, name
    assert results["one long of the same beginning"].num_cached_tokens > 0
    assert set(through.slots) == {"one token"}  # which ended before it was moved
    assert_idle(pair)


def test_loading_kernels_runs_all_that_communicates_and_leaves_idle_slots(
    pair: Pair, expected: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "unarmed", lambda epochs, ranks: epochs + 0)  # no heap on a CPU
    for engine in (pair.prefill, pair.decode):
        if not engine._compiled:
            engine.warm_up(progress=False)
        engine.clear_prefix_cache()
        ran = list[Any]()
        with monkeypatch.context() as patch:
            run = engine._run

            def counted(program: Any, *arguments: Any, run: Any = run, engine: Any = engine, ran: Any = ran) -> Any:
                before = np.array(engine._slots.epochs)
                results = run(program, *arguments)
                collectives = np.array(engine._slots.epochs) - before
                assert (collectives > 0).all() or program[0] in ("begin", "finish")
                ran.append(program)
                return results

            patch.setattr(engine, "_run", counted)
            engine._load_kernels()
        assert set(ran) == {program for program in engine._compiled if program[0] not in ("gather", "scatter", "admit")}
    results = pair.generate({"after loading": REQUESTS["greedy"]})
    assert results["after loading"].outputs[0].token_ids == expected["greedy"].outputs[0].token_ids
    assert_idle(pair)


def test_pages_are_staged_group_by_group_while_the_prompt_runs(pair: Pair) -> None:
    """One call runs 64 tokens here; a layer is a group, and the head comes last."""
    for engine in (pair.prefill, pair.decode):
        engine.clear_prefix_cache()
    pair.taken.clear()
    seen: list[tuple[int, int]] = []
    finish = pair.prefill._run

    def run(program: tuple[str, Any], *arguments: Any) -> tuple[Any, ...]:
        if program[0] in ("layers", "finish"):
            seen.append((len(pair.taken), 0 if program[0] == "finish" else 1))
        return finish(program, *arguments)

    pair.prefill._run = run  # type: ignore[method-assign]
    try:
        pair.generate({"a": (random_ids(100), greedy(3))})
    finally:
        pair.prefill._run = finish  # type: ignore[method-assign]
    starts = [(taken[1], taken[2], taken[3]) for taken in pair.taken]
    ranges = [(0, 64), (64, 100)]  # a call each
    assert starts == [(start, stop, plane) for start, stop in ranges for plane in (0, 2, 4)]
    # Before the second group of layers of the first call begins, the pages of the first are out.
    assert seen[:3] == [(0, 1), (1, 1), (2, 0)]


def test_one_corrupt_page_changes_the_output(pair: Pair, expected: dict[str, RequestOutput]) -> None:
    for engine in (pair.prefill, pair.decode):
        engine.clear_prefix_cache()

    def spoil(pages: np.ndarray) -> None:
        pages[0, 1] = -pages[0, 1]

    pair.spoil = spoil
    try:
        result = pair.generate({"greedy": REQUESTS["greedy"]})["greedy"]
    finally:
        pair.spoil = lambda pages: None
        pair.decode.clear_prefix_cache()
    assert result.outputs[0].token_ids != expected["greedy"].outputs[0].token_ids


def test_a_decode_engine_reserves_all_that_a_request_may_need_and_refuses_what_finds_no_room(pair: Pair) -> None:
    decode, (prompt, params) = pair.decode, (random_ids(40), greedy(60))
    pages = [pool.num_available for pool in decode.scheduler.pools]
    held = decode.scheduler.pools[0].take(62)
    try:
        assert decode.reserve("a", prompt, params) == 0  # 99 tokens are run: 4 pages, of the second rank
        assert [pool.num_available for pool in decode.scheduler.pools] == [2, 60]
        assert decode.reserve("b", prompt, params) is None
        assert decode.reserve("c", prompt, replace(params, max_tokens=20)) == 0
        with pytest.raises(ValueError, match="'a' is in use"):
            decode.reserve("a", prompt, params)
        for request_id in ("a", "b", "c", "a"):
            decode.cancel(request_id)
    finally:
        decode.scheduler.pools[0].give_back(held)
    assert [pool.num_available for pool in decode.scheduler.pools] == pages


def test_a_decode_engine_says_how_quickly_it_draws_and_takes_no_more_than_it_is_told_to(pair: Pair) -> None:
    decode, told = pair.decode, list[tuple[int, float, float, float]]()
    decode.clear_prefix_cache()
    pair.taken.clear()
    decode.on_decoded = lambda *each: told.append(each)
    began = time.monotonic()
    try:
        pair.generate({name: (random_ids(10, place), greedy(40)) for place, name in enumerate("ab")})  # a rank each
        first = len(told)
        time.sleep(0.3)  # which is not a slow call
        pair.generate({"c": (random_ids(10), greedy(40, speculation=False))})
    finally:
        decode.on_decoded = None
    ended = time.monotonic()
    assert told
    assert {batch for batch, *_ in told} == {1}  # of the fullest rank
    assert all(1 <= tokens <= decode.config.tokens_per_call for _, tokens, _, _ in told)
    assert {tokens for _, tokens, _, _ in told[first:]} == {decode.config.num_steps}
    assert all(began < now - seconds <= now < ended for _, _, seconds, now in told)
    assert sum(seconds for _, _, seconds, _ in told) < ended - began - 0.3

    decode.scheduler.max_running = 0
    try:
        assert decode.reserve("a", random_ids(10), greedy(5)) is None
    finally:
        decode.scheduler.max_running = decode.config.max_num_seqs
    assert_idle(pair)


@given(num_layers=st.integers(1, 100))
def test_groups_of_layers_are_four_of_about_the_same_size(num_layers: int) -> None:
    groups = layer_groups(num_layers)
    assert [layer for start, stop in groups for layer in range(start, stop)] == list(range(num_layers))
    sizes = [stop - start for start, stop in groups]
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == min(4, num_layers)


def test_prefill_on_several_data_ranks_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="data=2: prefill has one data rank"):
        build_engine(folder, PrefillEngine, **SIZES, data_parallel=2)
