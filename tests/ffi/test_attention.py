"""Attention over pages and over a call's own tokens, against float64 for one query at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi.attention import causal_attention, paged_attention, write_pages
from qwenjax_ffi.attention_gathered import gathered_attention, run_lengths
from qwenjax_ffi.implementation import KernelUnavailableError

LAYERS, PAGES, PAGE, MAX_PAGES = 2, 11, 4, 3
BATCH, Q_HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 16
LENGTHS = (10, 12, 1)  # a part of a last page, whole pages, one token
TABLE = np.array([[7, 2, 9], [0, 4, 3], [5, 10, 10]], np.int32)  # the last row's other entries belong to no one
WRITE, PAGED, CAUSAL = jax.jit(write_pages), jax.jit(paged_attention), jax.jit(causal_attention)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


K, V = (normal((BATCH, max(LENGTHS), KV_HEADS, HEAD_DIM), seed) for seed in (0, 1))
Q = normal((BATCH, max(LENGTHS), Q_HEADS, HEAD_DIM), 2)
POSITIONS = np.stack([np.where(np.arange(12) < length, np.arange(12), -1) for length in LENGTHS]).astype(np.int32)


def brute_force(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """q [batch, tokens, ...] at `positions` over k and v [batch, keys, ...] at 0, 1, 2, ...; NaN at padding."""
    out = np.full(q.shape, np.nan)
    for sequence, token in np.argwhere(positions >= 0):
        seen = positions[sequence, token] + 1
        for head in range(Q_HEADS):
            keys = k[sequence, :seen, head // (Q_HEADS // KV_HEADS)].astype(np.float64)
            scores = keys @ q[sequence, token, head].astype(np.float64) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            values = v[sequence, :seen, head // (Q_HEADS // KV_HEADS)].astype(np.float64)
            out[sequence, token, head] = weights / weights.sum() @ values
    return out


def assert_equal_where_valid(out: Any, expected: np.ndarray, positions: np.ndarray, tolerance: float = 1e-5) -> None:
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all(), "padding is finite, too"
    np.testing.assert_allclose(out[positions >= 0], expected[positions >= 0], rtol=tolerance, atol=tolerance)


def filled_caches(fill: float = np.nan, dtype: Any = np.float32) -> list[jax.Array]:
    """Pages that earlier sequences left full of `fill`, with K and V written over them in layer 1."""
    stale = jnp.full((LAYERS, PAGES, KV_HEADS, PAGE, HEAD_DIM), fill, dtype)
    return [WRITE(stale, values, TABLE, POSITIONS, 1) for values in (K, V)]


def test_paged_attention_equals_float64_and_stale_pages_do_not_leak() -> None:
    expected = brute_force(Q, K, V, POSITIONS)
    for fill in (np.nan, np.inf, 1e30):
        out = PAGED(Q, *filled_caches(fill), TABLE, POSITIONS, 1)
        assert_equal_where_valid(out, expected, POSITIONS)


def test_a_decode_step_attends_to_every_cached_token() -> None:
    last = np.array(LENGTHS, np.int32)[:, None] - 1
    out = PAGED(Q[:, :1], *filled_caches(), TABLE, last, np.array([1], np.int32))
    assert_equal_where_valid(out, brute_force(Q[:, :1], K, V, last), last)


def test_a_later_chunk_equals_the_whole_prompt() -> None:
    whole = PAGED(Q, *filled_caches(), TABLE, POSITIONS, 1)
    chunk = PAGED(Q[:, 6:], *filled_caches(), TABLE, POSITIONS[:, 6:], 1)
    assert_equal_where_valid(chunk, np.asarray(whole)[:, 6:], POSITIONS[:, 6:], 1e-6)


def test_all_padding_is_finite() -> None:
    nothing = np.full_like(POSITIONS, -1)
    assert np.isfinite(PAGED(Q, *filled_caches(), TABLE, nothing, 1)).all()
    assert np.isfinite(CAUSAL(Q, K, V, nothing)).all()


def test_causal_attention_equals_float64_and_attends_to_no_padding() -> None:
    padded_k, padded_v = K.copy(), V.copy()
    padded_k[POSITIONS < 0] = padded_v[POSITIONS < 0] = np.nan
    out = CAUSAL(Q, padded_k, padded_v, POSITIONS)
    assert_equal_where_valid(out, brute_force(Q, K, V, POSITIONS), POSITIONS)


def test_bfloat16_scores_and_sums_are_float32() -> None:
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (Q, K, V))
    expected = brute_force(*(np.asarray(a, np.float32) for a in (q, k, v)), POSITIONS)
    caches = filled_caches(dtype=jnp.bfloat16)
    for out in (CAUSAL(q, k, v, POSITIONS), PAGED(q, *caches, TABLE, POSITIONS, 1)):
        assert out.dtype == jnp.bfloat16
        # One rounding of the weights and one of the result, 2^-9 each, of values of up to 4.
        assert_equal_where_valid(out, expected, POSITIONS, 2**-6)


def test_write_pages_writes_its_positions_in_its_layer_and_nothing_else() -> None:
    before = normal((LAYERS, PAGES, KV_HEADS, PAGE, HEAD_DIM), 3)
    after = np.asarray(WRITE(jnp.asarray(before), K, TABLE, POSITIONS, 1))
    expected = before.copy()
    for sequence, token in np.argwhere(POSITIONS >= 0):
        page, slot = TABLE[sequence, POSITIONS[sequence, token] // PAGE], POSITIONS[sequence, token] % PAGE
        expected[1, page, :, slot] = K[sequence, token]
    np.testing.assert_array_equal(after, expected)


def test_a_position_past_the_page_table_is_not_written() -> None:
    before = jnp.zeros((LAYERS, PAGES, KV_HEADS, PAGE, HEAD_DIM), jnp.float32)
    past = np.full((BATCH, 12), MAX_PAGES * PAGE, np.int32)
    np.testing.assert_array_equal(WRITE(before, K, TABLE, past, 0), before)


@pytest.mark.parametrize("q_heads", [2, 4])
def test_query_heads_share_kv_heads_in_order(q_heads: int) -> None:
    # Values that are the number of their kv head come out as that number, whatever the weights are.
    v = np.broadcast_to(np.arange(KV_HEADS, dtype=np.float32)[:, None], V.shape)
    out = np.asarray(CAUSAL(Q[:, :, :q_heads], K, v, np.maximum(POSITIONS, 0)))
    expected = np.arange(q_heads) // (q_heads // KV_HEADS)
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None], out.shape), atol=1e-6)


GATHERED = jax.jit(partial(gathered_attention, implementation="xla"))


@pytest.mark.parametrize("fill", [np.nan, np.inf, 1e30])
def test_gathered_pages_give_the_same_and_stale_ones_do_not_leak(fill: float) -> None:
    out = GATHERED(Q, *filled_caches(fill), TABLE, POSITIONS, 1)
    assert_equal_where_valid(out, brute_force(Q, K, V, POSITIONS), POSITIONS)
    last = np.array(LENGTHS, np.int32)[:, None] - 1
    out = GATHERED(Q[:, :1], *filled_caches(fill), TABLE, last, np.array([1], np.int32))
    assert_equal_where_valid(out, brute_force(Q[:, :1], K, V, last), last)
    idle = np.array([[9], [-1], [-1]], np.int32)
    out = GATHERED(Q[:, :1], *filled_caches(fill), TABLE, idle, 1)
    assert_equal_where_valid(out, brute_force(Q[:, :1], K, V, idle), idle)


@pytest.mark.parametrize("tokens", [1, 3, 80])
@pytest.mark.parametrize("newest", [900, 1023, 1024, 4000])
def test_gathered_runs_hold_the_longest_sequence(tokens: int, newest: int) -> None:
    """Runs of 1,024, 2,048, 4,096 and 4,160 keys; many query rows and few, which are folded."""
    check_against_reference(tokens, newest, np.float32, GATHERED, 1e-5)


def check_against_reference(tokens: int, newest: int, dtype: Any, attention: Any, tolerance: float) -> None:
    page, max_pages, batch = 64, 65, 2
    rng = np.random.default_rng(newest)
    table = rng.permutation(2 * max_pages).reshape(batch, max_pages).astype(np.int32)
    shape = (2, 2 * max_pages, 2, page, 64)
    caches = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2)]
    q = jnp.asarray(rng.normal(size=(batch, tokens, 8, 64)), dtype)
    ends = np.array([newest, newest // 3])
    positions = (ends[:, None] - tokens + 1 + np.arange(tokens)).astype(np.int32)
    positions[1, : tokens // 2] = -1
    expected = np.asarray(
        jax.jit(partial(paged_attention, implementation="reference"))(q, *caches, table, positions, 1)
    )
    out = attention(q, *caches, table, positions, 1)
    assert_equal_where_valid(out, expected.astype(np.float32), positions, tolerance)


def test_runs_double_up_to_the_longest_sequence() -> None:
    assert run_lengths(640, 64) == [16, 32, 64, 128, 256, 512, 640]
    assert run_lengths(16, 64) == [16]
    assert run_lengths(3, 64) == [3]
    assert run_lengths(2, 2048) == [1, 2]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="both are there")
@pytest.mark.parametrize("form", ["kernel", "prefill_kernel", "cudnn"])
def test_a_form_without_a_gpu_is_an_error_that_says_so(form: Any) -> None:
    with pytest.raises(KernelUnavailableError, match=f"paged_attention: no {form} here: the backend is cpu"):
        paged_attention(Q, *filled_caches(), TABLE, POSITIONS, 1, implementation=form)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 512])
@pytest.mark.parametrize("newest", [700, 4000])
def test_cudnn_equals_the_reference(tokens: int, newest: int) -> None:
    cudnn = jax.jit(partial(paged_attention, implementation="cudnn"))
    check_against_reference(tokens, newest, jnp.bfloat16, cudnn, 2e-2)
