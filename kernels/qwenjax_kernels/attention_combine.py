"""The second kernel of paged attention: the sums of a sequence's splits become its result, in the order of its keys."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from qwenjax_kernels import device, vectors, warp_mma
from qwenjax_kernels.attention_splits import TILE_KEYS, WARP
from qwenjax_kernels.attention_work import AttentionWork

WARPS = 4
WIDTH = 4  # elements of a lane
TURN = 8  # splits loaded before the first is added


class AttentionCombine:
    """The kernel for one problem, of `paged_attention.PagedAttention`, whose shapes these are. A warp makes a row."""

    def __init__(
        self,
        *,
        dtype: Any,
        batch: int,
        tokens: int,
        q_heads: int,
        head_dim: int,
        work: AttentionWork,
    ) -> None:
        self.dtype = dtype
        self.tokens = tokens
        self.q_heads = q_heads
        self.group = q_heads // work.kv_heads
        self.rows = tokens * self.group
        self.head_dim = head_dim
        self.results = batch * tokens * q_heads
        self.work = work

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        partial: cute.Tensor,
        stats: cute.Tensor,
        positions: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(partial, stats, positions, out).launch(
            grid=[-(-self.results // WARPS), 1, 1],
            block=[WARPS * WARP, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, partial: cute.Tensor, stats: cute.Tensor, positions: cute.Tensor, out: cute.Tensor) -> None:
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()  # what multiplies the result may copy its weights meanwhile
        result = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if result < self.results:
            self.add_splits(
                partial.iterator.toint(),
                stats.iterator.toint(),
                positions.iterator.toint(),
                out.iterator.toint(),
                result,
                cute.arch.lane_idx(),
            )

    @cute.jit
    def add_splits(
        self, partial: Int64, stats: Int64, positions: Int64, out: Int64, result: Int32, lane: Int32
    ) -> None:
        """Lane l holds the weight of split l, and elements WIDTH * l to WIDTH * (l + 1) of the row."""
        query = result // self.q_heads
        query_head = result - query * self.q_heads
        sequence = query // self.tokens
        head = query_head // self.group
        row = (query - sequence * self.tokens) * self.group + query_head - head * self.group
        tiles = (self.work.length(positions, sequence) + (TILE_KEYS - 1)) // TILE_KEYS
        each = self.work.tiles_each(tiles)
        splits = (tiles + each - 1) // cutlass.max(each, Int32(1))
        max_splits = self.work.splits.max_splits
        first = (Int64(sequence) * self.work.kv_heads + Int64(head)) * (max_splits * self.rows) + Int64(row)

        cute.arch.griddepcontrol_wait()  # sums and stats are written until here, so that their loads are not .nc
        top = Float32(-1e30)
        total = Float32(0.0)
        if lane < splits:
            place = stats + (first + Int64(lane) * self.rows) * 8
            top = device.load_global_f32(place, read_only=False)
            total = device.load_global_f32(place + 4, read_only=False)
        holds = lane * WIDTH < self.head_dim
        source = partial + (first * self.head_dim + Int64(lane * WIDTH)) * 4
        loaded = cute.make_rmem_tensor((TURN * WIDTH,), Uint32)
        self.load_turn(source, Int32(0), splits, holds, loaded)  # on its way while the weights are found
        highest = top
        for distance in (1, 2, 4, 8, 16):
            highest = warp_mma.maximum(highest, cute.arch.shuffle_sync_bfly(highest, distance))
        weight = warp_mma.exp2(top - highest)
        total = total * weight
        for distance in (1, 2, 4, 8, 16):
            total = total + cute.arch.shuffle_sync_bfly(total, distance)
        inverse = Float32(1.0) / total if total > 0.0 else Float32(1.0)

        sums = cute.make_rmem_tensor((WIDTH,), Float32)
        sums.fill(0.0)
        for turn in cutlass.range((splits + (TURN - 1)) // TURN, unroll=1):
            if turn > 0:
                self.load_turn(source, turn, splits, holds, loaded)
            for i in cutlass.range_constexpr(TURN):
                factor = cute.arch.shuffle_sync(weight, turn * TURN + i)
                added = vectors.floats([loaded[i * WIDTH + element] for element in range(WIDTH)], Float32)
                for element in cutlass.range_constexpr(WIDTH):
                    sums[element] = sums[element] + added[element] * factor
        words = vectors.words_of([sums[element] * inverse for element in range(WIDTH)], self.dtype)
        if holds:
            target = out + (Int64(result) * self.head_dim + Int64(lane * WIDTH)) * 2
            device.store_global_v2(target, words[0], words[1])

    @cute.jit
    def load_turn(self, source: Int64, turn: Int32, splits: Int32, holds: Boolean, loaded: cute.Tensor) -> None:
        """The lane's elements of TURN splits; zeros past the last."""
        for i in cutlass.range_constexpr(TURN):
            split = turn * TURN + i
            address = source + Int64(split) * (self.rows * self.head_dim * 4)
            words = device.load_global_v4_or_zeros_if(Int32(holds and split < splits), address, read_only=False)
            for element in cutlass.range_constexpr(WIDTH):
                loaded[i * WIDTH + element] = words[element]
