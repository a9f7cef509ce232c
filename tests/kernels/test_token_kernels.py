"""The kernels that take a token each, without a GPU: what they compile to, and that PTX on an emulator."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax_ffi.attention_inputs import attention_inputs
from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.norm import add_rms_norm
from qwenjax_ffi.routing import top_k_experts
from qwenjax_kernels.add_rms_norm import AddRmsNorm
from qwenjax_kernels.head_norms import WARPS as HEAD_WARPS
from qwenjax_kernels.head_norms import HeadNorms
from qwenjax_kernels.router_logits import WARPS as LOGITS_WARPS
from qwenjax_kernels.router_logits import RouterLogits
from qwenjax_kernels.top_k_experts import WARPS as TOKEN_WARPS
from qwenjax_kernels.top_k_experts import TopKExperts
from tests.kernels.compiling import compile_cases
from tests.kernels.ptx_emulator import launch

COMPILE = Path(__file__).with_name("compile_token_kernels.py")
EPS = 1e-6
Case = tuple[Any, ...]

# More vectors than threads; heads whose words fill two turns of a warp, the second in part; experts that a warp's lanes
# do not divide.
NORM: Case = ("add_rms_norm", 2, 2072)
HEADS: Case = ("head_norms", 3, 4, 2, 144)
ROUTE: Case = ("top_k_experts", 6, 72, 5, True)
SUM: Case = ("sum_rows_add_rms_norm", 3, 264, 10)  # more rows than are read at once
LOGITS: Case = ("router_logits", 18, 6, 520)  # a block more than its tokens fill, and vectors that lanes do not divide
FAST = (NORM, HEADS, ROUTE, SUM, LOGITS)
SLOW: tuple[Case, ...] = (
    ("add_rms_norm", 256, 2048),
    ("add_rms_norm", 64, 4096),
    ("add_rms_norm", 1, 64),
    ("sum_rows_add_rms_norm", 64, 2048, 8),
    ("sum_rows_add_rms_norm", 1, 4096, 32),
    ("head_norms", 256, 32, 4, 128),
    ("head_norms", 1, 64, 4, 128),
    ("head_norms", 1, 4, 2, 16),
    ("router_logits", 64, 128, 4096),
    ("router_logits", 1, 128, 2048),
    ("top_k_experts", 256, 128, 8, True),
    ("top_k_experts", 1, 512, 32, False),
)


@functools.cache
def compiled(cases: tuple[Case, ...], architecture: str) -> tuple[str, dict[Case, str]]:
    """The compiler's remarks and the PTX of each."""
    remarks, texts = compile_cases(COMPILE, cases, architecture)
    return remarks, dict(zip(cases, texts, strict=True))


@pytest.mark.parametrize(
    ("cases", "architecture"),
    [(FAST, "sm_90a"), pytest.param(FAST, "sm_100a", marks=pytest.mark.slow)]
    + [pytest.param(SLOW, architecture, marks=pytest.mark.slow) for architecture in ("sm_90a", "sm_100a")],
)
def test_compiles_without_spills(cases: tuple[Case, ...], architecture: str) -> None:
    remarks, texts = compiled(cases, architecture)
    assert len(re.findall("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", remarks)) == len(cases)
    assert all(f".target {architecture}" in ptx for ptx in texts.values())


def close(ours: np.ndarray, expected: Any) -> None:
    """bfloat16: nearly all bits are equal, since float32 statistics may differ in the last; none is further off."""
    ours, expected = ours.astype(np.float32), np.asarray(expected, np.float32)
    assert (ours == expected).mean() > 0.97
    np.testing.assert_allclose(ours, expected, rtol=2**-7, atol=2**-8)


def test_emulated_sums_and_norms_are_the_references() -> None:
    _, tokens, features = NORM
    draw = np.random.default_rng(0)
    residual, x = (draw.normal(size=(tokens, features)).astype(ml_dtypes.bfloat16) for _ in range(2))
    weight = draw.uniform(0.5, 1.5, (3, features)).astype(ml_dtypes.bfloat16)
    total, normed = (np.full_like(x, np.nan) for _ in range(2))
    layer = np.array([2], np.int32)
    launch(compiled(FAST, "sm_90a")[1][NORM], [residual, x, weight, layer, total, normed], (tokens, 1))
    expected = add_rms_norm(*map(jnp.asarray, (residual, x, weight)), EPS, 2)
    np.testing.assert_array_equal(total, expected[0])
    close(normed, expected[1])


def test_emulated_rows_are_added_up_before_the_sum_and_its_norm() -> None:
    _, tokens, features, top_k = SUM
    draw = np.random.default_rng(3)
    residual, rows = (draw.normal(size=(n, features)).astype(ml_dtypes.bfloat16) for n in (tokens, tokens * top_k))
    token_rows = np.where(draw.random((tokens, top_k)) < 0.6, draw.permutation(tokens * top_k).reshape(tokens, -1), -1)
    token_rows = token_rows.astype(np.int32)
    token_rows[1] = -1
    rows[np.setdiff1d(np.arange(tokens * top_k), token_rows)] = np.nan
    weight = draw.uniform(0.5, 1.5, (3, features)).astype(ml_dtypes.bfloat16)
    total, normed = (np.full_like(residual, np.nan) for _ in range(2))
    layer = np.array([1], np.int32)
    arrays = [residual, rows, token_rows, weight, layer, total, normed]
    launch(compiled(FAST, "sm_90a")[1][SUM], arrays, (tokens, 1))
    added = sum_rows(jnp.asarray(rows), jnp.asarray(token_rows), jnp.bfloat16)
    expected = add_rms_norm(jnp.asarray(residual), added, jnp.asarray(weight), EPS, 1)
    np.testing.assert_array_equal(total, expected[0])
    close(normed, expected[1])


def test_emulated_heads_are_normed_and_rotated_as_the_references() -> None:
    _, tokens, q_heads, kv_heads, head_dim = HEADS
    draw = np.random.default_rng(1)
    qkv = draw.normal(size=(1, tokens, (q_heads + 2 * kv_heads) * head_dim)).astype(ml_dtypes.bfloat16)
    norms = [draw.uniform(0.5, 1.5, (3, head_dim)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    angles = draw.uniform(0, 6, (1, tokens, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    results = [np.full((1, tokens, h, head_dim), np.nan, qkv.dtype) for h in (q_heads, kv_heads, kv_heads)]
    blocks = -(-tokens * (q_heads + 2 * kv_heads) // HEAD_WARPS)
    arrays = [qkv, *norms, np.array([1], np.int32), cos, sin, *results]
    launch(compiled(FAST, "sm_90a")[1][HEADS], arrays, (blocks, 1))
    expected = attention_inputs(*map(jnp.asarray, (qkv, *norms)), 1, EPS, jnp.asarray(cos), jnp.asarray(sin), kv_heads)
    for ours, wanted in zip(results[:2], expected[:2], strict=True):
        close(ours, wanted)
    np.testing.assert_array_equal(results[2], expected[2])


def test_emulated_routing_is_the_references_with_ties_nan_infinities_and_padding() -> None:
    _, tokens, experts, top_k, normalise = ROUTE
    logits = np.random.default_rng(2).normal(0, 3, (tokens, experts)).astype(np.float32)
    logits[1] = np.repeat(logits[1, :36], 2)[::-1]  # every probability twice
    logits[2] = 0
    logits[3, 40] = np.nan
    logits[4, [70, 5]] = np.inf, -np.inf
    valid = np.array([1, 1, 1, 1, 1, 0], np.int32)
    weights, ids = np.full((tokens, top_k), 7, np.float32), np.full((tokens, top_k), 7, np.int32)
    blocks = -(-tokens // TOKEN_WARPS)
    launch(compiled(FAST, "sm_90a")[1][ROUTE], [logits, valid, weights, ids], (blocks, 1))
    expected = top_k_experts(jnp.asarray(logits), top_k, normalise, jnp.asarray(valid))
    np.testing.assert_array_equal(ids, expected[1])
    assert (ids[5] == -1).all()
    np.testing.assert_allclose(weights, expected[0], rtol=1e-5)


def test_emulated_logits_are_the_matmuls_of_a_layer() -> None:
    _, tokens, experts, features = LOGITS
    draw = np.random.default_rng(3)
    x, weight = (
        draw.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((tokens, features), (3, experts, features))
    )
    logits = np.full((tokens, experts), np.nan, np.float32)
    blocks = (
        -(-experts // LOGITS_WARPS),
        -(-tokens // RouterLogits(tokens=tokens, experts=experts, features=features).block_tokens),
    )
    launch(compiled(FAST, "sm_90a")[1][LOGITS], [x, weight, np.array([1], np.int32), logits], blocks)
    expected = x.astype(np.float64) @ weight[1].astype(np.float64).T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RouterLogits(tokens=65, experts=8, features=64), "65 tokens"),
        (lambda: RouterLogits(tokens=1, experts=8, features=60), "rows of 60 features"),
        (lambda: AddRmsNorm(tokens=1, features=60, eps=EPS), "rows of 60 features"),
        (lambda: HeadNorms(tokens=1, q_heads=2, kv_heads=1, head_dim=258, eps=EPS), "head_dim is 258"),
        (lambda: TopKExperts(tokens=1, experts=8, top_k=9, normalise=True), "9 of 8 experts"),
    ],
)
def test_what_the_kernels_are_not_for_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
