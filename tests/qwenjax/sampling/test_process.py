"""Logits processing against transformers' processors and a float64 brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from qwenjax.sampling import SamplingArrays, SamplingRow, build_arrays, count_tokens, process_logits
from qwenjax.sampling_params import SamplingParams

VOCAB = 997
NUM_ROWS = 12
PROCESS = jax.jit(process_logits)


def make_row(prompt_len: int = 4, end_ids: tuple[int, ...] = (), **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed=7, sample_index=0, prompt_len=prompt_len, end_ids=end_ids)


def make_arrays(*rows: SamplingRow | None) -> SamplingArrays:
    return build_arrays(rows, num_end_ids=4, num_biases=8)


def process(logits, *rows, position=4, counts=None) -> np.ndarray:
    """The rows' processed logits, computed among idle rows so that most tests share one compilation."""
    idle = max(0, NUM_ROWS - len(rows))
    logits, counts = jax.tree.map(lambda leaf: jnp.pad(jnp.asarray(leaf), [(0, idle), (0, 0)]), (logits, counts))
    positions = jnp.full(len(rows) + idle, position, jnp.int32)
    return np.asarray(PROCESS(logits, make_arrays(*rows, *[None] * idle), positions, counts))[: len(rows)]


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


def brute_force_truncation(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The ids one row keeps, bool [vocab], in float64: min-p, then top-k, then top-p over what is left."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    keep = weights >= params.min_p
    if params.top_k > 0:
        keep &= scaled >= np.sort(scaled[keep])[-min(params.top_k, keep.sum())]
    share = np.where(keep, weights, 0) / weights[keep].sum()
    mass_above = np.array([share[scaled > value].sum() for value in scaled])
    return keep & ((mass_above < params.top_p) if params.top_p < 1 else True)


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"temperature": 0.7}, hf.TemperatureLogitsWarper(0.7)),
        ({"top_k": 1}, hf.TopKLogitsWarper(1)),
        ({"top_k": 20}, hf.TopKLogitsWarper(20)),
        ({"top_p": 0.8}, hf.TopPLogitsWarper(0.8)),
        ({"top_p": 0.05}, hf.TopPLogitsWarper(0.05)),
        ({"min_p": 0.1}, hf.MinPLogitsWarper(0.1)),
        ({"min_p": 1.0}, hf.MinPLogitsWarper(1.0)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_each_step_equals_transformers(params, processor):
    logits = random_logits(5)
    expected = processor(torch.zeros(5, 1, dtype=torch.long), torch.tensor(logits)).numpy()
    np.testing.assert_allclose(process(logits, *[make_row(**params)] * 5), expected, rtol=1e-6)
    assert not np.array_equal(expected, logits)


def test_repetition_penalty_equals_transformers():
    logits = random_logits(2)
    prompts, outputs = [[3, 5, 5], [1, 2]], [[9, 3], [2]]
    expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([[3, 5, 5, 9, 3], [1, 2, 2, 2, 2]]), torch.tensor(logits)
    )
    rows = [make_row(repetition_penalty=1.7)] * 2
    found = process(logits, *rows, counts=count_tokens(prompts, outputs, VOCAB))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_presence_and_frequency_count_the_output_only():
    logits = random_logits(1)
    counts = count_tokens([[3, 4]], [[4, 5, 5]], VOCAB)
    found = process(logits, make_row(presence_penalty=0.5, frequency_penalty=0.25), counts=counts)
    expected = logits.copy()
    expected[0, 4] -= 0.75
    expected[0, 5] -= 1.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_truncation_together_equals_float64_brute_force(seed):
    rng = np.random.default_rng(seed)
    params = [
        {
            "temperature": rng.choice([0.5, 1.0, 2.0]),
            "top_k": rng.choice([0, 1, 2, 20, 400, VOCAB, 10**6]),
            "top_p": rng.choice([1e-42, 0.3, 0.9, 0.999, 1.0]),
            "min_p": rng.choice([0.0, 0.0, 0.02, 0.5]),
        }
        for _ in range(12)
    ]
    logits = random_logits(12, seed=seed + 100)
    rows = [make_row(**options) for options in params]
    found = process(logits, *rows) > -np.inf
    expected = [brute_force_truncation(line, row.params) for line, row in zip(logits, rows, strict=True)]
    np.testing.assert_array_equal(found, expected)


def test_ties_with_the_last_id_kept_are_kept():
    logits = np.array([[0.0, -0.0, 1.0, -1.0, 1.0, -2.0]], np.float32)
    assert (process(logits, make_row(top_k=3)) > -np.inf).tolist() == [[True, True, True, False, True, False]]
    assert (process(logits, make_row(top_p=0.7)) > -np.inf).tolist() == [[True, True, True, False, True, False]]
    assert (process(logits, make_row(top_p=0.1)) > -np.inf).tolist() == [[False, False, True, False, True, False]]


def test_rows_without_options_pass_beside_rows_with_all():
    logits = random_logits(3)
    busy = make_row(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1,
        logit_bias={1: 5},
        min_tokens=3,
        end_ids=(2,),
    )
    counts = count_tokens([[1]] * 3, [[2]] * 3, VOCAB)
    found = process(logits, make_row(), busy, make_row(), counts=counts)
    np.testing.assert_array_equal(found[[0, 2]], logits[[0, 2]])


def test_bias_precedes_penalties_and_temperature():
    logits = np.zeros((1, VOCAB), np.float32)
    row = make_row(logit_bias={2: 4.0, 3: -4.0}, repetition_penalty=2.0, temperature=0.5)
    found = process(logits, row, counts=count_tokens([[2, 3]], [[]], VOCAB))
    assert found[0, 2] == 4.0 / 2 / 0.5
    assert found[0, 3] == -4.0 * 2 / 0.5


@pytest.mark.parametrize(("position", "banned"), [(4, True), (6, True), (7, False)])
def test_end_ids_cannot_be_drawn_before_min_tokens(position, banned):
    logits = random_logits(1)
    found = process(logits, make_row(prompt_len=4, min_tokens=3, end_ids=(5, 9)), position=position)
    assert (found[0, [5, 9]] == -np.inf).tolist() == [banned] * 2
    assert np.isfinite(np.delete(found[0], [5, 9])).all()


def test_min_tokens_holds_against_a_bias_for_the_end():
    row = make_row(min_tokens=1, end_ids=(5,), logit_bias={5: 100.0})
    assert process(random_logits(1), row)[0, 5] == -np.inf


def test_bfloat16_logits_are_processed_in_float32():
    logits = jnp.asarray(random_logits(1), jnp.bfloat16)
    found = process(logits, make_row(temperature=0.3))
    np.testing.assert_allclose(found, np.asarray(logits, np.float32) / np.float32(0.3), rtol=1e-6)


def test_a_vocabulary_of_qwen_size_is_truncated_exactly():
    logits = np.random.default_rng(3).normal(0, 2, (2, 151_936)).astype(np.float32)
    found = process(logits, make_row(top_p=0.9), make_row(top_k=20, top_p=0.95)) > -np.inf
    ordered = np.sort(logits[0].astype(np.float64))[::-1]
    share = np.exp(ordered - ordered[0])
    share /= share.sum()
    # The mass above the first id left out is 0.9 within the rounding of 28-bit weights.
    assert abs(share[: found[0].sum()].sum() - 0.9) < 1e-5
    assert found[0].sum() == (logits[0] >= ordered[found[0].sum() - 1]).sum()
    expected = brute_force_truncation(np.sort(logits[1])[-40:], SamplingParams(top_k=20, top_p=0.95))
    assert found[1].sum() == expected.sum()


def test_counts_added_on_the_device_equal_counts_of_the_whole_output():
    counts = count_tokens([[1], [2]], [[5], []], VOCAB)
    counts = jax.tree.map(jnp.asarray, counts)
    counts = counts.add(jnp.array([5, 6]), jnp.array([True, True])).add(jnp.array([7, 8]), jnp.array([True, False]))
    expected = count_tokens([[1], [2]], [[5, 5, 7], [6]], VOCAB)
    jax.tree.map(np.testing.assert_array_equal, counts, expected)


def test_a_row_that_overflows_its_table_is_named():
    with pytest.raises(ValueError, match="logit_bias holds 9 ids; the sampler's table holds 8"):
        make_arrays(make_row(logit_bias=dict.fromkeys(range(9), 1.0)))
    with pytest.raises(ValueError, match="stop_token_ids with EOS holds 5 ids; the sampler's table holds 4"):
        make_arrays(make_row(end_ids=(1, 2, 3, 4, 5)))
