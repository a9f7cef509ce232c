"""Rows of bfloat16, gathered by row number and quantised to MXFP8 tiles (`block_scaled`), in one pass.

It has no instruction of Blackwell's alone: it is for the grouped GEMM there, and runs from compute capability 9.0.
A block takes one row tile and a slab of the contraction; half a warp a row and 128 of it, four lanes an MX block.
Every byte of a tile is written: rows past the end of the group, and what is past k, as zeros.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from qwenjax_kernels import block_scaled, device, mxfp8
from qwenjax_kernels.schedule import WARP, TileSchedule

WARPS = 8
LANES = 16  # of a row's 128 values: 8 each, which is one load of 16 bytes
ROWS = WARPS * WARP // LANES  # in one turn
SLAB_TILES = 4  # k tiles of a block, all loaded before the first is used


class QuantiseRows:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: x bfloat16 [tokens, k]; row_token int32 [rows] or None, where row r is x[r]; group_sizes int32 [groups]; out
    uint8 [row tiles, k tiles, tile bytes], of at least `block_scaled.max_row_tiles` row tiles. Tiles that no group
    needs are not written.
    """

    def __init__(self, *, k: int, num_groups: int, tile_rows: int, row_tiles: int) -> None:
        if k % block_scaled.MX_BLOCK:
            raise ValueError(f"k is {k}; it must be a multiple of {block_scaled.MX_BLOCK}")
        self.k = k
        self.k_tiles = block_scaled.k_tiles(k)
        self.num_groups = num_groups
        self.tile_rows = tile_rows
        self.row_tiles = row_tiles
        self.schedule = TileSchedule(num_groups=num_groups, tile_rows=tile_rows, m_tiles=1)

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        x: cute.Tensor,
        group_sizes: cute.Tensor,
        row_token: cute.Tensor | None,
        out: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(x, group_sizes, row_token, out).launch(
            grid=[self.row_tiles, -(-self.k_tiles // SLAB_TILES), 1], block=[WARPS * WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, group_sizes: cute.Tensor, row_token: cute.Tensor | None, out: cute.Tensor) -> None:
        @cute.struct
        class Storage:
            tile_end: cute.struct.MemRange[Int32, self.num_groups]
            row_end: cute.struct.MemRange[Int32, self.num_groups]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        tile_end = storage.tile_end.data_ptr().toint()
        row_end = storage.row_end.data_ptr().toint()
        thread, _, _ = cute.arch.thread_idx()
        tile, slab, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            self.schedule.write_tables(group_sizes.iterator.toint(), tile_end, row_end, lane)
        cute.arch.sync_threads()
        if tile < self.schedule.total(tile_end):
            _, _, _, first_row, rows_stop = self.schedule.locate(tile, tile_end, row_end, lane)
            self.quantise(
                x.iterator.toint(),
                device.address_of(row_token),
                out.iterator.toint(),
                tile,
                slab * SLAB_TILES,
                first_row,
                rows_stop,
                thread,
            )

    @cute.jit
    def quantise(
        self,
        x: Int64,
        tokens: Int64 | None,
        out: Int64,
        tile: Int32,
        first_k_tile: Int32,
        first_row: Int32,
        rows_stop: Int32,
        thread: Int32,
    ) -> None:
        """A block's slab of a row tile."""
        tile_bytes = block_scaled.tile_bytes(self.tile_rows)
        column = thread % LANES * 8
        for turn in cutlass.range(-(-self.tile_rows // ROWS), unroll=1):
            slot = turn * ROWS + thread // LANES
            row = first_row + slot
            there = row < rows_stop
            token = row
            if cutlass.const_expr(tokens is None):
                token = row
            elif there:
                token = device.load_global(tokens + Int64(row) * 4)
            loaded = []
            for part in cutlass.range_constexpr(SLAB_TILES):
                k = (first_k_tile + part) * block_scaled.TILE_K + column
                address = x + (Int64(token) * self.k + Int64(k)) * 2
                loaded.append(device.load_global_v4_or_zeros_if(Int32(there and k < self.k), address))
            for part in cutlass.range_constexpr(SLAB_TILES):
                k_tile = first_k_tile + part
                if k_tile < self.k_tiles:
                    target = out + (Int64(tile) * self.k_tiles + Int64(k_tile)) * tile_bytes
                    self.store(target, loaded[part], slot, column, thread)

    @cute.jit
    def store(
        self,
        target: Int64,
        words: tuple[Uint32, Uint32, Uint32, Uint32],
        slot: Int32,
        column: Int32,
        thread: Int32,
    ) -> None:
        """Eight values of a row; its MX block is theirs and those of the three neighbouring lanes."""
        values = []
        for word in words:
            values.append(device.float_of(Int32(word << 16)))
            values.append(device.float_of(Int32(word & 0xFFFF0000)))
        amax = Int32(0)
        for value in values:
            amax = cutlass.max(amax, device.magnitude_bits(value))
        for distance in (1, 2):
            amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        scale = mxfp8.scale_byte(amax)
        inverse: Float32 = mxfp8.inverse_scale(scale)
        scaled = [value * inverse for value in values]
        element = block_scaled.element_offset(slot, column)
        device.store_global_v2(
            target + Int64(element), device.pack_e4m3x4(*scaled[:4]), device.pack_e4m3x4(*scaled[4:])
        )
        if thread % 4 == 0:
            place = block_scaled.scale_offset(slot, column // block_scaled.MX_BLOCK)
            device.store_global_byte(target + Int64(self.tile_rows * block_scaled.TILE_K) + Int64(place), scale)
