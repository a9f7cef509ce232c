"""Grouped GEMM of bf16 rows and packed MXFP8 weights for Hopper (sm_90a).

Weight units (see `fragments`) come with cp.async.bulk. A consumer warpgroup loads its fragment bytes with 16-byte
shared loads, decodes them to bf16 in registers (exact, see `fragments`) and multiplies while the next half unit is
decoded.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from qwenjax_kernels import device, fragments
from qwenjax_kernels.grouped_gemm_sm90 import GroupedGemmSm90
from qwenjax_kernels.tiles import WARPGROUP


class MXFP8GroupedGemmSm90(GroupedGemmSm90):
    """weights: uint8 [(layers,) groups, row units, k units, 8448]; or a tuple of them, of one group each, whose outputs
    stand side by side: `widths` has how many each has, whole units but for the last."""

    unit_k = fragments.UNIT_K
    unit_bytes = fragments.UNIT_BYTES
    operand_source = warpgroup.OperandSource.RMEM
    halves_are_neighbours = True

    def __init__(self, *, widths: tuple[int, ...] | None = None, **problem: Any) -> None:
        super().__init__(**problem)
        self.widths = widths or (self.width,)
        if sum(self.widths) != self.width or any(width % fragments.UNIT_ROWS for width in self.widths[:-1]):
            raise ValueError(
                f"weights of {self.widths} outputs side by side for a result of {self.width}; all but the last must "
                f"have a multiple of {fragments.UNIT_ROWS}"
            )
        if len(self.widths) > 1 and (self.num_groups > 1 or self.epilogue != "plain"):
            raise ValueError(
                f"{len(self.widths)} weights with {self.num_groups} groups and the epilogue {self.epilogue!r}; several "
                "are for one group and 'plain'"
            )

    def weight_view(self, weights: Any) -> tuple[Any, Any, Any]:
        return None, None, None

    def weight_source(self, weights: Any, layer: cute.Tensor | None) -> list[Int64]:
        if len(self.widths) == 1:
            layer_bytes = self.num_groups * self.row_units * self.k_units * fragments.UNIT_BYTES
            return [device.layer_address(weights, layer, layer_bytes)]
        units = [-(-width // fragments.UNIT_ROWS) for width in self.widths]
        return [
            device.layer_address(weight, layer, count * self.k_units * fragments.UNIT_BYTES)
            for weight, count in zip(weights, units, strict=True)
        ]

    @cute.jit
    def unit_source(self, weights: list[Int64], group: Int32, row_unit: Int32) -> Int64:
        """The address of a row of units."""
        row_bytes = self.k_units * fragments.UNIT_BYTES
        source = weights[0] + (Int64(group) * self.row_units + Int64(row_unit)) * row_bytes
        for index in cutlass.range_constexpr(1, len(self.widths)):
            first = sum(self.widths[:index]) // fragments.UNIT_ROWS
            if row_unit >= first:
                source = weights[index] + Int64(row_unit - first) * row_bytes
        return source

    def weight_operand(self, tiled_mma: cute.TiledMma, thread: Int32, first_unit: Int32, shared_weights: Any) -> Any:
        half_unit = tiled_mma.partition_shape_A((fragments.UNIT_ROWS, fragments.UNIT_K // 2))
        buffers = [cute.make_rmem_tensor(half_unit, BFloat16) for _ in range(2)]
        return buffers, shared_weights + first_unit * fragments.UNIT_BYTES

    @cute.jit
    def copy_weights(
        self,
        weights: list[Int64],
        weight_copy: None,
        weight_tensor: None,
        shared_weights: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        row_end: Int32,
        block: Int32,
        first_unit: Int32,
        total: Int32,
        lane: Int32,
    ) -> None:
        """One lane issues a bulk copy a unit."""
        stage = Int32(0)
        phase = Int32(1)
        index = block
        while index < total:
            group, m_tile, _, _, _ = self.schedule.locate(index, tile_end, row_end, lane)
            sources = []
            for unit in cutlass.range_constexpr(self.tile.m_units):
                row_unit = cutlass.min(m_tile * self.tile.m_units + unit, self.row_units - 1)
                sources.append(self.unit_source(weights, group, row_unit) + Int64(first_unit) * fragments.UNIT_BYTES)
            for k_unit in cutlass.range(self.run_units, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile.m_units * fragments.UNIT_BYTES)
                    for unit in cutlass.range_constexpr(self.tile.m_units):
                        device.bulk_copy(
                            shared_weights
                            + stage * self.tile.m_units * fragments.UNIT_BYTES
                            + unit * fragments.UNIT_BYTES,
                            sources[unit] + Int64(k_unit) * fragments.UNIT_BYTES,
                            fragments.UNIT_BYTES,
                            (full + stage).toint(),
                            self.tile.rows <= 64,
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
        buffers, mine = operand
        previous = stage
        for turn in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            # The gathered rows were written by cp.async, which is not the proxy that wgmma reads through.
            cute.arch.fence_view_async_shared()
            base = mine + stage * (self.tile.m_units * fragments.UNIT_BYTES)
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
            stage, phase = self.advance(stage, phase, self.turn_step)
        warpgroup.wait_group(0)
        device.arrive_if((empty + previous).toint(), leads & Int32(count > 0))
        return stage, phase

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
