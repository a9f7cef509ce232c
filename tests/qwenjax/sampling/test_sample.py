"""Draws: what they depend on, and their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwenjax.sampling import (
    SamplingArrays,
    SamplingRow,
    build_arrays,
    count_tokens,
    draw,
    gumbel_noise,
    likeliest,
    new_seed,
    process_logits,
    sample,
    truncated,
)
from qwenjax.sampling.noise import gumbel_from_bits
from qwenjax.sampling.process import may_move_the_maximum
from qwenjax.sampling_params import SamplingParams

VOCAB = 515
ROWS = 64  # the batch that most tests use, so that they share one compilation
PINNED = [1.5341629, 2.0357704, 0.25248614, 0.5308565]
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"min_p": 0.05, "logit_bias": {3: 2.0}},
    {"top_p": 0.5},
    {"top_k": 5, "min_tokens": 8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]


@jax.jit
def process_and_draw(logits, arrays, positions, counts):
    processed = process_logits(logits, arrays, positions, counts)
    return processed, draw(processed, arrays, positions)


PROCESS = jax.jit(process_logits)
SAMPLE = jax.jit(sample)
NOISE = jax.jit(gumbel_noise, static_argnums=3)


def make_row(seed: int = 7, sample_index: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, sample_index, prompt_len=2, end_ids=(0,))


def arrays_of(rows) -> SamplingArrays:
    return build_arrays(rows, num_end_ids=2, num_biases=2)


def mixed_rows() -> list[SamplingRow]:
    return [make_row(seed=100 + i, sample_index=i % 3, **OPTIONS[i % len(OPTIONS)]) for i in range(ROWS)]


def mixed_inputs():
    """Logits, positions and counts of ROWS rows, all different."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    positions = rng.integers(2, 40, ROWS).astype(np.int32)
    counts = count_tokens(rng.integers(0, VOCAB, (ROWS, 9)), rng.integers(0, VOCAB, (ROWS, 30)), VOCAB)
    return logits, positions, counts


def take_rows(tree, order):
    return jax.tree.map(lambda leaf: leaf[np.asarray(order)], tree)


def test_a_row_is_the_same_to_the_bit_in_any_batch_order_slot_and_padding():
    rows, inputs = mixed_rows(), mixed_inputs()

    def run(order: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows in `order`, padded with idle ones up to `size`: their processed logits and ids."""
        idle = size - len(order)
        batch = arrays_of([*(rows[i] for i in order), *[None] * idle])
        logits, positions, counts = take_rows(inputs, [*order, *[0] * idle])
        processed, ids = process_and_draw(logits, batch, positions, counts)
        return np.asarray(processed)[: len(order)], np.asarray(ids)[: len(order)]

    processed, ids = run(list(range(ROWS)), ROWS)
    assert len(set(ids.tolist())) > 20
    rng = np.random.default_rng(1)
    orders = [
        (rng.permutation(ROWS)[:length].tolist(), size) for length, size in [(3, 3), (33, 33), (20, ROWS), (64, 64)]
    ]
    for order, size in [*orders, *(([index], 1) for index in range(len(OPTIONS)))]:
        alone = run(order, size)
        np.testing.assert_array_equal(alone[0], processed[order])
        np.testing.assert_array_equal(alone[1], ids[order])


def test_positions_verified_in_one_pass_draw_as_one_at_a_time():
    slots, length = 16, ROWS // 16
    rows = mixed_rows()[:slots]
    logits, _, counts = mixed_inputs()
    start = np.arange(2, 2 + slots, dtype=np.int32)
    batch = jax.tree.map(jnp.asarray, arrays_of(rows))
    positions = (start[:, None] + np.arange(length, dtype=np.int32)).ravel()
    together = process_and_draw(logits, batch.repeat(length), positions, counts)[1]
    for step in range(length):
        one = take_rows((logits, counts), np.arange(slots) * length + step)
        ids = process_and_draw(one[0], batch, start + step, one[1])[1]
        np.testing.assert_array_equal(together.reshape(slots, length)[:, step], ids)


def test_rows_sharded_over_a_mesh_draw_as_on_one_device():
    logits, positions, counts = mixed_inputs()
    args = logits, arrays_of(mixed_rows()), positions, counts
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharded = jax.jit(jax.shard_map(sample, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    np.testing.assert_array_equal(sharded(*args), process_and_draw(*args)[1])


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_lowest_of_equal_ids(temperature):
    logits, positions, counts = mixed_inputs()
    logits[0] = 0
    logits[0, [400, 17, 300]] = 5.0
    rows = [make_row(temperature=temperature), *mixed_rows()[1:]]
    ids = process_and_draw(logits, arrays_of(rows), positions, counts)[1]
    assert ids[0] == 17
    assert ids.dtype == jnp.int32


def noise(high: int = 1, low: int = 2, sample_index: int = 3, position: int = 4, vocab_size: int = VOCAB) -> np.ndarray:
    seed = jnp.array([[high, low]], jnp.uint32)
    return np.asarray(NOISE(seed, jnp.array([sample_index]), jnp.array([position]), vocab_size))[0]


def test_each_part_of_the_key_changes_the_noise():
    variants = [noise(), noise(high=2), noise(low=1), noise(high=2, low=1), noise(sample_index=4), noise(position=3)]
    variants.append(noise(sample_index=4, position=3))
    for index, variant in enumerate(variants):
        for other in variants[:index]:
            assert (variant == other).mean() < 0.01
    np.testing.assert_array_equal(noise(), variants[0])


def test_noise_is_pinned():
    """Threefry on these key words gives these values in every version of JAX; a change would break seeds."""
    np.testing.assert_allclose(noise()[:4], PINNED, rtol=1e-5)


def test_noise_of_an_id_does_not_depend_on_the_vocabulary():
    np.testing.assert_array_equal(noise(vocab_size=160), noise()[:160])


def test_the_extreme_bits_give_finite_noise():
    bits = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    exact = -np.log(-np.log1p(-np.minimum((bits + 0.5) / 2**32, 1 - 2.0**-24)))
    np.testing.assert_allclose(gumbel_from_bits(bits), exact, rtol=1e-5)


def test_noise_is_finite_and_has_gumbel_mean_and_variance():
    seeds = jnp.stack([jnp.zeros(ROWS, jnp.uint32), jnp.arange(ROWS, dtype=jnp.uint32)], axis=1)
    values = np.asarray(NOISE(seeds, jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, jnp.int32), 1 << 15))
    assert np.isfinite(values).all()
    assert abs(values.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * values.size)
    assert abs(values.var() - np.pi**2 / 6) < 0.01
    # Steps of 2^-23 would put these 64 of 2^21 draws into 256 values, and rare ids would win too seldom.
    assert np.unique(np.sort(values.ravel())[-64:]).size == 64


def chi_square(observed: np.ndarray, probability: np.ndarray) -> tuple[float, int]:
    expected = probability * observed.sum()
    kept = expected > 0
    return float(((observed - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"logit_bias": {1: 1.0}}],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    """Chi-square over positions, seeds and sample indices, held to 5 standard deviations above its mean."""
    vocab, rows, rounds = 16, 512, 24
    logits = np.tile(np.linspace(-1.5, 1.5, vocab).astype(np.float32), (rows, 1))
    batch = arrays_of([make_row(seed=i // 4, sample_index=i % 4, **params) for i in range(rows)])
    draws = [np.asarray(SAMPLE(logits, batch, np.full(rows, 2 + i, np.int32))) for i in range(rounds)]
    observed = np.bincount(np.concatenate(draws), minlength=vocab)
    processed = np.asarray(PROCESS(logits, batch, np.full(rows, 2, np.int32)), np.float64)[0]
    weights = np.exp(processed - processed.max())
    statistic, freedom = chi_square(observed, weights / weights.sum())
    assert observed[weights == 0].sum() == 0
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    uniform = np.where(weights > 0, 1 / (weights > 0).sum(), 0)
    assert chi_square(observed, uniform)[0] > freedom + 20 * np.sqrt(2 * freedom), "the test must tell them apart"


def test_a_request_without_a_seed_gets_a_fresh_one():
    assert new_seed(SamplingParams(seed=11)) == 11
    drawn = {new_seed(SamplingParams()) for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**64 for seed in drawn)


def test_seeds_above_32_bits_are_told_apart():
    words = arrays_of([make_row(seed=5), make_row(seed=5 << 32), make_row(seed=2**64 - 1)]).seed
    assert words.tolist() == [[0, 5], [5, 0], [2**32 - 1, 2**32 - 1]]


def test_end_ids_are_recognised_on_the_device():
    batch = jax.tree.map(jnp.asarray, arrays_of([make_row(), None]))
    assert batch.is_end(jnp.array([0, 0])).tolist() == [True, False]
    assert batch.is_end(jnp.array([1, 1])).tolist() == [False, False]


@pytest.mark.parametrize("one", [{}, *(option for option in OPTIONS if "temperature" not in option)], ids=str)
def test_a_batch_of_greedy_rows_draws_what_processing_draws_whatever_one_of_them_asks_for(one):
    logits, positions, counts = mixed_inputs()
    logits[5] = np.nan
    logits[6] = 0
    logits[7, 9] = -0.0
    rows = [make_row(temperature=0.0) for _ in range(ROWS)]
    for changed in (one, {**one, "temperature": 0.0}):
        rows[3] = make_row(**changed)
        arrays = arrays_of(rows)
        drawn = jax.jit(sample)(logits, arrays, positions, counts)
        np.testing.assert_array_equal(drawn, process_and_draw(logits, arrays, positions, counts)[1])


def test_what_may_move_the_largest_logit_is_told_by_row():
    positions = jnp.full(6, 3, jnp.int32)
    stays = [make_row(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1), None]
    moves = [{"logit_bias": {3: 2.0}}, {"min_tokens": 8}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.2}]
    arrays = arrays_of([*stays, *(make_row(temperature=0.0, **option) for option in moves)])
    assert may_move_the_maximum(arrays, positions, VOCAB).tolist() == [False] * 2 + [True] * 4


def test_rows_that_only_draw_do_so_without_branches_as_with_them():
    rng = np.random.default_rng(5)
    logits = (4 * rng.normal(size=(ROWS, VOCAB))).astype(np.float32)
    logits[:, ::7] = 1.5  # ties
    positions = np.arange(3, 3 + ROWS, dtype=np.int32)
    params = [SamplingParams(**OPTIONS[i % 3], seed=i) for i in range(ROWS)]
    params[::8] = [SamplingParams(min_p=0.2, top_p=0.5, seed=1)] * len(params[::8])
    assert all(one.only_draws for one in params)
    arrays = arrays_of([SamplingRow(one, 100 + i, 0, 2, (0,)) for i, one in enumerate(params)])
    expected = SAMPLE(logits, arrays, positions)
    np.testing.assert_array_equal(jax.jit(truncated)(logits, arrays, positions), expected)
    of_greedy = [i for i, one in enumerate(params) if one.greedy]
    np.testing.assert_array_equal(likeliest(logits)[jnp.array(of_greedy)], expected[jnp.array(of_greedy)])


@pytest.mark.parametrize("changes", [OPTIONS[3], OPTIONS[5], OPTIONS[6], {"logprobs": 0}, {"frequency_penalty": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_that_ask_for_more_are_told(changes, temperature):
    assert not SamplingParams(**{**changes, "temperature": temperature}).only_draws
