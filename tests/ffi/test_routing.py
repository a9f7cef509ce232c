"""The router's choice, and the order of rows by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from qwenjax_ffi.routing import sort_rows, top_k_experts

EXPERTS, TOP_K = 8, 3
ROUTE = jax.jit(top_k_experts, static_argnums=(1, 2))
SORT = jax.jit(sort_rows, static_argnums=3)
NAN, INF = float("nan"), float("inf")


def test_softmax_over_all_experts_then_the_top_k() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (64, EXPERTS)).astype(np.float32)
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(-1, keepdims=True)
    expected_ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :TOP_K]
    expected = np.take_along_axis(probabilities, expected_ids, -1)
    for normalise in (False, True):
        weights, ids = ROUTE(logits, TOP_K, normalise)
        assert (weights.dtype, ids.dtype) == (jnp.float32, jnp.int32)
        np.testing.assert_array_equal(ids, expected_ids)
        scale = expected.sum(-1, keepdims=True) if normalise else 1
        np.testing.assert_allclose(weights, expected / scale, rtol=1e-5)


def test_bfloat16_logits_are_routed_in_float32() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(16, EXPERTS)), jnp.bfloat16)
    for ours, expected in zip(ROUTE(logits, TOP_K, True), ROUTE(logits.astype(jnp.float32), TOP_K, True), strict=True):
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2]),
        ([1, 5, 2, 5, 5, 0, 5, 0], [1, 3, 4]),
        ([9, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2]),
        ([-INF, -INF, 3, -INF, -INF, -INF, -INF, -INF], [2, 0, 1]),
        ([-0.0, 0.0, -0.0, 0.0, -1, -1, -1, -1], [0, 1, 2]),
        ([-1e38, 1e38, 0, 1e38, 0, 0, 0, 0], [1, 3, 0]),
    ],
)
def test_ties_go_to_the_lowest_id(row: list[float], ids: list[int]) -> None:
    assert ROUTE(np.array([row], np.float32), TOP_K, False)[1].tolist() == [ids]


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.float32, (4, EXPERTS), elements=st.sampled_from([0.0, -0.0, 1.0, -3.5, NAN, INF, -INF, 3e38])))
def test_ids_are_distinct_and_in_range_whatever_the_logits(logits: np.ndarray) -> None:
    for top_k in (TOP_K, EXPERTS):
        ids = np.asarray(ROUTE(logits, top_k, True)[1])
        assert all(len(set(row)) == top_k for row in ids.tolist())
        assert ids.min() >= 0
        assert ids.max() < EXPERTS


def check_sorted(ids: np.ndarray, first: int, count: int) -> None:
    weights = np.arange(ids.size, dtype=np.float32).reshape(ids.shape)  # which pair a row is
    rows = SORT(ids, weights, first, count)
    assert [leaf.dtype for leaf in rows] == [jnp.int32, jnp.int32, jnp.float32, jnp.int32]
    tokens, top_k = ids.shape
    pairs = [
        (expert - first, token * top_k + choice)
        for token, row in enumerate(ids.tolist())
        for choice, expert in enumerate(row)
        if expert >= 0 and first <= expert < first + count
    ]
    pairs.sort()
    choices = [choice for _, choice in pairs]
    assert rows.group_sizes.tolist() == [sum(expert == e for expert, _ in pairs) for e in range(count)]
    assert rows.row_weight.tolist()[: len(pairs)] == choices
    assert rows.row_token.tolist()[: len(pairs)] == [choice // top_k for choice in choices]
    expected = np.full(tokens * top_k, -1)
    expected[choices] = np.arange(len(choices))
    assert rows.token_rows.tolist() == expected.reshape(tokens, top_k).tolist()
    # Padding rows may be gathered by a reference: they point at tokens that are there.
    assert 0 <= int(rows.row_token.min()) <= int(rows.row_token.max()) < tokens


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_sort_rows_equals_brute_force(data: st.DataObject) -> None:
    tokens = data.draw(st.sampled_from([1, 17]))
    choice = st.integers(-1, EXPERTS - 1)
    ids = data.draw(arrays.arrays(np.int32, (tokens, TOP_K), elements=choice, fill=st.nothing()))
    first, count = data.draw(st.sampled_from([(0, 8), (0, 4), (4, 4), (3, 4)]))
    check_sorted(ids, first, count)


@pytest.mark.parametrize("expert", [-1, 0, 5])
def test_sort_rows_of_one_expert_or_none(expert: int) -> None:
    check_sorted(np.full((5, TOP_K), expert, np.int32), 4, 4)
