"""Grouped GEMM of bf16 rows and packed MXFP8 weights for Hopper (sm_90a).

The weights are the M operand of `wgmma` and the rows of a group its N operand, so that groups of a few rows waste
no tensor work. A persistent block runs over tiles of `tile_m` weight rows by `tile_rows` rows of one group:

- one warp copies weight units (see `fragments`) to shared memory with cp.async.bulk, `stages` deep;
- two warps gather the rows with cp.async into the 128-byte swizzle that wgmma reads;
- each consumer warpgroup loads its fragment bytes with 16-byte shared loads, decodes them to bf16 in registers
  (exact, see `fragments`) and multiplies while the next half unit is decoded;
- the epilogue applies SwiGLU or the rows' weights in float32 and stores straight to the row.

Rows at and after sum(group_sizes) are neither read nor written.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from qwenjax_kernels import device, fragments
from qwenjax_kernels.schedule import WARP, TileSchedule
from qwenjax_kernels.tiles import WARPGROUP, Epilogue, Tile

GATHER_WARPS = 2
GATHERED_ROWS = 2 * GATHER_WARPS  # in one turn
# wgmma truncates as it accumulates: 2.4e-6 of the norm over k = 2048. Float32 results sum segments of 512 instead.
SEGMENT_UNITS = 4


class GroupedGemmSm90:
    """The kernel for one problem and tile choice; call `launch` from a `@cute.jit` function.

    y[r] = weight[group of r] @ x[row_token[r] or r], then the epilogue. Shapes: x bf16 [tokens, k]; weights uint8
    [(layers,) groups, row units, k units, 8448]; group_sizes int32 [groups]; row_token int32 [rows] or None;
    row_weight float32 [rows] or None; layer int32 [1] or None; out bf16 or float32 [rows, width].
    """

    def __init__(
        self,
        *,
        k: int,
        width: int,
        num_groups: int,
        epilogue: Epilogue,
        tile: Tile,
        num_sms: int,
        float32_out: bool = False,
    ) -> None:
        if k % fragments.MX_BLOCK:
            raise ValueError(f"k is {k}; it must be a multiple of {fragments.MX_BLOCK}")
        self.k = k
        self.width = width
        self.num_groups = num_groups
        self.epilogue = epilogue
        self.tile = tile
        self.float32_out = float32_out
        fragment_rows = 2 * (-(-width // 32) * 32) if epilogue == "swiglu" else width
        self.row_units, self.k_units = fragments.units(fragment_rows, k)
        self.m_tiles = -(-self.row_units // tile.m_units)
        self.schedule = TileSchedule(num_groups=num_groups, tile_rows=tile.rows, m_tiles=self.m_tiles)
        self.stages = tile.stages(num_groups)
        self.grid = num_sms
        if self.stages < 2:
            raise ValueError(f"{tile} leaves room for {self.stages} stages")

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        x: cute.Tensor,
        weights: cute.Tensor,
        group_sizes: cute.Tensor,
        row_token: cute.Tensor | None,
        row_weight: cute.Tensor | None,
        layer: cute.Tensor | None,
        out: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        tiled_mma = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                BFloat16,
                Float32,
                (fragments.UNIT_ROWS, self.tile.rows, 16),
                warpgroup.OperandSource.RMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        row_layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16),
            (self.tile.rows, fragments.UNIT_K, self.stages),
            order=(0, 1, 2),
        )
        self.kernel(x, weights, group_sizes, row_token, row_weight, layer, out, tiled_mma, row_layout).launch(
            grid=[self.grid, 1, 1],
            block=[self.tile.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weights: cute.Tensor,
        group_sizes: cute.Tensor,
        row_token: cute.Tensor | None,
        row_weight: cute.Tensor | None,
        layer: cute.Tensor | None,
        out: cute.Tensor,
        tiled_mma: cute.TiledMma,
        row_layout: cute.ComposedLayout,
    ) -> None:
        stages = self.stages

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(row_layout)], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, stages * self.tile.weight_stage_bytes], 128]
            barriers: cute.struct.MemRange[Int64, 2 * stages]
            tile_end: cute.struct.MemRange[Int32, self.num_groups]
            row_end: cute.struct.MemRange[Int32, self.num_groups]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        shared_rows = storage.rows.get_tensor(row_layout.outer, swizzle=row_layout.inner)
        weights_address = storage.weights.data_ptr().toint()
        full = storage.barriers.data_ptr()
        empty = full + stages
        tile_end = storage.tile_end.data_ptr().toint()
        row_end = storage.row_end.data_ptr().toint()

        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()

        if warp == 0:
            self.schedule.write_tables(group_sizes.iterator.toint(), tile_end, row_end, lane)
        if warp == 1:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + stage, 1 + GATHER_WARPS * WARP)
                    cute.arch.mbarrier_init(empty + stage, 4 * self.tile.warpgroups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        total = self.schedule.total(tile_end)
        producer_registers, consumer_registers = self.tile.registers()
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            source = device.layer_address(
                weights, layer, self.num_groups * self.row_units * self.k_units * fragments.UNIT_BYTES
            )
            if warp == 0:
                self.copy_weights(source, weights_address, full, empty, tile_end, row_end, block, total, lane)
            elif warp <= GATHER_WARPS:
                self.gather_rows(
                    x.iterator.toint(),
                    device.address_of(row_token),
                    storage.rows.data_ptr().toint(),
                    full,
                    empty,
                    tile_end,
                    row_end,
                    block,
                    total,
                    warp - 1,
                    lane,
                )
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            factors = device.address_of(row_weight)
            self.multiply(
                tiled_mma,
                shared_rows,
                weights_address,
                full,
                empty,
                tile_end,
                row_end,
                out.iterator.toint(),
                factors,
                block,
                total,
                thread - WARPGROUP,
                lane,
            )

    @cute.jit
    def copy_weights(
        self,
        weights: Int64,
        weights_address: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        row_end: Int32,
        block: Int32,
        total: Int32,
        lane: Int32,
    ) -> None:
        """The weight producer: a warp of which one lane issues a bulk copy a unit."""
        stage = Int32(0)
        phase = Int32(1)
        index = block
        while index < total:
            group, m_tile, _, _, _ = self.schedule.locate(index, tile_end, row_end, lane)
            sources = []
            for unit in cutlass.range_constexpr(self.tile.m_units):
                row_unit = cutlass.min(m_tile * self.tile.m_units + unit, self.row_units - 1)
                sources.append(
                    weights + (Int64(group) * self.row_units + Int64(row_unit)) * (self.k_units * fragments.UNIT_BYTES)
                )
            for k_unit in cutlass.range(self.k_units, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile.weight_stage_bytes)
                    for unit in cutlass.range_constexpr(self.tile.m_units):
                        device.bulk_copy(
                            weights_address + stage * self.tile.weight_stage_bytes + unit * fragments.UNIT_BYTES,
                            sources[unit] + Int64(k_unit) * fragments.UNIT_BYTES,
                            fragments.UNIT_BYTES,
                            (full + stage).toint(),
                            self.tile.rows <= 64,
                        )
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase ^= 1
            index += self.grid

    @cute.jit
    def gather_rows(
        self,
        x: Int64,
        tokens: Int64 | None,
        rows_address: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        row_end: Int32,
        block: Int32,
        total: Int32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """The row producers: half a warp copies the 256 bytes of a row that belong to a stage.

        Two warps take four rows a turn. A 16-byte chunk is XORed with its 128-byte line modulo 8, so that a thread's
        place in the swizzle differs between even and odd turns only.
        """
        stage = Int32(0)
        phase = Int32(1)
        chunk = lane % 16
        slot = warp * 2 + lane // 16
        turns = self.tile.rows // GATHERED_ROWS
        swizzled = ((chunk % 8) ^ slot) * 16
        line = rows_address + (chunk // 8) * (self.tile.rows * 128) + slot * 128
        lines = [line + swizzled, line + (swizzled ^ 64)]
        index = block
        while index < total:
            _, _, _, first_row, rows_stop = self.schedule.locate(index, tile_end, row_end, lane)
            origins = []
            if cutlass.const_expr(tokens is not None):
                # Lane l keeps the token of its l-th row (half a turn a row); a copy asks for it by a shuffle.
                for word in cutlass.range_constexpr(-(-turns * 2 // WARP)):
                    own = word * WARP + lane
                    row = first_row + own // 2 * GATHERED_ROWS + warp * 2 + own % 2
                    origin = Int32(-1)
                    if row < rows_stop:
                        origin = device.load_global(tokens + Int64(row) * 4)
                    origins.append(origin)
            for k_unit in cutlass.range(self.k_units, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                column = k_unit * (fragments.UNIT_K * 2) + chunk * 16
                base = x + Int64(column)
                inside = column < self.k * 2
                for turn in cutlass.range_constexpr(turns):
                    if cutlass.const_expr(tokens is not None):
                        token = cute.arch.shuffle_sync(origins[turn // 16], turn % 16 * 2 + lane // 16)
                        copies = token
                    else:
                        token = first_row + turn * GATHERED_ROWS + slot
                        copies = rows_stop - 1 - token
                    target = lines[turn % 2] + stage * self.tile.row_stage_bytes + turn * (GATHERED_ROWS * 128)
                    address = base + Int64(token) * (self.k * 2)
                    if cutlass.const_expr(self.k % fragments.UNIT_K == 0):
                        device.copy_16_if(copies, target, address)
                    else:
                        size = Int32(16) if inside else Int32(0)
                        device.copy_16_or_zeros_if(copies, target, address if inside else x, size)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase ^= 1
            index += self.grid

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        shared_rows: cute.Tensor,
        weights_address: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        row_end: Int32,
        out: Int64,
        factors: Int64 | None,
        block: Int32,
        total: Int32,
        thread: Int32,
        lane: Int32,
    ) -> None:
        """A consumer warpgroup: decodes its units, multiplies, and stores its part of each tile."""
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        slice_ = tiled_mma.get_slice(thread)
        rows_fragment = tiled_mma.make_fragment_B(slice_.partition_B(shared_rows))
        shape = tiled_mma.partition_shape_C((fragments.UNIT_ROWS, self.tile.rows))
        accumulators = [tiled_mma.make_fragment_C(shape) for _ in range(self.tile.units)]
        half_unit = tiled_mma.partition_shape_A((fragments.UNIT_ROWS, fragments.UNIT_K // 2))
        buffers = [cute.make_rmem_tensor(half_unit, BFloat16) for _ in range(2)]
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        mine = weights_address + warpgroup_index * (self.tile.units * fragments.UNIT_BYTES)

        leads = Int32(lane == 0)
        stage = Int32(0)
        phase = Int32(0)
        index = block
        while index < total:
            _, m_tile, _, first_row, rows_stop = self.schedule.locate(index, tile_end, row_end, lane)
            row_factors = self.load_factors(factors, first_row, rows_stop, lane)
            for unit in cutlass.range_constexpr(self.tile.units):
                accumulators[unit].fill(0.0)
            if cutlass.const_expr(self.float32_out):
                sums = [cute.make_rmem_tensor_like(accumulators[0]) for _ in range(self.tile.units)]
                for unit in cutlass.range_constexpr(self.tile.units):
                    sums[unit].fill(0.0)
                for segment in cutlass.range(-(-self.k_units // SEGMENT_UNITS), unroll=1):
                    count = cutlass.min(self.k_units - segment * SEGMENT_UNITS, SEGMENT_UNITS)
                    stage, phase = self.multiply_units(
                        tiled_mma,
                        accumulators,
                        buffers,
                        rows_fragment,
                        mine,
                        full,
                        empty,
                        count,
                        stage,
                        phase,
                        thread,
                        leads,
                    )
                    for unit in cutlass.range_constexpr(self.tile.units):
                        sums[unit].store(sums[unit].load() + accumulators[unit].load())
                        accumulators[unit].fill(0.0)
                for unit in cutlass.range_constexpr(self.tile.units):
                    accumulators[unit].store(sums[unit].load())
            else:
                stage, phase = self.multiply_units(
                    tiled_mma,
                    accumulators,
                    buffers,
                    rows_fragment,
                    mine,
                    full,
                    empty,
                    Int32(self.k_units),
                    stage,
                    phase,
                    thread,
                    leads,
                )
            for unit in cutlass.range_constexpr(self.tile.units):
                row_unit = m_tile * self.tile.m_units + warpgroup_index * self.tile.units + unit
                self.store(accumulators[unit], out, row_factors, row_unit, first_row, rows_stop, thread, lane)
            index += self.grid

    @cute.jit
    def multiply_units(
        self,
        tiled_mma: cute.TiledMma,
        accumulators: Any,
        buffers: Any,
        rows_fragment: cute.Tensor,
        mine: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        count: Int32,
        stage: Int32,
        phase: Int32,
        thread: Int32,
        leads: Int32,
    ) -> tuple[Int32, Int32]:
        """Adds `count` units of k to the accumulators; on return no wgmma is in flight."""
        previous = stage
        for turn in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            # The gathered rows were written by cp.async, which is not the proxy that wgmma reads through.
            cute.arch.fence_view_async_shared()
            base = mine + stage * self.tile.weight_stage_bytes
            for unit in cutlass.range_constexpr(self.tile.units):
                words, scales = self.load_unit(base + unit * fragments.UNIT_BYTES, thread)
                for half in cutlass.range_constexpr(2):
                    # Two halves in flight: the one before the last has been read, its buffer is free.
                    warpgroup.wait_group(1)
                    if cutlass.const_expr(unit == 0 and half == 1):
                        # One arrival a warp: its loads and wgmmas of the stage before are over.
                        device.arrive_if((empty + previous).toint(), leads & Int32(turn > 0))
                    self.decode_half(words, scales, half, buffers[half])
                    warpgroup.fence()
                    for step in cutlass.range_constexpr(4):
                        cute.gemm(
                            tiled_mma,
                            accumulators[unit],
                            buffers[half][None, None, step],
                            rows_fragment[None, None, half * 4 + step, stage],
                            accumulators[unit],
                        )
                    warpgroup.commit_group()
            previous = stage
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase ^= 1
        warpgroup.wait_group(0)
        device.arrive_if((empty + previous).toint(), leads)
        return stage, phase

    @cute.jit
    def load_factors(self, factors: Int64 | None, first_row: Int32, rows_stop: Int32, lane: Int32) -> Any:
        """Lane l keeps the weights of rows l, l + 32, ...: asked for a whole tile before they are used."""
        row_factors = []
        if cutlass.const_expr(factors is not None):
            for word in cutlass.range_constexpr(-(-self.tile.rows // WARP)):
                row = cutlass.min(first_row + word * WARP + lane, rows_stop - 1)
                row_factors.append(device.load_global_f32(factors + Int64(row) * 4))
        return row_factors

    @cute.jit
    def load_unit(self, address: Int32, thread: Int32) -> Any:
        """A thread's 16 words of elements and the scales of its two rows (a byte an MX block)."""
        words = []
        for vector in cutlass.range_constexpr(fragments.UNIT_VECTORS):
            words += list(device.load_shared_v4(address + vector * (WARPGROUP * 16) + thread * 16))
        scales = device.load_shared_v2(address + fragments.UNIT_ELEMENT_BYTES + (thread // 4) * 8)
        return words, scales

    @cute.jit
    def decode_half(self, words: Any, scales: Any, half: cutlass.Constexpr, buffer: cute.Tensor) -> None:
        """Two MX blocks (64 of k) as A fragments of four wgmmas."""
        registers = cute.recast_tensor(buffer, Uint32)
        first_mask = Uint32(fragments.FIRST_MASK * 0x10001)
        low_mask = Uint32(fragments.SECOND_LOW_MASK * 0x10001)
        high_mask = Uint32(fragments.SECOND_HIGH_MASK * 0x10001)
        for block in cutlass.range_constexpr(2):
            vector = half * 2 + block
            for row_half in cutlass.range_constexpr(2):
                scale = device.byte_twice(scales[row_half], vector)
                # 2^(scale - 127 + 120) as bf16; past 2^127 the sum runs into infinity and is held at NaN.
                factor = device.min_u16x2(scale * Uint32(128) + Uint32(0x3C003C00), 0x7FC07FC0)
                for step in cutlass.range_constexpr(2):
                    word = words[vector * 4 + step * 2 + row_half]
                    first = word & first_mask
                    second = ((word << 4) & low_mask) | ((word >> 4) & high_mask)
                    register = (block * 2 + step) * 4 + row_half
                    registers[register] = device.multiply_bf16x2(first, factor)
                    registers[register + 2] = device.multiply_bf16x2(second, factor)

    @cute.jit
    def store(
        self,
        accumulator: cute.Tensor,
        out: Int64,
        row_factors: Any,
        row_unit: Int32,
        first_row: Int32,
        rows_stop: Int32,
        thread: Int32,
        lane: Int32,
    ) -> None:
        """The epilogue of one unit. A thread holds fragment rows g and g + 8 of its warp, two columns in eight."""
        warp = thread // WARP
        lane_group = lane // 4
        column = (lane % 4) * 2
        if cutlass.const_expr(self.epilogue == "swiglu"):
            # Neighbours in lane_group trade a column, so that each stores two outputs of one row: 4 bytes.
            odd = lane_group % 2
            feature = row_unit * 32 + warp * 8 + lane_group - odd
            for block in cutlass.range_constexpr(self.tile.rows // 8):
                values = []
                for pair in cutlass.range_constexpr(2):
                    gate = accumulator[block * 4 + pair]
                    up = accumulator[block * 4 + 2 + pair]
                    values.append(device.silu_times(gate, up))
                give = values[0] if odd == 1 else values[1]
                keep = values[1] if odd == 1 else values[0]
                got = cute.arch.shuffle_sync_bfly(give, 4)
                row = first_row + block * 8 + column + odd
                if row < rows_stop and feature < self.width:
                    low = got if odd == 1 else keep
                    high = keep if odd == 1 else got
                    self.store_pair(out, row, feature, low, high)
        else:
            feature = row_unit * fragments.UNIT_ROWS + warp * 16 + lane_group * 2
            for block in cutlass.range_constexpr(self.tile.rows // 8):
                for pair in cutlass.range_constexpr(2):
                    low = accumulator[block * 4 + pair]
                    high = accumulator[block * 4 + 2 + pair]
                    if cutlass.const_expr(self.epilogue == "row_weight"):
                        factor = cute.arch.shuffle_sync(row_factors[block // 4], block % 4 * 8 + column + pair)
                        low = low * factor
                        high = high * factor
                    row = first_row + block * 8 + column + pair
                    if row < rows_stop and feature < self.width:
                        self.store_pair(out, row, feature, low, high)

    @cute.jit
    def store_pair(self, out: Int64, row: Int32, feature: Int32, low: Float32, high: Float32) -> None:
        """Two neighbouring outputs of a row."""
        element = Int64(row) * self.width + Int64(feature)
        if cutlass.const_expr(self.float32_out):
            device.store_global_v2_f32(out + element * 4, low, high)
        else:
            device.store_global(out + element * 2, device.pack_bf16x2(low, high))
