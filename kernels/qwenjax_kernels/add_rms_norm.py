"""A residual sum and its RMSNorm, for a rank that has the whole sum: what follows attention and the experts in a layer.

A block takes a token's row and reads it once; after the experts, it adds up the token's rows first, as `sum_rows` does.
Over several ranks the same is part of the all-reduce.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from qwenjax_kernels import device, vectors
from qwenjax_kernels.expert_rows_limits import MAX_TOP_K

WARP = 32
MAX_THREADS = 256
PER_VECTOR = 8  # bfloat16
ROWS_AT_ONCE = 8  # of a token's, in flight
MAX_FEATURES = MAX_THREADS * PER_VECTOR * 8  # a thread keeps its vectors in registers


class AddRmsNorm:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: residual, total and normed bf16 [tokens, features], features a multiple of 8; x alike, or with top_k rows
    [rows, features] of which token_rows, int32 [tokens, top_k], names each token's, -1 for none; weight bf16 [layers,
    features]; layer int32 [1]. Rounded where qwenjax_ffi.norm.add_rms_norm rounds, and the sum of rows before.
    follows: the kernel that makes x may still run at the launch; those that make residual and token_rows may not.
    """

    def __init__(
        self, *, tokens: int, features: int, eps: float, top_k: int | None = None, follows: bool = False
    ) -> None:
        if top_k is not None and not 1 <= top_k <= MAX_TOP_K:
            raise ValueError(f"{top_k} choices a token; the kernel is for 1 to {MAX_TOP_K}")
        if features % PER_VECTOR or not PER_VECTOR <= features <= MAX_FEATURES:
            raise ValueError(
                f"rows of {features} features; the kernel takes multiples of {PER_VECTOR} up to {MAX_FEATURES}"
            )
        self.tokens, self.features, self.eps, self.top_k, self.follows = tokens, features, eps, top_k, follows
        self.vectors = features // PER_VECTOR
        self.threads = min(MAX_THREADS, -(-self.vectors // WARP) * WARP)
        self.parts = -(-self.vectors // self.threads)

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        residual: cute.Tensor,
        x: cute.Tensor,
        token_rows: cute.Tensor | None,
        weight: cute.Tensor,
        layer: cute.Tensor,
        total: cute.Tensor,
        normed: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(residual, x, token_rows, weight, layer, total, normed).launch(
            grid=[self.tokens, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.follows,
        )

    @cute.kernel
    def kernel(
        self,
        residual: cute.Tensor,
        x: cute.Tensor,
        token_rows: cute.Tensor | None,
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
            addresses = residual.iterator.toint() + row, first_weight
            loaded.append([device.load_global_v4_or_zeros_if(there, address + offset) for address in addresses])
        own_row = token
        if cutlass.const_expr(self.top_k is not None):
            own_row = self.own_row(device.address_of(token_rows), token)
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        sums = []
        squares = Float32(0.0)
        for part in cutlass.range_constexpr(self.parts):
            old = vectors.floats(loaded[part][0], BFloat16)
            new = self.added(x.iterator.toint(), own_row, part * self.threads + thread)
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
                factors = vectors.floats(loaded[part][1], BFloat16)
                products = [value * factor for value, factor in zip(scaled, factors, strict=True)]
                vectors.store_result(normed.iterator.toint() + offset, vectors.words_of(products, BFloat16))

    @cute.jit
    def own_row(self, token_rows: Int64, token: Int32) -> Int32:
        """Lane l's row: that of the token's choice l, -1 where there is none."""
        lane = cute.arch.lane_idx()
        row = Int32(-1)
        if lane < self.top_k:
            row = device.load_global(token_rows + (Int64(token) * self.top_k + Int64(lane)) * 4)
        return row

    @cute.jit
    def added(self, x: Int64, row: Int32, vector: Int32) -> list[Float32]:
        """A vector of what is added to the residual: of the block's row of x, or of the sum of the token's rows."""
        there = Boolean(vector < self.vectors)
        place = x + Int64(vector) * (PER_VECTOR * 2)
        row_bytes = self.features * 2
        if cutlass.const_expr(self.top_k is None):
            words = device.load_global_v4_or_zeros_if(
                Int32(there), place + Int64(row) * row_bytes, read_only=not self.follows
            )
            return vectors.floats(list(words), BFloat16)
        sums = [Float32(0.0) for _ in range(PER_VECTOR)]
        for begin in cutlass.range_constexpr(0, self.top_k, ROWS_AT_ONCE):
            loaded = []
            for choice in cutlass.range_constexpr(begin, min(begin + ROWS_AT_ONCE, self.top_k)):
                chosen = cute.arch.shuffle_sync(row, choice)
                address = place + Int64(chosen) * row_bytes
                loaded.append(
                    device.load_global_v4_or_zeros_if(Int32(there and chosen >= 0), address, read_only=not self.follows)
                )
            for words in loaded:
                sums = [a + b for a, b in zip(sums, vectors.floats(list(words), BFloat16), strict=True)]
        return vectors.rounded(sums, BFloat16)
