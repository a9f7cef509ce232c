"""The pages of a data rank: free, held, or kept in the prefix tree."""

from __future__ import annotations

import pytest

from qwenjax.engine.pages import PagePool, block_keys


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.give_back(first)
    assert pool.num_free == 2
    assert pool.take(2) == first  # the page freed last goes first
    assert pool.take(0) == []


def test_more_pages_than_there_are_are_refused_and_none_is_taken() -> None:
    pool = PagePool(5)
    pool.take(3)
    with pytest.raises(ValueError, match="3 pages asked for, 2 of 5 are available"):
        pool.take(3)
    assert pool.num_free == 2


def kept(pool: PagePool, text: str) -> None:
    """Puts a path of blocks named by the letters of `text` into the tree, a page each, and lets go of it."""
    path = pool.match(text_keys(text))
    pool.hold(path)
    for letter in text[len(path) :]:
        path.append(pool.keep(path, letter.encode(), pool.take(1)))
    pool.let_go(path)


def text_keys(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_the_longest_known_prefix_is_found() -> None:
    pool = PagePool(9)
    kept(pool, "abc")
    kept(pool, "abd")
    assert [len(pool.match(text_keys(text))) for text in ("abc", "abde", "ab", "ac", "b", "")] == [3, 3, 2, 1, 0, 0]
    assert pool.num_cached == 4
    assert pool.num_available == 9


def test_the_least_recently_used_goes_first_and_no_block_before_those_after_it() -> None:
    pool = PagePool(5)
    for text in ("ab", "ac", "d", "ab"):
        kept(pool, text)
    assert pool.num_free == 1
    pool.give_back(pool.take(2))
    assert [len(pool.match(text_keys(text))) for text in ("ab", "ac", "d")] == [2, 1, 1]
    pool.give_back(pool.take(3))
    assert [len(pool.match(text_keys(text))) for text in ("ab", "ac", "d")] == [2, 1, 0]
    pool.give_back(pool.take(4))
    assert [len(pool.match(text_keys(text))) for text in ("ab", "ac", "d")] == [1, 1, 0]
    pool.evict_all()
    assert pool.blocks() == []
    assert pool.num_free == 5


def test_what_is_held_is_not_evicted() -> None:
    pool = PagePool(3)
    kept(pool, "ab")
    path = pool.match(text_keys("ab"))
    assert pool.num_available_beside(path) == 1
    pool.hold(path)
    assert pool.num_available == 1
    with pytest.raises(ValueError, match="2 pages asked for, 1 of 3"):
        pool.take(2)
    pool.evict_all()
    assert pool.match(text_keys("ab")) == path


def test_a_block_that_is_there_already_is_shared_and_the_pages_brought_for_it_are_freed() -> None:
    pool = PagePool(3)
    first = pool.keep([], b"a", pool.take(1))
    assert pool.keep([], b"a", pool.take(1)) is first
    assert (first.holders, pool.num_free) == (2, 2)


def test_keys_depend_on_the_block_the_salt_and_what_follows_it() -> None:
    tokens = list(range(10))
    plain = block_keys(tokens, 4, 0, None)
    assert len(plain) == 2
    assert block_keys(tokens[:8], 4, 0, None) == plain
    assert len(block_keys(tokens[:8], 4, 1, None)) == 1  # what follows the second is not known
    assert block_keys([*tokens[:4], 99], 4, 0, None) == plain[:1]
    assert block_keys([*tokens[:4], 99], 4, 1, None) != block_keys(tokens[:5], 4, 1, None)
    salted = block_keys(tokens, 4, 0, "x")
    assert salted[0] != plain[0]
    assert salted[0] != block_keys(tokens, 4, 0, "y")[0]
    assert salted[1] == plain[1]  # below another first block
    assert block_keys([1, 2], 4, 0, "x") == []
