"""The head that ships with the small model is worth having, and the figure that says so cannot be faked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from qwenjax import LLM, SamplingParams
from qwenjax.outputs import SpeculationStats
from qwenjax.sharded_model import by_name, from_names

TINY = Path(__file__).parents[2] / "configs" / "tiny"
PROMPTS = [
    "The king went up to the city, and",
    "She opened the letter and read it slowly, for",
    "The ship had been three weeks at sea when",
    "At the foot of the mountain there was a",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        TINY, dtype="float32", num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=16, progress=False
    )


def accepted(llm: LLM, params: SamplingParams) -> tuple[list[list[int]], SpeculationStats]:
    outputs = llm.generate(PROMPTS, params)
    total = SpeculationStats.of(2)
    for output in outputs:
        assert output.speculation is not None
        total.drafted = [a + b for a, b in zip(total.drafted, output.speculation.drafted, strict=True)]
        total.accepted = [a + b for a, b in zip(total.accepted, output.speculation.accepted, strict=True)]
    return [output.outputs[0].token_ids for output in outputs], total


def test_the_head_is_accepted_and_one_of_shuffled_weights_is_not(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    tokens, trained = accepted(llm, params)
    assert trained.acceptance[0] > 0.5
    assert trained.acceptance[1] > 0.25

    rng = np.random.default_rng(0)
    model = llm._engine.model
    leaves = {
        name: jax.device_put(rng.permutation(np.asarray(leaf).reshape(-1)).reshape(leaf.shape), leaf.sharding)
        if name.startswith("mtp.")
        else leaf
        for name, leaf in by_name(model.state).items()
    }
    # The programs take the parameters as an argument, so that nothing is compiled anew.
    llm._engine.model = replace(model, state=from_names(model.state, leaves))
    try:
        same_tokens, shuffled = accepted(llm, params)
    finally:
        llm._engine.model = model
    assert same_tokens == tokens
    assert shuffled.acceptance[0] < 0.1
