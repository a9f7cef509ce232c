"""Sorting and adding up the experts' rows without a GPU: what it compiles to, and that PTX on an emulator."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cutlass import BFloat16, Float32

from qwenjax_kernels.sort_rows import MAX_TURNS, ONE_BLOCK_PAIRS, SortRows
from qwenjax_kernels.sum_rows import SumRows
from tests.kernels.compiling import compile_cases
from tests.kernels.ptx_emulator import launch

COMPILE = Path(__file__).with_name("compile_expert_rows.py")
Case = tuple[Any, ...]

# One block in three turns of the warps, experts in three groups of lanes; five chunks, the last one ragged.
SMALL: Case = ("sort_rows", 130, 16, 70)
CHUNKED: Case = ("sort_rows", 1366, 3, 37)
# Features that no number of warps divides, all rows at once; and the form for many tokens.
SUM: Case = ("sum_rows", 5, 8, 2888, "bfloat16")
SUM_MANY: Case = ("sum_rows", 1025, 3, 24, "float32")
FAST = (SMALL, CHUNKED, SUM, SUM_MANY)
SLOW: tuple[Case, ...] = (
    ("sort_rows", 1, 1, 1),
    ("sort_rows", 256, 16, 512),
    ("sort_rows", 16384, 8, 32),
    ("sort_rows", 65537, 16, 512),
    ("sum_rows", 64, 8, 2048, "bfloat16"),
    ("sum_rows", 16384, 8, 4096, "bfloat16"),
    ("sum_rows", 65537, 16, 4096, "float32"),
)


@functools.cache
def compiled(cases: tuple[Case, ...], architecture: str) -> tuple[str, dict[Case, str]]:
    """The compiler's remarks and the PTX of each."""
    remarks, texts = compile_cases(COMPILE, cases, architecture)
    return remarks, dict(zip(cases, texts, strict=True))


def check(cases: tuple[Case, ...], architecture: str) -> None:
    remarks, texts = compiled(cases, architecture)
    kernels = sum(ptx.count(".visible .entry") for ptx in texts.values())
    assert len(re.findall("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", remarks)) == kernels
    for case, ptx in texts.items():
        assert f".target {architecture}" in ptx
        wanted = ["ld.global.nc.v4.b32", "st.global.v4.b32"] if case[0] == "sum_rows" else ["match.any.sync.b32"]
        for instruction in wanted:
            assert instruction in ptx
        # Nothing whose result depends on an order: the only sums that blocks share are of integers in shared memory.
        assert "atom." not in ptx
        assert "red.global" not in ptx


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_compiles_without_spills_and_without_atomics_on_results(architecture: str) -> None:
    check(FAST, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_the_models_shapes_compile_without_spills(architecture: str) -> None:
    check(SLOW, architecture)


def sorted_pairs(ids: np.ndarray, first: int, experts: int) -> list[tuple[int, int]]:
    """(expert, pair) of this rank's experts, by expert, then by pair."""
    return sorted((e - first, pair) for pair, e in enumerate(ids.ravel().tolist()) if first <= e < first + experts)


POISON = -77


def emulated_sort(case: Case, ids: np.ndarray, first: int, seed: int) -> tuple[np.ndarray, ...]:
    """row_token, group_sizes, row_weight and token_rows, POISON where nothing was written; a pair's weight is its
    number."""
    _, tokens, top_k, experts = case
    ptx = compiled(FAST, "sm_90a")[1][case]
    chunks = SortRows(tokens=tokens, top_k=top_k, experts=experts).chunks
    weights = np.arange(ids.size, dtype=np.float32).reshape(ids.shape)
    results = (
        np.full(ids.size, POISON, np.int32),
        np.full(experts, POISON, np.int32),
        np.full(ids.size, POISON, np.float32),
        np.full(ids.shape, POISON, np.int32),
    )
    first_expert = np.asarray([first], np.int32)
    if chunks == 1:
        launch(ptx, [ids, weights, first_expert, *results], (1, 1), seed)
    else:
        counts = np.full((chunks, experts), POISON, np.int32)
        launch(ptx, [ids, first_expert, counts], (chunks, 1), seed, "_count_")
        launch(ptx, [ids, weights, first_expert, *results, counts], (chunks, 1), seed, "_place_")
    return results


@pytest.mark.parametrize(
    ("case", "routing"),
    [*((SMALL, routing) for routing in ("random", "one expert", "none here", "padding")), (CHUNKED, "random")],
    ids=str,
)
def test_emulated_rows_are_sorted_by_expert_and_padding_is_left_alone(case: Case, routing: str) -> None:
    _, tokens, top_k, experts = case
    first, draw = 20, np.random.default_rng(tokens)
    ids = {
        "random": draw.integers(-1, 128, (tokens, top_k)),
        "one expert": np.full((tokens, top_k), first + experts - 1),
        "none here": draw.integers(0, first, (tokens, top_k)),
        "padding": np.full((tokens, top_k), -1),
    }[routing].astype(np.int32)
    row_token, group_sizes, row_weight, token_rows = emulated_sort(case, ids, first, seed=tokens)
    pairs = sorted_pairs(ids, first, experts)
    choices = [pair for _, pair in pairs]
    assert row_weight[: len(pairs)].tolist() == choices
    assert row_token[: len(pairs)].tolist() == [pair // top_k for pair in choices]
    assert (row_token[len(pairs) :] == POISON).all()
    assert (row_weight[len(pairs) :] == POISON).all()
    assert group_sizes.tolist() == np.bincount([e for e, _ in pairs], minlength=experts).tolist()
    expected = np.full(ids.size, -1)
    expected[choices] = np.arange(len(pairs))
    assert token_rows.ravel().tolist() == expected.tolist()


@pytest.mark.parametrize("case", [SUM, SUM_MANY], ids=str)
def test_emulated_sums_are_float32_in_the_order_of_choices_and_read_no_other_row(case: Case) -> None:
    _, tokens, top_k, features, name = case
    draw = np.random.default_rng(tokens)
    rows = (draw.normal(size=(tokens * top_k, features)) * 2.0 ** draw.integers(-9, 9, (tokens * top_k, 1))).astype(
        ml_dtypes.bfloat16
    )
    token_rows = np.where(draw.random((tokens, top_k)) < 0.5, draw.permutation(tokens * top_k).reshape(tokens, -1), -1)
    token_rows = token_rows.astype(np.int32)
    token_rows[0] = -1
    rows[np.setdiff1d(np.arange(tokens * top_k), token_rows)] = np.nan
    out_dtype = BFloat16 if name == "bfloat16" else Float32
    kernel = SumRows(tokens=tokens, top_k=top_k, features=features, out_dtype=out_dtype)
    out = np.full((tokens, features), np.nan, ml_dtypes.bfloat16 if name == "bfloat16" else np.float32)
    blocks = min(kernel.blocks, 40)
    launch(compiled(FAST, "sm_90a")[1][case], [rows, token_rows, out], (blocks, 1))
    total = np.zeros((tokens, features), np.float32)
    for choice in token_rows.T:
        total += np.where((choice >= 0)[:, None], rows[np.maximum(choice, 0)].astype(np.float32), 0)
    written = blocks // kernel.slabs
    np.testing.assert_array_equal(out[:written], total[:written].astype(out.dtype))
    assert np.isnan(out[written:].astype(np.float32)).all()


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (256, 16), (513, 8), (16384, 8), (65537, 16), (1 << 20, 8)])
def test_chunks_cover_every_pair_once_and_fit_registers(tokens: int, top_k: int) -> None:
    kernel = SortRows(tokens=tokens, top_k=top_k, experts=128)
    assert (kernel.chunks == 1) == (tokens * top_k <= ONE_BLOCK_PAIRS)
    assert 1 <= kernel.turns <= MAX_TURNS
    assert (kernel.chunks - 1) * kernel.turns * 1024 < tokens * top_k <= kernel.chunks * kernel.turns * 1024


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SortRows(tokens=4, top_k=2, experts=513), "513 experts a rank; the kernel is for 1 to 512"),
        (lambda: SortRows(tokens=0, top_k=2, experts=8), "0 tokens of 2 choices"),
        (lambda: SumRows(tokens=4, top_k=33, features=64, out_dtype=BFloat16), "33 choices a token"),
        (lambda: SumRows(tokens=4, top_k=2, features=60, out_dtype=BFloat16), "60 features"),
        (lambda: SumRows(tokens=4, top_k=2, features=64, out_dtype=np.float16), "bfloat16 or float32, not"),
    ],
)
def test_what_the_kernels_are_not_for_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
