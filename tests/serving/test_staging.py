"""Byte ranges between staging buffers, executed by memmove, against what the plan says."""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.kv_transfer import KVLayout, Pages, plan_transfer
from qwenjax_serving.transfer.staging import StagingBuffer, byte_ranges, joined


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    ranks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    page_sizes=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4, 8])),
    tokens=st.integers(0, 20),
    start=st.integers(0, 20),
    planes=st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted),
    bounds=st.tuples(*(st.sets(st.integers(1, 5)).map(lambda inner: sorted({0, 6, *inner})) for _ in range(2))),
)
def test_ranges_move_what_the_plan_says(
    kv_heads: int,
    ranks: tuple[int, int],
    page_sizes: tuple[int, int],
    tokens: int,
    start: int,
    planes: list[int],
    bounds: tuple[list[int], list[int]],
) -> None:
    sides = [KVLayout(kv_heads, size, count) for size, count in zip(page_sizes, ranks, strict=True)]
    source, target = (
        StagingBuffer(side, planes=6, head_dim=3, dtype=np.int32, num_slots=12, bounds=own)
        for side, own in zip(sides, bounds, strict=True)
    )
    whole = np.arange(source.pages.size, dtype=np.int32).reshape(source.pages.shape)
    source.put(whole, 0, range(12), (0, 6))
    target.put(np.full_like(target.pages, -1), 0, range(12), (0, 6))
    expected = target.pages.copy()
    generator = np.random.default_rng(0)
    slots = [generator.permutation(12)[: -(-tokens // size)].tolist() for size in page_sizes]
    plan = plan_transfer(*sides, Pages(*slots, min(start, tokens), tokens))
    which = slice(*planes)
    for c in plan.copies:
        heads, rows = slice(c.target_head, c.target_head + c.heads), slice(c.target_token, c.target_token + c.tokens)
        block = whole[c.source_rank, c.source_page, c.source_head : c.source_head + c.heads, which]
        moved = block[:, :, c.source_token : c.source_token + c.tokens]
        expected[c.target_rank, c.target_page, heads, which, rows] = moved

    ranges = byte_ranges(plan.copies, source.layout, target.layout, (planes[0], planes[1]))
    for from_address, to_address, size in ranges[:, :3].tolist():
        ctypes.memmove(to_address, from_address, size)
    np.testing.assert_array_equal(target.pages, expected)
    np.testing.assert_array_equal(target.take_out([3, 1], 0), expected[:, [3, 1]])
    assert ranges[:, 2].sum() == plan.num_bytes(planes[1] - planes[0], row_bytes=12)


def test_a_group_of_layers_is_one_range_a_page_and_head() -> None:
    layout = KVLayout(2, 4)
    source, target = (StagingBuffer(layout, planes=8, head_dim=2, dtype=np.float32, num_slots=4) for _ in range(2))
    plan = plan_transfer(layout, layout, Pages([0, 1], [2, 3], 0, 8))
    assert len(byte_ranges(plan.copies, source.layout, target.layout, (2, 4))) == 4
    assert len(byte_ranges(plan.copies, source.layout, target.layout, (0, 8))) == 1


def test_a_group_of_layers_of_neighbouring_slots_is_one_range() -> None:
    layout, bounds = KVLayout(2, 4), (0, 4, 6)
    source, target = (StagingBuffer(layout, 6, 2, np.float32, num_slots=8, bounds=bounds) for _ in range(2))
    plan = plan_transfer(layout, layout, Pages([2, 3, 4, 7], [1, 2, 3, 5], 0, 16))
    assert len(byte_ranges(plan.copies, source.layout, target.layout, (0, 4))) == 2  # of three pages and of one
    assert len(byte_ranges(plan.copies, source.layout, target.layout, (4, 6))) == 2
    halves = KVLayout(2, 4, 2)
    sides = [StagingBuffer(halves, 6, 2, np.float32, num_slots=8, bounds=bounds).layout for _ in range(2)]
    plan = plan_transfer(halves, halves, Pages([2, 3, 4, 7], [1, 2, 3, 5], 0, 16))
    assert len(byte_ranges(plan.copies, *sides, (0, 4))) == 4  # the same of either rank
    other = StagingBuffer(halves, 6, 2, np.float32, num_slots=8, bounds=bounds)
    plan = plan_transfer(layout, halves, Pages([2, 3], [1, 2], 0, 8))
    assert len(byte_ranges(plan.copies, source.layout, other.layout, (0, 4))) == 4  # a page and head each


def test_slots_that_are_taken_are_neighbours_where_there_are_as_many() -> None:
    buffer = StagingBuffer(KVLayout(1, 4), planes=2, head_dim=2, dtype=np.float32, num_slots=8)
    taken = [buffer.take(count) for count in (2, 1, 5)]
    assert taken == [[0, 1], [2], [3, 4, 5, 6, 7]]
    buffer.give_back([1, 0])
    buffer.give_back([6, 5, 4])
    assert buffer.take(3) == [4, 5, 6]
    buffer.give_back([4, 6])
    assert buffer.take(4) == [0, 1, 4, 6]
    assert buffer.take(0) == []


def test_slots_are_taken_whole_or_not_at_all() -> None:
    buffer = StagingBuffer(KVLayout(1, 4), planes=2, head_dim=2, dtype=np.float32, num_slots=3)
    first = buffer.take(2)
    assert first is not None
    assert buffer.take(2) is None
    buffer.give_back(first)
    assert sorted(buffer.take(3) or []) == [0, 1, 2]


def test_what_does_not_fit_is_refused() -> None:
    layout = KVLayout(1, 4)
    source, target = (StagingBuffer(layout, planes=4, head_dim=2, dtype=np.float32, num_slots=4) for _ in range(2))
    plan = plan_transfer(layout, layout, Pages([3], [4], 0, 4))
    with pytest.raises(ValueError, match="outside the staging buffer of 4 slots"):
        byte_ranges(plan.copies, source.layout, target.layout, (0, 4))
    inside = [copy._replace(target_page=0) for copy in plan.copies]
    with pytest.raises(ValueError, match="planes"):
        byte_ranges(inside, source.layout, target.layout, (0, 5))
    with pytest.raises(ValueError, match="4 planes of 8-byte rows, the target 6"):
        byte_ranges(inside, source.layout, msgspec.structs.replace(target.layout, bounds=(0, 6)), (0, 4))


def test_buffers_of_several_processes_are_one_to_who_reads_from_them() -> None:
    layout = KVLayout(4, 4, 4)
    sizes = {"planes": 4, "head_dim": 2, "dtype": np.float32, "num_slots": 3}
    parts = [StagingBuffer(layout, **sizes, ranks=ranks, process=place) for place, ranks in enumerate([[0, 2], [1, 3]])]
    assert [part.pages.shape[0] for part in parts] == [2, 2]
    whole = joined([part.layout for part in parts])
    assert whole.processes == (0, 1, 0, 1)
    for rank, (process, address) in enumerate(zip(whole.processes, whole.addresses, strict=True)):
        assert address == parts[process].pages[rank // 2].ctypes.data
