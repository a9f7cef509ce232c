"""Two-shot all-reduce kernels on emulated ranks, against their definition in numpy: one launch after the other."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from qwenjax_kernels.heap_layout import TIMED_OUT, HeapLayout
from tests.kernels.compiling import compile_case
from tests.kernels.ptx_emulator import EmulationError
from tests.kernels.ptx_ranks import EmulatedRanks

COMPILE = Path(__file__).with_name("compile_all_reduce.py")
BF16 = np.dtype(ml_dtypes.bfloat16)
RANKS, TOP_K, LAUNCHES = 2, 8, 2


def added_up(rows: np.ndarray, token_rows: np.ndarray) -> np.ndarray:
    total = np.zeros((len(token_rows), rows.shape[1]), np.float32)
    for choice in token_rows.T:
        total += np.where((choice >= 0)[:, None], rows[choice].astype(np.float32), 0)
    return total.astype(BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "tokens", "features", "norm"),
    [("two_shot", 1, 6000, False), ("two_shot", 2, 2880, True), ("two_shot of rows", 2, 4096, True)],
)
def test_sums_of_ranks_are_those_of_float32(algorithm: str, tokens: int, features: int, norm: bool) -> None:
    from tests.kernels.gpu_ranks import DTYPES, AllReduce

    elements, of_rows = tokens * features, algorithm == "two_shot of rows"
    _, ptx = compile_case(COMPILE, (algorithm, RANKS, "bfloat16", elements, features * norm), "sm_90a")
    sums = {"top_k": TOP_K, "features": features} if of_rows else {}
    kernel = AllReduce(
        ranks=RANKS, dtype=DTYPES["bfloat16"][0], elements=elements, algorithm="two_shot", row=features * norm, **sums
    )
    ranks = EmulatedRanks(RANKS, HeapLayout(RANKS).num_bytes)
    draw = np.random.default_rng(elements)
    for seed in range(LAUNCHES):
        residual, weight = (
            draw.normal(0, 1, (tokens, features)).astype(BF16),
            draw.normal(1, 0.1, features).astype(BF16),
        )
        total = np.zeros((tokens, features), np.float32)
        outs, arguments = [], []
        for table in ranks.tables:
            x = draw.normal(0, 1, (3 * tokens if of_rows else tokens, features)).astype(BF16)
            named = draw.integers(-5, 3 * tokens, (tokens, TOP_K)).clip(-1).astype(np.int32)
            total += (added_up(x, named) if of_rows else x).astype(np.float32)
            outs.append([np.full((tokens, features), np.nan, BF16) for _ in range(1 + norm)])
            operands = [ranks.put(x), table, *([ranks.put(named)] if of_rows else [])]
            operands += [ranks.put(value.copy()) for value in (residual, weight)] if norm else []
            arguments.append([*operands, *map(ranks.put, outs[-1])])
        ranks.launch(ptx, kernel.grid, arguments, seed)
        expected = total.astype(BF16)
        if norm:
            expected = (residual.astype(np.float32) + expected.astype(np.float32)).astype(BF16)
        wide = expected.astype(np.float64)
        scaled = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(BF16).astype(np.float64)
        for out, *normed in outs:
            np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
            for found in normed:
                # Rounded twice to bf16; where the norm lies between two of its values, either.
                np.testing.assert_allclose(found.astype(np.float64), scaled * weight.astype(np.float64), rtol=2.0**-6)


def test_a_kernel_traps_only_once_its_failure_record_and_the_peers_abort_words_are_written() -> None:
    _, ptx = compile_case(COMPILE.with_name("compile_failing_waits.py"), 64, "sm_90a")
    for seed in range(10):
        ranks = EmulatedRanks(2, HeapLayout.inboxes)
        with pytest.raises(EmulationError, match="the kernel gave up"):
            ranks.launch(ptx, 1, [[ranks.tables[0]]], seed)
        assert ranks.records[0].view(np.uint32)[:3].tolist() == [TIMED_OUT, 1, 1]  # for rank 1, in collective 1
        assert [heap.view(np.uint32)[HeapLayout.abort // 4] for heap in ranks.heaps] == [1, 1]
