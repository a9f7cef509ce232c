"""Each token's rows, added in float32 in the order of its choices: what follows the experts' down projection.

A block takes a token and a slab of its features. Its rows' numbers come first, then as many rows at a time as `batch`
says: of a token that has two of its eight experts here, two are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from qwenjax_kernels import device, vectors
from qwenjax_kernels.expert_rows_limits import MAX_TOP_K
from qwenjax_kernels.vectors import Words

WARP = 32
VECTOR = 16  # bytes
PER_VECTOR = 8  # bfloat16


@dataclass(frozen=True)
class Tile:
    """threads of a block; vectors of 16 bytes a thread; rows that are read at a time."""

    threads: int
    vectors: int
    batch: int


def choose_tile(tokens: int, features: int, top_k: int) -> Tile:
    """Few tokens: all rows at once, since latency is all there is. Many: more blocks, fewer registers."""
    row_vectors = features // PER_VECTOR
    if tokens <= 1024:
        return Tile(min(256, -(-row_vectors // WARP) * WARP), 1, min(top_k, 8))
    return Tile(min(256, -(-row_vectors // WARP) * WARP), 2 if row_vectors >= 512 else 1, min(top_k, 2))


@cute.jit
def sums_of_rows(
    rows: Int64,
    row: Int32,
    columns: list[Int32],
    features: cutlass.Constexpr,
    batch: cutlass.Constexpr,
    read_only: cutlass.Constexpr = True,
) -> list[cute.Tensor]:
    """Eight sums in float32 from each of these columns on, of the rows that the warp's lanes name, in their order.

    rows: address of bfloat16 [rows, features]; row: negative for none; columns: nothing is read at or past `features`;
    batch: rows that are read at a time; read_only: as `device` has it. The whole warp calls it with the same rows.
    """
    sums = [cute.make_rmem_tensor(PER_VECTOR, Float32) for _ in range(len(columns))]
    for part in cutlass.range_constexpr(len(columns)):
        sums[part].fill(0.0)
    left = cute.arch.vote_ballot_sync(row >= 0)
    while left != 0:
        loaded = []
        for _ in cutlass.range_constexpr(batch):
            there = left != 0
            source = cute.arch.shuffle_sync(row, cute.arch.popc((left & -left) - 1))
            left = left & (left - 1)
            for column in columns:
                address = rows + (Int64(source) * features + Int64(column)) * 2
                reads = Int32(there and column < features)
                loaded.append(device.load_global_v4_or_zeros_if(reads, address, read_only=read_only))
        for index in cutlass.range_constexpr(len(loaded)):
            part = index % len(columns)
            for i, value in enumerate(vectors.floats(loaded[index], BFloat16)):
                sums[part][i] = sums[part][i] + value
    return sums


class SumRows:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: rows bfloat16 [rows, features], features a multiple of 8; token_rows int32 [tokens, top_k], -1 for none; out
    [tokens, features], bfloat16 or float32. Every element of out is written; rows that nothing names are not read.
    """

    def __init__(
        self,
        *,
        tokens: int,
        top_k: int,
        features: int,
        out_dtype: Any,
        tile: Tile | None = None,
        follows: bool = False,
    ) -> None:
        """follows: the kernel that makes rows may still run at the launch; the one that makes token_rows may not."""
        if features % PER_VECTOR:
            raise ValueError(f"rows of {features} features; the kernel takes multiples of {PER_VECTOR}")
        if not 1 <= top_k <= MAX_TOP_K:
            raise ValueError(f"{top_k} choices a token; the kernel is for 1 to {MAX_TOP_K}")
        if out_dtype not in (BFloat16, Float32):
            raise ValueError(f"the kernel writes bfloat16 or float32, not {out_dtype}")
        self.top_k, self.features, self.out_dtype, self.follows = top_k, features, out_dtype, follows
        self.tile = tile or choose_tile(tokens, features, top_k)
        self.slabs = -(-features // (PER_VECTOR * self.tile.threads * self.tile.vectors))
        self.blocks = tokens * self.slabs

    @cute.jit
    def launch(self, stream: cuda.CUstream, rows: cute.Tensor, token_rows: cute.Tensor, out: cute.Tensor) -> None:
        """Enqueues the kernel on the stream."""
        # Without min_blocks_per_mp the compiler keeps to 32 registers and waits for each load before the next.
        self.kernel(rows, token_rows, out).launch(
            grid=[self.blocks, 1, 1],
            block=[self.tile.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.follows,
        )

    @cute.kernel
    def kernel(self, rows: cute.Tensor, token_rows: cute.Tensor, out: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        token, slab = block // self.slabs, block % self.slabs
        row = Int32(-1)
        if lane < self.top_k:
            row = device.load_global(token_rows.iterator.toint() + (Int64(token) * self.top_k + Int64(lane)) * 4)
        first = (slab * self.tile.threads * self.tile.vectors + thread) * PER_VECTOR
        columns = [first + part * self.tile.threads * PER_VECTOR for part in range(self.tile.vectors)]
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        sums = sums_of_rows(rows.iterator.toint(), row, columns, self.features, self.tile.batch, not self.follows)
        for part in cutlass.range_constexpr(self.tile.vectors):
            if columns[part] < self.features:
                self.store(out.iterator.toint(), Int64(token) * self.features + Int64(columns[part]), sums[part])

    def store(self, out: Int64, element: Int64, sums: Any) -> None:
        """A vector's eight sums."""
        values = [sums[i] for i in range(PER_VECTOR)]
        if self.out_dtype is BFloat16:
            vectors.store_result(out + element * 2, vectors.words_of(values, BFloat16))
        else:
            for half in (0, 4):
                words: Words = vectors.words_of(values[half : half + 4], Float32)
                vectors.store_result(out + (element + half) * 4, words)
