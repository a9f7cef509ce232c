"""The decode all-to-all holds in any order of execution, also between all-reduces; bugs put into it are found."""

from __future__ import annotations

import itertools
import random
import types
from typing import Any

import pytest

from qwenjax_kernels import all_reduce_protocol, token_exchange_protocol
from qwenjax_kernels.heap_layout import MAX_RANKS, HeapLayout
from qwenjax_kernels.token_exchange_layout import MAX_TOKENS, UNIT, ExchangeLayout, row_bytes, units_for
from tests.kernels.exchange_simulation import Exchange, ExchangeSimulation
from tests.kernels.protocol_simulation import Call, ProtocolError


def routing(draw: random.Random, ranks: int, tokens: int) -> tuple[tuple[frozenset[int], ...], ...]:
    """Where each token of each rank goes: to some ranks; or all to one rank; or those of a rank nowhere."""
    kind = draw.choice(("some", "some", "one", "none"))
    one, idle = draw.randrange(ranks), draw.randrange(ranks)

    def of(rank: int) -> frozenset[int]:
        if kind == "one":
            return frozenset([one])
        if kind == "none" and rank == idle:
            return frozenset()
        return frozenset(peer for peer in range(ranks) if draw.random() < 0.5)

    return tuple(tuple(of(rank) for _ in range(tokens)) for rank in range(ranks))


def some_calls(seed: int, ranks: int, count: int, max_tokens: int, max_grid: int) -> list[Call | Exchange]:
    """Layers of dispatch and combine, two layers in flight, and all-reduces of both kinds between them."""
    draw = random.Random(seed)
    calls: list[Call | Exchange] = []
    while len(calls) < count:
        routes = [routing(draw, ranks, draw.randint(1, max_tokens)) for _ in range(2)]
        kinds = draw.choice((("dispatch", "combine"), ("dispatch", "dispatch", "combine", "combine")))
        calls += [Exchange(kind, routes[i % 2], draw.randint(1, max_grid)) for i, kind in enumerate(kinds)]
        if draw.random() < 0.5:
            calls.append(Call(draw.choice(("one_shot", "two_shot")), draw.randint(1, 4), 1))
    return calls


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_calls_are_free_of_races_and_rows_arrive(ranks: int, seed: int) -> None:
    ExchangeSimulation(ranks, some_calls(seed, ranks, 60 // ranks, 5, 3), seed).run()


def test_sixteen_ranks() -> None:
    ExchangeSimulation(16, some_calls(0, 16, 4, 2, 2), 0).run()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(2, 17))
def test_many_orders(ranks: int) -> None:
    for seed in range(200 // ranks):
        ExchangeSimulation(ranks, some_calls(seed, ranks, 12, 5, 4), seed).run()


def changed(**changes: Any) -> dict[str, Any]:
    """The protocol with some of its names changed."""
    return {"exchange": types.SimpleNamespace(**{**vars(token_exchange_protocol), **changes})}


def without(action: str) -> dict[str, Any]:
    names = {"DISPATCH": token_exchange_protocol.DISPATCH, "COMBINE": token_exchange_protocol.COMBINE}
    return changed(**{name: tuple(a for a in actions if a != action) for name, actions in names.items()})


EARLY_FLAGS = ("tell", "count", "signal", "push", "expect", "agree", "wait", "collect")
STEPS = all_reduce_protocol.STEPS
BUGS: dict[str, dict[str, Any]] = {
    "the fence before a flag dropped": {"release": False},
    "the acquire of a wait dropped": {"acquire": False},
    "the wait for rows dropped": without("wait"),
    "the agreement dropped": without("agree") | {"kinds": ("combine",)},
    "flags raised before the rows": changed(DISPATCH=EARLY_FLAGS),
    "an epoch reused by flags": changed(row_flag=lambda epoch: 1),
    "an epoch reused by counts": changed(count_word=lambda epoch, count: STEPS + count + 1),
    "slots collected twice": changed(slot_of=lambda item, ranks: item // ranks),
    "one inbox instead of two": changed(inbox=lambda epoch: 0),
    "inboxes swapped every other epoch": changed(inbox=lambda epoch: epoch // 2 % 2),
    "an epoch that counts blocks": {
        "protocol": types.SimpleNamespace(**{**vars(all_reduce_protocol), "arrival_share": lambda is_first, grid: 1})
    },
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_finds(bug: str) -> None:
    arguments = dict(BUGS[bug])
    kinds = arguments.pop("kinds", ("dispatch", "combine"))
    draw = random.Random(0)
    # One rank has nothing to send or to get in every other call, and so waits for no row.
    both, one_way = frozenset([0, 1]), frozenset([1])
    routes = [((both,) * 3, (both,) * 3), ((one_way,) * 3, (frozenset[int](),) * 3)]
    calls: list[Call | Exchange] = [
        Exchange(kinds[i % len(kinds)], routes[draw.randrange(2)], 1 + i % 2) for i in range(14)
    ]
    ExchangeSimulation(2, calls, 0).run()  # without the bug

    def run() -> None:
        for seed in range(20):
            ExchangeSimulation(2, calls, seed, **arguments).run()

    with pytest.raises(ProtocolError):
        run()


@pytest.mark.parametrize("ranks", range(2, MAX_RANKS + 1))
def test_regions_of_the_heap_do_not_overlap(ranks: int) -> None:
    layout = ExchangeLayout(ranks, 3)
    regions = [
        (0, HeapLayout(ranks).num_bytes),
        (layout.counts, 2 * MAX_RANKS * 8),
        (layout.flags, 2 * ranks * MAX_TOKENS * 8),
        (layout.rows, 2 * ranks * 3 * UNIT),
        (layout.num_bytes, 0),
    ]
    for (begin, size), (following, _) in itertools.pairwise(regions):
        assert begin + size <= following
        assert following % 128 == 0


@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(1, 64, 1), (64, 8192, 8), (128, 8192, 8), (5000, 4096, 6)])
def test_the_units_hold_the_tokens_and_no_unit_is_too_many(tokens: int, hidden: int, top_k: int) -> None:
    units, needed = units_for(tokens, hidden, top_k), min(tokens, MAX_TOKENS) * (hidden + 8 * top_k)
    assert units * UNIT >= min(tokens, MAX_TOKENS) * row_bytes(hidden, top_k) >= needed
    assert (units - 1) * UNIT < needed + 8 * min(tokens, MAX_TOKENS)
