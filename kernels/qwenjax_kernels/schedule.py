"""The tiles of a grouped GEMM, found on the device: which group, which weight rows and which rows a tile number means.

Rows are sorted by group and only the device knows how many each has. A group of s rows has ceil(s / tile_rows) row
tiles, each of which is multiplied with all `m_tiles` tiles of the group's weight rows. Tiles are numbered by group.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from qwenjax_kernels import device

WARP = 32


class TileSchedule:
    """Tables in shared memory, an int32 a group: `tile_end` and `row_end`, the inclusive sums of tiles and rows."""

    def __init__(self, *, num_groups: int, tile_rows: int, m_tiles: int, read_only: bool = True) -> None:
        """read_only: whether group_sizes are there before the kernel starts."""
        self.num_groups = num_groups
        self.tile_rows = tile_rows
        self.m_tiles = m_tiles
        self.read_only = read_only

    @cute.jit
    def write_tables(self, group_sizes: Int64, tile_end: Int32, row_end: Int32, lane: Int32) -> None:
        """One warp writes the inclusive sums of tiles and of rows over the groups."""
        chunks = -(-self.num_groups // WARP)
        sizes = []
        for chunk in cutlass.range_constexpr(chunks):
            size = Int32(0)
            if chunk * WARP + lane < self.num_groups:
                size = device.load_global(group_sizes + Int64(chunk * WARP + lane) * 4, self.read_only)
            sizes.append(size)
        tiles_before = Int32(0)
        rows_before = Int32(0)
        for chunk in cutlass.range_constexpr(chunks):
            rows = sizes[chunk]
            tiles = (rows + (self.tile_rows - 1)) // self.tile_rows * self.m_tiles
            for step in cutlass.range_constexpr(5):
                lower_rows = cute.arch.shuffle_sync_up(rows, 1 << step, mask_and_clamp=0)
                lower_tiles = cute.arch.shuffle_sync_up(tiles, 1 << step, mask_and_clamp=0)
                if lane >= 1 << step:
                    rows += lower_rows
                    tiles += lower_tiles
            rows += rows_before
            tiles += tiles_before
            group = chunk * WARP + lane
            if group < self.num_groups:
                device.store_shared(tile_end + 4 * group, tiles)
                device.store_shared(row_end + 4 * group, rows)
            rows_before = cute.arch.shuffle_sync(rows, WARP - 1)
            tiles_before = cute.arch.shuffle_sync(tiles, WARP - 1)

    @cute.jit
    def total(self, tile_end: Int32) -> Int32:
        """How many tiles there are."""
        return device.load_shared(tile_end + 4 * (self.num_groups - 1))

    @cute.jit
    def locate(
        self, index: Int32, tile_end: Int32, row_end: Int32, lane: Int32
    ) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """The tile's group, M tile, row tile counted over all groups, first row and end of the group's rows; by a warp.

        Tiles of a group run over its row tiles first, so that a weight tile read again is still in the L2.
        """
        group = Int32(0)
        for chunk in cutlass.range_constexpr(-(-self.num_groups // WARP)):
            passed = Boolean(False)
            if chunk * WARP + lane < self.num_groups:
                passed = device.load_shared(tile_end + 4 * (chunk * WARP + lane)) <= index
            group += cute.arch.popc(cute.arch.vote_ballot_sync(passed))
        first_tile = Int32(0)
        row_begin = Int32(0)
        if group > 0:
            first_tile = device.load_shared(tile_end + 4 * group - 4)
            row_begin = device.load_shared(row_end + 4 * group - 4)
        rows_stop = device.load_shared(row_end + 4 * group)
        row_tiles = (rows_stop - row_begin + (self.tile_rows - 1)) // self.tile_rows
        m_tile = (index - first_tile) // row_tiles
        row_tile = (index - first_tile) - m_tile * row_tiles
        first_row = row_begin + row_tile * self.tile_rows
        return group, m_tile, first_tile // self.m_tiles + row_tile, first_row, rows_stop
