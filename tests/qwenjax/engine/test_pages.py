"""The free list of pages."""

from __future__ import annotations

import pytest

from qwenjax.engine.pages import PagePool


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.give_back(first)
    assert pool.num_free == 2
    assert pool.take(2) == first  # the page freed last goes first
    assert pool.take(0) == []


def test_more_pages_than_are_free_are_refused_and_none_is_taken() -> None:
    pool = PagePool(5)
    pool.take(3)
    with pytest.raises(ValueError, match="3 pages asked for, 2 of 5 are free"):
        pool.take(3)
    assert pool.num_free == 2
