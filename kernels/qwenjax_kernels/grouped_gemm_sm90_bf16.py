"""Grouped GEMM of bf16 rows and bf16 weights for Hopper (sm_90a), the weights as checkpoints have them.

Weights come by TMA into the 128-byte swizzle and go to wgmma from there. For SwiGLU a tile holds eight gate rows and
their eight up rows in turn, so that a thread has both in fragment rows g and g + 8 of its warp; the tensor map does
that, [2, width] seen as [width / 8, 2, 8].
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from qwenjax_kernels import device, fragments
from qwenjax_kernels.grouped_gemm_sm90 import GroupedGemmSm90

ROWS_IN_TURN = 8


class BF16GroupedGemmSm90(GroupedGemmSm90):
    """weights: bf16 [(layers,) groups, width, k], or [(layers,) groups, 2 * width, k], gate rows first, for SwiGLU,
    whose width is a multiple of 8."""

    unit_k = 64  # with 128 only two stages of the largest tile fit
    unit_bytes = fragments.UNIT_ROWS * unit_k * 2
    operand_source = warpgroup.OperandSource.SMEM
    halves_are_neighbours = False

    def weight_view(self, weights: cute.Tensor) -> tuple[Any, Any, Any]:
        stack = self.layers * self.num_groups
        k, width = self.k, self.width
        if self.epilogue == "swiglu":
            rows = (ROWS_IN_TURN, 2, width // ROWS_IN_TURN)
            layout = cute.make_layout((rows, k, stack), stride=((k, width * k, ROWS_IN_TURN * k), 1, 2 * width * k))
        else:
            layout = cute.make_layout((width, k, stack), stride=(k, 1, width * k))
        tile = (self.tile.m_units * fragments.UNIT_ROWS, self.unit_k)
        shared = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16),
            (*tile, self.stages),
            order=(0, 1, 2),
        )
        copy, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(weights.iterator, layout),
            cute.slice_(shared, (None, None, 0)),
            tile,
        )
        return copy, tensor, shared

    def weight_source(self, weights: cute.Tensor, layer: cute.Tensor | None) -> Int32:
        return Int32(0) if layer is None else layer[0] * self.num_groups

    def weight_operand(self, tiled_mma: cute.TiledMma, thread: Int32, first_unit: Int32, shared_weights: Any) -> Any:
        slice_ = tiled_mma.get_slice(thread)
        tile = (fragments.UNIT_ROWS, self.unit_k)
        return [
            tiled_mma.make_fragment_A(
                slice_.partition_A(cute.local_tile(shared_weights, tile, (first_unit + unit, 0, None)))
            )
            for unit in range(self.tile.units)
        ]

    @cute.jit
    def copy_weights(
        self,
        first_matrix: Int32,
        weight_copy: cute.CopyAtom,
        weight_tensor: cute.Tensor,
        shared_weights: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        row_end: Int32,
        block: Int32,
        first_unit: Int32,
        total: Int32,
        lane: Int32,
    ) -> None:
        """One lane issues the TMA copies of a stage."""
        tile = (self.tile.m_units * fragments.UNIT_ROWS, self.unit_k)
        tiles = cute.local_tile(weight_tensor, tile, (None, None, None))
        to_shared, from_global = cpasync.tma_partition(
            weight_copy,
            0,
            cute.make_layout(1),
            cute.group_modes(shared_weights, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        stage = Int32(0)
        phase = Int32(1)
        index = block
        while index < total:
            group, m_tile, _, _, _ = self.schedule.locate(index, tile_end, row_end, lane)
            for k_unit in cutlass.range(self.run_units, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile.m_units * self.unit_bytes)
                cute.copy(
                    weight_copy,
                    from_global[None, m_tile, first_unit + k_unit, first_matrix + group],
                    to_shared[None, stage],
                    tma_bar_ptr=full + stage,
                )
                stage, phase = self.advance(stage, phase, 1)
            index += self.grid

    @cute.jit
    def multiply_units(
        self,
        tiled_mma: cute.TiledMma,
        accumulators: Any,
        operand: Any,
        rows_fragment: cute.Tensor,
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
            warpgroup.fence()
            for unit in cutlass.range_constexpr(self.tile.units):
                for step in cutlass.range_constexpr(self.unit_k // 16):
                    cute.gemm(
                        tiled_mma,
                        accumulators[unit],
                        operand[unit][None, None, step, stage],
                        rows_fragment[None, None, step, stage],
                        accumulators[unit],
                    )
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            # One arrival a warp: its wgmmas of the stage before are over.
            device.arrive_if((empty + previous).toint(), leads & Int32(turn > 0))
            previous = stage
            stage, phase = self.advance(stage, phase, self.turn_step)
        warpgroup.wait_group(0)
        device.arrive_if((empty + previous).toint(), leads & Int32(count > 0))
        return stage, phase
