"""The all-reduce kernels on GPUs without JAX: as many ranks as asked on the GPUs there are, one GPU being enough.

Ranks of one process that share a GPU run beside each other on streams of their own, with grids that leave room for all.
Those of several processes take turns on it, milliseconds each, and have it for themselves then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenjax_ffi.symmetric_memory_exchange import PeerError
from tests.ffi.gpu_processes import check_folder, most_ranks
from tests.kernels import all_reduce_cases as cases

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("gpu_ranks.py")
RESIDENT = 128  # blocks of all ranks that share a GPU
CANARY = 64  # bytes before and behind a result that must stay as they are


def make(ranks: int) -> Any:
    from tests.kernels.gpu_ranks import Ranks, call

    call("cuInit", 0)
    devices = call("cuDeviceGetCount")
    return Ranks({rank: rank % devices for rank in range(ranks)}, ranks)


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = make(request.param)
    yield made
    made.close()


CASES = [
    ("one_shot", "bfloat16", 1, 0),
    ("one_shot", "bfloat16", 1001, 1),
    ("one_shot", "float32", 2880, 3),
    ("two_shot", "bfloat16", 3, 0),
    ("two_shot", "bfloat16", 1001, 1),
    ("two_shot", "float16", 2880, 0),
    ("two_shot", "float32", 1_000_003, 0),
    ("two_shot", "bfloat16", 9_000_000, 0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_float32_in_rank_order_and_nothing_else_is_written(ranks: Any, case: tuple[Any, ...]) -> None:
    from tests.kernels.gpu_ranks import DTYPES, compiled

    algorithm, name, elements, offset = case
    dtype = DTYPES[name][1]
    values = np.random.default_rng(elements).normal(0, 1, (ranks.ranks, elements)).astype(dtype)
    total = cases.summed(values)
    kernel = compiled(ranks.ranks, name, elements, algorithm, max_blocks=RESIDENT // ranks.ranks)
    shift = offset * dtype.itemsize
    outs = {}
    for rank in ranks.local:
        padded = np.concatenate([np.zeros(offset, dtype), values[rank]])
        outs[rank] = ranks.put(rank, np.full(elements * dtype.itemsize + 2 * CANARY + shift, 0xAB, np.uint8))
        ranks.launch(kernel, rank, ranks.put(rank, padded) + shift, outs[rank] + CANARY + shift)
    ranks.synchronise()
    ranks.memory.check()
    for rank, out in outs.items():
        raw = ranks.get(out, (elements * dtype.itemsize + 2 * CANARY + shift,), np.uint8)
        assert (raw[: CANARY + shift] == 0xAB).all()
        assert (raw[-CANARY:] == 0xAB).all()
        bits = np.dtype(f"u{dtype.itemsize}")
        np.testing.assert_array_equal(
            raw[CANARY + shift : -CANARY].view(bits), total.view(bits), err_msg=f"rank {rank}"
        )


@pytest.mark.parametrize(("algorithm", "rows", "row"), [("one_shot", 5, 2880), ("two_shot", 300, 4096)])
def test_the_fused_form_adds_the_residual_and_normalises(ranks: Any, algorithm: str, rows: int, row: int) -> None:
    from tests.kernels.gpu_ranks import DTYPES, compiled

    dtype = DTYPES["bfloat16"][1]
    draw = np.random.default_rng(row)
    x = draw.normal(0, 1, (ranks.ranks, rows, row)).astype(dtype)
    residual, weight = draw.normal(0, 1, (rows, row)).astype(dtype), draw.normal(1, 0.1, row).astype(dtype)
    added = cases.with_residual(cases.summed(x), residual)
    kernel = compiled(ranks.ranks, "bfloat16", rows * row, algorithm, row, max_blocks=RESIDENT // ranks.ranks)
    outs = {}
    for rank in ranks.local:
        operands = [ranks.put(rank, value) for value in (x[rank], residual, weight)]
        outs[rank] = [ranks.empty(rank, 2 * rows * row) for _ in range(2)]
        ranks.launch(kernel, rank, *operands, *outs[rank])
    ranks.synchronise()
    ranks.memory.check()
    check_fused(ranks, outs, added, weight)


def check_fused(ranks: Any, outs: dict[int, list[int]], added: np.ndarray, weight: np.ndarray) -> None:
    """outs: addresses of the sums and of their norms, by rank; the norms' bits are the same on all."""
    normed = [ranks.get(norm, added.shape, added.dtype) for _, norm in outs.values()]
    for (rank, (out, _)), got in zip(outs.items(), normed, strict=True):
        found = ranks.get(out, added.shape, added.dtype)
        np.testing.assert_array_equal(cases.bits(found), cases.bits(added), err_msg=f"rank {rank}")
        cases.check_norm(got, added, weight, f"on rank {rank}")
        np.testing.assert_array_equal(cases.bits(got), cases.bits(normed[0]), err_msg=f"rank {rank}")


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "with residual and norm"])
@pytest.mark.parametrize(("tokens", "features"), [(1, 4096), (77, 2880), (1000, 2048), (3000, 64)])
def test_rows_are_added_up_as_they_are_sent(ranks: Any, tokens: int, features: int, fused: bool) -> None:
    from tests.kernels.gpu_ranks import DTYPES, compiled

    dtype = DTYPES["bfloat16"][1]
    rows, named = cases.rows_of_tokens(tokens, ranks.ranks, tokens, features, dtype)
    draw = np.random.default_rng(features)
    residual, weight = draw.normal(0, 1, (tokens, features)).astype(dtype), draw.normal(1, 0.1, features).astype(dtype)
    kernel = compiled(
        ranks.ranks, "bfloat16", tokens * features, "two_shot", features if fused else 0,
        top_k=cases.TOP_K, features=features, max_blocks=RESIDENT // ranks.ranks,
    )  # fmt: skip
    outs = {}
    for rank in ranks.local:
        outs[rank] = [ranks.put(rank, np.full((tokens, features), np.nan, dtype)) for _ in range(1 + fused)]
        others = [ranks.put(rank, value) for value in (residual, weight)] if fused else []
        ranks.launch(kernel, rank, ranks.put(rank, rows[rank]), *others, *outs[rank], ranks.put(rank, named[rank]))
    ranks.synchronise()
    ranks.memory.check()
    total = cases.summed(cases.added_up(rows, named))
    if fused:
        check_fused(ranks, outs, cases.with_residual(total, residual), weight)
    else:
        for rank, (out,) in outs.items():
            np.testing.assert_array_equal(ranks.get(out, total.shape, dtype), total, err_msg=f"rank {rank}")


def test_ten_thousand_calls_with_late_ranks_and_inputs_overwritten_at_once(ranks: Any) -> None:
    from tests.kernels.gpu_ranks import many_calls

    many_calls(ranks, 10_000, seed=1)


def test_a_process_a_gpu_without_jax_or_two_on_one(tmp_path: Path) -> None:
    from tests.kernels.gpu_ranks import call

    call("cuInit", 0)
    ranks = most_ranks(call("cuDeviceGetCount"))
    check_folder(PROGRAM, tmp_path, max(ranks, 2), 400 if ranks > 1 else 60)


def test_a_rank_that_does_not_come_and_one_with_another_shape_are_failures_not_hangs() -> None:
    from tests.kernels.gpu_ranks import compiled

    both = make(2)
    slow = compiled(2, "bfloat16", 1001, "two_shot", timeout_ns=200 * 10**6)
    x, out = (both.put(0, np.zeros(1001, np.uint16)) for _ in range(2))
    began = time.monotonic()
    both.launch(slow, 0, x, out)
    both.synchronise()
    assert 0.15 < time.monotonic() - began < 5
    with pytest.raises(PeerError, match=r"rank 0: a peer did not arrive in time \(rank 1, collective 1\)"):
        both.memory.check()
    both.close()

    both = make(2)
    kernels = [compiled(2, "bfloat16", elements, "one_shot", timeout_ns=2 * 10**9) for elements in (1001, 1002)]
    operands = [[both.put(rank, np.zeros(1002, np.uint16)) for _ in range(2)] for rank in range(2)]
    for armed in (False, True):  # loading a kernel would wait for the one that waits for it
        for rank in range(2):
            both.launch(kernels[rank], rank, *operands[rank], armed=armed)
        both.synchronise()
    with pytest.raises(PeerError, match=r"another collective or another shape|gave up"):
        both.memory.check()
    both.close()


def test_a_barrier_of_some_blocks_lets_none_pass_before_all_have_come() -> None:
    from tests.kernels.gpu_ranks import compiled_barrier

    both = make(2)
    blocks, rounds = 24, 5
    kernel = compiled_barrier(blocks, grid=32, rounds=rounds)
    for repeat in range(1, 4):
        out = both.put(0, np.zeros(rounds + 1, np.uint32))
        kernel(both.streams[0], both.tables[0], out)
        both.synchronise()
        assert both.get(out, (rounds + 1,), np.uint32).tolist() == [blocks] * rounds + [0], repeat
    both.memory.check()
    both.close()


def test_a_heap_gives_its_memory_back() -> None:
    from qwenjax_ffi.symmetric_memory_driver import CudaDriver

    driver = CudaDriver()
    make(2).close()
    before, _ = driver.memory(0)
    for _ in range(3):
        made = make(2)
        during, _ = driver.memory(0)
        made.close()
    after, _ = driver.memory(0)
    assert before - during >= 20 << 20
    assert before - after < 8 << 20
