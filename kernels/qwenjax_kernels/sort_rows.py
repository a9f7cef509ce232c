"""The (token, choice) pairs of a rank's experts, sorted by expert: a stable counting sort, the same bits every time.

A warp takes 32 consecutive pairs a turn and a block a chunk of consecutive warps, so that a pair's place is the rows
of lower experts and those of its own expert in chunks before, warps before, turns before and lanes before. The last
two are known as the warp counts, and a scan over the block's warps gives the third. Up to `ONE_BLOCK_PAIRS` pairs, one
block is all there is. Above, a first kernel counts each chunk's rows, and each block of the second adds up the counts
of all chunks: 64 KiB a block at 128 chunks and 128 experts, from the L2.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from qwenjax_kernels import device
from qwenjax_kernels.expert_rows_limits import MAX_EXPERTS

WARP = 32
WARPS = 32
THREADS = WARP * WARPS
ONE_BLOCK_PAIRS = 4 * THREADS
CHUNKS = 128  # as long as a warp has no more than MAX_TURNS of them
MAX_TURNS = 8  # a pair's expert and rank stay in registers between counting and placing
COLUMN = 16  # counts of a column in flight


class SortRows:
    """The kernels for one problem; call `launch` from a `@cute.jit` function.

    Shapes: ids int32 and weights float32 [tokens, top_k]; first_expert int32 [1]; row_token int32 and row_weight
    float32 [tokens * top_k]; group_sizes int32 [experts]; token_rows int32 [tokens, top_k]; chunk_counts int32 [chunks,
    experts], which passes from one kernel to the other, None where there is one chunk. qwenjax_ffi.routing defines the
    results.
    Rows at and after the sum of group_sizes are not written.
    follows: the kernel that makes ids and weights may still run at the launch; for one chunk.
    """

    def __init__(self, *, tokens: int, top_k: int, experts: int, follows: bool = False) -> None:
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"{experts} experts a rank; the kernel is for 1 to {MAX_EXPERTS}")
        self.pairs = tokens * top_k
        if not 1 <= self.pairs < 1 << 31:
            raise ValueError(f"{tokens} tokens of {top_k} choices; the kernel is for 1 to 2^31 - 1 pairs")
        self.top_k, self.experts = top_k, experts
        chunks = 1 if self.pairs <= ONE_BLOCK_PAIRS else CHUNKS
        self.turns = min(-(-self.pairs // (chunks * THREADS)), MAX_TURNS)
        self.chunks = -(-self.pairs // (self.turns * THREADS))
        if follows and self.chunks > 1:
            raise ValueError(f"{self.pairs} pairs are {self.chunks} chunks; those of one may follow another kernel")
        self.follows = follows
        self.groups = -(-experts // WARP)  # of a warp's lanes, an expert each

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        ids: cute.Tensor,
        weights: cute.Tensor,
        first_expert: cute.Tensor,
        row_token: cute.Tensor,
        group_sizes: cute.Tensor,
        row_weight: cute.Tensor,
        token_rows: cute.Tensor,
        chunk_counts: cute.Tensor | None,
    ) -> None:
        """Enqueues the kernels on the stream."""
        shape = {"grid": [self.chunks, 1, 1], "block": [THREADS, 1, 1], "min_blocks_per_mp": 1, "stream": stream}
        if cutlass.const_expr(chunk_counts is not None):
            self.count(ids, first_expert, chunk_counts).launch(**shape)
        self.place(ids, weights, first_expert, row_token, group_sizes, row_weight, token_rows, chunk_counts).launch(
            use_pdl=self.follows, **shape
        )

    @cute.kernel
    def count(self, ids: cute.Tensor, first_expert: cute.Tensor, chunk_counts: cute.Tensor) -> None:
        """The rows of each expert in each chunk."""

        @cute.struct
        class Storage:
            counts: cute.struct.MemRange[Int32, WARPS * self.experts]

        counts = cutlass.memory.SmemAllocator().allocate(Storage).counts.data_ptr().toint()
        thread, _, _ = cute.arch.thread_idx()
        chunk, _, _ = cute.arch.block_idx()
        self.count_chunk(ids.iterator.toint(), first_expert.iterator.toint(), counts, chunk, thread)
        if thread < self.experts:
            total = self.sum_over_warps(counts, thread)
            target = chunk_counts.iterator.toint() + Int64(chunk * self.experts + thread) * 4
            device.store_global(target, Uint32(total))

    @cute.kernel
    def place(
        self,
        ids: cute.Tensor,
        weights: cute.Tensor,
        first_expert: cute.Tensor,
        row_token: cute.Tensor,
        group_sizes: cute.Tensor,
        row_weight: cute.Tensor,
        token_rows: cute.Tensor,
        chunk_counts: cute.Tensor | None,
    ) -> None:
        """Each pair to its row."""

        @cute.struct
        class Storage:
            counts: cute.struct.MemRange[Int32, WARPS * self.experts]
            before: cute.struct.MemRange[Int32, self.groups * WARP]  # rows of an expert in chunks before
            total: cute.struct.MemRange[Int32, self.groups * WARP]  # and in all
            group_total: cute.struct.MemRange[Int32, self.groups]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        counts, before = storage.counts.data_ptr().toint(), storage.before.data_ptr().toint()
        total, group_total = storage.total.data_ptr().toint(), storage.group_total.data_ptr().toint()
        thread, _, _ = cute.arch.thread_idx()
        chunk, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        if thread < self.groups * WARP:
            device.store_shared(before + 4 * thread, Int32(0))
            device.store_shared(total + 4 * thread, Int32(0))
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        # On its way while the rows are counted.
        pair_weights = self.load_pairs(weights.iterator.toint(), chunk, thread, 0)
        pairs = self.count_chunk(ids.iterator.toint(), first_expert.iterator.toint(), counts, chunk, thread)
        earlier_counts = device.address_of(chunk_counts)
        if cutlass.const_expr(earlier_counts is not None):
            self.add_chunks(earlier_counts, before, total, chunk, thread)
        if thread < self.experts:
            here = self.sum_over_warps(counts, thread)
            if cutlass.const_expr(chunk_counts is None):
                device.store_shared(total + 4 * thread, here)
        cute.arch.sync_threads()
        self.scan_experts(before, total, group_total, group_sizes.iterator.toint(), chunk, thread)
        for turn in cutlass.range_constexpr(self.turns):
            pair = self.pair(chunk, thread, turn)
            expert, rank = pairs[turn]
            if pair < self.pairs:
                row = Int32(-1)
                if expert < self.experts:
                    row = rank + device.load_shared(before + 4 * expert)
                    row += device.load_shared(counts + 4 * (thread // WARP * self.experts + expert))
                    device.store_global(row_token.iterator.toint() + Int64(row) * 4, Uint32(pair // self.top_k))
                    device.store_global(row_weight.iterator.toint() + Int64(row) * 4, Uint32(pair_weights[turn]))
                device.store_global(token_rows.iterator.toint() + Int64(pair) * 4, Uint32(row))

    def pair(self, chunk: Int32, thread: Int32, turn: int) -> Int32:
        """The pair of a thread's turn."""
        warp, lane = thread // WARP, thread % WARP
        return ((chunk * WARPS + warp) * self.turns + turn) * WARP + lane

    @cute.jit
    def load_pairs(self, values: Int64, chunk: Int32, thread: Int32, otherwise: cutlass.Constexpr) -> list[Int32]:
        """A word of each of this thread's pairs; `otherwise` of those past the end."""
        loaded = []
        for turn in cutlass.range_constexpr(self.turns):
            pair = self.pair(chunk, thread, turn)
            value = Int32(otherwise)
            if pair < self.pairs:
                value = device.load_global(values + Int64(pair) * 4, not self.follows)
            loaded.append(value)
        return loaded

    @cute.jit
    def count_chunk(
        self, ids: Int64, first_expert: Int64, counts: Int32, chunk: Int32, thread: Int32
    ) -> list[tuple[Int32, Int32]]:
        """Each warp's rows an expert, to shared memory [warps, experts]; ends with a barrier.

        Returns, of each of this thread's pairs: its expert, `experts` where that is not here, and how many pairs of its
        warp come before it and have its expert.
        """
        lane = cute.arch.lane_idx()
        warp = thread // WARP
        own = counts + 4 * warp * self.experts
        for group in cutlass.range_constexpr(self.groups):
            if group * WARP + lane < self.experts:
                device.store_shared(own + 4 * (group * WARP + lane), Int32(0))
        cute.arch.sync_warp()
        first = device.load_global(first_expert)
        expert_ids = self.load_pairs(ids, chunk, thread, -1)
        ranked = []
        lower_lanes = (Uint32(1) << Uint32(lane)) - Uint32(1)
        for turn in cutlass.range_constexpr(self.turns):
            expert = Int32(self.experts)
            if expert_ids[turn] >= first and expert_ids[turn] >= 0:
                expert = cutlass.min(expert_ids[turn] - first, Int32(self.experts))
            same = device.lanes_with_the_same(expert)
            rank = Int32(cute.arch.popc(same & lower_lanes))
            if expert < self.experts:
                rank = rank + device.load_shared(own + 4 * expert)
            cute.arch.sync_warp()
            if expert < self.experts and same >> Uint32(lane) == Uint32(1):  # the last of its lanes
                device.store_shared(own + 4 * expert, rank + 1)
            cute.arch.sync_warp()
            ranked.append((expert, rank))
        cute.arch.sync_threads()
        return ranked

    @cute.jit
    def sum_over_warps(self, counts: Int32, expert: Int32) -> Int32:
        """The block's rows of an expert; the warps' counts become those of the warps before."""
        running = Int32(0)
        for begin in cutlass.range_constexpr(0, WARPS, COLUMN):
            column = [
                device.load_shared(counts + 4 * ((begin + warp) * self.experts + expert)) for warp in range(COLUMN)
            ]
            for warp in cutlass.range_constexpr(COLUMN):
                device.store_shared(counts + 4 * ((begin + warp) * self.experts + expert), running)
                running = running + column[warp]
        return running

    @cute.jit
    def add_chunks(self, chunk_counts: Int64, before: Int32, total: Int32, chunk: Int32, thread: Int32) -> None:
        """Rows of each expert in the chunks before this one, and in all; integers, so that any order will do."""
        lanes = self.groups * WARP
        parts = THREADS // lanes
        expert, part = thread % lanes, thread // lanes
        sums = Int32(0)
        lower = Int32(0)
        for step in cutlass.range(-(-self.chunks // parts), unroll=8):
            other = step * parts + part
            if other < self.chunks and expert < self.experts and part < parts:
                rows = device.load_global(chunk_counts + Int64(other * self.experts + expert) * 4)
                sums = sums + rows
                if other < chunk:
                    lower = lower + rows
        if sums > 0:
            device.add_shared(total + 4 * expert, sums)
            device.add_shared(before + 4 * expert, lower)

    @cute.jit
    def scan_experts(
        self, before: Int32, total: Int32, group_total: Int32, group_sizes: Int64, chunk: Int32, thread: Int32
    ) -> None:
        """Makes `before` the row at which this chunk's rows of each expert begin; the first block tells group_sizes."""
        lane = cute.arch.lane_idx()
        group = thread // WARP
        size = Int32(0)
        inclusive = Int32(0)
        scans = Boolean(group < self.groups)
        if scans:
            size = device.load_shared(total + 4 * thread)
            inclusive = size
            for step in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(inclusive, 1 << step, mask_and_clamp=0)
                if lane >= 1 << step:
                    inclusive += lower
            if lane == WARP - 1:
                device.store_shared(group_total + 4 * group, inclusive)
        cute.arch.sync_threads()
        if scans:
            first = inclusive - size + device.load_shared(before + 4 * thread)
            for lower_group in cutlass.range_constexpr(self.groups - 1):
                rows = device.load_shared(group_total + 4 * lower_group)
                if lower_group < group:
                    first += rows
            device.store_shared(before + 4 * thread, first)
            if chunk == 0 and thread < self.experts:
                device.store_global(group_sizes + Int64(thread) * 4, Uint32(size))
        cute.arch.sync_threads()
