"""Staging buffers: host memory that a transfer may read or write, since JAX promises no stable address for its arrays.

A buffer is [model ranks, slots, heads, planes, page_size, head_dim]: a slot takes one page of a sequence, and a plane
is the keys or the values of one layer (2 * layer, 2 * layer + 1). Planes lie inside a page, unlike in the cache: a page
of a group of layers is then one run of bytes per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from qwenjax.kv_transfer import Copy, KVLayout


class StagingLayout(msgspec.Struct, frozen=True):
    """A staging buffer as its owner describes it to who reads from it. Sizes in bytes where the name says so.

    addresses: of each model rank's part in its process, 0 for one that the describing process does not have. processes:
    of the owner's the one that each rank's part is in. row_bytes: of head_dim elements.
    """

    kv_heads: int
    page_size: int
    planes: int
    row_bytes: int
    num_slots: int
    addresses: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def kv(self) -> KVLayout:
        return KVLayout(self.kv_heads, self.page_size, len(self.addresses))


class StagingBuffer:
    """The memory, and which of its slots are in use; a slot is in use on every rank alike."""

    def __init__(
        self,
        layout: KVLayout,
        planes: int,
        head_dim: int,
        dtype: Any,
        num_slots: int,
        ranks: Sequence[int] | None = None,
        process: int = 0,
    ) -> None:
        """planes: layers times two, the multi-token-prediction head's layer included. ranks: the model ranks whose
        parts are here, by default all; process: this one, of the worker's."""
        self.ranks = list(range(layout.ranks)) if ranks is None else list(ranks)
        shape = (len(self.ranks), num_slots, layout.heads_per_rank, planes, layout.page_size, head_dim)
        self.pages = np.zeros(shape, dtype)
        self._free = list(range(num_slots - 1, -1, -1))
        rank_bytes = self.pages[0].nbytes
        base = self.pages.ctypes.data
        self.layout = StagingLayout(
            layout.kv_heads,
            layout.page_size,
            planes,
            head_dim * self.pages.itemsize,
            num_slots,
            tuple(
                base + self.ranks.index(rank) * rank_bytes if rank in self.ranks else 0 for rank in range(layout.ranks)
            ),
            (process,) * layout.ranks,
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` slots, or None where fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        """Frees slots that `take` gave and that no transfer touches any more."""
        self._free.extend(reversed(slots))


def joined(layouts: Sequence[StagingLayout]) -> StagingLayout:
    """The buffers of a worker's processes, each with some of the model ranks, as one. The first that has a rank's part
    is the one to go to for it."""
    processes = tuple(
        next(process for process, layout in enumerate(layouts) if layout.addresses[rank])
        for rank in range(layouts[0].kv.ranks)
    )
    addresses = tuple(layouts[process].addresses[rank] for rank, process in enumerate(processes))
    return msgspec.structs.replace(layouts[0], addresses=addresses, processes=processes)


def byte_ranges(
    copies: Sequence[Copy], source: StagingLayout, target: StagingLayout, planes: tuple[int, int]
) -> np.ndarray:
    """What a plan's copies are in memory: uint64 [ranges, 3] of source address, target address and bytes.

    planes: first and last + 1, those to move. Neighbours on both sides are one range. Raises ValueError where the
    buffers hold different models, or a copy or plane lies outside of them.
    """
    if (source.planes, source.row_bytes) != (target.planes, target.row_bytes):
        raise ValueError(
            f"the source has {source.planes} planes of {source.row_bytes}-byte rows, "
            f"the target {target.planes} of {target.row_bytes}"
        )
    if not 0 <= planes[0] <= planes[1] <= source.planes:
        raise ValueError(f"planes {planes} lie outside the {source.planes} of a page")
    if not copies or planes[0] == planes[1]:
        return np.zeros((0, 3), np.uint64)
    table = np.array(copies, np.int64)
    tokens = table[:, 9]
    from_address = _addresses(table[:, 0:4], table[:, 8], tokens, source, planes)
    to_address = _addresses(table[:, 4:8], table[:, 8], tokens, target, planes)
    # A copy of h heads is h * planes runs of tokens.
    sizes = np.repeat(tokens * source.row_bytes, table[:, 8] * (planes[1] - planes[0]))
    follows = (from_address[1:] == from_address[:-1] + sizes[:-1]) & (to_address[1:] == to_address[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    merged = np.stack([from_address[first], to_address[first], np.add.reduceat(sizes, first)], axis=1)
    return merged.astype(np.uint64)


def _addresses(
    places: np.ndarray, heads: np.ndarray, tokens: np.ndarray, layout: StagingLayout, planes: tuple[int, int]
) -> np.ndarray:
    """Addresses of the runs of every copy, by copy, head and plane. places: [copies, 4] of rank, slot, head, token."""
    rank, slot, head, token = places.T
    inside = (slot < layout.num_slots) & (head + heads <= layout.kv.heads_per_rank)
    inside &= (rank < len(layout.addresses)) & (token + tokens <= layout.page_size)
    if not inside.all() or places.min() < 0:
        raise ValueError(f"copies lie outside the staging buffer of {layout.num_slots} slots")
    copy = np.repeat(np.arange(len(heads)), heads)
    own_head = head[copy] + np.arange(len(copy)) - np.repeat(np.cumsum(heads) - heads, heads)
    plane = np.arange(*planes)
    row = (slot[copy] * layout.kv.heads_per_rank + own_head)[:, None] * layout.planes + plane
    row = row * layout.page_size + token[copy][:, None]
    base = np.array(layout.addresses, np.int64)[rank[copy]]
    return (base[:, None] + row * layout.row_bytes).reshape(-1)
