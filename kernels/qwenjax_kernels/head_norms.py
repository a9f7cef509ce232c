"""What comes between attention's projections and attention: RMSNorm of each query and key head, and their rotation.

A warp takes a head of a token: it reads it once, from the projections' rows, and writes it where attention wants it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from qwenjax_kernels import device, vectors

WARP = 32
WARPS = 4
MAX_HEAD_DIM = 256


class HeadNorms:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: qkv bf16 [tokens, (q_heads + 2 kv_heads) * head_dim], the queries first, then keys, then values; q_norm,
    k_norm bf16 [layers, head_dim]; layer int32 [1]; cos, sin float32 [tokens, head_dim / 2]; q, k and v bf16 [tokens,
    heads, head_dim] each. Rounded where qwenjax_ffi.attention_inputs rounds.
    follows: the kernel that makes qkv may still run at the launch.
    """

    def __init__(
        self, *, tokens: int, q_heads: int, kv_heads: int, head_dim: int, eps: float, follows: bool = False
    ) -> None:
        if head_dim % 4 or not 4 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {head_dim}; the kernel takes multiples of 4 up to {MAX_HEAD_DIM}")
        self.q_heads, self.kv_heads, self.head_dim, self.eps = q_heads, kv_heads, head_dim, eps
        self.follows = follows
        self.heads = q_heads + 2 * kv_heads
        self.count = tokens * self.heads
        self.half_words = head_dim // 4  # of two bf16 each
        self.turns = -(-self.half_words // WARP)

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        qkv: cute.Tensor,
        q_norm: cute.Tensor,
        k_norm: cute.Tensor,
        layer: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(qkv, q_norm, k_norm, layer, cos, sin, q, k, v).launch(
            grid=[-(-self.count // WARPS), 1, 1],
            block=[WARPS * WARP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.follows,
        )

    @cute.kernel
    def kernel(
        self,
        qkv: cute.Tensor,
        q_norm: cute.Tensor,
        k_norm: cute.Tensor,
        layer: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        item = block * WARPS + cute.arch.make_warp_uniform(thread // WARP)
        if item < self.count:
            token = item // self.heads
            head = item - token * self.heads
            head_bytes = self.head_dim * 2
            source = qkv.iterator.toint() + Int64(item) * head_bytes
            target = q.iterator.toint() + (Int64(token) * self.q_heads + Int64(head)) * head_bytes
            norm = q_norm.iterator.toint()
            kv_head = head - self.q_heads
            if kv_head >= 0:
                target = k.iterator.toint() + (Int64(token) * self.kv_heads + Int64(kv_head)) * head_bytes
                norm = k_norm.iterator.toint()
            if kv_head >= self.kv_heads:
                value_head = Int64(kv_head - self.kv_heads)
                target = v.iterator.toint() + (Int64(token) * self.kv_heads + value_head) * head_bytes
            words = [self.load_half(source + half * self.head_dim, lane, not self.follows) for half in range(2)]
            if kv_head < self.kv_heads:
                norm += Int64(layer[0]) * head_bytes
                weights = [self.load_half(norm + half * self.head_dim, lane) for half in range(2)]
                row = Int64(token) * (self.head_dim * 2)
                self.rotate(words, weights, cos.iterator.toint() + row, sin.iterator.toint() + row, target, lane)
            else:
                self.store(words, target, lane)

    @cute.jit
    def load_half(self, address: Int64, lane: Int32, read_only: cutlass.Constexpr = True) -> list[Uint32]:
        """The lane's words of half a head: pairs of features lane, lane + 32, ..."""
        words = []
        for turn in cutlass.range_constexpr(self.turns):
            word = Uint32(0)
            if turn * WARP + lane < self.half_words:
                word = Uint32(device.load_global(address + Int64(turn * WARP + lane) * 4, read_only))
            words.append(word)
        return words

    @cute.jit
    def store(self, words: list[list[Uint32]], target: Int64, lane: Int32) -> None:
        """Both halves of a head."""
        for turn in cutlass.range_constexpr(self.turns):
            if turn * WARP + lane < self.half_words:
                for half in cutlass.range_constexpr(2):
                    place = target + half * self.head_dim + Int64(turn * WARP + lane) * 4
                    device.store_global(place, words[half][turn])

    @cute.jit
    def rotate(
        self,
        words: list[list[Uint32]],
        weights: list[list[Uint32]],
        cos: Int64,
        sin: Int64,
        target: Int64,
        lane: Int32,
    ) -> None:
        """Norms a head, rotates the pairs (i, i + head_dim / 2) of it and stores it."""
        halves = [vectors.floats(words[half], BFloat16) for half in range(2)]
        squares = Float32(0.0)
        for value in halves[0] + halves[1]:
            squares = squares + value * value
        mean = device.warp_sum(squares) * Float32(1.0 / self.head_dim)
        inverse = cute.math.rsqrt(mean + Float32(self.eps))
        normed = []
        for half in cutlass.range_constexpr(2):
            scaled = vectors.rounded([value * inverse for value in halves[half]], BFloat16)
            factors = vectors.floats(weights[half], BFloat16)
            products = [value * factor for value, factor in zip(scaled, factors, strict=True)]
            normed.append(vectors.rounded(products, BFloat16))
        rotated: list[list[Float32]] = [[], []]
        for turn in cutlass.range_constexpr(self.turns):
            for i in cutlass.range_constexpr(2):
                place = Int64((turn * WARP + lane) * 2 + i) * 4
                cosine = Float32(0.0)
                sine = Float32(0.0)
                if turn * WARP + lane < self.half_words:
                    cosine = device.load_global_f32(cos + place)
                    sine = device.load_global_f32(sin + place)
                first, second = normed[0][turn * 2 + i], normed[1][turn * 2 + i]
                rotated[0].append(first * cosine - second * sine)
                rotated[1].append(second * cosine + first * sine)
        self.store([vectors.words_of(half, BFloat16) for half in rotated], target, lane)
