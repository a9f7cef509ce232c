"""The tile choices of the Hopper grouped GEMM and what follows from them: pure Python, importable without CuTeDSL."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from qwenjax_kernels import fragments

Epilogue = Literal["plain", "swiglu", "row_weight"]

WARPGROUP = 128
SHARED_BYTES = 227 * 1024  # of one block on sm_90
REGISTERS = 65536  # of one multiprocessor


@dataclass(frozen=True)
class Tile:
    """One tile choice.

    rows: rows of a group in a tile, wgmma's N (a multiple of 8 up to 256).
    warpgroups: consumer warpgroups; units: 64-row weight units that each has. tile_m is 64 times their product, or with
    split_k 64 times units: then the warpgroups take turns along k, and their sums are added at the end.
    k_blocks: blocks of a cluster that have a tile together, each a run of k; the first adds their sums and stores them.
    """

    rows: int
    warpgroups: int = 2
    units: int = 1
    split_k: bool = False
    k_blocks: int = 1

    @property
    def m_units(self) -> int:
        return self.units if self.split_k else self.warpgroups * self.units

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.warpgroups)

    @property
    def exchange_bytes(self) -> int:
        """Shared memory in which the warpgroups of split_k add their float32 sums."""
        return (self.warpgroups - 1) * self.units * fragments.UNIT_ROWS * self.rows * 4 if self.split_k else 0

    @property
    def inbox_bytes(self) -> int:
        """Shared memory to which the other blocks of a cluster write their float32 sums."""
        return (self.k_blocks - 1) * self.m_units * fragments.UNIT_ROWS * self.rows * 4

    def stages(self, num_groups: int, unit_bytes: int, unit_k: int) -> int:
        """As many as fit beside the group tables: the more bytes in flight, the closer to the memory's rate.

        With split_k a multiple of the warpgroups, so that a stage is always the same warpgroup's. One that has not
        waited for a stage's last filling may not wait for the next: a barrier tells the parity of its phase alone, so
        that while the last is still under way the wait for the next is over at once. Copies end in any order.

        unit_bytes: of 64 weight rows by the unit_k of a stage.
        """
        spare = (
            1024 + 8 * num_groups + 512 + self.exchange_bytes + self.inbox_bytes
        )  # alignment, the two tables, barriers
        budget = SHARED_BYTES - spare
        stages = min(12, budget // (self.m_units * unit_bytes + self.rows * unit_k * 2))
        return stages - stages % self.warpgroups if self.split_k else stages

    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producers and of the consumers.

        A block starts with the largest multiple of 8 that all its threads can have, and setmaxnreg only moves those
        about: a sum above them leaves the last warpgroup waiting for ever.
        """
        producer = 40
        consumer = (self.register_pool - producer) // self.warpgroups // 8 * 8
        return producer, min(240, consumer)

    @property
    def register_pool(self) -> int:
        """Registers a thread summed over the warpgroups, as the block is launched."""
        return min(255, REGISTERS // self.threads) // 8 * 8 * (1 + self.warpgroups)


# Rows of a tile, and the largest mean group that it is chosen for.
TILE_ROWS = ((8, 4.0), (16, 8.0), (32, 16.0), (64, 64.0), (128, float("inf")))
# The other fields of the tiles that were measured for each: bench/results/grouped_gemm.md.
MXFP8_TILES = {
    8: ((2, 2), (3, 1), (2, 1), (4, 1, True)),
    16: ((2, 2), (3, 1), (2, 1), (4, 1, True)),
    32: ((2, 2), (3, 1), (2, 1), (3, 1, True)),
    64: ((2, 3), (2, 2), (2, 1), (2, 1, True)),
    128: ((2, 2), (2, 1, True)),
}
BF16_TILES = {
    8: ((2, 1), (2, 1, True)),
    16: ((2, 1), (2, 1, True)),
    32: ((2, 1), (2, 1, True)),
    64: ((2, 2), (2, 1), (2, 1, True)),
    128: ((2, 2), (2, 1, True)),
}
# Time of a unit of 64 by 128 beside that of the highest tile of as many rows, where the tensor cores are the limit.
SPLIT_K_COST = 1.3
NEARLY = 1.1  # times the shortest queue within which the highest tile is taken; chosen, not swept
K_BLOCKS = 2  # of a cluster that share a tile's k; 4 were slower than 2, at one row and at 64
MAX_INBOX_BYTES = 64 << 10  # of the sums that one block hands another: what a tile leaves of shared memory


def choose_tile(
    rows: int,
    num_groups: int,
    row_units: int,
    k_units: int = 1,
    *,
    mxfp8: bool,
    float32_out: bool = False,
    num_sms: int = 132,
) -> Tile:
    """The tile of a call with `rows` rows over `num_groups` groups whose weights are `row_units` units high.

    k_units: how many they are long. Where a single matrix has too few tiles for the multiprocessors, two share one.

    The rows of a tile follow the mean group, whose sizes vary, or are those of a single one: a group past it costs a
    second tile, whose weights come from the L2. Groups without rows have no tiles; as many have some as bins that so
    many balls fall into: 8 of 128 for one token's experts. A tile's height is the one that keeps the multiprocessors
    busy with the fewest units in the longest queue; among those that are nearly equal the highest, which reads the rows
    least often. Float32 results keep every accumulator twice, in tiles of half the height.
    """
    mean = rows / num_groups
    tile_rows = next(size for size, largest in TILE_ROWS if mean <= (largest if num_groups > 1 or size > 64 else size))
    busy = max(1, math.ceil(num_groups * (1 - (1 - 1 / num_groups) ** rows)))
    row_tiles = busy * math.ceil(rows / busy / tile_rows)

    def longest_queue(tile: Tile) -> float:
        units = math.ceil(row_tiles * math.ceil(row_units / tile.m_units) / num_sms) * tile.m_units
        return units * SPLIT_K_COST if tile.split_k and tile.rows > 64 else units

    tiles = [Tile(tile_rows, *fields) for fields in (MXFP8_TILES if mxfp8 else BF16_TILES)[tile_rows]]
    if float32_out:
        tiles = [replace(tile, units=min(tile.units, 128 // tile_rows)) for tile in tiles]
    shortest = min(map(longest_queue, tiles))
    tile = max((tile for tile in tiles if longest_queue(tile) <= shortest * NEARLY), key=lambda tile: tile.m_units)
    if not mxfp8 or num_groups > 1:
        return tile
    count = row_tiles * math.ceil(row_units / tile.m_units)
    shared = replace(tile, k_blocks=K_BLOCKS)
    even = k_units % K_BLOCKS == 0 and k_units // K_BLOCKS >= tile.warpgroups
    return shared if even and count * K_BLOCKS <= num_sms and shared.inbox_bytes <= MAX_INBOX_BYTES else tile
