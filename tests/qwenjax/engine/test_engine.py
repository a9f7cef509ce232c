"""The engine: requests on a tiny model with few slots and fewer pages."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from qwenjax import SamplingParams
from qwenjax.engine.config import decode_kind
from qwenjax.engine.engine import Engine, EngineConfig, Program
from qwenjax.mesh import make_mesh
from qwenjax.outputs import RequestOutput
from qwenjax.tokenizer import Tokenizer
from qwenjax_ffi.symmetric_memory_exchange import PeerError
from tests.generation import EOS_IDS, VOCABULARY, assert_engine_free, backend, forced, greedy, ids_of_bytes, random_ids
from tests.helpers import model_from_tensors, random_tensors, tiny

# Two slots; nine pages of 8 tokens, where the longest sequence takes eight.
SIZES: dict[str, int] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "num_pages": 9,
    "page_size": 8,
    "max_num_batched_tokens": 32,
    "num_steps": 4,
}


lowered_programs: list[jax.stages.Lowered] = []


@pytest.fixture(scope="module")
def shared() -> Engine:
    raw = tiny(vocab_size=VOCABULARY)
    model = model_from_tensors(raw, make_mesh(), random_tensors(raw))
    engine = Engine(model, Tokenizer(backend(), eos_ids=EOS_IDS), EngineConfig(**SIZES, programs_by_kind=True))
    lower = jax.stages.Traced.lower

    def recorded(traced: jax.stages.Traced) -> jax.stages.Lowered:
        lowered_programs.append(lower(traced))
        return lowered_programs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", recorded)
        engine.warm_up(progress=False)
    return engine


@pytest.fixture
def engine(shared: Engine) -> Any:
    yield shared
    assert_engine_free(shared)
    shared.clear_prefix_cache()
    assert shared.stats().free_pages == (SIZES["num_pages"],)


def running(engine: Engine) -> list[str]:
    orders = [job.order for rank in range(engine.ranks) for job in engine.scheduler.running(rank)]
    return [engine._sequences[order].request.request_id for order in orders]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def whole(engine: Engine, prompt: list[int], params: SamplingParams, salt: str | None = None) -> RequestOutput:
    engine.add_request("solo", prompt, params, cache_salt=salt)
    return finish(engine)["solo"]


def solo(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    return [part.token_ids for part in whole(engine, prompt, params).outputs]


def test_no_program_has_arrays_without_elements_which_break_the_partitioner_of_jax_0_11_2(engine: Engine) -> None:
    assert len(lowered_programs) == len(engine._compiled)
    assert all("tensor<0x" not in program.as_text() for program in lowered_programs)


def test_results_do_not_depend_on_scarcity(engine: Engine) -> None:
    rng = random.Random(1)
    requests: list[tuple[list[int], SamplingParams]] = []
    for seed in range(12):
        n = rng.choice([1, 3])
        params = SamplingParams(temperature=0.8, n=n, seed=seed, max_tokens=rng.randint(1, 24), ignore_eos=True)
        requests.append((random_ids(rng.randint(1, 40), seed), params))
    alone = [solo(engine, *request) for request in requests]
    before = engine.stats().num_preemptions
    for index, request in enumerate(requests):
        engine.add_request(str(index), *request)
    outputs = finish(engine)
    assert [[part.token_ids for part in outputs[str(i)].outputs] for i in range(12)] == alone
    assert engine.stats().num_preemptions > before


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "seed": 3, "logprobs": 2, "prompt_logprobs": 1},
        {"min_tokens": 30},
    ],
)
def test_a_preempted_request_goes_on_as_if_nothing_had_been(engine: Engine, settings: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **settings})
    prompt = random_ids(17)
    expected = whole(engine, prompt, params)
    engine.clear_prefix_cache()
    before = engine.stats().num_preemptions
    engine.add_request("older", random_ids(20), greedy(40))
    engine.add_request("preempted", prompt, params)
    found = finish(engine)["preempted"]
    assert engine.stats().num_preemptions > before
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.num_cached_tokens == 0
    for ours, theirs in (
        (found.outputs[0].logprobs, expected.outputs[0].logprobs),
        (found.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert (ours is None) == (theirs is None)
        for mine, other in zip(ours or [], theirs or [], strict=True):
            assert (mine and list(mine)) == (other and list(other))
            np.testing.assert_allclose(
                [entry.logprob for entry in (mine or {}).values()],
                [entry.logprob for entry in (other or {}).values()],
                atol=1e-4,
            )


def test_a_slot_and_its_pages_hold_nothing_of_who_was_there_before(engine: Engine) -> None:
    # Penalties would see the counts of an earlier request, attention its keys.
    params = greedy(20, repetition_penalty=1.5, presence_penalty=1.0)
    expected = solo(engine, random_ids(9), params)
    for seed in range(3):
        solo(engine, random_ids(40, seed), greedy(24, frequency_penalty=2.0))
        assert solo(engine, random_ids(9), params) == expected


def test_a_hit_changes_no_bit_50_times_over(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=3, ignore_eos=True)
    for seed in range(50):
        prompt = random_ids(33 + seed % 16, seed % 7)
        engine.clear_prefix_cache()
        cold = whole(engine, prompt, params)
        warm = whole(engine, prompt, params)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
        # What follows another's prefix is as good.
        forked = whole(engine, [*prompt[:32], *random_ids(9, seed)], params)
        assert forked.num_cached_tokens == 32
        engine.clear_prefix_cache()
        assert whole(engine, forked.prompt_token_ids, params).outputs == forked.outputs
        assert warm.outputs == cold.outputs  # log-probabilities among them


def test_a_salt_keeps_prompts_apart(engine: Engine) -> None:
    prompt = random_ids(18)
    cached = [whole(engine, prompt, greedy(2), salt).num_cached_tokens for salt in (None, "a", "b", "a", None)]
    assert cached == [0, 0, 0, 16, 16]


def test_prompt_logprobs_do_without_the_cache_and_leave_it_filled(engine: Engine) -> None:
    prompt = random_ids(40)
    outputs = [whole(engine, prompt, greedy(2, prompt_logprobs=asked)) for asked in (1, 1, None)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32]
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs


def test_outputs_of_one_prompt_read_it_once(engine: Engine) -> None:
    read = engine.stats()
    result = whole(engine, random_ids(40), SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
    now = engine.stats()
    assert len({tuple(part.token_ids) for part in result.outputs}) == 3
    assert now.prompt_tokens - read.prompt_tokens == 3 * 40
    # The second and third run what lies beyond the cached blocks: 4 pages of 8 tokens.
    assert now.cached_prompt_tokens - read.cached_prompt_tokens == 2 * 32
    assert sum(len(block.pages) for block in engine.scheduler.pools[0].blocks()) == 4


def test_what_the_cache_never_holds_is_refused(engine: Engine) -> None:
    config = EngineConfig(**{**SIZES, "num_pages": 7})
    small = Engine(engine.model, engine.tokenizer, config)
    small.check(random_ids(40), greedy(16))
    with pytest.raises(ValueError, match="max_tokens: prompt and output need 8 pages of 8 tokens, the cache has 7"):
        small.add_request("too long", random_ids(40), greedy(17))
    assert not small.has_unfinished


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(engine: Engine) -> None:
    engine.add_request("a", random_ids(3), greedy(2))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        engine.add_request("a", random_ids(3), greedy(2))
    finish(engine)
    engine.add_request("a", random_ids(3), greedy(2))
    finish(engine)


def test_calls_of_one_kind_and_all_steps_run_programs_without_branches_and_draw_what_the_others_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, run = list[str](), engine._run

    def recorded(program: Program, *arguments: Any) -> tuple[Any, ...]:
        ran.append(program[0])
        return run(program, *arguments)

    monkeypatch.setattr(engine, "_run", recorded)
    prompt = random_ids(5)
    for kind, params in (
        ("greedy", greedy(10)),
        ("truncated", SamplingParams(max_tokens=10, ignore_eos=True, seed=3, temperature=2, top_k=30, top_p=0.8)),
    ):
        ran.clear()
        (expected,) = solo(engine, prompt, replace(params, logprobs=0))
        assert ran == ["prefill", "decode", "decode", "decode"]  # 4, 4 and 1 of the 9 steps
        ran.clear()
        assert solo(engine, prompt, params) == [expected]
        assert ran == ["prefill", kind, kind, "decode"]
        for changes in ({"min_tokens": 1}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}):
            ran.clear()
            solo(engine, prompt, replace(params, **changes))
            assert set(ran) == {"prefill", "decode"}, changes
        engine.add_request(kind, prompt, params)
    ran.clear()
    finish(engine)  # both
    assert "truncated" in ran
    assert "greedy" not in ran
    branches = {
        kind: " conditional(" in engine._compiled[kind, (1, 0)].as_text() for kind in engine.config.decode_kinds
    }
    assert branches == {"decode": True, "greedy": False, "truncated": False}


@pytest.mark.parametrize(
    ("requests", "kind"),
    [
        ([{}, {"top_p": 0.5}], "greedy"),
        ([{"temperature": 1}], "decode"),
        ([{"temperature": 1, "top_k": 5}, {"top_p": 0.5}], "decode"),
        ([{"temperature": 1, "top_k": 5}, {"temperature": 1, "top_p": 0.5}, {}], "truncated"),
        ([{"temperature": 1, "top_k": 5, "top_p": 0.5}, {"logprobs": 0}], "decode"),
        ([{}, {"min_tokens": 1}], "decode"),
    ],
)
def test_the_kind_of_a_decode_call_follows_from_its_requests(requests: list[dict[str, Any]], kind: str) -> None:
    assert decode_kind(SamplingParams(**{"temperature": 0, **changes}) for changes in requests) == kind


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_aborting_frees_slots_and_pages_whatever_a_request_is_doing(engine: Engine, steps: int) -> None:
    kept = greedy(14)
    expected = solo(engine, random_ids(5), kept)
    engine.add_request("chunks", random_ids(40), greedy(8))
    engine.add_request("kept", random_ids(5), kept)
    engine.add_request("waits", random_ids(5), SamplingParams(n=4, seed=1))
    outputs: dict[str, RequestOutput] = {}
    for _ in range(steps):
        outputs |= {output.request_id: output for output in engine.step()}
    aborted = engine.abort(["chunks", "waits", "chunks", "never seen"])
    assert [output.request_id for output in aborted] == ["chunks", "waits"]
    assert all(output.finished for output in aborted)
    assert {part.finish_reason for output in aborted for part in output.outputs} == {"abort"}
    assert set(running(engine)) <= {"kept"}
    outputs |= finish(engine)
    assert [part.token_ids for part in outputs["kept"].outputs] == expected


def test_a_step_without_requests_runs_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_run", None)
    assert engine.step() == []


def test_a_call_is_begun_before_the_results_of_the_one_before_are_taken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    run, take = engine._run, engine._take_results

    def began(program: Any, table: np.ndarray) -> Any:
        events.append(program[0])
        return run(program, table)

    def taken(*arguments: Any) -> Any:
        events.append("results")
        return take(*arguments)

    monkeypatch.setattr(engine, "_run", began)
    monkeypatch.setattr(engine, "_take_results", taken)
    solo(engine, random_ids(3), greedy(9))
    assert events == ["prefill", "greedy", "results", "greedy", "results", "results"]


def test_ctrl_c_while_results_are_awaited_loses_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = solo(engine, random_ids(3), greedy(20))
    engine.add_request("a", random_ids(3), greedy(20))
    get, interrupted, outputs = jax.device_get, 0, {}

    def interrupt(found: Any) -> Any:
        nonlocal interrupted
        interrupted += 1
        if interrupted % 2:
            raise KeyboardInterrupt
        return get(found)

    monkeypatch.setattr(jax, "device_get", interrupt)
    while engine.has_unfinished:
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            continue
    assert interrupted > 6
    assert [part.token_ids for part in outputs["a"].outputs] == expected


def test_surplus_tokens_of_a_late_stop_string_are_dropped(engine: Engine) -> None:
    ids = ids_of_bytes("abcdefgh")
    result = whole(engine, [200, 201], forced(ids, stop="bc"))
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("a", ids[:3])


def test_a_failed_call_ends_the_engine_with_an_error_that_says_so(engine: Engine) -> None:
    broken = Engine(engine.model, engine.tokenizer, engine.config)
    broken._compiled = dict.fromkeys(engine._compiled, lambda *_: 1 / 0)
    broken.add_request("a", random_ids(3), greedy(2))
    with pytest.raises(ZeroDivisionError):
        broken.step()
    with pytest.raises(RuntimeError, match=r"the engine failed .*division by zero.*make a new one"):
        broken.step()


def test_a_rank_that_did_not_come_ends_the_engine_with_an_error_that_asks_for_a_new_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwenjax.engine.engine.peer_failure", lambda mesh: PeerError("rank 1 did not come"))
    broken = Engine(engine.model, engine.tokenizer, engine.config)
    broken._compiled = dict.fromkeys(engine._compiled, lambda *_: 1 / 0)
    broken.add_request("a", random_ids(3), greedy(2))
    with pytest.raises(PeerError, match="rank 1 did not come"):
        broken.step()
    with pytest.raises(RuntimeError, match=r"the engine failed \(rank 1 did not come\); start a new process"):
        broken.step()


def test_an_engine_logs_the_memory_beside_xlas_pool(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="qwenjax.engine.engine"):
        Engine(engine.model, engine.tokenizer, engine.config)
        assert not caplog.records
        monkeypatch.setattr("qwenjax.engine.engine.bytes_outside_xla", lambda: 68_157_440)
        Engine(engine.model, engine.tokenizer, engine.config)
    assert [record.message for record in caplog.records] == ["68,157,440 bytes of a GPU are in use beside XLA's pool"]


def test_a_busy_engine_logs_a_line_of_figures(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qwenjax.engine.engine._LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, logger="qwenjax.engine.engine"):
        solo(engine, random_ids(3), greedy(9))
    assert "generated tokens/s, 1 running, 0 waiting, pages held" in caplog.records[0].message


def test_figures_of_a_request_and_of_the_engine(engine: Engine) -> None:
    before = engine.stats()
    engine.add_request("a", random_ids(40), greedy(9))
    engine.add_request("b", random_ids(40), greedy(9))
    engine.add_request("c", random_ids(20), greedy(9))
    assert engine.stats().num_waiting == 3
    assert engine.stats().queued_prompt_tokens == 100
    engine.step()
    assert engine.stats().num_running > 0
    engine.abort(["c"])
    metrics = finish(engine)["a"].metrics
    assert metrics is not None
    assert metrics.num_tokens == 9
    assert metrics.queue_time is not None
    assert metrics.inter_token_time is not None
    assert metrics.latest_token is not None
    assert metrics.latest_token <= (metrics.finished or 0)
    now = engine.stats()
    assert now.generated_tokens - before.generated_tokens == 18
    assert now.prompt_tokens - before.prompt_tokens == 80
    assert now.num_aborts - before.num_aborts == 1
    assert (now.num_waiting, now.num_running, now.num_pages) == (0, 0, SIZES["num_pages"])


def test_row_lengths_batches_and_blocks_follow_from_the_sizes() -> None:
    config = EngineConfig(**{**SIZES, "max_num_batched_tokens": 300})
    assert config.chunk_lengths == [18, 75]
    assert config.max_pages == 8
    assert config.block_size == 600
    assert EngineConfig(**{**SIZES, "max_num_batched_tokens": 2048, "page_size": 64}).block_size == 512
    assert EngineConfig(**{**SIZES, "max_num_seqs": 100}).decode_batches == [1, 8, 64, 100]
    assert EngineConfig(**{**SIZES, "max_num_seqs": 8}).decode_batches == [1, 8]


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_cannot_be_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least"):
        EngineConfig(**{**SIZES, name: 0})


def test_data_ranks_share_the_requests() -> None:
    raw = tiny(vocab_size=VOCABULARY)
    model = model_from_tensors(raw, make_mesh(2, 1), random_tensors(raw))
    engine = Engine(model, Tokenizer(backend()), EngineConfig(**SIZES))
    for index in range(5):
        engine.add_request(str(index), random_ids(3), greedy(4))
    engine.scheduler.plan()
    slots = [[job and job.order for job in table] for table in engine.scheduler.slots]
    assert slots == [[0, 2], [1, 3]]
    assert engine.stats().free_pages == (7, 7)
    engine.abort([str(index) for index in range(5)])
    assert engine.stats().free_pages == (9, 9)
