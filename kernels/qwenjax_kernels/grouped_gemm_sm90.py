"""Grouped GEMM for Hopper (sm_90a): what its forms for MXFP8 and for bf16 weights share.

The weights are the M operand of `wgmma` and the rows of a group its N operand, so that groups of a few rows waste
no tensor work. A persistent block runs over tiles of `tile_m` weight rows by `tile_rows` rows of one group:

- one warp copies weights to shared memory, `stages` deep, `unit_k` of k a stage;
- two warps gather the rows with cp.async into the 128-byte swizzle that wgmma reads;
- the consumer warpgroups multiply, each its own units of 64 weight rows, or each its own stages in turn (`split_k`);
- where a cluster's blocks have a tile together (`k_blocks`), each multiplies a run of k, and the first adds their sums;
- the epilogue applies SwiGLU or the rows' weights in float32 and stores straight to the row.

Rows at and after sum(group_sizes) are neither read nor written.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from qwenjax_kernels import device, fragments
from qwenjax_kernels.schedule import WARP, TileSchedule
from qwenjax_kernels.tiles import WARPGROUP, Epilogue, Tile

GATHER_WARPS = 2
# wgmma truncates as it accumulates: 2.4e-6 of the norm over k = 2048. Float32 results sum segments of 512 instead.
SEGMENT_K = 512
# Named barriers of split_k: the sums in the exchange have been read, they are all there.
EXCHANGE_FREE, EXCHANGE_FULL = 1, 2
Follows = Literal["groups", "rows"] | None


class GroupedGemmSm90:
    """The kernel for one problem and tile choice; call `launch` of a subclass from a `@cute.jit` function.

    y[r] = weight[group of r] @ x[row_token[r] or r], then the epilogue. Shapes: x bf16 [tokens, k]; weights as the
    subclass says, of `layers` layers; group_sizes int32 [groups]; row_token int32 [rows] or None; row_weight float32
    [rows] or None; layer int32 [1] or None; out bf16 or float32 [rows, width].

    follows: what the kernel before this one makes, which may still run when this one starts: "groups", all that says
    which rows are whose; "rows", x; None, nothing. All else is read without waiting: with "rows", group_sizes and
    row_weight must have been complete before the kernel that makes x let this one start.

    A subclass sets `unit_k`, what a stage holds of k, 64 or 128; `unit_bytes`, of 64 weight rows by unit_k in shared
    memory; `operand_source`, where wgmma finds them; and `halves_are_neighbours`, whether fragment rows g and g + 8 of
    a warp are neighbouring outputs (else they are as they lie, and only SwiGLU has its gate in g and its up row in
    g + 8).
    """

    unit_k: int
    unit_bytes: int
    operand_source: warpgroup.OperandSource
    halves_are_neighbours: bool

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
        layers: int = 1,
        follows: Follows = None,
    ) -> None:
        if k % fragments.MX_BLOCK:
            raise ValueError(f"k is {k}; it must be a multiple of {fragments.MX_BLOCK}")
        self.k = k
        self.width = width
        self.num_groups = num_groups
        self.layers = layers
        self.epilogue = epilogue
        self.tile = tile
        self.float32_out = float32_out
        fragment_rows = 2 * (-(-width // 32) * 32) if epilogue == "swiglu" else width
        self.row_units, self.k_units = -(-fragment_rows // fragments.UNIT_ROWS), -(-k // self.unit_k)
        self.m_tiles = -(-self.row_units // tile.m_units)
        self.follows = follows
        self.groups_are_there = follows != "groups"
        self.schedule = TileSchedule(
            num_groups=num_groups, tile_rows=tile.rows, m_tiles=self.m_tiles, read_only=self.groups_are_there
        )
        self.stages = tile.stages(num_groups, self.unit_bytes, self.unit_k)
        self.turn_step = tile.warpgroups if tile.split_k else 1
        self.grid = num_sms // tile.k_blocks  # clusters, or blocks where they are the same
        if self.k_units % tile.k_blocks:
            raise ValueError(f"{self.k_units} units of {self.unit_k} of k; {tile.k_blocks} blocks have unequal runs")
        self.run_units = self.k_units // tile.k_blocks  # of k that a block multiplies
        if self.stages < max(2, self.turn_step) or self.stages % self.turn_step:
            raise ValueError(f"{tile} has {self.stages} stages; 2 at least are needed, a multiple of {self.turn_step}")

    @cute.jit
    def wait_for(self, what: cutlass.Constexpr) -> None:
        """Waits for the kernel before this one where it makes `what`; it may still run when this one starts."""
        if cutlass.const_expr(self.follows == what):
            cute.arch.griddepcontrol_wait()

    def weight_view(self, weights: Any) -> tuple[Any, Any, Any]:
        """The TMA copy of a stage's weights, the tensor that it reads and their layout in shared memory, or None."""
        raise NotImplementedError

    def weight_source(self, weights: Any, layer: cute.Tensor | None) -> Any:
        """What `copy_weights` needs to find the layer."""
        raise NotImplementedError

    def weight_operand(self, tiled_mma: cute.TiledMma, thread: Int32, first_unit: Int32, shared_weights: Any) -> Any:
        """What `multiply_units` needs of a consumer warpgroup's weights, whose units begin at `first_unit`."""
        raise NotImplementedError

    def copy_weights(self, *arguments: Any) -> None:
        """The weight producer, a warp."""
        raise NotImplementedError

    def multiply_units(self, *arguments: Any) -> Any:
        """Adds units of k to the accumulators: the stages from `stage` in steps of `turn_step`."""
        raise NotImplementedError

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        x: cute.Tensor,
        weights: Any,
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
                self.operand_source,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        row_layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16),
            (self.tile.rows, self.unit_k, self.stages),
            order=(0, 1, 2),
        )
        copy, source, weight_layout = self.weight_view(weights)
        self.kernel(
            x,
            weights,
            group_sizes,
            row_token,
            row_weight,
            layer,
            out,
            tiled_mma,
            row_layout,
            copy,
            source,
            weight_layout,
        ).launch(
            grid=[self.grid * self.tile.k_blocks, 1, 1],
            cluster=[self.tile.k_blocks, 1, 1] if self.tile.k_blocks > 1 else None,
            block=[self.tile.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.follows is not None,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weights: Any,
        group_sizes: cute.Tensor,
        row_token: cute.Tensor | None,
        row_weight: cute.Tensor | None,
        layer: cute.Tensor | None,
        out: cute.Tensor,
        tiled_mma: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        weight_copy: cute.CopyAtom | None,
        weight_tensor: cute.Tensor | None,
        weight_layout: Any,
    ) -> None:
        stages = self.stages
        weight_bytes = stages * self.tile.m_units * self.unit_bytes

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(row_layout)], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[BFloat16, weight_bytes // 2], 1024]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, max(self.tile.exchange_bytes // 4, 1)], 16]
            inbox: cute.struct.Align[cute.struct.MemRange[Float32, max(self.tile.inbox_bytes // 4, 1)], 16]
            barriers: cute.struct.MemRange[Int64, 2 * stages + 1]
            tile_end: cute.struct.MemRange[Int32, self.num_groups]
            row_end: cute.struct.MemRange[Int32, self.num_groups]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        shared_rows = storage.rows.get_tensor(row_layout.outer, swizzle=row_layout.inner)
        if cutlass.const_expr(weight_layout is None):
            shared_weights = storage.weights.data_ptr().toint()
        else:
            shared_weights = storage.weights.get_tensor(weight_layout.outer, swizzle=weight_layout.inner)
        full = storage.barriers.data_ptr()
        empty = full + stages
        sums_there = empty + stages
        tile_end = storage.tile_end.data_ptr().toint()
        row_end = storage.row_end.data_ptr().toint()

        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = block % self.tile.k_blocks
        block = block // self.tile.k_blocks
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()

        if warp == 1:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + stage, 1 + GATHER_WARPS * WARP)
                    cute.arch.mbarrier_init(empty + stage, 4 * self.tile.warpgroups // self.turn_step)
                if cutlass.const_expr(self.tile.k_blocks > 1):
                    threads = WARPGROUP * self.tile.warpgroups // self.turn_step
                    cute.arch.mbarrier_init(sums_there, (self.tile.k_blocks - 1) * threads)
            cute.arch.mbarrier_init_fence()
        self.wait_for("groups")
        # What follows may start, and copy its first weights, on multiprocessors that have no more tiles here.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            self.schedule.write_tables(group_sizes.iterator.toint(), tile_end, row_end, lane)
        if cutlass.const_expr(self.tile.k_blocks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        total = self.schedule.total(tile_end)
        producer_registers, consumer_registers = self.tile.registers()
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                self.copy_weights(
                    self.weight_source(weights, layer),
                    weight_copy,
                    weight_tensor,
                    shared_weights,
                    full,
                    empty,
                    tile_end,
                    row_end,
                    block,
                    rank * self.run_units,
                    total,
                    lane,
                )
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
                    rank * self.run_units,
                    total,
                    warp - 1,
                    lane,
                )
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.multiply(
                tiled_mma,
                shared_rows,
                shared_weights,
                storage.exchange.data_ptr().toint(),
                storage.inbox.data_ptr().toint(),
                sums_there.toint(),
                full,
                empty,
                tile_end,
                row_end,
                out.iterator.toint(),
                device.address_of(row_weight),
                block,
                rank,
                total,
                thread - WARPGROUP,
                lane,
            )

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
        first_unit: Int32,
        total: Int32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """The row producers: a quarter or half of a warp copies the 128 or 256 bytes of a row that belong to a stage.

        Two warps take eight or four rows a turn. A 16-byte chunk is XORed with its row modulo 8, which differs, where
        a turn takes four rows, between even and odd turns.
        """
        self.wait_for("rows")
        stage = Int32(0)
        phase = Int32(1)
        lanes = self.unit_k * 2 // 16  # of a row
        warp_rows = WARP // lanes
        turn_rows = GATHER_WARPS * warp_rows
        turns = self.tile.rows // turn_rows
        chunk = lane % lanes
        slot = warp * warp_rows + lane // lanes
        swizzled = ((chunk % 8) ^ slot) * 16
        line = rows_address + (chunk // 8) * (self.tile.rows * 128) + slot * 128
        lines = [line + swizzled, line + (swizzled ^ (turn_rows % 8 * 16))]
        row_stage_bytes = self.tile.rows * self.unit_k * 2
        index = block
        while index < total:
            _, _, _, first_row, rows_stop = self.schedule.locate(index, tile_end, row_end, lane)
            origins = []
            if cutlass.const_expr(tokens is not None):
                # Lane l keeps the token of the warp's l-th row; a copy asks for it by a shuffle.
                for word in cutlass.range_constexpr(-(-turns * warp_rows // WARP)):
                    own = word * WARP + lane
                    row = first_row + own // warp_rows * turn_rows + warp * warp_rows + own % warp_rows
                    origin = Int32(-1)
                    if row < rows_stop:
                        origin = device.load_global(tokens + Int64(row) * 4, self.groups_are_there)
                    origins.append(origin)
            for k_unit in cutlass.range(self.run_units, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                column = (first_unit + k_unit) * (self.unit_k * 2) + chunk * 16
                inside = column < self.k * 2
                base = x + Int64(column if inside else 0)
                if cutlass.const_expr(tokens is not None):
                    for turn in cutlass.range_constexpr(turns):
                        own = turn * warp_rows
                        token = cute.arch.shuffle_sync(origins[own // WARP], own % WARP + lane // lanes)
                        target = lines[turn % 2] + stage * row_stage_bytes + turn * (turn_rows * 128)
                        self.copy_row(base, inside, token, token, target)
                else:
                    # 32 turns at once spill from 40 registers.
                    unrolled = math.gcd(turns, 8)
                    for several in cutlass.range(turns // unrolled, unroll=1):
                        for turn in cutlass.range_constexpr(unrolled):
                            here = several * (unrolled * turn_rows) + turn * turn_rows
                            self.copy_row(
                                base,
                                inside,
                                rows_stop - 1 - (first_row + slot) - here,
                                first_row + slot + here,
                                lines[turn % 2] + stage * row_stage_bytes + here * 128,
                            )
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage, phase = self.advance(stage, phase, 1)
            index += self.grid

    @cute.jit
    def copy_row(self, base: Int64, inside: cutlass.Boolean, copies: Int32, token: Int32, target: Int32) -> None:
        """A thread's 16 bytes of a row, where `copies` is not negative; zeros past the end of k (not `inside`)."""
        address = base + Int64(token) * (self.k * 2)
        if cutlass.const_expr(self.k % self.unit_k == 0):
            device.copy_16_if(copies, target, address)
        else:
            size = Int32(16) if inside else Int32(0)
            device.copy_16_or_zeros_if(copies, target, address, size)

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        shared_rows: cute.Tensor,
        shared_weights: Any,
        exchange: Int32,
        inbox: Int32,
        sums_there: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        row_end: Int32,
        out: Int64,
        factors: Int64 | None,
        block: Int32,
        rank: Int32,
        total: Int32,
        thread: Int32,
        lane: Int32,
    ) -> None:
        """A consumer warpgroup: multiplies its units or its stages, and stores its part of each tile."""
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        units = self.tile.units
        first_unit = Int32(0) if self.tile.split_k else warpgroup_index * units
        first_turn = warpgroup_index if self.tile.split_k else Int32(0)
        rows_fragment = tiled_mma.make_fragment_B(tiled_mma.get_slice(thread).partition_B(shared_rows))
        shape = tiled_mma.partition_shape_C((fragments.UNIT_ROWS, self.tile.rows))
        accumulators = [tiled_mma.make_fragment_C(shape) for _ in range(units)]
        operand = self.weight_operand(tiled_mma, thread, first_unit, shared_weights)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

        leads = Int32(lane == 0)
        turns = (self.run_units - first_turn + (self.turn_step - 1)) // self.turn_step
        segment_turns = SEGMENT_K // self.unit_k
        tile_stage = Int32(0)
        tile_phase = Int32(0)
        index = block
        while index < total:
            _, m_tile, _, first_row, rows_stop = self.schedule.locate(index, tile_end, row_end, lane)
            row_factors = self.load_factors(factors, first_row, rows_stop, lane)
            stage, phase = self.advance(tile_stage, tile_phase, first_turn)
            for unit in cutlass.range_constexpr(units):
                accumulators[unit].fill(0.0)
            if cutlass.const_expr(self.float32_out):
                sums = [cute.make_rmem_tensor_like(accumulators[0]) for _ in range(units)]
                for unit in cutlass.range_constexpr(units):
                    sums[unit].fill(0.0)
                for segment in cutlass.range((turns + (segment_turns - 1)) // segment_turns, unroll=1):
                    count = cutlass.min(turns - segment * segment_turns, segment_turns)
                    stage, phase = self.multiply_units(
                        tiled_mma,
                        accumulators,
                        operand,
                        rows_fragment,
                        full,
                        empty,
                        count,
                        stage,
                        phase,
                        thread,
                        leads,
                    )
                    for unit in cutlass.range_constexpr(units):
                        sums[unit].store(sums[unit].load() + accumulators[unit].load())
                        accumulators[unit].fill(0.0)
                for unit in cutlass.range_constexpr(units):
                    accumulators[unit].store(sums[unit].load())
            else:
                stage, phase = self.multiply_units(
                    tiled_mma,
                    accumulators,
                    operand,
                    rows_fragment,
                    full,
                    empty,
                    turns,
                    stage,
                    phase,
                    thread,
                    leads,
                )
            first_row_unit = m_tile * self.tile.m_units + first_unit
            if cutlass.const_expr(self.tile.split_k):
                tile_stage, tile_phase = self.advance_far(tile_stage, tile_phase, self.run_units)
                self.add_sums(accumulators, exchange, warpgroup_index, thread)
            else:
                tile_stage = stage
                tile_phase = phase
            stores = Boolean(warpgroup_index == 0) if self.tile.split_k else Boolean(True)
            if cutlass.const_expr(self.tile.k_blocks > 1):
                if stores:
                    self.add_blocks(accumulators, inbox, sums_there, rank, first_unit, thread)
                stores = stores & (rank == 0)
            if stores:
                self.store_units(accumulators, out, row_factors, first_row_unit, first_row, rows_stop, thread, lane)
            index += self.grid

    @cute.jit
    def advance(self, stage: Int32, phase: Int32, by: Any) -> tuple[Int32, Int32]:
        """The stage and its phase `by` stages on, no more than there are."""
        stage += by
        if stage >= self.stages:
            stage -= self.stages
            phase ^= 1
        return stage, phase

    @cute.jit
    def advance_far(self, stage: Int32, phase: Int32, by: cutlass.Constexpr) -> tuple[Int32, Int32]:
        """The same by any number of stages."""
        rounds = (stage + by) // self.stages
        return stage + by - rounds * self.stages, phase ^ (rounds & 1)

    @cute.jit
    def add_sums(self, accumulators: Any, exchange: Int32, warpgroup_index: Int32, thread: Int32) -> None:
        """Adds the accumulators of all warpgroups, in their order, to those of the first.

        All have multiplied the tile when one goes on to the next, where a stage may be another warpgroup's: see
        `Tile.stages`.
        """
        threads = self.tile.warpgroups * WARPGROUP
        size = cute.size(accumulators[0].shape)
        if warpgroup_index > 0:
            mine = exchange + (warpgroup_index - 1) * (self.tile.units * size * WARPGROUP * 4) + thread * 4
            for unit in cutlass.range_constexpr(self.tile.units):
                for four in cutlass.range_constexpr(size // 4):
                    for register in cutlass.range_constexpr(four * 4, four * 4 + 4):
                        place = (unit * size + register) * (WARPGROUP * 4)
                        device.store_shared_f32(mine + place, accumulators[unit][register])
            cute.arch.barrier_arrive(barrier_id=EXCHANGE_FULL, number_of_threads=threads)
            cute.arch.barrier(barrier_id=EXCHANGE_FREE, number_of_threads=threads)
        else:
            cute.arch.barrier(barrier_id=EXCHANGE_FULL, number_of_threads=threads)
            for other in cutlass.range_constexpr(self.tile.warpgroups - 1):
                for unit in cutlass.range_constexpr(self.tile.units):
                    for four in cutlass.range_constexpr(size // 4):
                        for register in cutlass.range_constexpr(four * 4, four * 4 + 4):
                            place = ((other * self.tile.units + unit) * size + register) * (WARPGROUP * 4)
                            added = device.load_shared_f32(exchange + place + thread * 4)
                            accumulators[unit][register] = accumulators[unit][register] + added
            cute.arch.barrier_arrive(barrier_id=EXCHANGE_FREE, number_of_threads=threads)

    @cute.jit
    def add_blocks(
        self, accumulators: Any, inbox: Int32, sums_there: Int32, rank: Int32, first_unit: Int32, thread: Int32
    ) -> None:
        """Adds the accumulators of the cluster's blocks, in their order, to those of the first: once in a launch."""
        size = cute.size(accumulators[0].shape)
        unit_bytes = size * WARPGROUP * 4
        mine = inbox + first_unit * unit_bytes + thread * 16
        block_bytes = self.tile.m_units * unit_bytes
        if rank > 0:
            target = device.remote_address(mine + (rank - 1) * block_bytes, Int32(0))
            for unit in cutlass.range_constexpr(self.tile.units):
                for four in cutlass.range_constexpr(size // 4):
                    values = [accumulators[unit][four * 4 + i] for i in range(4)]
                    device.store_remote_v4_f32(target + (unit * unit_bytes + four * (WARPGROUP * 16)), values)
            device.arrive_remote(device.remote_address(sums_there, Int32(0)))
        else:
            device.wait_for_cluster(sums_there)
            for other in cutlass.range_constexpr(self.tile.k_blocks - 1):
                for unit in cutlass.range_constexpr(self.tile.units):
                    for four in cutlass.range_constexpr(size // 4):
                        place = other * block_bytes + unit * unit_bytes + four * (WARPGROUP * 16)
                        added = device.load_shared_v4_f32(mine + place)
                        for i in cutlass.range_constexpr(4):
                            accumulators[unit][four * 4 + i] = accumulators[unit][four * 4 + i] + added[i]

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
    def store_units(
        self,
        accumulators: Any,
        out: Int64,
        row_factors: Any,
        first_row_unit: Int32,
        first_row: Int32,
        rows_stop: Int32,
        thread: Int32,
        lane: Int32,
    ) -> None:
        """The epilogue. A thread holds fragment rows g and g + 8 of its warp, two columns in eight."""
        if cutlass.const_expr(self.epilogue == "row_weight"):
            self.weigh(accumulators, row_factors, lane)
        for unit in cutlass.range_constexpr(self.tile.units):
            row_unit = first_row_unit + unit
            if cutlass.const_expr(self.epilogue == "swiglu"):
                feature = row_unit * 32 + thread // WARP * 8 + lane // 4
                values = [
                    device.silu_times(
                        accumulators[unit][i // 2 * 4 + i % 2], accumulators[unit][i // 2 * 4 + 2 + i % 2]
                    )
                    for i in range(self.tile.rows // 4)
                ]
                self.store_columns(values, out, feature, first_row, rows_stop, lane)
            else:
                feature = row_unit * fragments.UNIT_ROWS + thread // WARP * 16
                halves = [
                    [accumulators[unit][i // 2 * 4 + half * 2 + i % 2] for i in range(self.tile.rows // 4)]
                    for half in range(2)
                ]
                if cutlass.const_expr(self.halves_are_neighbours):
                    self.store_pairs(halves[0], halves[1], out, feature + lane // 4 * 2, first_row, rows_stop, lane)
                else:
                    for half in cutlass.range_constexpr(2):
                        self.store_columns(
                            halves[half], out, feature + half * 8 + lane // 4, first_row, rows_stop, lane
                        )

    @cute.jit
    def weigh(self, accumulators: Any, row_factors: Any, lane: Int32) -> None:
        """Multiplies the accumulators by the weights of their rows."""
        column = (lane % 4) * 2
        for i in cutlass.range_constexpr(self.tile.rows // 4):
            factor = cute.arch.shuffle_sync(row_factors[i // 8], i // 2 % 4 * 8 + column + i % 2)
            for unit in cutlass.range_constexpr(self.tile.units):
                for half in cutlass.range_constexpr(2):
                    register = i // 2 * 4 + half * 2 + i % 2
                    accumulators[unit][register] = accumulators[unit][register] * factor

    @cute.jit
    def store_columns(
        self, values: Any, out: Int64, feature: Int32, first_row: Int32, rows_stop: Int32, lane: Int32
    ) -> None:
        """Stores a feature's values. Neighbours in lane / 4, which have neighbouring features, trade a column first, so
        that each stores two outputs of one row."""
        odd = lane // 4 % 2
        lows = []
        highs = []
        for block in cutlass.range_constexpr(self.tile.rows // 8):
            first = values[block * 2]
            second = values[block * 2 + 1]
            give = first if odd == 1 else second
            keep = second if odd == 1 else first
            got = cute.arch.shuffle_sync_bfly(give, 4)
            lows.append(got if odd == 1 else keep)
            highs.append(keep if odd == 1 else got)
        row = first_row + lane % 4 * 2 + odd
        self.store_rows(lows, highs, out, feature - odd, row, rows_stop, 8)

    @cute.jit
    def store_pairs(
        self, lows: Any, highs: Any, out: Int64, feature: Int32, first_row: Int32, rows_stop: Int32, lane: Int32
    ) -> None:
        """Stores the values of two neighbouring features."""
        for pair in cutlass.range_constexpr(2):
            row = first_row + lane % 4 * 2 + pair
            self.store_rows(lows[pair::2], highs[pair::2], out, feature, row, rows_stop, 8)

    @cute.jit
    def store_rows(
        self, lows: Any, highs: Any, out: Int64, feature: Int32, row: Int32, rows_stop: Int32, step: cutlass.Constexpr
    ) -> None:
        """Stores two neighbouring features of rows row, row + step, ..."""
        count = rows_stop - row if feature < self.width else Int32(0)
        size = 4 if self.float32_out else 2
        address = out + (Int64(row) * self.width + Int64(feature)) * size
        for index in cutlass.range_constexpr(len(lows)):
            offset = index * step * self.width * size
            if cutlass.const_expr(self.float32_out):
                device.store_global_v2_f32_if(address, offset, lows[index], highs[index], count, index * step)
            else:
                word = device.pack_bf16x2(lows[index], highs[index])
                device.store_global_if(address, offset, word, count, index * step)
