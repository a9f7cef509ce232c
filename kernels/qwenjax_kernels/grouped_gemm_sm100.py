"""Grouped GEMM of MXFP8 rows and packed MXFP8 weights for Blackwell (sm_100a). It has not run on a Blackwell GPU.

The weights are the M operand of block-scaled `tcgen05.mma` and the rows of a group its N operand, so that groups of a
few rows waste little. Both lie in global memory as `block_scaled` tiles, which bulk copies bring to shared memory in
the order that the instruction reads. A persistent block runs over tiles of one or two 128-row weight tiles by
`tile_rows` rows of one group, with a warp or more for each part:

- the scheduler finds the block's next tile and puts its record into a ring;
- the loader copies weights and rows, `stages` deep;
- the multiplier copies the scales on to tensor memory and issues the products, 128 of the contraction a stage;
- four epilogue warps read the accumulators. With two accumulators the next tile is multiplied meanwhile.

The epilogues: "plain" and "row_weight" (times the row's weight) store straight to the row; "swiglu" has gate in one
accumulator and up in the other, multiplies silu(gate) * up, rounds it to bfloat16 and that to MXFP8, and stores tiles
as this kernel reads them, for the matmul after it.

One block a tile, not a pair (cta_group::2): a 128 x 128 product of e4m3 takes 64 cycles for 32 of the contraction and
reads 8 KB of shared memory, its 128 bytes a cycle, so that a pair would halve traffic that just fits.
Rows at and after sum(group_sizes) are neither read nor written.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

from qwenjax_kernels import block_scaled, device, mxfp8
from qwenjax_kernels.schedule import WARP, TileSchedule
from qwenjax_kernels.tiles import Epilogue
from qwenjax_kernels.tiles_sm100 import SCALE_COLUMNS, Tile

EPILOGUE_WARPS = 4
MULTIPLIER, LOADER, SCHEDULER = 4, 5, 6
THREADS = 7 * WARP
RECORDS = 4  # tiles that the scheduler may be ahead
RECORD_BYTES = 32
RECORD_READERS = EPILOGUE_WARPS + 2
EPILOGUE_BARRIER = 1
CHUNK = 16  # accumulator columns that an epilogue warp holds at a time


class GroupedGemmSm100:
    """The kernel for one problem and tile choice; call `launch` from a `@cute.jit` function.

    y[r] = weight[group of r] @ x[r], then the epilogue. Shapes: rows uint8 [row tiles, k tiles, tile bytes]; weights
    uint8 [(layers,) groups, weight row tiles, k tiles, 16896]; group_sizes int32 [groups]; row_weight float32 [rows] or
    None; layer int32 [1] or None; out bfloat16 or float32 [rows, width], for "swiglu" uint8 [row tiles, width tiles,
    tile bytes].
    """

    def __init__(
        self,
        *,
        k: int,
        width: int,
        num_groups: int,
        epilogue: Epilogue,
        tile_rows: int,
        num_sms: int,
        float32_out: bool = False,
    ) -> None:
        if k % block_scaled.MX_BLOCK:
            raise ValueError(f"k is {k}; it must be a multiple of {block_scaled.MX_BLOCK}")
        gate_up = epilogue == "swiglu"
        self.width = width
        self.num_groups = num_groups
        self.epilogue = epilogue
        self.float32_out = float32_out
        self.tile = Tile(tile_rows, units=2 if gate_up else 1)
        self.k_tiles = block_scaled.k_tiles(k)
        self.weight_tiles = block_scaled.weight_row_tiles(width, gate_up)
        self.schedule = TileSchedule(
            num_groups=num_groups, tile_rows=tile_rows, m_tiles=self.weight_tiles // self.tile.units
        )
        self.stages = self.tile.stages(num_groups)
        self.grid = num_sms
        # The barriers, in order: each pair is full, then empty.
        self.full, self.empty = 0, self.stages
        self.sums_full = 2 * self.stages
        self.sums_empty = self.sums_full + self.tile.accumulators
        self.record_full = self.sums_empty + self.tile.accumulators
        self.record_empty = self.record_full + RECORDS
        self.barriers = self.record_empty + RECORDS

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        rows: cute.Tensor,
        weights: cute.Tensor,
        group_sizes: cute.Tensor,
        row_weight: cute.Tensor | None,
        layer: cute.Tensor | None,
        out: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        mma = cute.make_tiled_mma(
            tcgen05.MmaMXF8F6F4Op(
                Float8E4M3FN,
                Float8E4M3FN,
                (block_scaled.WEIGHT_ROWS, self.tile.rows, block_scaled.MX_BLOCK),
                tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        shape = (block_scaled.WEIGHT_ROWS, self.tile.rows, block_scaled.TILE_K)
        weight_stages = self.stages * self.tile.units
        layouts = (
            blackwell_helpers.make_smem_layout_a(mma, shape, Float8E4M3FN, weight_stages),
            blackwell_helpers.make_smem_layout_b(mma, shape, Float8E4M3FN, self.stages),
            blockscaled_layout.make_smem_layout_sfa(mma, shape, block_scaled.MX_BLOCK, weight_stages),
            blockscaled_layout.make_smem_layout_sfb(mma, shape, block_scaled.MX_BLOCK, self.stages),
        )
        self.kernel(rows, weights, group_sizes, row_weight, layer, out, mma, *layouts).launch(
            grid=[self.grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        weights: cute.Tensor,
        group_sizes: cute.Tensor,
        row_weight: cute.Tensor | None,
        layer: cute.Tensor | None,
        out: cute.Tensor,
        mma: cute.TiledMma,
        weight_layout: cute.ComposedLayout,
        row_layout: cute.ComposedLayout,
        weight_scale_layout: cute.Layout,
        row_scale_layout: cute.Layout,
    ) -> None:
        weight_scale_bytes = self.stages * self.tile.units * block_scaled.SCALE_TILE_BYTES
        row_scale_bytes = self.stages * block_scaled.SCALE_TILE_BYTES

        @cute.struct
        class Storage:
            weights: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(weight_layout.outer)], 1024]
            rows: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(row_layout.outer)], 1024]
            weight_scales: cute.struct.Align[cute.struct.MemRange[Float8E8M0FNU, weight_scale_bytes], 128]
            row_scales: cute.struct.Align[cute.struct.MemRange[Float8E8M0FNU, row_scale_bytes], 128]
            records: cute.struct.Align[cute.struct.MemRange[Int32, RECORDS * RECORD_BYTES // 4], 16]
            barriers: cute.struct.MemRange[Int64, self.barriers]
            tile_end: cute.struct.MemRange[Int32, self.num_groups]
            row_end: cute.struct.MemRange[Int32, self.num_groups]
            tensor_memory: cute.struct.MemRange[Int32, 1]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        barriers = storage.barriers.data_ptr()
        records = storage.records.data_ptr().toint()
        tile_end = storage.tile_end.data_ptr().toint()
        row_end = storage.row_end.data_ptr().toint()

        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()

        if warp == 0:
            cute.arch.alloc_tmem(self.tile.columns, storage.tensor_memory.data_ptr())
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == LOADER:
            with cute.arch.elect_one():
                self.initialise(barriers)
            cute.arch.mbarrier_init_fence()
        if warp == SCHEDULER:
            self.schedule.write_tables(group_sizes.iterator.toint(), tile_end, row_end, lane)
        device.fence_before_thread_sync()
        cute.arch.sync_threads()
        device.fence_after_thread_sync()
        columns = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_memory.data_ptr())

        if warp == SCHEDULER:
            self.schedule_tiles(records, barriers, tile_end, row_end, block, lane)
        if warp == LOADER:
            layer_bytes = self.num_groups * self.weight_tiles * self.k_tiles * self.weight_tile_bytes
            self.load(
                rows.iterator.toint(),
                device.layer_address(weights, layer, layer_bytes),
                storage.weights.data_ptr().toint(),
                storage.rows.data_ptr().toint(),
                storage.weight_scales.data_ptr().toint(),
                storage.row_scales.data_ptr().toint(),
                records,
                barriers,
                lane,
            )
        if warp == MULTIPLIER:
            self.multiply(
                mma,
                storage.weights.get_tensor(weight_layout.outer, swizzle=weight_layout.inner),
                storage.rows.get_tensor(row_layout.outer, swizzle=row_layout.inner),
                storage.weight_scales.get_tensor(weight_scale_layout),
                storage.row_scales.get_tensor(row_scale_layout),
                columns,
                records,
                barriers,
                lane,
            )
        if warp < EPILOGUE_WARPS:
            address = device.load_shared(storage.tensor_memory.data_ptr().toint())
            self.store_tiles(
                out.iterator.toint(), device.address_of(row_weight), address, records, barriers, warp, lane
            )
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=EPILOGUE_WARPS * WARP)
            if warp == 0:
                cute.arch.dealloc_tmem(columns, self.tile.columns)

    @property
    def weight_tile_bytes(self) -> int:
        return block_scaled.tile_bytes(block_scaled.WEIGHT_ROWS)

    @cute.jit
    def initialise(self, barriers: cute.Pointer) -> None:
        """Sets the arrivals that each barrier waits for."""
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(barriers + (self.full + stage), 1)
            cute.arch.mbarrier_init(barriers + (self.empty + stage), 1)
        for accumulator in cutlass.range_constexpr(self.tile.accumulators):
            cute.arch.mbarrier_init(barriers + (self.sums_full + accumulator), 1)
            cute.arch.mbarrier_init(barriers + (self.sums_empty + accumulator), EPILOGUE_WARPS)
        for record in cutlass.range_constexpr(RECORDS):
            cute.arch.mbarrier_init(barriers + (self.record_full + record), 1)
            cute.arch.mbarrier_init(barriers + (self.record_empty + record), RECORD_READERS)

    @cute.jit
    def schedule_tiles(
        self, records: Int32, barriers: cute.Pointer, tile_end: Int32, row_end: Int32, block: Int32, lane: Int32
    ) -> None:
        """The scheduler: a record a tile, and one of no rows after the last."""
        total = self.schedule.total(tile_end)
        slot = Int32(0)
        phase = Int32(1)
        index = block
        more = Boolean(True)
        while more:
            more = index < total
            group = Int32(0)
            m_tile = Int32(0)
            row_tile = Int32(0)
            first_row = Int32(0)
            rows_stop = Int32(0)
            if more:
                group, m_tile, row_tile, first_row, rows_stop = self.schedule.locate(index, tile_end, row_end, lane)
            cute.arch.mbarrier_wait(barriers + (self.record_empty + slot), phase)
            with cute.arch.elect_one():
                record = records + slot * RECORD_BYTES
                device.store_shared(record, group)
                device.store_shared(record + 4, m_tile)
                device.store_shared(record + 8, row_tile)
                device.store_shared(record + 12, first_row)
                device.store_shared(record + 16, rows_stop - first_row)
                cute.arch.mbarrier_arrive(barriers + (self.record_full + slot))
            slot, phase = self.next(slot, phase, RECORDS)
            index += self.grid

    @cute.jit
    def next(self, index: Int32, phase: Int32, count: cutlass.Constexpr) -> tuple[Int32, Int32]:
        """The place after this one in a ring, and the phase of its barrier."""
        index += 1
        if index == count:
            index = Int32(0)
            phase ^= 1
        return index, phase

    @cute.jit
    def take(
        self, records: Int32, barriers: cute.Pointer, slot: Int32, phase: Int32, lane: Int32
    ) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """A reader's next tile: group, M tile, row tile, first row, rows; by a warp together. No rows: the end."""
        cute.arch.mbarrier_wait(barriers + (self.record_full + slot), phase)
        record = records + slot * RECORD_BYTES
        fields = [device.load_shared(record + 4 * field) for field in range(5)]
        cute.arch.sync_warp()
        device.arrive_if((barriers + (self.record_empty + slot)).toint(), Int32(lane == 0))
        return fields[0], fields[1], fields[2], fields[3], cutlass.min(fields[4], self.tile.rows)

    @cute.jit
    def load(
        self,
        rows: Int64,
        weights: Int64,
        shared_weights: Int32,
        shared_rows: Int32,
        shared_weight_scales: Int32,
        shared_row_scales: Int32,
        records: Int32,
        barriers: cute.Pointer,
        lane: Int32,
    ) -> None:
        """The loader: elements and scales of the weight tiles and of the row tile, for each stage."""
        weight_elements = block_scaled.WEIGHT_ROWS * block_scaled.TILE_K
        row_elements = self.tile.rows * block_scaled.TILE_K
        row_tile_bytes = block_scaled.tile_bytes(self.tile.rows)
        scale_bytes = block_scaled.SCALE_TILE_BYTES
        # Weights that one block reads once make no room of the L2 their own; with more row tiles they are read again.
        evict_first = self.tile.rows < 128

        slot = Int32(0)
        slot_phase = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        group, m_tile, row_tile, _, count = self.take(records, barriers, slot, slot_phase, lane)
        while count > 0:
            weight_tile = Int64(group) * self.weight_tiles + Int64(m_tile) * self.tile.units
            weight_source = weights + weight_tile * (self.k_tiles * self.weight_tile_bytes)
            row_source = rows + Int64(row_tile) * (self.k_tiles * row_tile_bytes)
            for k_tile in cutlass.range(self.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(barriers + (self.empty + stage), phase)
                full = barriers + (self.full + stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile.stage_bytes)
                    for unit in cutlass.range_constexpr(self.tile.units):
                        source = weight_source + (
                            Int64(k_tile) * self.weight_tile_bytes + unit * self.k_tiles * self.weight_tile_bytes
                        )
                        place = stage * self.tile.units + unit
                        device.bulk_copy(
                            shared_weights + place * weight_elements, source, weight_elements, full.toint(), evict_first
                        )
                        device.bulk_copy(
                            shared_weight_scales + place * scale_bytes,
                            source + weight_elements,
                            scale_bytes,
                            full.toint(),
                            evict_first,
                        )
                    source = row_source + Int64(k_tile) * row_tile_bytes
                    device.bulk_copy(shared_rows + stage * row_elements, source, row_elements, full.toint(), False)
                    device.bulk_copy(
                        shared_row_scales + stage * scale_bytes, source + row_elements, scale_bytes, full.toint(), False
                    )
                stage, phase = self.next(stage, phase, self.stages)
            slot, slot_phase = self.next(slot, slot_phase, RECORDS)
            group, m_tile, row_tile, _, count = self.take(records, barriers, slot, slot_phase, lane)
        # The last arrivals must find this block's shared memory still its own.
        for _ in cutlass.range(self.stages, unroll=1):
            cute.arch.mbarrier_wait(barriers + (self.empty + stage), phase)
            stage, phase = self.next(stage, phase, self.stages)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        weights: cute.Tensor,
        rows: cute.Tensor,
        weight_scales: cute.Tensor,
        row_scales: cute.Tensor,
        columns: cute.Pointer,
        records: Int32,
        barriers: cute.Pointer,
        lane: Int32,
    ) -> None:
        """The multiplier: for each stage its scales to tensor memory, then four products of 32 a weight tile."""
        units = self.tile.units
        shape = (block_scaled.WEIGHT_ROWS, self.tile.rows, block_scaled.TILE_K)
        weight_fragments = mma.make_fragment_A(weights)
        row_fragments = mma.make_fragment_B(rows)
        sums_shape = cute.append(mma.partition_shape_C(shape[:2]), self.tile.accumulators * units)
        sums = cute.make_tensor(columns, mma.make_fragment_C(sums_shape).layout)

        scales = self.tile.accumulators * units * self.tile.rows
        weight_scale_layout = blockscaled_layout.make_tmem_layout_sfa(
            mma, shape, block_scaled.MX_BLOCK, cute.slice_(weight_scales.layout, (None, None, None, 0))
        )
        row_scale_layout = blockscaled_layout.make_tmem_layout_sfb(
            mma, shape, block_scaled.MX_BLOCK, cute.slice_(row_scales.layout, (None, None, None, 0))
        )
        unit_scales = []
        for unit in cutlass.range_constexpr(units):
            pointer = cute.recast_ptr(columns + (scales + unit * SCALE_COLUMNS), dtype=Float8E8M0FNU)
            unit_scales.append(cute.make_tensor(pointer, weight_scale_layout))
        pointer = cute.recast_ptr(columns + (scales + units * SCALE_COLUMNS), dtype=Float8E8M0FNU)
        tile_scales = cute.make_tensor(pointer, row_scale_layout)
        weight_copy, weight_sources, _ = self.scale_copy(weight_scales, unit_scales[0])
        weight_targets = [self.scale_copy(weight_scales, unit_scale)[2] for unit_scale in unit_scales]
        row_copy, row_sources, row_target = self.scale_copy(row_scales, tile_scales)

        slot = Int32(0)
        slot_phase = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        buffer = Int32(0)
        buffer_phase = Int32(1)
        _, _, _, _, count = self.take(records, barriers, slot, slot_phase, lane)
        while count > 0:
            cute.arch.mbarrier_wait(barriers + (self.sums_empty + buffer), buffer_phase)
            device.fence_after_thread_sync()
            for k_tile in cutlass.range(self.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(barriers + (self.full + stage), phase)
                device.fence_after_thread_sync()
                # In order with the products that read them, so that one copy of the scales is enough.
                cute.copy(row_copy, row_sources[None, None, None, None, stage], row_target)
                for unit in cutlass.range_constexpr(units):
                    place = stage * units + unit
                    cute.copy(weight_copy, weight_sources[None, None, None, None, place], weight_targets[unit])
                for unit in cutlass.range_constexpr(units):
                    result = sums[None, None, None, buffer * units + unit]
                    mma.set(tcgen05.Field.ACCUMULATE, k_tile != 0)
                    cute.gemm(
                        mma,
                        result,
                        [weight_fragments[None, None, None, stage * units + unit], unit_scales[unit]],
                        [row_fragments[None, None, None, stage], tile_scales],
                        result,
                    )
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + (self.empty + stage))
                stage, phase = self.next(stage, phase, self.stages)
            with cute.arch.elect_one():
                tcgen05.commit(barriers + (self.sums_full + buffer))
            buffer, buffer_phase = self.next(buffer, buffer_phase, self.tile.accumulators)
            slot, slot_phase = self.next(slot, slot_phase, RECORDS)
            _, _, _, _, count = self.take(records, barriers, slot, slot_phase, lane)

    @cute.jit
    def scale_copy(self, shared: cute.Tensor, target: cute.Tensor) -> Any:
        """The copy of a tile of scales from shared to tensor memory, which repeats it for the four warps' lanes."""
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), Float8E8M0FNU)
        compact = cute.filter_zeros(target)
        copy = tcgen05.make_s2t_copy(atom, compact)
        slice_ = copy.get_slice(0)
        sources = tcgen05.get_s2t_smem_desc_tensor(copy, slice_.partition_S(cute.filter_zeros(shared)))
        return copy, sources, slice_.partition_D(compact)

    @cute.jit
    def store_tiles(
        self,
        out: Int64,
        factors: Int64 | None,
        columns: Int32,
        records: Int32,
        barriers: cute.Pointer,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """An epilogue warp: the 32 outputs in its lanes of tensor memory, some rows (columns) at a time."""
        lanes = columns + (warp << 21)  # the lane of an address stands above its 16 bits of column
        slot = Int32(0)
        slot_phase = Int32(0)
        buffer = Int32(0)
        phase = Int32(0)
        _, m_tile, row_tile, first_row, count = self.take(records, barriers, slot, slot_phase, lane)
        while count > 0:
            cute.arch.mbarrier_wait(barriers + (self.sums_full + buffer), phase)
            device.fence_after_thread_sync()
            first = lanes + buffer * (self.tile.units * self.tile.rows)
            if cutlass.const_expr(self.epilogue == "swiglu"):
                self.store_quantised(out, first, m_tile, row_tile, warp, lane)
            else:
                self.store_rows(out, factors, first, m_tile, first_row, count, warp, lane)
            device.fence_before_thread_sync()
            cute.arch.sync_warp()
            device.arrive_if((barriers + (self.sums_empty + buffer)).toint(), Int32(lane == 0))
            buffer, phase = self.next(buffer, phase, self.tile.accumulators)
            slot, slot_phase = self.next(slot, slot_phase, RECORDS)
            _, m_tile, row_tile, first_row, count = self.take(records, barriers, slot, slot_phase, lane)

    @cute.jit
    def store_quantised(
        self, out: Int64, first: Int32, m_tile: Int32, row_tile: Int32, warp: Int32, lane: Int32
    ) -> None:
        """silu(gate) * up as MXFP8: a tile of this output's 128 columns, its rows of padding with it.

        The 32 outputs of an MX block are the lanes of a warp: their largest magnitude is one reduction. The padding is
        zeros, since its rows are.
        """
        output_tiles = self.weight_tiles // self.tile.units
        tile_bytes = block_scaled.tile_bytes(self.tile.rows)
        target = out + (Int64(row_tile) * output_tiles + Int64(m_tile)) * tile_bytes
        scales = target + self.tile.rows * block_scaled.TILE_K
        odd_selector, even_selector = (Uint32(block_scaled.transpose_selectors(lane_)[0]) for lane_ in (1, 0))
        high_selector, low_selector = (Uint32(block_scaled.transpose_selectors(lane_)[1]) for lane_ in (2, 0))
        selector = odd_selector if lane & 1 != 0 else even_selector
        second_selector = high_selector if lane & 2 != 0 else low_selector
        for chunk in cutlass.range(self.tile.rows // CHUNK, unroll=1):
            column = chunk * CHUNK
            gates = device.load_tensor_memory(first + column, CHUNK)
            ups = device.load_tensor_memory(first + (self.tile.rows + column), CHUNK)
            own_scale = Int32(0)
            for quad in cutlass.range_constexpr(CHUNK // 4):
                values = []
                for element in cutlass.range_constexpr(4):
                    index = quad * 4 + element
                    product = device.silu_times(gates[index], ups[index])
                    value = device.round_to_bf16(product)
                    amax = cute.arch.warp_redux_sync(device.magnitude_bits(value), "max")
                    scale = mxfp8.scale_byte(amax)
                    own_scale = scale if lane == index else own_scale
                    values.append(value * mxfp8.inverse_scale(scale))
                word = device.pack_e4m3x4(*values)
                word = device.permute_bytes(word, cute.arch.shuffle_sync_bfly(word, 1), selector)
                word = device.permute_bytes(word, cute.arch.shuffle_sync_bfly(word, 2), second_selector)
                row, k = block_scaled.quantised_place(warp, lane, column + quad * 4)
                device.store_global(target + Int64(block_scaled.element_offset(row, k)), word)
            if lane < CHUNK:
                place = block_scaled.scale_offset(column + lane, warp)
                device.store_global_byte(scales + Int64(place), own_scale)

    @cute.jit
    def store_rows(
        self,
        out: Int64,
        factors: Int64 | None,
        first: Int32,
        m_tile: Int32,
        first_row: Int32,
        count: Int32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """Rows of outputs. Neighbouring lanes trade a column, so that each stores two outputs of one row."""
        odd = lane & 1
        output = m_tile * block_scaled.WEIGHT_ROWS + warp * WARP + lane - odd
        inside = output < self.width
        for chunk in cutlass.range(self.tile.rows // CHUNK, unroll=1):
            column = chunk * CHUNK
            sums = device.load_tensor_memory(first + column, CHUNK)
            own_factor = Float32(1.0)
            if cutlass.const_expr(factors is not None):
                # Lane l keeps the weight of the chunk's row l, within the rows that there are.
                row = first_row + cutlass.min(column + lane % CHUNK, count - 1)
                own_factor = device.load_global_f32(factors + Int64(row) * 4)
            for pair in cutlass.range_constexpr(CHUNK // 2):
                values = [sums[pair * 2], sums[pair * 2 + 1]]
                if cutlass.const_expr(factors is not None):
                    values = [
                        value * cute.arch.shuffle_sync(own_factor, pair * 2 + index)
                        for index, value in enumerate(values)
                    ]
                give = values[0] if odd == 1 else values[1]
                keep = values[1] if odd == 1 else values[0]
                got = cute.arch.shuffle_sync_bfly(give, 1)
                low = got if odd == 1 else keep
                high = keep if odd == 1 else got
                row = column + pair * 2 + odd
                if row < count and inside:
                    element = (Int64(first_row) + Int64(row)) * self.width + Int64(output)
                    if cutlass.const_expr(self.float32_out):
                        device.store_global_v2_f32(out + element * 4, low, high)
                    else:
                        device.store_global(out + element * 2, device.pack_bf16x2(low, high))
