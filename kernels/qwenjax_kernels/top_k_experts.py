"""The router of a Qwen3-MoE layer: softmax over all experts, then the top k. A warp takes a token."""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from qwenjax_kernels import device, warp_mma
from qwenjax_kernels.expert_rows_limits import MAX_EXPERTS, MAX_TOP_K

WARP = 32
WARPS = 4
NAN_KEY = 0x7FFFFFFF  # above the bits of any number, as jax.lax.top_k has it


class TopKExperts:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: logits float32 [tokens, experts]; valid int32 [tokens], 0 for padding; weights float32 and ids int32
    [tokens, top_k]. A token's bits depend on its own logits alone. qwenjax_ffi.routing defines the results.
    follows: the kernel that makes the logits may still run at the launch.
    """

    def __init__(self, *, tokens: int, experts: int, top_k: int, normalise: bool, follows: bool = False) -> None:
        if not 1 <= top_k <= min(experts, MAX_TOP_K) or experts > MAX_EXPERTS:
            raise ValueError(
                f"{top_k} of {experts} experts; the kernel is for 1 to {MAX_TOP_K} of at most {MAX_EXPERTS}"
            )
        self.tokens, self.experts, self.top_k, self.normalise = tokens, experts, top_k, normalise
        self.follows = follows
        self.per_lane = -(-experts // WARP)

    @cute.jit
    def launch(
        self, stream: cuda.CUstream, logits: cute.Tensor, valid: cute.Tensor, weights: cute.Tensor, ids: cute.Tensor
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(logits, valid, weights, ids).launch(
            grid=[-(-self.tokens // WARPS), 1, 1],
            block=[WARPS * WARP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.follows,
        )

    @cute.kernel
    def kernel(self, logits: cute.Tensor, valid: cute.Tensor, weights: cute.Tensor, ids: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        token = block * WARPS + cute.arch.make_warp_uniform(thread // WARP)
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        if token < self.tokens:
            is_valid = device.load_global(valid.iterator.toint() + Int64(token) * 4)
            keys = self.probability_keys(logits.iterator.toint() + Int64(token) * (self.experts * 4), lane)
            chosen = Int32(-1)
            weight = Float32(0.0)
            for choice in cutlass.range_constexpr(self.top_k):
                best = keys[0]
                for key in keys[1:]:
                    best = cutlass.max(best, key)
                best = cute.arch.warp_redux_sync(best, "max")
                expert = Int32(self.per_lane * WARP)
                for index in cutlass.range_constexpr(self.per_lane - 1, -1, -1):
                    expert = Int32(index * WARP) + lane if keys[index] == best else expert
                expert = cute.arch.warp_redux_sync(expert, "min")
                for index in cutlass.range_constexpr(self.per_lane):
                    keys[index] = Int32(-1) if index * WARP + lane == expert else keys[index]
                chosen = expert if lane == choice else chosen
                weight = device.float_of(best) if lane == choice else weight
            if cutlass.const_expr(self.normalise):
                weight = weight / device.warp_sum(weight)
            if lane < self.top_k:
                place = (Int64(token) * self.top_k + Int64(lane)) * 4
                if is_valid == 0:
                    chosen = Int32(-1)
                device.store_global(ids.iterator.toint() + place, Uint32(chosen))
                device.store_global_f32(weights.iterator.toint() + place, weight)

    @cute.jit
    def probability_keys(self, logits: Int64, lane: Int32) -> list[Int32]:
        """The lane's probabilities, of experts lane, lane + 32, ..., as integers that order as they do; -1 past the
        last expert."""
        values = []
        top = Float32(-math.inf)
        for index in cutlass.range_constexpr(self.per_lane):
            value = Float32(-math.inf)
            if index * WARP + lane < self.experts:
                value = device.load_global_f32(logits + Int64(index * WARP + lane) * 4, not self.follows)
            values.append(value)
            top = warp_mma.maximum(top, value)
        for step in cutlass.range_constexpr(5):
            top = warp_mma.maximum(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
        exponentials = []
        total = Float32(0.0)
        for index in cutlass.range_constexpr(self.per_lane):
            exponential = warp_mma.exp2((values[index] - top) * Float32(math.log2(math.e)))
            if index * WARP + lane >= self.experts:
                exponential = Float32(0.0)
            exponentials.append(exponential)
            total = total + exponential
        total = device.warp_sum(total)
        keys = []
        for index in cutlass.range_constexpr(self.per_lane):
            bits = device.magnitude_bits(exponentials[index] / total)
            key = Int32(NAN_KEY) if bits > 0x7F800000 else bits
            keys.append(key if index * WARP + lane < self.experts else Int32(-1))
        return keys
