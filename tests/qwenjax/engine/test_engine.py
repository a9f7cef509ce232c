"""The engine: who runs when, with few slots and fewer pages."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from qwenjax import SamplingParams
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.mesh import make_mesh
from qwenjax.outputs import RequestOutput
from qwenjax.tokenizer import Tokenizer
from tests.generation import EOS_IDS, VOCABULARY, backend, greedy, random_ids
from tests.helpers import model_from_tensors, random_tensors, tiny

# Two slots; nine pages of 8 tokens, where the longest sequence takes eight.
SIZES: dict[str, int] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "num_pages": 9,
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "num_steps": 4,
}


@pytest.fixture(scope="module")
def shared() -> Engine:
    raw = tiny(vocab_size=VOCABULARY)
    model = model_from_tensors(raw, make_mesh(), random_tensors(raw))
    engine = Engine(model, Tokenizer(backend(), eos_ids=EOS_IDS), EngineConfig(**SIZES))
    engine.warm_up(progress=False)
    return engine


@pytest.fixture
def engine(shared: Engine) -> Any:
    yield shared
    assert not shared.has_unfinished
    assert free_pages(shared) == [SIZES["num_pages"]]
    assert running(shared) == []


def free_pages(engine: Engine) -> list[int]:
    return [pool.num_free for pool in engine._pools]


def running(engine: Engine) -> list[str]:
    return [s.request.request_id for table in engine._table for s in table if s is not None]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def solo(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine.add_request("solo", prompt, params)
    return [part.token_ids for part in finish(engine)["solo"].outputs]


def test_a_request_without_room_waits_and_keeps_those_behind_it_waiting(engine: Engine) -> None:
    engine.add_request("six pages", random_ids(40), greedy(8))
    engine.add_request("four pages", random_ids(20), greedy(12))
    engine.add_request("one page", random_ids(3), greedy(5))
    engine.step()
    assert running(engine) == ["six pages"]
    assert free_pages(engine) == [3]
    order = []
    while engine.has_unfinished:
        order += [output.request_id for output in engine.step() if output.finished]
    assert order[0] == "six pages"
    assert sorted(order[1:]) == ["four pages", "one page"]


def test_results_do_not_depend_on_scarcity(engine: Engine) -> None:
    rng = random.Random(1)
    requests: list[tuple[list[int], SamplingParams]] = []
    for seed in range(12):
        n = rng.choice([1, 3])
        params = SamplingParams(temperature=0.8, n=n, seed=seed, max_tokens=rng.randint(1, 24), ignore_eos=True)
        requests.append((random_ids(rng.randint(1, 40), seed), params))
    alone = [solo(engine, *request) for request in requests]
    for index, request in enumerate(requests):
        engine.add_request(str(index), *request)
    outputs = finish(engine)
    assert [[part.token_ids for part in outputs[str(i)].outputs] for i in range(12)] == alone


def test_a_slot_and_its_pages_hold_nothing_of_who_was_there_before(engine: Engine) -> None:
    # Penalties would see the counts of an earlier request, attention its keys.
    params = greedy(20, repetition_penalty=1.5, presence_penalty=1.0)
    expected = solo(engine, random_ids(9), params)
    for seed in range(3):
        solo(engine, random_ids(40, seed), greedy(24, frequency_penalty=2.0))
        assert solo(engine, random_ids(9), params) == expected


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
    engine.abort(["chunks", "waits", "chunks", "never seen"])
    assert set(running(engine)) <= {"kept"}
    outputs |= finish(engine)
    assert [part.token_ids for part in outputs["kept"].outputs] == expected


def test_an_aborted_request_says_so(engine: Engine) -> None:
    engine.add_request("a", random_ids(3), greedy(20))
    request = engine._requests["a"]
    engine.step()
    engine.abort(["a"])
    assert request.output().finished
    assert [part.finish_reason for part in request.output().outputs] == ["abort"]


def test_a_step_without_requests_runs_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_program", None)
    assert engine.step() == []


def test_a_call_runs_no_more_steps_than_any_sequence_can_take(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    run = engine._run_decode

    def counted(variant: tuple[int, int], num_steps: int, want: bool) -> Any:
        asked.append((variant[0], num_steps))
        return run(variant, num_steps, want)

    monkeypatch.setattr(engine, "_run_decode", counted)
    engine.add_request("a", random_ids(3), greedy(4))
    engine.add_request("b", random_ids(3), greedy(8))
    finish(engine)
    # One token comes with the prompt; b goes on alone in the second slot, so the batch stays two.
    assert asked == [(2, 4), (2, 3)]
    asked.clear()
    solo(engine, random_ids(3), greedy(3))
    assert asked == [(1, 2)]


def test_prompts_share_a_prefill_call_only_where_their_chunks_have_one_length() -> None:
    config = EngineConfig(**{**SIZES, "max_num_batched_tokens": 300})
    assert config.chunk_lengths == [18, 75, 300]
    assert config.max_pages == 8
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
    engine._admit()
    assert [[s and s.request.request_id for s in table] for table in engine._table] == [["0", "2"], ["1", "3"]]
    assert free_pages(engine) == [7, 7]
    np.testing.assert_array_equal(engine._keep(), [False] * 4)
    engine.abort([str(index) for index in range(5)])
    assert free_pages(engine) == [9, 9]
