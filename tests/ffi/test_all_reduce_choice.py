"""The choice between all-reduce algorithms, and the prediction that its table comes from."""

from __future__ import annotations

import pytest

from qwenjax_ffi.all_reduce_choice import (
    MULTICAST_RANKS,
    bytes_each_way,
    choose_algorithm,
    predicted_limit,
    predicted_seconds,
)
from qwenjax_kernels.heap_layout import MAX_RANKS, HeapLayout

KIB = 1024


@pytest.mark.parametrize("ranks", range(2, MAX_RANKS + 1))
def test_the_table_holds_what_is_predicted(ranks: int) -> None:
    limit = predicted_limit(ranks)
    assert choose_algorithm(limit, ranks, multicast=False) == "one_shot"
    assert choose_algorithm(limit + 1, ranks, multicast=False) == "two_shot"
    for size in (64 << 20, 1 << 30):
        best = min(("two_shot", "multicast"), key=lambda algorithm: predicted_seconds(algorithm, size, ranks))  # type: ignore[arg-type]
        if ranks != 3:  # where both move as much
            assert choose_algorithm(size, ranks, multicast=True) == best


@pytest.mark.parametrize("ranks", range(2, MAX_RANKS + 1))
def test_one_shot_messages_fit_their_inbox(ranks: int) -> None:
    limit = HeapLayout(ranks).one_shot_bytes
    for size in (1, limit, limit + 1, 1 << 40):
        chosen = choose_algorithm(size, ranks, multicast=False)
        assert chosen == "two_shot" or size <= limit


def test_without_multicast_it_is_never_chosen() -> None:
    for ranks in range(2, MAX_RANKS + 1):
        for power in range(40):
            assert choose_algorithm(1 << power, ranks, multicast=False) != "multicast"


def test_two_ranks_leave_the_switch_alone() -> None:
    assert MULTICAST_RANKS > 2
    assert choose_algorithm(256 << 20, 2, multicast=True) == "two_shot"


def test_the_switch_moves_17_percent_less_at_four_ranks_and_36_at_eight() -> None:
    for ranks, saved in ((4, 0.17), (8, 0.36)):
        ratio = bytes_each_way("multicast", 1 << 27, ranks) / bytes_each_way("two_shot", 1 << 27, ranks)
        assert ratio == pytest.approx(1 - saved, abs=0.005)


def test_small_messages_at_two_ranks_are_predicted_within_their_bars() -> None:
    assert predicted_seconds(choose_algorithm(512 * KIB, 2, False), 512 * KIB, 2) <= 8e-6
    assert predicted_seconds(choose_algorithm(64 * KIB, 2, False), 64 * KIB, 2) <= 6e-6
