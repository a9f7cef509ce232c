"""Random requests of every kind at once on too few slots and pages: each gets what it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from qwenjax import SamplingParams
from qwenjax.config import ModelConfig
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.mesh import make_mesh
from qwenjax.outputs import RequestOutput
from qwenjax.sharded_model import by_name, from_names, random_model
from qwenjax.tokenizer import Tokenizer
from tests.generation import EOS_IDS, VOCABULARY, assert_engine_free, backend
from tests.helpers import tiny

LONGEST, MOST_TOKENS = 2000, 40
Request = tuple[list[int], SamplingParams, str | None]


def engine_of(num_drafts: int, programs_by_kind: bool = False) -> Engine:
    """Two layers in float32 with a head, and the pages of one of the longest requests."""
    raw = tiny(vocab_size=VOCABULARY, max_position_embeddings=2048)
    config = replace(ModelConfig.from_dict(raw), mtp_num_hidden_layers=1)
    model = random_model(config, make_mesh())
    # Matrices ten times as large as they are made: a token is to depend on those before it.
    leaves = {name: leaf if name.endswith("norm") else leaf * 10 for name, leaf in by_name(model.state).items()}
    model = replace(model, state=from_names(model.state, leaves))
    sizes = {"max_model_len": 2048, "max_num_seqs": 4, "num_pages": 260, "page_size": 8, "num_steps": 4}
    engine = Engine(
        model,
        Tokenizer(backend(), eos_ids=EOS_IDS),
        EngineConfig(
            **sizes,
            max_num_batched_tokens=256,
            num_speculative_tokens=num_drafts,
            speculation_max_batch=4,
            programs_by_kind=programs_by_kind,
        ),
    )
    engine.warm_up(progress=False)
    return engine


def requests_of(count: int) -> list[Request]:
    """Lengths of 1 to 2,000 tokens, the short ones more often; a third begin as others do."""
    rng = random.Random(7)
    families = [[rng.randrange(VOCABULARY) for _ in range(LONGEST)] for _ in range(3)]
    requests = []
    for index in range(count):
        length = round(LONGEST ** (rng.random() ** 1.5))
        # One that fills the cache alone, pairs that do together, and among the others some of several blocks.
        length = {0: LONGEST, 30: 960, 31: 960, 60: 990, 61: 990}.get(index, max(length, 130 * (index % 6 == 0)))
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        if index % 3 == 0:
            shared = rng.randint(length // 2, length)
            prompt = rng.choice(families)[:shared] + prompt[shared:]
        temperature = rng.choice([0.0, 0.0, 0.7, 1.0])
        params = SamplingParams(
            temperature=temperature,
            seed=index,
            n=1 if temperature == 0 else rng.choice([1, 1, 2, 3]),
            max_tokens=rng.randint(1, MOST_TOKENS),
            top_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            frequency_penalty=rng.choice([0.0, 0.0, -0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            stop=rng.choice([None, None, "a", ["th", "e"]]),
            stop_token_ids=rng.choice([None, [9, 10]]),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]) if length < 100 else None,
            speculation=rng.random() < 0.8,
        )
        requests.append((prompt, params, rng.choice([None, None, "salt"])))
    return requests


def shown(output: RequestOutput) -> list[Any]:
    return [(part.token_ids, part.text, part.finish_reason, part.stop_reason) for part in output.outputs]


def alone(engine: Engine, request: Request) -> RequestOutput:
    """What a request gives with nothing in the cache and nobody beside it."""
    engine.clear_prefix_cache()
    prompt, params, salt = request
    engine.add_request("alone", prompt, params, cache_salt=salt)
    while engine.has_unfinished:
        outputs = engine.step()
    assert outputs[0].num_cached_tokens == 0
    return outputs[0]


def together(engine: Engine, requests: list[Request]) -> dict[int, RequestOutput]:
    """All requests, which come a few at a time; every tenth is aborted at some time."""
    rng = random.Random(1)
    coming = list(enumerate(requests))
    aborts: dict[int, list[str]] = {}
    outputs: dict[int, RequestOutput] = {}
    steps = 0
    while coming or engine.has_unfinished:
        for index, (prompt, params, salt) in coming[: rng.choice([0, 0, 1, 3])]:
            engine.add_request(str(index), prompt, params, cache_salt=salt)
            coming.pop(0)
            if index % 10 == 9:
                aborts.setdefault(steps + rng.randint(0, 60), []).append(str(index))
        arrived = engine.abort(aborts.pop(steps, [])) + engine.step()
        outputs |= {int(output.request_id): output for output in arrived}
        steps += 1
    return outputs


def check_equal_to_solo_runs(mixed: Engine, solo: Engine, count: int) -> None:
    requests, compiled = requests_of(count), list[str]()

    def listener(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        found = together(mixed, requests)
        stats = mixed.stats()
        expected = [alone(solo, request) for request in requests]
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []
    assert sorted(found) == list(range(count))
    num_aborted = 0
    for index, theirs in enumerate(expected):
        for ours, solo_part in zip(found[index].outputs, theirs.outputs, strict=True):
            if ours.finish_reason == "abort":
                num_aborted += 1
                assert ours.token_ids == solo_part.token_ids[: len(ours.token_ids)], index
        if not any(part.finish_reason == "abort" for part in found[index].outputs):
            assert shown(found[index]) == shown(theirs), index
            assert len(found[index].prompt_logprobs or []) == len(theirs.prompt_logprobs or [])
    # All that is to be shown did happen.
    assert stats.num_preemptions > 0
    assert stats.cached_prompt_tokens > 0
    assert num_aborted > 0
    if mixed.config.num_speculative_tokens:
        assert sum(stats.speculation.accepted) > 0
    for engine in mixed, solo:
        assert_engine_free(engine)
        engine.clear_prefix_cache()
        assert engine.stats().free_pages == (engine.config.num_pages,)


def check_memory(engine: Engine) -> None:
    """Every decode program writes the cache in place, and needs less than a layer of it beside."""
    cache = engine._slots.cache
    whole = cache.keys.nbytes + cache.values.nbytes
    for (name, size), program in engine._compiled.items():
        if name in engine.config.decode_kinds:
            memory = program.memory_analysis()
            assert memory.alias_size_in_bytes >= whole, size
            assert memory.temp_size_in_bytes < whole / cache.keys.shape[0], size
    assert np.isfinite(np.asarray(engine._slots.cache.keys)).all()


def test_100_mixed_requests_equal_their_solo_runs() -> None:
    engine = engine_of(2)
    check_equal_to_solo_runs(engine, engine, 100)
    check_memory(engine)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_500_mixed_requests_equal_their_solo_runs_without_speculation(num_drafts: int) -> None:
    # One alone takes many steps a call, which the programs for greedy calls are for.
    solo = engine_of(0, programs_by_kind=True)
    check_equal_to_solo_runs(engine_of(num_drafts), solo, 500)
    check_memory(solo)


@pytest.mark.slow
def test_100_mixed_requests_equal_their_solo_runs_with_speculation() -> None:
    solo = engine_of(2, programs_by_kind=True)
    check_equal_to_solo_runs(engine_of(0), solo, 100)
    check_memory(solo)
