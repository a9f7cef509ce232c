"""Sorting and adding up the experts' rows on a GPU, against the references: the same bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax_ffi.expert_parallel import ExpertWeights, local_experts
from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.implementation import KernelUnavailableError
from qwenjax_ffi.routing import sort_rows

SORT = jax.jit(sort_rows, static_argnums=3, static_argnames="implementation")
SUM = jax.jit(sum_rows, static_argnames=("dtype", "implementation"))
TOKENS = [1, 2, 127, 128, 129, 513, 4097, 65537]
EXPERTS, FIRST, LOCAL = 128, 32, 32


def routings(tokens: int, top_k: int) -> dict[str, np.ndarray]:
    """ids int32 [tokens, top_k] of 128 experts, of which a rank has 32 to 63."""
    draw = np.random.default_rng(tokens)
    random = np.argsort(draw.random((tokens, EXPERTS)), axis=1)[:, :top_k].astype(np.int32)
    return {
        "random": random,
        "padded": np.where(draw.random((tokens, 1)) < 0.3, -1, random),
        "no experts here": np.where((random >= FIRST) & (random < FIRST + LOCAL), 0, random),
        "all to one expert": np.full((tokens, top_k), FIRST + LOCAL - 1, np.int32),
        "all is padding": np.full((tokens, top_k), -1, np.int32),
    }


def assert_sorted(ids: np.ndarray, first: int, local: int, name: str) -> None:
    """Every result, row_token and row_weight as far as there are rows, is that of numpy's stable sort."""
    weights = np.random.default_rng(0).random(ids.shape).astype(np.float32)
    results = SORT(ids, weights, jnp.int32(first), local, implementation="kernel")
    row_token, group_sizes, row_weight, token_rows = map(np.asarray, results)
    here = (ids.ravel() >= first) & (ids.ravel() < first + local)
    group = np.where(here, ids.ravel() - first, local)
    order, rows = np.argsort(group, kind="stable"), here.sum()
    expected = np.empty_like(order)
    expected[order] = np.arange(order.size)
    np.testing.assert_array_equal(group_sizes, np.bincount(group, minlength=local + 1)[:local], err_msg=name)
    np.testing.assert_array_equal(row_token[:rows], order[:rows] // ids.shape[1], err_msg=name)
    np.testing.assert_array_equal(row_weight[:rows], weights.ravel()[order[:rows]], err_msg=name)
    np.testing.assert_array_equal(token_rows.ravel(), np.where(here, expected, -1), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("top_k", [1, 8, 16])
def test_rows_are_sorted_by_expert_stable_by_token(tokens: int, top_k: int) -> None:
    for name, ids in routings(tokens, top_k).items():
        assert_sorted(ids, FIRST, LOCAL, name)


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "local"), [(0, 1), (0, 128), (127, 1), (3, 37), (0, 512)])
@pytest.mark.parametrize("tokens", [129, 4097])
def test_any_share_of_the_experts_is_sorted(first: int, local: int, tokens: int) -> None:
    ids = np.random.default_rng(1).integers(-1, max(EXPERTS, local), (tokens, 8)).astype(np.int32)
    assert_sorted(ids, first, local, "random")


@pytest.mark.gpu
def test_sorted_rows_are_those_of_the_reference() -> None:
    for tokens in (129, 4097):
        ids = routings(tokens, 8)["padded"]
        weights = np.random.default_rng(0).random(ids.shape).astype(np.float32)
        ours, reference = (SORT(ids, weights, FIRST, LOCAL, implementation=name) for name in ("kernel", "reference"))
        rows = int(reference.group_sizes.sum())
        for result, expected in zip(ours, reference, strict=True):
            stop = rows if result.shape == (ids.size,) else None
            np.testing.assert_array_equal(result[:stop], expected[:stop])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "top_k", "features", "dtype"),
    [
        (1, 8, 4096, jnp.bfloat16),
        (2, 8, 2048, jnp.float32),
        (127, 16, 264, jnp.bfloat16),
        (128, 1, 2048, jnp.bfloat16),
        (129, 10, 8, jnp.float32),
        (1025, 8, 2888, jnp.bfloat16),
        (4097, 8, 4096, jnp.float32),
        (4097, 1, 4096, jnp.bfloat16),
        (65537, 8, 2048, jnp.bfloat16),
        (65537, 16, 264, jnp.float32),
    ],
)
def test_sums_are_those_of_the_reference_to_the_bit_and_read_no_row_of_padding(
    tokens: int, top_k: int, features: int, dtype: Any
) -> None:
    rows = jax.random.normal(jax.random.key(tokens), (tokens * top_k, features), jnp.bfloat16)
    for name, ids in routings(tokens, top_k).items():
        weights = np.ones(ids.shape, np.float32)
        sorted_rows = SORT(ids, weights, FIRST, LOCAL, implementation="kernel")
        poisoned = jnp.where(jnp.arange(ids.size)[:, None] < sorted_rows.group_sizes.sum(), rows, jnp.nan)
        ours, expected = (
            SUM(poisoned, sorted_rows.token_rows, dtype=dtype, implementation=implementation)
            for implementation in ("kernel", "reference")
        )
        assert ours.dtype == dtype
        bits = jnp.uint16 if dtype == jnp.bfloat16 else jnp.uint32
        same = jax.lax.bitcast_convert_type(ours, bits) == jax.lax.bitcast_convert_type(expected, bits)
        assert bool(same.all()), name
        assert bool(jnp.isfinite(ours).all()), name


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_added() -> None:
    rows = jnp.arange(524289).astype(jnp.bfloat16)[:, None] * jnp.ones(4096, jnp.bfloat16)
    token_rows = jnp.asarray([[524288, 1], [-1, 524287], [2, 3]], jnp.int32)
    out = np.asarray(SUM(rows, token_rows, implementation="kernel"))
    wide = np.arange(524289).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(out, np.array([wide[524288] + 1, wide[524287], 5])[:, None] * np.ones(4096))


@pytest.mark.gpu
def test_local_experts_give_the_same_twice_whatever_the_memory_held() -> None:
    tokens, top_k, hidden, width, local = 300, 8, 256, 128, 32
    x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    w13 = jax.random.normal(jax.random.key(1), (1, local, 2 * width, hidden), jnp.bfloat16) * jnp.bfloat16(0.1)
    w2 = jax.random.normal(jax.random.key(2), (1, local, hidden, width), jnp.bfloat16) * jnp.bfloat16(0.1)
    weights = jax.random.uniform(jax.random.key(3), (tokens, top_k))
    ids = routings(tokens, top_k)["padded"]
    run = jax.jit(lambda *a: local_experts(*a[:3], ExpertWeights(a[3], a[4], 0), FIRST))
    results = []
    for fill in (np.nan, 1e9):
        poison = jax.block_until_ready([jnp.full((1 << 20,), fill, jnp.float32) for _ in range(16)])
        del poison
        results.append(np.asarray(run(x, jnp.asarray(ids), weights, w13, w2)).astype(np.float32))
    np.testing.assert_array_equal(*results)
    assert np.isfinite(results[0]).all()
    here = ((ids >= FIRST) & (ids < FIRST + LOCAL)).any(axis=1)
    assert (results[0][~here] == 0).all()
    assert (results[0][here] != 0).any(axis=1).all()


def test_asking_for_a_kernel_on_a_cpu_is_an_error_that_says_why() -> None:
    ids, weights = jnp.zeros((2, 2), jnp.int32), jnp.ones((2, 2))
    with pytest.raises(KernelUnavailableError, match="sort_rows: no kernel here: the backend is cpu"):
        sort_rows(ids, weights, 0, 4, implementation="kernel")
    with pytest.raises(KernelUnavailableError, match="sum_rows: no kernel here: rows are float32 and sums float32"):
        sum_rows(jnp.ones((4, 8)), ids, implementation="kernel")
    with pytest.raises(KernelUnavailableError, match="sum_rows: no kernel here: 2 rows a token of 12 features"):
        sum_rows(jnp.ones((4, 12), jnp.bfloat16), ids, implementation="kernel")
    with pytest.raises(ValueError, match=r"ids are \[2, 2\] and weights \[4\]"):
        sort_rows(ids, jnp.ones(4), 0, 4)
