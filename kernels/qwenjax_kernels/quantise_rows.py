"""Rows of bfloat16, gathered by row number and quantised to MXFP8 tiles (`block_scaled`), in one pass.

It has no instruction of Blackwell's alone: it is for the grouped GEMM there, and runs from compute capability 9.0.
A block takes one row tile and a slab of the contraction; eight lanes a row and 128 of it, two lanes an MX block.
Every byte of a tile is written: rows past the end of the group, and what is past k, as zeros.

Blocks of one slab run beside each other over all tiles, so that a token's piece, read again for each of its experts, is
still in the L2: 8 MB a slab of 256 at 16,384 tokens.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from qwenjax_kernels import block_scaled, device, mxfp8, vectors
from qwenjax_kernels.schedule import WARP, TileSchedule

MAX_WARPS = 8
LANES = 8  # of a row's 128 values: 16 each, which are two loads of 16 bytes and a chunk of the swizzle
ROWS = WARP // LANES  # of a warp in one turn
SLAB_TILES = 2  # k tiles of a block, all loaded before the first is used


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
        self.warps = min(MAX_WARPS, tile_rows // ROWS)
        self.slabs = -(-self.k_tiles // SLAB_TILES)
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
        # Without min_blocks_per_mp the compiler keeps to 32 registers and waits for each load before the next.
        self.kernel(x, group_sizes, row_token, out).launch(
            grid=[self.row_tiles, self.slabs, 1],
            block=[self.warps * WARP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
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
        column = thread % LANES * 16
        turn_rows = self.warps * ROWS
        turns = self.tile_rows // turn_rows
        rows = [first_row + turn * turn_rows + thread // LANES for turn in range(turns)]
        sources = []
        for turn in cutlass.range_constexpr(turns):
            source = rows[turn]
            if cutlass.const_expr(tokens is None):
                source = rows[turn]
            elif source < rows_stop:
                source = device.load_global(tokens + Int64(source) * 4)
            sources.append(source)
        for turn in cutlass.range_constexpr(turns):
            loaded = self.load(x, sources[turn], first_k_tile, column, rows[turn] < rows_stop)
            for part in cutlass.range_constexpr(SLAB_TILES):
                k_tile = first_k_tile + part
                if k_tile < self.k_tiles:
                    target = out + (Int64(tile) * self.k_tiles + Int64(k_tile)) * tile_bytes
                    self.store(target, loaded[part], rows[turn] - first_row, column, thread)

    @cute.jit
    def load(self, x: Int64, row: Int32, first_k_tile: Int32, column: Int32, there: Boolean) -> list[list[Uint32]]:
        """A lane's sixteen values of each k tile of a slab; zeros where there is no row, and past k."""
        loaded = []
        for part in cutlass.range_constexpr(SLAB_TILES):
            k = (first_k_tile + part) * block_scaled.TILE_K + column
            address = x + (Int64(row) * self.k + Int64(k)) * 2
            reads = Int32(there and k < self.k)
            first = device.load_global_v4_or_zeros_if(reads, address)
            second = device.load_global_v4_or_zeros_if(reads, address + 16)
            loaded.append([*first, *second])
        return loaded

    @cute.jit
    def store(self, target: Int64, words: list[Uint32], slot: Int32, column: Int32, thread: Int32) -> None:
        """Sixteen values of a row; their MX block is theirs and those of the neighbouring lane."""
        # Two magnitudes at a time: the bits of bfloat16 without the sign order as the numbers do.
        pairs = [word & 0x7FFF7FFF for word in words]
        largest = pairs[0]
        for pair in pairs[1:]:
            largest = device.max_u16x2(largest, pair)
        largest = device.max_u16x2(largest, cute.arch.shuffle_sync_bfly(largest, 1))
        amax = Int32(cutlass.max(largest << 16, largest & 0xFFFF0000))
        scale = mxfp8.scale_byte(amax)
        inverse: Float32 = mxfp8.inverse_scale(scale)
        packed = []
        for first in cutlass.range_constexpr(0, 8, 2):
            values = []
            for word in words[first : first + 2]:
                values.append(device.float_of(Int32(word << 16)) * inverse)
                values.append(device.float_of(Int32(word & 0xFFFF0000)) * inverse)
            packed.append(device.pack_e4m3x4(*values))
        vectors.store_result(target + Int64(block_scaled.element_offset(slot, column)), packed)
        # The row's four scales lie beside each other: one store.
        scales = scale << (thread % LANES // 2 * 8)
        for distance in (2, 4):
            scales = scales | cute.arch.shuffle_sync_bfly(scales, distance)
        if thread % LANES == 0:
            place = self.tile_rows * block_scaled.TILE_K + block_scaled.scale_offset(slot, 0)
            device.store_global(target + Int64(place), Uint32(scales))
