"""Dispatch and combine on GPUs without JAX: two ranks, four and eight on the GPUs there are, one GPU being enough."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from qwenjax_ffi.symmetric_memory_exchange import PeerError
from tests.ffi.gpu_processes import check_folder, most_ranks

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("exchange_ranks.py")

# ranks, dtype, tokens, hidden, top_k, experts, MXFP8 rows
SHAPES = [
    (2, "bfloat16", 1, 8, 1, 2),
    (2, "bfloat16", 64, 4096, 8, 128),
    (2, "float16", 33, 2880, 4, 32),
    (2, "float32", 128, 2048, 8, 128),
    (2, "bfloat16", 300, 1000, 6, 64),
    (4, "bfloat16", 64, 4096, 8, 128),
    (4, "float32", 5, 24, 3, 8),
    (2, "bfloat16", 64, 4096, 8, 128, True),
    (4, "bfloat16", 7, 1056, 3, 8, True),
    (8, "bfloat16", 64, 4096, 8, 128),
    (8, "float16", 3, 1000, 2, 16),
    (8, "float32", 5, 24, 3, 8),
    (8, "bfloat16", 64, 4096, 8, 128, True),
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_rows_arrive_and_sums_come_home_for_every_routing(sizes: tuple[Any, ...]) -> None:
    from tests.kernels import exchange_ranks as exchange

    shape = exchange.Shape(*sizes)
    ranks = exchange.make_ranks(shape)
    cases = [
        exchange.make_case(shape, ids, seed, integers=False)
        for seed, ids in enumerate(exchange.routings(shape, 1).values())
    ]
    layer = exchange.Layer(ranks, shape, cases)
    blocks = 128 // shape.ranks  # all resident where the ranks share one GPU
    dispatch, combine = (f(shape, max_blocks=blocks) for f in (exchange.compiled_dispatch, exchange.compiled_combine))
    exchange.load(ranks, layer, dispatch, combine)
    for k, name in enumerate(exchange.routings(shape, 1)):
        for step, kernel in (("dispatch", dispatch), ("combine", combine)):
            for rank in ranks.local:
                getattr(layer, step)(kernel, rank, k)
        ranks.synchronise()
        ranks.memory.check()
        for rank in ranks.local:
            out = layer.combined(layer.out[rank])
            cases[k].check(shape, rank, layer.dispatched(rank), out, f"{name}, rank {rank}")
    ranks.close()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_thousand_iterations_of_two_layers_in_flight_with_late_ranks(size: int) -> None:
    from tests.kernels import exchange_ranks as exchange

    shape = exchange.Shape(size, "bfloat16", tokens=9, hidden=264, top_k=3, experts=8)
    ranks = exchange.make_ranks(shape)
    exchange.many_layers(ranks, shape, 1024, seed=1, max_blocks=128 // size)  # all resident on one GPU
    ranks.close()


def test_a_process_a_gpu_or_two_on_one(tmp_path: Path) -> None:
    from tests.kernels.gpu_ranks import call

    call("cuInit", 0)
    ranks = most_ranks(call("cuDeviceGetCount"))
    # Processes that share a GPU take turns on it, milliseconds each.
    check_folder(PROGRAM, tmp_path, max(ranks, 2), 1024 if ranks > 1 else 16)


def test_a_rank_that_does_not_come_is_an_error_not_a_hang() -> None:
    from tests.kernels import exchange_ranks as exchange

    shape = exchange.SMALL
    for step in ("dispatch", "combine"):
        both = exchange.make_ranks(shape)
        layer = exchange.Layer(both, shape, [exchange.make_case(shape, exchange.routings(shape, 0)["random"], 0, True)])
        compiled = {"dispatch": exchange.compiled_dispatch, "combine": exchange.compiled_combine}[step]
        slow = compiled(shape, timeout_ns=200 * 10**6)
        began = time.monotonic()
        exchange.nothing_to_wait_for(layer, 0)  # a combine of nothing still waits for the ranks
        getattr(layer, step)(slow, 0, 0)
        both.synchronise()
        assert 0.15 < time.monotonic() - began < 5
        with pytest.raises(PeerError, match=r"rank 0: a peer did not arrive in time \(rank 1, collective 1\)"):
            both.memory.check()
        both.close()


def test_ranks_in_different_calls_find_out() -> None:
    from tests.kernels import exchange_ranks as exchange

    shape = exchange.SMALL
    both = exchange.make_ranks(shape)
    layer = exchange.Layer(both, shape, [exchange.make_case(shape, exchange.routings(shape, 0)["random"], 0, True)])
    dispatch = exchange.compiled_dispatch(shape, timeout_ns=2 * 10**9)
    combine = exchange.compiled_combine(shape, timeout_ns=2 * 10**9)
    exchange.load(both, layer, dispatch, combine)
    exchange.nothing_to_wait_for(layer, 1)
    layer.dispatch(dispatch, 0, 0)
    layer.combine(combine, 1, 0)
    both.synchronise()
    with pytest.raises(PeerError, match=r"another collective or another shape|gave up"):
        both.memory.check()
    both.close()
