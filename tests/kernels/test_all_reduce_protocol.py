"""The all-reduce protocols hold in any order of execution, and the simulation finds the bugs that are put into them."""

from __future__ import annotations

import random
import types
from dataclasses import replace
from typing import Any

import pytest

from qwenjax_kernels import all_reduce_protocol
from tests.kernels.protocol_simulation import Call, ProtocolError, Simulation


def some_calls(seed: int, count: int, max_tiles: int, max_grid: int) -> list[Call]:
    """All algorithms and several sizes and grids in turn, as one decoder mixes them."""
    draw = random.Random(seed)
    calls = []
    for _ in range(count):
        tiles = draw.randint(1, max_tiles)
        calls.append(
            Call(draw.choice(("one_shot", "two_shot", "multicast")), tiles, draw.randint(1, min(tiles, max_grid)))
        )
    return calls


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_calls_are_free_of_races_and_add_up(ranks: int, seed: int) -> None:
    Simulation(ranks, some_calls(seed, 100 // ranks, 9, 3), seed).run()


def test_sixteen_ranks() -> None:
    Simulation(16, some_calls(0, 2, 2, 2), 0).run()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(2, 17))
def test_many_orders(ranks: int) -> None:
    for seed in range(200 // ranks):
        Simulation(ranks, some_calls(seed, 12, 10, 4), seed).run()


def changed(**changes: Any) -> Any:
    """The protocol with some of its names changed."""
    return types.SimpleNamespace(**{**vars(all_reduce_protocol), **changes})


def with_lag(action: str, lag: int) -> Any:
    steps = tuple(replace(s, lag=lag) if s.action == action else s for s in all_reduce_protocol.TWO_SHOT)
    return changed(TWO_SHOT=steps, LAST_LAG=max(step.lag for step in steps))


def in_order(*actions: str) -> Any:
    steps = {step.action: step for step in all_reduce_protocol.TWO_SHOT}
    return changed(TWO_SHOT=tuple(steps[action] for action in actions))


MIXED, ONE_SHOT, TWO_SHOT = ("one_shot", "two_shot"), ("one_shot",), ("two_shot",)
MULTICAST = ("multicast",)
BUGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "the fence before a signal dropped": (TWO_SHOT, {"release": False}),
    "the acquire of a wait dropped": (TWO_SHOT, {"acquire": False}),
    "the wait dropped": (TWO_SHOT, {"protocol": in_order("stage", "reduce", "collect")}),
    "the wait behind the sum": (TWO_SHOT, {"protocol": in_order("stage", "reduce", "wait", "collect")}),
    "a wait for the turn before": (TWO_SHOT, {"protocol": with_lag("wait", 2)}),
    "an epoch reused by signals": (TWO_SHOT, {"protocol": changed(signal_value=lambda epoch, step: 1 + step)}),
    "one value for all turns": (
        TWO_SHOT,
        {"protocol": changed(signal_value=lambda epoch, step: epoch * all_reduce_protocol.STEPS)},
    ),
    "an epoch that counts blocks": (MIXED, {"protocol": changed(arrival_share=lambda is_first, grid: 1)}),
    "an epoch reused by one-shot": (ONE_SHOT, {"protocol": changed(epoch_of=lambda arrivals: 1)}),
    "one inbox instead of two": (ONE_SHOT, {"protocol": changed(inbox=lambda epoch: 0)}),
    "inboxes swapped every other epoch": (ONE_SHOT, {"protocol": changed(inbox=lambda epoch: epoch // 2 % 2)}),
    "a slot too few": (TWO_SHOT, {"protocol": changed(slot=lambda i: i % (all_reduce_protocol.SLOTS - 1))}),
    "tiles collected a turn earlier": (TWO_SHOT, {"protocol": with_lag("collect", 1)}),
    "tiles collected two turns later": (TWO_SHOT, {"protocol": with_lag("collect", 4)}),
    "tiles reduced a turn later": (TWO_SHOT, {"protocol": with_lag("reduce", 2)}),
    "tiles never collected": (TWO_SHOT, {"protocol": in_order("stage", "wait", "reduce")}),
    "tiles never collected by one-shot": (ONE_SHOT, {"protocol": changed(ONE_SHOT=("push",))}),
    "a turn too few": (TWO_SHOT, {"protocol": changed(LAST_LAG=all_reduce_protocol.LAST_LAG - 1)}),
}
# The same steps, but for where tiles are staged.
BUGS |= {f"{bug}, through the switch": (MULTICAST, b) for bug, (of, b) in BUGS.items() if of is TWO_SHOT}


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_finds(bug: str) -> None:
    algorithms, arguments = BUGS[bug]
    calls = [Call(algorithms[i % len(algorithms)], 8, 1 + i % 2) for i in range(12)]
    Simulation(2, calls, 0).run()  # without the bug

    def run() -> None:
        for seed in range(20):
            Simulation(2, calls, seed, **arguments).run()

    with pytest.raises(ProtocolError):
        run()
