"""A moved cache holds on every rank what that rank would have computed: against a whole cache, written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from qwenjax.cache import CACHE_SPEC, KVCache
from qwenjax.kv_transfer import KVLayout, Pages, move_pages, plan_transfer
from qwenjax.mesh import make_mesh

HEAD_DIM = 2
NUM_PAGES = 40  # in the pool of either side


def ranks_hold(layout: KVLayout, rank: int) -> list[int]:
    """The heads of a rank, by counting: heads, or copies of them, dealt out in order."""
    if layout.ranks <= layout.kv_heads:
        return [h for h in range(layout.kv_heads) if h * layout.ranks // layout.kv_heads == rank]
    return [rank * layout.kv_heads // layout.ranks]


def held(layout: KVLayout, sequence: np.ndarray, numbers: list[int], fill: float) -> np.ndarray:
    """[ranks, pages, heads, page_size, head_dim]: `sequence` [tokens, kv_heads, head_dim] as the ranks hold it."""
    shape = (layout.ranks, NUM_PAGES, layout.heads_per_rank, layout.page_size, HEAD_DIM)
    cache = np.full(shape, fill, np.float32)
    for rank in range(layout.ranks):
        for position, token in enumerate(sequence):
            page = numbers[position // layout.page_size]
            cache[rank, page, :, position % layout.page_size] = token[ranks_hold(layout, rank)]
    return cache


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    kv_heads = draw(st.sampled_from([1, 2, 4, 6, 8]))
    ranks = [r for r in range(1, 9) if kv_heads % r == 0 or r % kv_heads == 0]
    sizes = st.sampled_from([1, 2, 3, 4, 8])
    return tuple(KVLayout(kv_heads, draw(sizes), draw(st.sampled_from(ranks))) for _ in range(2))  # type: ignore[return-value]


@st.composite
def transfers(draw: st.DrawFn) -> tuple[KVLayout, KVLayout, int, Pages]:
    """Two layouts, the number of tokens the source holds, and which to move between shuffled pages."""
    source, target = draw(layouts())
    tokens = draw(st.integers(0, 30))
    start = draw(st.integers(0, tokens))
    stop = draw(st.integers(start, tokens))
    numbers = [draw(st.permutations(range(NUM_PAGES)))[: -(-tokens // side.page_size)] for side in (source, target)]
    return source, target, tokens, Pages(*numbers, start, stop)


@settings(max_examples=150, deadline=None)
@given(transfers())
def test_a_plan_brings_every_rank_its_heads_and_touches_nothing_else(
    case: tuple[KVLayout, KVLayout, int, Pages],
) -> None:
    source, target, tokens, pages = case
    sequence = np.random.default_rng(0).standard_normal((tokens, source.kv_heads, HEAD_DIM), np.float32)
    cache = held(source, sequence, list(pages.source), fill=-1)
    result = np.full((target.ranks, NUM_PAGES, target.heads_per_rank, target.page_size, HEAD_DIM), -2, np.float32)
    expected = result.copy()
    whole = held(target, sequence, list(pages.target), fill=-2)
    for position in range(pages.start, pages.stop):
        place = np.s_[:, pages.target[position // target.page_size], :, position % target.page_size]
        expected[place] = whole[place]

    plan = plan_transfer(source, target, pages)
    written = np.zeros(result.shape[:4], np.int32)
    for c in plan.copies:
        heads, rows = slice(c.target_head, c.target_head + c.heads), slice(c.target_token, c.target_token + c.tokens)
        block = cache[c.source_rank, c.source_page, c.source_head : c.source_head + c.heads]
        result[c.target_rank, c.target_page, heads, rows] = block[:, c.source_token : c.source_token + c.tokens]
        written[c.target_rank, c.target_page, heads, rows] += 1

    np.testing.assert_array_equal(result, expected)
    assert written.max(initial=0) <= 1
    # Every target rank gets each of its rows once: nothing is sent that it does not need.
    assert plan.num_rows == written.sum() == (pages.stop - pages.start) * target.ranks * target.heads_per_rank
    assert plan.num_bytes(planes=6, row_bytes=8) == plan.num_rows * 48


def test_equal_layouts_make_one_copy_a_page() -> None:
    layout = KVLayout(kv_heads=4, page_size=64)
    plan = plan_transfer(layout, layout, Pages([7, 3], [1, 2], 0, 100))
    assert [(c.source_page, c.target_page, c.heads, c.tokens) for c in plan.copies] == [(7, 1, 4, 64), (3, 2, 4, 36)]


def test_copies_of_a_head_take_turns_as_the_source() -> None:
    plan = plan_transfer(KVLayout(2, 4, 8), KVLayout(2, 4, 1), Pages([0, 1, 2, 3], [0, 1, 2, 3], 0, 16))
    assert {c.source_rank for c in plan.copies} == set(range(8))


def test_pages_of_a_part_of_a_sequence() -> None:
    layout = KVLayout(1, 4)
    plan = plan_transfer(layout, layout, Pages([9], [0, 1, 2], 9, 11, source_first=8))
    assert [(c.source_page, c.source_token, c.target_page, c.tokens) for c in plan.copies] == [(9, 1, 2, 2)]


def test_no_pages_make_an_empty_plan() -> None:
    plan = plan_transfer(KVLayout(4, 64, 4), KVLayout(4, 128), Pages([], [], 0, 0))
    assert plan.copies == ()
    assert plan.num_bytes(96, 256) == 0


@pytest.mark.parametrize(
    ("source", "target", "pages", "message"),
    [
        (KVLayout(4, 64), KVLayout(2, 64), Pages([0], [0], 0, 1), "4 kv heads and the target 2"),
        (KVLayout(4, 64), KVLayout(4, 64), Pages([0], [0, 1], 0, 65), "outside the source's pages"),
        (KVLayout(4, 64), KVLayout(4, 64), Pages([0, 1], [0], 0, 65), "outside the target's pages"),
        (KVLayout(4, 64), KVLayout(4, 64), Pages([0], [0], 5, 4), "no range"),
        (KVLayout(4, 64), KVLayout(4, 64), Pages([0], [0], 70, 80, source_first=65), "no multiple"),
    ],
)
def test_bad_transfers_are_refused(source: KVLayout, target: KVLayout, pages: Pages, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_transfer(source, target, pages)


@pytest.mark.parametrize("ranks", [3, 6])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{ranks} ranks do not divide 4 kv heads"):
        KVLayout(4, 64, ranks)


@pytest.mark.parametrize(
    ("source_mesh", "target_mesh", "kv_heads", "page_sizes"),
    [((1, 4), (2, 1), 4, (4, 8)), ((1, 1), (1, 4), 4, (4, 4)), ((1, 2), (1, 4), 2, (8, 4))],
)
def test_caches_of_two_meshes_in_one_process(
    source_mesh: tuple[int, int], target_mesh: tuple[int, int], kv_heads: int, page_sizes: tuple[int, int]
) -> None:
    layers, tokens, data_rank = 3, 13, target_mesh[0] - 1
    source = KVLayout(kv_heads, page_sizes[0], source_mesh[1])
    target = KVLayout(kv_heads, page_sizes[1], target_mesh[1])
    pages = Pages([5, 2, 7, 1][: -(-tokens // source.page_size)], [3, 0, 6, 4][: -(-tokens // target.page_size)], 2, 13)
    generator = np.random.default_rng(0)
    sequences = generator.standard_normal((2 * layers, tokens, kv_heads, HEAD_DIM), np.float32)

    def cache(layout: KVLayout, mesh_size: tuple[int, int], numbers: list[int], fill: float, kind: int) -> jax.Array:
        # A rank's heads side by side: [layers, data ranks * pages, model ranks * heads, page_size, head_dim].
        planes = [np.concatenate(held(layout, sequence, numbers, fill), axis=1) for sequence in sequences[kind::2]]
        whole = np.concatenate([np.stack(planes)] * mesh_size[0], axis=1)
        sharding = NamedSharding(make_mesh(*mesh_size), CACHE_SPEC)
        return jax.device_put(jnp.asarray(whole), sharding)

    from_cache = KVCache(*(cache(source, source_mesh, list(pages.source), -1, kind) for kind in (0, 1)))
    filled = KVCache(*(cache(target, target_mesh, list(pages.target), -2, kind) for kind in (0, 1)))
    empty = jax.tree.map(lambda array: jax.device_put(jnp.full_like(array, -2), array.sharding), filled)
    moved = move_pages(plan_transfer(source, target, pages), from_cache, empty, target_data_rank=data_rank)

    for got, whole in ((moved.keys, filled.keys), (moved.values, filled.values)):
        expected = np.full(whole.shape, -2, np.float32)
        for position in range(pages.start, pages.stop):
            page = data_rank * NUM_PAGES + pages.target[position // target.page_size]
            place = np.s_[:, page, :, position % target.page_size]
            expected[place] = np.asarray(whole)[place]
        np.testing.assert_array_equal(np.asarray(got), expected)
        assert got.sharding == whole.sharding
