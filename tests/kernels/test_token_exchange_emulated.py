"""Dispatch and combine on emulated ranks, several blocks each, against their definition in numpy."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from qwenjax_kernels.token_exchange_layout import ExchangeLayout
from tests.kernels import exchange_ranks as exchange
from tests.kernels.ptx_ranks import EmulatedRanks
from tests.kernels.test_all_reduce_compiles import compile_cases
from tests.kernels.test_token_exchange_compiles import COMPILE

# The shape and the blocks of a rank: several tokens a block, and vectors of rows that threads share unevenly; two words
# of ballots; several vectors of a row a thread.
CASES = {
    "three ranks": (exchange.Shape(3, "float32", tokens=4, hidden=132, top_k=2, experts=9), 3),
    "two ranks": (exchange.Shape(2, "bfloat16", tokens=5, hidden=264, top_k=3, experts=8), 2),
    "many tokens": (exchange.Shape(2, "bfloat16", tokens=35, hidden=8, top_k=3, experts=8), 3),
    "long rows": (exchange.Shape(2, "bfloat16", tokens=2, hidden=8200, top_k=1, experts=2), 1),
}
FAST = ("three ranks",)


@functools.cache
def kernels(names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """The PTX of dispatch and combine of these cases."""
    cases = [
        (kernel, shape.ranks, shape.dtype, shape.tokens, shape.hidden, shape.top_k, shape.experts, blocks)
        for shape, blocks in (CASES[name] for name in names)
        for kernel in ("dispatch", "combine")
    ]
    with tempfile.TemporaryDirectory() as folder:
        _, texts = compile_cases(cases, "sm_90a", Path(folder), COMPILE)
    return dict(zip(names, zip(texts[::2], texts[1::2], strict=True), strict=True))


def run(name: str, routes: dict[str, np.ndarray]) -> None:
    """One layer after the other on the same heaps, the results of each filled with NaN and junk before."""
    shape, blocks = CASES[name]
    ranks = EmulatedRanks(shape.ranks, ExchangeLayout(shape.ranks, shape.units).num_bytes)
    grid = min(blocks, shape.tokens * (shape.ranks - 1))
    for seed, (kind, ids) in enumerate(routes.items()):
        case = exchange.make_case(shape, ids, seed, integers=False)
        results = [
            [
                np.full(exchange.size(dims, dtype), byte, np.uint8).view(dtype).reshape(dims)
                for dims, dtype, byte in shape.dispatched
            ]
            for _ in range(shape.ranks)
        ]
        out = [np.full(case.out.shape[1:], np.nan, case.out.dtype) for _ in range(shape.ranks)]
        places = [[ranks.put(value) for value in mine] for mine in results]
        dispatch, combine = kernels(FAST if name in FAST else tuple(CASES))[name]
        sent = [
            [*(ranks.put(value[r].copy()) for value in (case.x, case.ids, case.weights)), ranks.tables[r], *places[r]]
            for r in range(shape.ranks)
        ]
        ranks.launch(dispatch, grid, sent, seed)
        brought = [
            [ranks.put(case.partial[r].copy()), *places[r][3:], ranks.tables[r], ranks.put(out[r])]
            for r in range(shape.ranks)
        ]
        ranks.launch(combine, grid, brought, seed)
        for r in range(shape.ranks):
            case.check(shape, r, results[r], out[r], f"{kind}, rank {r}")


@pytest.mark.parametrize("name", FAST)
def test_rows_slots_and_sums_are_those_of_the_definition(name: str) -> None:
    routes = exchange.routings(CASES[name][0], 3)
    run(name, {kind: routes[kind] for kind in ("padding between tokens", "a rank has no tokens", "all to one expert")})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_routing_in_every_shape(name: str) -> None:
    for seed in range(2):
        run(name, exchange.routings(CASES[name][0], seed))
