"""A residual sum and its RMSNorm, for a rank that has the whole sum: what follows attention and the experts in a layer.

A block takes a token's row and reads it once. Over several ranks the same is part of the all-reduce.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from qwenjax_kernels import device, vectors

WARP = 32
MAX_THREADS = 256
PER_VECTOR = 8  # bfloat16
MAX_FEATURES = MAX_THREADS * PER_VECTOR * 8  # a thread keeps its vectors in registers


class AddRmsNorm:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: residual, x, total and normed bf16 [tokens, features], features a multiple of 8; weight bf16 [layers,
    features]; layer int32 [1]. Rounded where qwenjax_ffi.norm.add_rms_norm rounds.
    """

    def __init__(self, *, tokens: int, features: int, eps: float) -> None:
        if features % PER_VECTOR or not PER_VECTOR <= features <= MAX_FEATURES:
            raise ValueError(
                f"rows of {features} features; the kernel takes multiples of {PER_VECTOR} up to {MAX_FEATURES}"
            )
        self.tokens, self.features, self.eps = tokens, features, eps
        self.vectors = features // PER_VECTOR
        self.threads = min(MAX_THREADS, -(-self.vectors // WARP) * WARP)
        self.parts = -(-self.vectors // self.threads)

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        residual: cute.Tensor,
        x: cute.Tensor,
        weight: cute.Tensor,
        layer: cute.Tensor,
        total: cute.Tensor,
        normed: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(residual, x, weight, layer, total, normed).launch(
            grid=[self.tokens, 1, 1], block=[self.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        residual: cute.Tensor,
        x: cute.Tensor,
        weight: cute.Tensor,
        layer: cute.Tensor,
        total: cute.Tensor,
        normed: cute.Tensor,
    ) -> None:
        warps = self.threads // WARP

        @cute.struct
        class Storage:
            squares: cute.struct.MemRange[Float32, warps]

        shared = cutlass.memory.SmemAllocator().allocate(Storage).squares.data_ptr().toint()
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        row = Int64(token) * (self.features * 2)
        first_weight = weight.iterator.toint() + Int64(layer[0]) * (self.features * 2)
        # All loads before the first use: latency is all there is.
        loaded = []
        for part in cutlass.range_constexpr(self.parts):
            offset = Int64(part * self.threads + thread) * (PER_VECTOR * 2)
            there = Int32(part * self.threads + thread < self.vectors)
            addresses = residual.iterator.toint() + row, x.iterator.toint() + row, first_weight
            loaded.append([device.load_global_v4_or_zeros_if(there, address + offset) for address in addresses])
        sums = []
        squares = Float32(0.0)
        for part in cutlass.range_constexpr(self.parts):
            old, new = (vectors.floats(words, BFloat16) for words in loaded[part][:2])
            values = vectors.rounded([a + b for a, b in zip(old, new, strict=True)], BFloat16)
            sums.append(values)
            for value in values:
                squares = squares + value * value
        squares = device.warp_sum(squares)
        if cute.arch.lane_idx() == 0:
            device.store_shared_f32(shared + thread // WARP * 4, squares)
        cute.arch.sync_threads()
        squares = Float32(0.0)
        for warp in cutlass.range_constexpr(warps):
            squares = squares + device.load_shared_f32(shared + warp * 4)
        inverse = cute.math.rsqrt(squares * Float32(1.0 / self.features) + Float32(self.eps))
        for part in cutlass.range_constexpr(self.parts):
            if part * self.threads + thread < self.vectors:
                offset = row + Int64(part * self.threads + thread) * (PER_VECTOR * 2)
                vectors.store_result(total.iterator.toint() + offset, vectors.words_of(sums[part], BFloat16))
                scaled = vectors.rounded([value * inverse for value in sums[part]], BFloat16)
                factors = vectors.floats(loaded[part][2], BFloat16)
                products = [value * factor for value, factor in zip(scaled, factors, strict=True)]
                vectors.store_result(normed.iterator.toint() + offset, vectors.words_of(products, BFloat16))
