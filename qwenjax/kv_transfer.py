"""Where the parts of a KV cache go when it moves between meshes that shard and page it differently.

`plan_transfer` is a pure function of two layouts and the tokens to move. What moves the bytes only executes its plan:
`move_pages` between caches of one process, `qwenjax_serving.transfer` between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from qwenjax.cache import CACHE_SPEC, KVCache


@dataclass(frozen=True)
class KVLayout:
    """How a data rank holds keys and values: HND pages of page_size tokens, heads spread over its model ranks.

    kv_heads: the model's. With more ranks than heads, neighbouring ranks hold copies of one head (qwenjax.cache).
    Raises ValueError for ranks that do not divide the heads, or the other way round.
    """

    kv_heads: int
    page_size: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.page_size, self.ranks) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        if self.kv_heads % self.ranks and self.ranks % self.kv_heads:
            raise ValueError(f"{self.ranks} ranks do not divide {self.kv_heads} kv heads, nor the heads the ranks")

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.kv_heads // self.ranks)

    @property
    def ranks_per_head(self) -> int:
        """Copies of every head."""
        return max(1, self.ranks // self.kv_heads)

    def first_head(self, rank: int) -> int:
        """The model's number of the first head that a rank holds."""
        return rank // self.ranks_per_head * self.heads_per_rank


@dataclass(frozen=True)
class Pages:
    """Where tokens [start, stop) of a sequence lie on either side.

    source, target: page numbers, of which the first holds positions from source_first (target_first) on, a multiple of
    the side's page size: 0 where the pages are those of a whole sequence. What the target has already, a cached
    prefix, is left out by `start`.
    """

    source: Sequence[int]
    target: Sequence[int]
    start: int
    stop: int
    source_first: int = 0
    target_first: int = 0


class Copy(NamedTuple):
    """A block of `heads` heads and `tokens` tokens of one page, for keys and values of every layer alike.

    Heads are a rank's own numbers, tokens places within the page.
    """

    source_rank: int
    source_page: int
    source_head: int
    source_token: int
    target_rank: int
    target_page: int
    target_head: int
    target_token: int
    heads: int
    tokens: int


@dataclass(frozen=True)
class TransferPlan:
    """Copies that bring some tokens of a sequence from one layout to another; no two write the same place."""

    source: KVLayout
    target: KVLayout
    copies: tuple[Copy, ...]

    @property
    def num_rows(self) -> int:
        """Vectors of head_dim elements moved for each layer and each of keys and values."""
        return sum(copy.heads * copy.tokens for copy in self.copies)

    def num_bytes(self, planes: int, row_bytes: int) -> int:
        """Bytes moved. planes: layers times two; row_bytes: of head_dim elements."""
        return self.num_rows * planes * row_bytes


def plan_transfer(source: KVLayout, target: KVLayout, pages: Pages) -> TransferPlan:
    """The copies that give every target rank the heads it holds, of tokens [start, stop). No tokens make no copies.

    Where the source has several copies of a head, the target's ranks and pages take turns among them. Raises
    ValueError where the two hold different numbers of heads, or pages do not cover the tokens.
    """
    if source.kv_heads != target.kv_heads:
        raise ValueError(f"the source holds {source.kv_heads} kv heads and the target {target.kv_heads}")
    if not 0 <= pages.start <= pages.stop:
        raise ValueError(f"tokens [{pages.start}, {pages.stop}) are no range")
    _check_covers("source", source, pages.source, pages.source_first, pages)
    _check_covers("target", target, pages.target, pages.target_first, pages)
    copies = []
    start = pages.start
    while start < pages.stop:
        # The longest run within one page of either side.
        tokens = min(_left_in_page(start, source), _left_in_page(start, target), pages.stop - start)
        source_page = pages.source[(start - pages.source_first) // source.page_size]
        target_page = pages.target[(start - pages.target_first) // target.page_size]
        for source_rank, source_head, target_rank, target_head, heads in _shared_heads(source, target):
            # A source rank stands for all that hold its heads; which one serves goes round.
            turn = (target_rank + start // source.page_size) % source.ranks_per_head
            copies.append(
                Copy(
                    source_rank + turn,
                    source_page,
                    source_head,
                    start % source.page_size,
                    target_rank,
                    target_page,
                    target_head,
                    start % target.page_size,
                    heads,
                    tokens,
                )
            )
        start += tokens
    return TransferPlan(source, target, tuple(copies))


def _check_covers(side: str, layout: KVLayout, numbers: Sequence[int], first: int, pages: Pages) -> None:
    if first % layout.page_size:
        raise ValueError(f"{side}_first {first} is no multiple of the {side}'s page size {layout.page_size}")
    last = first + len(numbers) * layout.page_size
    if pages.start < pages.stop and not first <= pages.start <= pages.stop <= last:
        raise ValueError(f"tokens [{pages.start}, {pages.stop}) lie outside the {side}'s pages, [{first}, {last})")


def _left_in_page(position: int, layout: KVLayout) -> int:
    return layout.page_size - position % layout.page_size


@lru_cache(maxsize=64)
def _shared_heads(source: KVLayout, target: KVLayout) -> tuple[tuple[int, int, int, int, int], ...]:
    """(source rank, its head, target rank, its head, number of heads) of every block that must move."""
    shared = []
    for target_rank in range(target.ranks):
        needed = target.first_head(target_rank)
        for source_rank in range(0, source.ranks, source.ranks_per_head):
            held = source.first_head(source_rank)
            start = max(needed, held)
            stop = min(needed + target.heads_per_rank, held + source.heads_per_rank)
            if start < stop:
                shared.append((source_rank, start - held, target_rank, start - needed, stop - start))
    return tuple(shared)


def move_pages(
    plan: TransferPlan, source: KVCache, target: KVCache, source_data_rank: int = 0, target_data_rank: int = 0
) -> KVCache:
    """Executes a plan between the caches of two meshes of one process; the target is donated and returned anew.

    Page numbers are those of the data ranks named. Each pair of ranks is one gather, one copy from device to device and
    one scatter; a number of rows that is new to it compiles both.
    """
    moved = []
    for from_array, to_array in ((source.keys, target.keys), (source.values, target.values)):
        from_shards = _shards_of(from_array, source_data_rank)
        shards = {shard.device: shard.data for shard in to_array.addressable_shards}
        for target_rank, (device, _) in enumerate(_shards_of(to_array, target_data_rank)):
            for source_rank, (_, data) in enumerate(from_shards):
                copies = [c for c in plan.copies if (c.source_rank, c.target_rank) == (source_rank, target_rank)]
                if copies:
                    rows, places = _rows(copies)
                    shards[device] = _put_rows(shards[device], places, jax.device_put(_take_rows(data, rows), device))
        arrays = [shards[device] for device in to_array.sharding.addressable_devices_indices_map(to_array.shape)]
        moved.append(jax.make_array_from_single_device_arrays(to_array.shape, to_array.sharding, arrays))
    return KVCache(*moved)


def _shards_of(array: jax.Array, data_rank: int) -> list[tuple[Any, jax.Array]]:
    """(device, shard) of each model rank of a data rank."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.spec != CACHE_SPEC:
        raise ValueError(f"the cache lies as {sharding}; create_cache spreads it by {CACHE_SPEC}")
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [(device, by_device[device]) for device in sharding.mesh.devices[data_rank]]


def _rows(copies: list[Copy]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of head_dim elements that copies of one pair of ranks read and write: int32 [rows, 3] each, of page,
    head and place in the page."""
    taken, put = [], []
    for copy in copies:
        heads, tokens = np.indices((copy.heads, copy.tokens)).reshape(2, -1)
        page = np.zeros_like(heads)
        taken.append(np.stack([page + copy.source_page, heads + copy.source_head, tokens + copy.source_token], axis=1))
        put.append(np.stack([page + copy.target_page, heads + copy.target_head, tokens + copy.target_token], axis=1))
    return np.concatenate(taken).astype(np.int32), np.concatenate(put).astype(np.int32)


@jax.jit
def _take_rows(cache: jax.Array, rows: jax.Array) -> jax.Array:
    """[layers, rows, head_dim] of a rank's [layers, pages, heads, page_size, head_dim]."""
    return cache[:, rows[:, 0], rows[:, 1], rows[:, 2]]


def _put(cache: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    return cache.at[:, places[:, 0], places[:, 1], places[:, 2]].set(values)


_put_rows = jax.jit(_put, donate_argnums=0)
