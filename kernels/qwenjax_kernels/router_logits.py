"""The router's logits of a few tokens: a warp takes an expert and some tokens.

A decode step's router is 0.5 MB of weights and almost no work: what counts is how soon its loads are under way. More
tokens than MAX_TOKENS are for a matmul.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from qwenjax_kernels import device, vectors

WARP = 32
WARPS = 4
PER_VECTOR = 8  # bfloat16
MAX_TOKENS = 64
MAX_FEATURES = 4096  # a lane keeps its part of an expert's weights in registers
AT_ONCE = 2  # tokens whose loads are in flight together


class RouterLogits:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: x bf16 [tokens, features], features a multiple of 8; weight bf16 [layers, experts, features]; layer int32
    [1]; logits float32 [tokens, experts]. Products are exact and summed in float32; a token's bits depend on its own
    row alone.
    """

    def __init__(self, *, tokens: int, experts: int, features: int) -> None:
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} tokens; the kernel is for 1 to {MAX_TOKENS}")
        if features % PER_VECTOR or not PER_VECTOR <= features <= MAX_FEATURES:
            raise ValueError(
                f"rows of {features} features; the kernel takes multiples of {PER_VECTOR} up to {MAX_FEATURES}"
            )
        self.tokens, self.experts, self.features = tokens, experts, features
        self.vectors = features // PER_VECTOR
        self.parts = -(-self.vectors // WARP)
        self.block_tokens = min(AT_ONCE * (2 if tokens > 16 else 1), tokens)

    @cute.jit
    def launch(
        self, stream: cuda.CUstream, x: cute.Tensor, weight: cute.Tensor, layer: cute.Tensor, logits: cute.Tensor
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(x, weight, layer, logits).launch(
            grid=[-(-self.experts // WARPS), -(-self.tokens // self.block_tokens), 1],
            block=[WARPS * WARP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, layer: cute.Tensor, logits: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, turn, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        expert = block * WARPS + cute.arch.make_warp_uniform(thread // WARP)
        if expert < self.experts:
            row = Int64(layer[0]) * self.experts + Int64(expert)
            weights = self.load_row(weight.iterator.toint() + row * (self.features * 2), lane)
            first = turn * self.block_tokens
            for begin in cutlass.range_constexpr(0, self.block_tokens, AT_ONCE):
                count = min(AT_ONCE, self.block_tokens - begin)
                rows = [
                    self.load_row(
                        x.iterator.toint() + Int64(self.inside(first + begin + i)) * (self.features * 2), lane
                    )
                    for i in range(count)
                ]
                for i in cutlass.range_constexpr(count):
                    token = first + begin + i
                    total = Float32(0.0)
                    for part in cutlass.range_constexpr(self.parts):
                        ours, theirs = vectors.floats(rows[i][part], BFloat16), vectors.floats(weights[part], BFloat16)
                        for a, b in zip(ours, theirs, strict=True):
                            total = total + a * b
                    total = device.warp_sum(total)
                    if lane == 0 and token < self.tokens:
                        place = Int64(token) * self.experts + Int64(expert)
                        device.store_global_f32(logits.iterator.toint() + place * 4, total)

    def inside(self, token: Int32) -> Int32:
        """The token, or the last one."""
        return cutlass.min(token, Int32(self.tokens - 1))

    @cute.jit
    def load_row(self, address: Int64, lane: Int32) -> list[list]:
        """The lane's vectors of a row: vectors lane, lane + 32, ..., zeros past the end."""
        loaded = []
        for part in cutlass.range_constexpr(self.parts):
            vector = part * WARP + lane
            there = Int32(vector < self.vectors)
            loaded.append(list(device.load_global_v4_or_zeros_if(there, address + Int64(vector) * 16)))
        return loaded
