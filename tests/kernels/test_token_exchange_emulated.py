"""Dispatch and combine on emulated ranks, several blocks each, against their definition in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qwenjax_kernels.token_exchange_layout import ExchangeLayout
from tests.kernels import exchange_ranks as exchange
from tests.kernels.ptx_ranks import EmulatedRanks
from tests.kernels.test_token_exchange_compiles import ALL_EMULATED, EMULATED, FAST, compiled

KERNELS = ("dispatch", "combine")

# A case's kernels, dispatch and combine: [kernel, ranks, dtype, tokens, hidden, top_k, experts, blocks of a rank].
CASES: dict[str, tuple[tuple[Any, ...], ...]] = EMULATED | {
    "several tokens a block": tuple((name, 2, "bfloat16", 5, 264, 3, 8, 2) for name in KERNELS),
    "two words of ballots": tuple((name, 2, "bfloat16", 35, 8, 3, 8, 3) for name in KERNELS),
    "several vectors a thread": tuple((name, 2, "bfloat16", 2, 8200, 1, 2, 1) for name in KERNELS),
}


def kernels(name: str) -> list[str]:
    """The PTX of dispatch and combine of a case."""
    together = FAST + ALL_EMULATED if name in EMULATED else CASES[name]
    _, texts = compiled(together, "sm_90a")
    return [texts[together.index(case)] for case in CASES[name]]


def shape_of(name: str) -> exchange.Shape:
    kernel, *sizes, _ = CASES[name][0]
    return exchange.Shape(*sizes, mxfp8=kernel == "dispatch MXFP8")


def run(name: str, routes: dict[str, np.ndarray]) -> None:
    """One layer after the other on the same heaps, the results of each filled with NaN and junk before."""
    shape, blocks = shape_of(name), CASES[name][0][-1]
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
        dispatch, combine = kernels(name)
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


@pytest.mark.parametrize("name", EMULATED)
def test_rows_slots_and_sums_are_those_of_the_definition(name: str) -> None:
    routes = exchange.routings(shape_of(name), 3)
    run(name, {kind: routes[kind] for kind in ("padding between tokens", "a rank has no tokens")})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_routing_in_every_shape(name: str) -> None:
    for seed in range(2):
        run(name, exchange.routings(shape_of(name), seed))
