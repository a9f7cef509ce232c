"""Staging buffers: memory that a transfer may read or write, since JAX promises no stable address for its arrays. Host
memory here, GPU memory in `device_staging`.

A slot takes one page of a sequence; a plane of it is the keys or the values of one layer (2 * layer, 2 * layer + 1).
Each model rank's part of a buffer is a block [slots, heads, planes, page_size, head_dim] for every group of layers that
prefill stages at once, one after another: of such a group pages in neighbouring slots are one run of bytes where both
sides have the same heads, and else a page is one run per head.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from qwenjax.kv_transfer import Copy, KVLayout

if TYPE_CHECKING:  # engines need Flax, which takes seconds to import
    from qwenjax.engine.decode_engine import DevicePages
    from qwenjax.engine.prefill_engine import StagedPages

MemoryKind = Literal["DRAM", "VRAM"]  # NIXL's names of host and GPU memory


class Region(NamedTuple):
    """Memory of one kind. device: the GPU's number in its process, 0 for host memory."""

    address: int
    num_bytes: int
    device: int = 0


class StagingLayout(msgspec.Struct, frozen=True):
    """A staging buffer as its owner describes it to who reads from it. Sizes in bytes where the name says so.

    addresses: of each model rank's part in its process, 0 for one that the describing process does not have. processes:
    of the owner's the one that each rank's part is in. devices: GPUs of those processes that the parts are on, 0 for
    host memory. bounds: planes that groups begin with, and the number of planes. row_bytes: of head_dim elements.
    """

    kv_heads: int
    page_size: int
    bounds: tuple[int, ...]
    row_bytes: int
    num_slots: int
    addresses: tuple[int, ...]
    processes: tuple[int, ...]
    devices: tuple[int, ...]
    memory: MemoryKind = "DRAM"

    @property
    def kv(self) -> KVLayout:
        return KVLayout(self.kv_heads, self.page_size, len(self.addresses))

    @property
    def planes(self) -> int:
        return self.bounds[-1]


class StagingBuffer:
    """The memory, and which of its slots are in use; a slot is in use on every rank alike."""

    memory: MemoryKind = "DRAM"

    def __init__(
        self,
        layout: KVLayout,
        planes: int,
        head_dim: int,
        dtype: Any,
        num_slots: int,
        ranks: Sequence[int] | None = None,
        process: int = 0,
        bounds: Sequence[int] | None = None,
    ) -> None:
        """planes: layers times two, the multi-token-prediction head's layer included. ranks: the model ranks whose
        parts are here, by default all; process: this one, of the worker's. bounds: of the groups of planes, see
        StagingLayout, by default one of all."""
        self.ranks = list(range(layout.ranks)) if ranks is None else list(ranks)
        self.shape = (num_slots, layout.heads_per_rank, planes, layout.page_size, head_dim)  # of each rank's part
        self.dtype = np.dtype(dtype)
        self.bounds = (0, planes) if bounds is None else tuple(bounds)
        self._free = list(range(num_slots))  # ascending
        parts = dict(zip(self.ranks, self._allocate(), strict=True))
        nowhere = Region(0, 0)
        self.layout = StagingLayout(
            layout.kv_heads,
            layout.page_size,
            self.bounds,
            head_dim * self.dtype.itemsize,
            num_slots,
            tuple(parts.get(rank, nowhere).address for rank in range(layout.ranks)),
            (process,) * layout.ranks,
            tuple(parts.get(rank, nowhere).device for rank in range(layout.ranks)),
            self.memory,
        )

    def _allocate(self) -> list[Region]:
        """Each rank's part."""
        self._memory = np.zeros((len(self.ranks), math.prod(self.shape)), self.dtype)
        slots, heads, planes, *rest = self.shape
        plane = math.prod(self.shape) // planes  # elements of one, in all slots
        blocks = np.split(self._memory, [plane * bound for bound in self.bounds[1:-1]], axis=1)
        self._groups = [block.reshape(len(self.ranks), slots, heads, -1, *rest) for block in blocks]
        return [Region(part.ctypes.data, part.nbytes) for part in self._memory]

    @property
    def pages(self) -> np.ndarray:
        """[ranks, slots, heads, planes, page_size, head_dim]: the memory itself where it is one group, else a copy."""
        return self._groups[0] if len(self._groups) == 1 else np.concatenate(self._groups, axis=3)

    @property
    def regions(self) -> list[Region]:
        """What a transfer may read or write."""
        return [Region(self._memory.ctypes.data, self._memory.nbytes)]

    def begin(self, staged: StagedPages) -> None:
        """Lets pages that are being computed be on their way to where `fetch` waits for them. From any thread."""
        for array in staged.arrays:
            array.copy_to_host_async()

    def fetch(self, staged: StagedPages) -> Any:
        """Waits until pages are computed; what `put` takes of them. From any thread."""
        return staged.on_host()

    def put(self, fetched: Any, first: int, slots: Sequence[int], planes: tuple[int, int]) -> None:
        """Copies pages from place `first` on to planes [first, last + 1) of slots; -1 for pages that are not wanted."""
        wanted = [(first + place, slot) for place, slot in enumerate(slots) if slot >= 0]
        places, places_in = [place for place, _ in wanted], [slot for _, slot in wanted]
        for group, own, given in self._within(planes):
            self._groups[group][:, places_in, :, slice(*own)] = fetched[:, places, :, slice(*given)]

    def _within(self, planes: tuple[int, int]) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """The groups that have some of the planes: their numbers, and which of their own and of the given those are."""
        for group, (start, stop) in enumerate(pairwise(self.bounds)):
            first, last = max(start, planes[0]), min(stop, planes[1])
            if first < last:
                yield group, (first - start, last - start), (first - planes[0], last - planes[0])

    def take_out(self, slots: Sequence[int], data_rank: int) -> np.ndarray | DevicePages:
        """A copy of the pages in slots, as `Arrived` has them, for a data rank. From any thread."""
        return np.concatenate([group[:, list(slots)] for group in self._groups], axis=3)

    def copy(self, ranges: np.ndarray) -> None:
        """Copies ranges (see byte_ranges) within this process, from another buffer of its kind, and waits."""
        for source, target, num_bytes in ranges[:, :3].tolist():
            ctypes.memmove(target, source, num_bytes)

    def close(self) -> None:
        """Frees the memory, which nothing may touch any more."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` slots, neighbours where there are as many, or None where fewer are free."""
        free = self._free
        if count > len(free):
            return None
        starts = range(len(free) - count + 1)
        first = next((place for place in starts if not count or free[place + count - 1] - free[place] < count), 0)
        taken = free[first : first + count]
        del free[first : first + count]
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Frees slots that `take` gave and that no transfer touches any more."""
        self._free = sorted([*self._free, *slots])


def joined(layouts: Sequence[StagingLayout]) -> StagingLayout:
    """The buffers of a worker's processes, each with some of the model ranks, as one. The first that has a rank's part
    is the one to go to for it."""
    processes = tuple(
        next(process for process, layout in enumerate(layouts) if layout.addresses[rank])
        for rank in range(layouts[0].kv.ranks)
    )
    addresses = tuple(layouts[process].addresses[rank] for rank, process in enumerate(processes))
    devices = tuple(layouts[process].devices[rank] for rank, process in enumerate(processes))
    return msgspec.structs.replace(layouts[0], addresses=addresses, processes=processes, devices=devices)


def byte_ranges(
    copies: Sequence[Copy], source: StagingLayout, target: StagingLayout, planes: tuple[int, int]
) -> np.ndarray:
    """What a plan's copies are in memory: uint64 [ranges, 5] of source address, target address, bytes, and the devices
    of both.

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
        return np.zeros((0, 5), np.uint64)
    table = np.array(copies, np.int64)
    table = table[np.lexsort((table[:, 0], table[:, 4]))]  # by pairs of ranks, in each of which pages are neighbours
    edges = sorted(
        {*planes, *(bound for side in (source, target) for bound in side.bounds if planes[0] < bound < planes[1])}
    )
    return np.concatenate([_ranges_of_group(table, source, target, part) for part in pairwise(edges)])


def _ranges_of_group(
    table: np.ndarray, source: StagingLayout, target: StagingLayout, planes: tuple[int, int]
) -> np.ndarray:
    """byte_ranges for planes that lie within one group of either side."""
    tokens = table[:, 9]
    from_address = _addresses(table[:, 0:4], table[:, 8], tokens, source, planes)
    to_address = _addresses(table[:, 4:8], table[:, 8], tokens, target, planes)
    # A copy of h heads is h * planes runs of tokens.
    sizes = np.repeat(tokens * source.row_bytes, table[:, 8] * (planes[1] - planes[0]))
    devices = np.stack(
        [
            np.repeat(np.array(side.devices, np.int64)[table[:, column]], table[:, 8] * (planes[1] - planes[0]))
            for side, column in ((source, 0), (target, 4))
        ],
        axis=1,
    )
    follows = (from_address[1:] == from_address[:-1] + sizes[:-1]) & (to_address[1:] == to_address[:-1] + sizes[:-1])
    follows &= (devices[1:] == devices[:-1]).all(axis=1)  # addresses of two GPUs may be neighbours
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    merged = np.stack([from_address[first], to_address[first], np.add.reduceat(sizes, first)], axis=1)
    return np.concatenate([merged, devices[first]], axis=1).astype(np.uint64)


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
    group = bisect_right(layout.bounds, planes[0]) - 1
    start, width = layout.bounds[group], layout.bounds[group + 1] - layout.bounds[group]
    before = layout.num_slots * layout.kv.heads_per_rank * start  # planes of the groups before
    row = before + (slot[copy] * layout.kv.heads_per_rank + own_head)[:, None] * width + plane - start
    row = row * layout.page_size + token[copy][:, None]
    base = np.array(layout.addresses, np.int64)[rank[copy]]
    return (base[:, None] + row * layout.row_bytes).reshape(-1)
