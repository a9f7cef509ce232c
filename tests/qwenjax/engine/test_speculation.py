"""Speculative decoding changes how many steps an output takes and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwenjax import LLM, RequestOutput, SamplingParams
from qwenjax.config import ModelConfig
from qwenjax.engine import build
from qwenjax.engine.engine import EngineConfig
from qwenjax.outputs import SpeculationStats
from tests.generation import (
    EOS_IDS,
    VOCABULARY,
    add_tokenizer,
    assert_all_free,
    greedy,
    random_ids,
    small_llm,
    write_folder,
)
from tests.helpers import random_tensors, tiny, write_checkpoint

NUM_DRAFTS = 3
X = 100  # an id that biases force
RAW = tiny(vocab_size=VOCABULARY, num_hidden_layers=2)


def with_head(folder: Path) -> Path:
    """A checkpoint of random weights with a head of random weights."""
    hidden = RAW["hidden_size"]
    layer = random_tensors(tiny(vocab_size=VOCABULARY, num_hidden_layers=1), seed=1)
    head = {name.replace("model.", "mtp.", 1): tensor for name, tensor in layer.items() if "layers.0" in name}
    rng = np.random.default_rng(2)
    head["mtp.fc.weight"] = rng.normal(0, 0.2, (hidden, 2 * hidden)).astype(np.float32)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    return add_tokenizer(write_checkpoint(folder, RAW, random_tensors(RAW) | head))


# What each draws is decided by the model alone (greedy, sampled) or by biases, under which every draft is right.
PARAMS = {
    "greedy": greedy(30),
    "sampled": SamplingParams(temperature=0.7, seed=11, max_tokens=30, ignore_eos=True, logprobs=2),
    "truncated": SamplingParams(
        temperature=1.0, seed=3, top_k=8, top_p=0.9, min_p=0.01, max_tokens=20, ignore_eos=True
    ),
    "penalised": SamplingParams(
        temperature=0.8, seed=5, max_tokens=25, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2
    ),
    "several": SamplingParams(temperature=0.9, seed=6, n=2, max_tokens=12, ignore_eos=True),
    "forced": greedy(21, logit_bias={X: 1e4}),
    "one token": greedy(1, logit_bias={X: 1e4}),
    "two tokens": greedy(2, logit_bias={X: 1e4}),
    "eos within accepted drafts": SamplingParams(
        temperature=0, max_tokens=40, min_tokens=6, logit_bias={EOS_IDS[0]: 2e4, X: 1e4}
    ),
    "stop id within accepted drafts": SamplingParams(
        temperature=0, max_tokens=40, min_tokens=9, stop_token_ids=[7], logit_bias={7: 2e4, X: 1e4}
    ),
    "to the context's end": greedy(None, logit_bias={X: 1e4}),
}


def run(llm: LLM, names: list[str], **changes: bool) -> list[RequestOutput]:
    prompts = [random_ids(5 + 7 * place, seed=4) for place in range(len(names))]  # up to 75 tokens: five chunks
    return llm.generate(prompts, [replace(PARAMS[name], **changes) for name in names])


def drawn(outputs: list[RequestOutput]) -> list[list[tuple[list[int], str, str | None, int | str | None]]]:
    return [[(p.token_ids, p.text, p.finish_reason, p.stop_reason) for p in output.outputs] for output in outputs]


def speculating_llm(folder: Path, **changes: int) -> LLM:
    """Of few programs: prompts in chunks of 16 tokens alone."""
    return small_llm(folder, **{"max_num_batched_tokens": 16, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("with-head"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[RequestOutput]:
    """Every request of PARAMS without speculation."""
    return run(speculating_llm(folder, num_speculative_tokens=0, max_num_seqs=1), list(PARAMS))


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return speculating_llm(folder, num_speculative_tokens=NUM_DRAFTS)


@pytest.fixture
def speculating(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_all_free(shared)


def test_outputs_equal_those_without_speculation(speculating: LLM, plain: list[RequestOutput]) -> None:
    outputs = run(speculating, list(PARAMS))
    assert drawn(outputs) == drawn(plain)
    for output, expected in zip(outputs, plain, strict=True):
        if output.outputs[0].logprobs is not None:
            for ours, theirs in zip(output.outputs[0].logprobs, expected.outputs[0].logprobs or [], strict=True):
                assert list(ours) == list(theirs)
                ours_values, values = ([entry.logprob for entry in table.values()] for table in (ours, theirs))
                np.testing.assert_allclose(ours_values, values, atol=1e-4)


def test_outputs_alone_equal_those_in_a_batch(speculating: LLM, plain: list[RequestOutput]) -> None:
    for name in ("greedy", "penalised", "eos within accepted drafts"):
        place = list(PARAMS).index(name)
        alone = speculating.generate([random_ids(5 + 7 * place, seed=4)], PARAMS[name])
        assert drawn(alone) == drawn(plain[place : place + 1])


@pytest.mark.parametrize(("data", "model"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_mesh_draws_the_same(folder: Path, plain: list[RequestOutput], data: int, model: int) -> None:
    llm = speculating_llm(folder, num_speculative_tokens=2, data_parallel=data, model_parallel=model, max_num_seqs=1)
    assert drawn(run(llm, list(PARAMS))) == drawn(plain)
    assert llm.speculation is not None
    assert llm.speculation.accepted[0] > 0


def test_right_drafts_are_accepted_whole_and_wrong_ones_at_once(speculating: LLM) -> None:
    forced, sampled = (
        speculating.generate([random_ids(9)], PARAMS[name])[0].speculation for name in ("forced", "sampled")
    )
    assert forced is not None
    assert sampled is not None
    # 21 tokens: one by prefill, then 4 a step; the last step ends with its fourth.
    assert (forced.steps, forced.tokens) == (5, 20)
    assert forced.accepted == [5, 5, 5]
    assert forced.acceptance == [1.0, 1.0, 1.0]
    assert forced.mean_length == 4.0
    # A head of random weights guesses little, and a later draft is never accepted without those before it.
    assert sampled.tokens == 29
    assert sampled.steps > 29 / 2
    assert sampled.accepted == sorted(sampled.accepted, reverse=True)
    assert sampled.tokens == sampled.steps + sum(sampled.accepted)


def test_a_request_may_go_without_drafts(speculating: LLM, plain: list[RequestOutput]) -> None:
    alone = run(speculating, ["greedy"], speculation=False)[0]
    assert alone.speculation is None
    mixed = speculating.generate([random_ids(5, seed=4)] * 2, [PARAMS["greedy"], greedy(30, speculation=False)])
    assert mixed[0].speculation is not None
    assert mixed[0].speculation.steps > 0
    assert mixed[1].speculation is None
    assert drawn([alone]) == drawn(mixed[:1]) == drawn(mixed[1:]) == drawn(plain[:1])


def test_above_its_batch_speculation_switches_itself_off_and_comes_back_as_good(
    folder: Path, shared: LLM, plain: list[RequestOutput]
) -> None:
    llm = speculating_llm(folder, num_speculative_tokens=NUM_DRAFTS, speculation_max_batch=1)
    prompt = random_ids(5, seed=4)
    long, short = llm.generate([prompt, random_ids(12, seed=4)], [PARAMS["greedy"], greedy(9)])
    tokens = long.outputs[0].token_ids
    assert tokens == plain[0].outputs[0].token_ids
    # The short request never decoded alone; the long one did once the other had left, and then had drafts.
    assert short.speculation is not None
    assert short.speculation.steps == 0
    assert long.speculation is not None
    assert 0 < long.speculation.tokens <= len(tokens) - 9
    # The head ran along meanwhile: it fares just as after a prefill of all that was drawn without drafts.
    before = len(tokens) - long.speculation.tokens - 1
    fresh = shared.generate([[*prompt, *tokens[:before]]], greedy(len(tokens) - before))[0]
    assert fresh.outputs[0].token_ids == tokens[before:]
    assert fresh.speculation == long.speculation


@pytest.mark.parametrize(("slots", "limit"), [(64, 32), (32, 16), (32, 4), (3, 2), (1, 1)])
def test_drafts_have_a_program_at_every_batch_up_to_the_limit(slots: int, limit: int) -> None:
    sizes = {"max_model_len": 64, "num_pages": 8, "page_size": 16, "max_num_batched_tokens": 16, "num_steps": 2}
    config = EngineConfig(max_num_seqs=slots, num_speculative_tokens=2, speculation_max_batch=limit, **sizes)
    # A single sequence may be left in the highest slot.
    assert {batch for batch, drafts in config.decode_variants if drafts} == set(config.decode_batches)
    off = EngineConfig(max_num_seqs=slots, num_speculative_tokens=2, speculation_max_batch=0, **sizes)
    assert not any(drafts for _, drafts in off.decode_variants)


@pytest.mark.slow
def test_two_sequences_within_the_limit_draft_together(folder: Path) -> None:
    llm = speculating_llm(folder, num_speculative_tokens=NUM_DRAFTS, speculation_max_batch=2)
    outputs = llm.generate([random_ids(5), random_ids(6)], greedy(9, logit_bias={X: 1e4}))
    assert all(output.speculation is not None and output.speculation.tokens == 8 for output in outputs)


def test_without_a_head_drafts_are_off_by_default_and_an_error_when_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    headless = write_folder(tmp_path / "headless")
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 2, and .* has no multi-token-prediction head"):
        small_llm(headless, num_speculative_tokens=2)
    with caplog.at_level(logging.INFO, logger="qwenjax.engine.build"):
        llm = small_llm(headless, max_num_seqs=1, max_num_batched_tokens=16)
    assert [record.message for record in caplog.records if "head" in record.message] == [
        f"{headless} has no multi-token-prediction head: speculative decoding is off"
    ]
    assert llm.speculation is None
    assert llm.generate([[5]], greedy(3))[0].speculation is None


def test_stats_count_a_step_that_an_output_ended_only_as_far_as_it_went() -> None:
    stats = SpeculationStats.of(3)
    stats.add(4, finished=False)
    stats.add(2, finished=False)
    stats.add(2, finished=True)
    assert (stats.steps, stats.tokens) == (3, 8)
    assert stats.drafted == [3, 2, 2]
    assert stats.accepted == [3, 1, 1]
    assert stats.acceptance == [1.0, 0.5, 0.5]
    assert stats.mean_length == pytest.approx(8 / 3)


@pytest.mark.parametrize(("platform", "drafts"), [("cpu", 0), ("gpu", 1)])
def test_drafts_are_made_by_default_where_they_gain_time(folder: Path, platform: str, drafts: int) -> None:
    config = ModelConfig.from_folder(folder)
    assert build._num_drafts(folder, config, None, platform) == drafts
    assert build._num_drafts(folder, config, 2, platform) == 2
