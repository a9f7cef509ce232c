"""Attention of chunks of prompts over a paged KV cache, for Hopper (sm_90a).

A block takes BLOCK_ROWS query tokens of one query head and walks the keys that they see in tiles of TILE_KEYS, the
newest first, with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). One warp copies keys and values
by TMA, a page or a part of one a copy, from where they lie. Two warpgroups multiply, 64 rows each, scores and weights
in registers, as FlashAttention-3 does (Shah et al. 2024, arXiv:2407.08608): a turn issues the sums over one tile and
the scores of the next together, and one warpgroup's products run during the other's softmax.

Left out, measured on an H200 with 8 prompts of 6,000 tokens in rows of 2,048: products that the warpgroups issue in
turn (1.0% faster), and within a warpgroup the softmax of a tile during the products of the next (0.1%; both, 1.4%).

Tiles that no query of the block sees are not read, and only tiles that some query does not see wholly are masked.
Memory past the newest position that a block sees may be NaN: pages there are not read, and in the page of that
position scores are masked and values set to zero.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from qwenjax_kernels import device, vectors, warp_mma
from qwenjax_kernels.prefill_attention_limits import BLOCK_ROWS, HEAD_DIM, TILE_KEYS

WARP, WARPGROUP = 32, 128
CONSUMERS = 2  # warpgroups
GROUP_ROWS = BLOCK_ROWS // CONSUMERS
STAGES = 2  # of keys, and of values
SWIZZLE_COLUMNS = 64  # elements of the 128 bytes that the swizzle spans
HALVES = HEAD_DIM // SWIZZLE_COLUMNS
TILE_BYTES = TILE_KEYS * HEAD_DIM * 2
# A block of 384 threads starts with 168 registers each.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
ZEROS = 1  # named barriers, one a warpgroup, from here on: its zeros are written


class PrefillAttention:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: q [batch, tokens, q_heads, HEAD_DIM] and out alike; caches [layers, num_pages, kv_heads, page_size,
    HEAD_DIM]; page_table int32 [batch, max_pages]; positions int32 [batch, tokens], -1 for padding, whose results are
    zeros; layer int32 [1]. A position past the table is taken for the table's last.
    """

    def __init__(
        self,
        *,
        dtype: Any,
        batch: int,
        tokens: int,
        q_heads: int,
        kv_heads: int,
        layers: int,
        num_pages: int,
        page_size: int,
        max_pages: int,
    ) -> None:
        self.dtype = dtype
        self.batch = batch
        self.tokens = tokens
        self.q_heads = q_heads
        self.kv_heads = kv_heads
        self.group = q_heads // kv_heads
        self.layers = layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_pages = max_pages
        self.row_blocks = -(-tokens // BLOCK_ROWS)
        self.piece_keys = min(page_size, TILE_KEYS)  # of a tile that lie in one page
        self.pieces = TILE_KEYS // self.piece_keys
        self.factor = HEAD_DIM**-0.5 * math.log2(math.e)  # of scores whose exponential is a power of two

    def products(self) -> tuple[list[cute.TiledMma], cute.TiledMma]:
        """A warpgroup's Q K^T, both from shared memory, that begins a sum and that adds, and P V, P from registers."""
        shape = (GROUP_ROWS, TILE_KEYS, 16)
        scores = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, shape, warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
        )
        sums = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (GROUP_ROWS, HEAD_DIM, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.MN,
        )
        score_products = [cute.make_tiled_mma(scores) for _ in range(2)]
        score_products[0].set(warpgroup.Field.ACCUMULATE, False)
        score_products[1].set(warpgroup.Field.ACCUMULATE, True)
        sum_product = cute.make_tiled_mma(sums)
        sum_product.set(warpgroup.Field.ACCUMULATE, True)
        return score_products, sum_product

    def swizzled(self, rows: int, *stages: int) -> Any:
        """[rows, HEAD_DIM, stages] in shared memory, as the TMA writes it: HALVES blocks of 128-byte rows."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, HEAD_DIM, *stages), order=tuple(range(2 + len(stages))))

    def transposed(self) -> Any:
        """[HEAD_DIM, TILE_KEYS, STAGES], the same memory as `swizzled` has it."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.dtype)
        return cute.tile_to_shape(atom, (HEAD_DIM, TILE_KEYS, STAGES), order=(1, 0, 2))

    def copy_of(self, tensor: cute.Tensor, layout: cute.Layout, rows: int) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA copy of `rows` rows of a half, and the tensor that it reads."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        box = (rows, SWIZZLE_COLUMNS)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(tensor.iterator, layout),
            cute.tile_to_shape(atom, box, order=(0, 1)),
            box,
        )

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        page_table: cute.Tensor,
        positions: cute.Tensor,
        layer: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        row = self.q_heads * HEAD_DIM
        queries = cute.make_layout(
            (self.tokens, HEAD_DIM, self.q_heads, self.batch), stride=(row, 1, HEAD_DIM, self.tokens * row)
        )
        page = self.page_size * HEAD_DIM
        # One axis of pages over all layers: a layer is known on the device alone.
        pages = cute.make_layout(
            (self.page_size, HEAD_DIM, self.kv_heads, self.layers * self.num_pages),
            stride=(HEAD_DIM, 1, page, self.kv_heads * page),
        )
        q_copy, q_source = self.copy_of(q, queries, BLOCK_ROWS)
        k_copy, k_source = self.copy_of(k_cache, pages, self.piece_keys)
        v_copy, v_source = self.copy_of(v_cache, pages, self.piece_keys)
        self.kernel(
            q_copy,
            q_source,
            k_copy,
            k_source,
            v_copy,
            v_source,
            page_table,
            positions,
            layer,
            out,
            self.swizzled(BLOCK_ROWS),
            self.swizzled(TILE_KEYS, STAGES),
            self.transposed(),
        ).launch(
            grid=[self.batch * self.q_heads * self.row_blocks, 1, 1],
            block=[(1 + CONSUMERS) * WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q_copy: cute.CopyAtom,
        q_source: cute.Tensor,
        k_copy: cute.CopyAtom,
        k_source: cute.Tensor,
        v_copy: cute.CopyAtom,
        v_source: cute.Tensor,
        page_table: cute.Tensor,
        positions: cute.Tensor,
        layer: cute.Tensor,
        out: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ) -> None:
        dtype = self.dtype

        @cute.struct
        class Storage:
            queries: cute.struct.Align[cute.struct.MemRange[dtype, BLOCK_ROWS * HEAD_DIM], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[dtype, STAGES * TILE_KEYS * HEAD_DIM], 1024]
            values: cute.struct.Align[cute.struct.MemRange[dtype, STAGES * TILE_KEYS * HEAD_DIM], 1024]
            barriers: cute.struct.MemRange[Int64, 1 + 4 * STAGES]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        q_full = storage.barriers.data_ptr()
        k_full = q_full + 1
        v_full = k_full + STAGES
        k_empty = v_full + STAGES
        v_empty = k_empty + STAGES

        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        # Query heads of a kv head are neighbours in time and share its tiles in the L2; long blocks come first.
        head = block % self.q_heads
        sequence = block // self.q_heads % self.batch
        first_token = (self.row_blocks - 1 - block // (self.q_heads * self.batch)) * BLOCK_ROWS

        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_full, 1)
                for stage in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(k_full + stage, 1)
                    cute.arch.mbarrier_init(v_full + stage, 1)
                    cute.arch.mbarrier_init(k_empty + stage, CONSUMERS * WARPGROUP // WARP)
                    cute.arch.mbarrier_init(v_empty + stage, CONSUMERS * WARPGROUP // WARP)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        row_positions = positions.iterator.toint() + Int64(sequence) * (self.tokens * 4)
        end, all_see = self.keys_of_block(row_positions, first_token, lane)
        tiles = (end + (TILE_KEYS - 1)) // TILE_KEYS
        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.copy_tiles(
                    q_copy,
                    q_source,
                    k_copy,
                    k_source,
                    v_copy,
                    v_source,
                    storage.queries.data_ptr(),
                    storage.keys.data_ptr(),
                    storage.values.data_ptr(),
                    q_layout,
                    k_layout,
                    q_full,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    page_table.iterator.toint() + Int64(sequence) * (self.max_pages * 4),
                    layer[0] * self.num_pages,
                    sequence,
                    head,
                    first_token // BLOCK_ROWS,
                    end,
                    tiles,
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply_tiles(
                storage.queries.get_tensor(q_layout.outer, swizzle=q_layout.inner),
                storage.keys.get_tensor(k_layout.outer, swizzle=k_layout.inner),
                storage.values.get_tensor(v_layout.outer, swizzle=v_layout.inner),
                storage.values.data_ptr().toint(),
                q_full,
                k_full,
                v_full,
                k_empty,
                v_empty,
                row_positions,
                out.iterator.toint() + (Int64(sequence) * self.tokens * self.q_heads + Int64(head)) * (HEAD_DIM * 2),
                first_token,
                end,
                all_see,
                tiles,
                thread - WARPGROUP,
                lane,
            )

    @cute.jit
    def keys_of_block(self, positions: Int64, first_token: Int32, lane: Int32) -> tuple[Int32, Int32]:
        """How many keys some query of the block sees, and how many every query sees that is no padding; by a warp."""
        newest = Int32(-1)
        oldest = Int32(2**31 - 2)
        for turn in cutlass.range_constexpr(BLOCK_ROWS // WARP):
            token = first_token + turn * WARP + lane
            if token < self.tokens:
                position = device.load_global(positions + Int64(token) * 4)
                newest = cutlass.max(newest, position)
                if position >= 0:
                    oldest = cutlass.min(oldest, position)
        newest = cute.arch.warp_redux_sync(newest, "max")
        oldest = cute.arch.warp_redux_sync(oldest, "min")
        end = cutlass.min(newest + 1, self.max_pages * self.page_size)
        return end, cutlass.min(oldest + 1, end)

    @cute.jit
    def advance(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The next stage and its phase."""
        stage += 1
        if stage == STAGES:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def copy_tiles(
        self,
        q_copy: cute.CopyAtom,
        q_source: cute.Tensor,
        k_copy: cute.CopyAtom,
        k_source: cute.Tensor,
        v_copy: cute.CopyAtom,
        v_source: cute.Tensor,
        queries: cute.Pointer,
        keys: cute.Pointer,
        values: cute.Pointer,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        q_full: cute.Pointer,
        k_full: cute.Pointer,
        v_full: cute.Pointer,
        k_empty: cute.Pointer,
        v_empty: cute.Pointer,
        page_table: Int64,
        first_page: Int32,
        sequence: Int32,
        head: Int32,
        row_block: Int32,
        end: Int32,
        tiles: Int32,
    ) -> None:
        """The producer warp: the queries, then tiles of keys and values, the last first."""
        halves = (BLOCK_ROWS, SWIZZLE_COLUMNS, HALVES)
        to_queries, from_queries = self.partition(
            q_copy,
            q_source,
            queries,
            q_layout,
            cute.make_layout(halves, stride=(SWIZZLE_COLUMNS, 1, BLOCK_ROWS * SWIZZLE_COLUMNS)),
        )
        block_elements = TILE_KEYS * SWIZZLE_COLUMNS
        pieces = cute.make_layout(
            (self.piece_keys, SWIZZLE_COLUMNS, self.pieces, HALVES, STAGES),
            stride=(
                SWIZZLE_COLUMNS,
                1,
                self.piece_keys * SWIZZLE_COLUMNS,
                block_elements,
                HALVES * block_elements,
            ),
        )
        to_keys, from_keys = self.partition(k_copy, k_source, keys, k_layout, pieces)
        to_values, from_values = self.partition(v_copy, v_source, values, k_layout, pieces)

        if tiles > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, BLOCK_ROWS * HEAD_DIM * 2)
            for half in cutlass.range_constexpr(HALVES):
                cute.copy(
                    q_copy,
                    from_queries[None, row_block, half, head, sequence],
                    to_queries[None, half],
                    tma_bar_ptr=q_full,
                )
        kv_head = head // self.group
        stage = Int32(0)
        phase = Int32(1)
        for turn in cutlass.range(tiles, unroll=1):
            first_key = (tiles - 1 - turn) * TILE_KEYS
            count = cutlass.min((end - first_key + (self.piece_keys - 1)) // self.piece_keys, self.pieces)
            places = []
            for piece in cutlass.range_constexpr(self.pieces):
                key = first_key + piece * self.piece_keys
                page = Int32(0)
                # A page of the table past the newest position means nothing.
                if piece < count:
                    page = device.load_global(page_table + Int64(key // self.page_size) * 4)
                places.append((first_page + page, key % self.page_size // self.piece_keys))
            num_bytes = count * (self.piece_keys * HEAD_DIM * 2)
            for tensor in cutlass.range_constexpr(2):
                full, empty = (v_full, v_empty) if tensor else (k_full, k_empty)
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_bytes)
                for piece in cutlass.range_constexpr(self.pieces):
                    if piece < count:
                        page, part = places[piece]
                        for half in cutlass.range_constexpr(HALVES):
                            cute.copy(
                                v_copy if tensor else k_copy,
                                (from_values if tensor else from_keys)[None, part, half, kv_head, page],
                                (to_values if tensor else to_keys)[None, piece, half, stage],
                                tma_bar_ptr=full + stage,
                            )
            stage, phase = self.advance(stage, phase)

    @cute.jit
    def partition(
        self,
        copy: cute.CopyAtom,
        source: cute.Tensor,
        target: cute.Pointer,
        swizzled: cute.ComposedLayout,
        boxes: cute.Layout,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """The boxes of a copy, the first mode of both results: in shared memory at `target` by the other modes of
        `boxes`, and of the source by its tiles."""
        shape = (boxes.shape[0], boxes.shape[1])
        shared = cute.make_tensor(cute.recast_ptr(target, swizzled.inner, self.dtype), boxes)
        tiled = cute.local_tile(source, shape, (None, None, None, None))
        return cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiled, 0, 2)
        )

    @cute.jit
    def multiply_tiles(
        self,
        queries: cute.Tensor,
        keys: cute.Tensor,
        values: cute.Tensor,
        values_address: Int32,
        q_full: cute.Pointer,
        k_full: cute.Pointer,
        v_full: cute.Pointer,
        k_empty: cute.Pointer,
        v_empty: cute.Pointer,
        positions: Int64,
        out: Int64,
        first_token: Int32,
        end: Int32,
        all_see: Int32,
        tiles: Int32,
        thread: Int32,
        lane: Int32,
    ) -> None:
        """A consumer warpgroup. A lane holds rows lane / 4 and that + 8 of its warp's 16."""
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        first_row = first_token + group * GROUP_ROWS + thread // WARP * 16 + lane // 4
        newest = []
        for half in cutlass.range_constexpr(2):
            token = first_row + half * 8
            position = Int32(-1)
            if token < self.tokens:
                position = device.load_global(positions + Int64(token) * 4)
            newest.append(cutlass.min(position, end - 1))

        score_products, sum_product = self.products()
        score_product = score_products[0]
        score_slice, sum_slice = score_product.get_slice(thread), sum_product.get_slice(thread)
        query_rows = cute.local_tile(queries, (GROUP_ROWS, HEAD_DIM), (group, 0))
        q_fragment = score_product.make_fragment_A(score_slice.partition_A(query_rows))
        k_fragment = score_product.make_fragment_B(score_slice.partition_B(keys))
        v_fragment = sum_product.make_fragment_B(sum_slice.partition_B(values))
        scores = score_product.make_fragment_C(score_product.partition_shape_C((GROUP_ROWS, TILE_KEYS)))
        sums = sum_product.make_fragment_C(sum_product.partition_shape_C((GROUP_ROWS, HEAD_DIM)))
        weights = cute.make_rmem_tensor(sum_product.partition_shape_A((GROUP_ROWS, TILE_KEYS)), self.dtype)
        tops = cute.make_rmem_tensor((2,), Float32)
        totals = cute.make_rmem_tensor((2,), Float32)
        scales = cute.make_rmem_tensor((2,), Float32)
        sums.fill(0.0)
        tops.fill(-math.inf)
        totals.fill(0.0)
        leads = Int32(lane == 0)

        if tiles > 0:
            cute.arch.mbarrier_wait(q_full, 0)
            cute.arch.mbarrier_wait(k_full, 0)
            self.issue_scores(score_products, scores, q_fragment, k_fragment, Int32(0))
            warpgroup.wait_group(0)
            device.arrive_if(k_empty.toint(), leads)
            first_key = (tiles - 1) * TILE_KEYS
            self.soften(scores, tops, totals, scales, newest, first_key, lane, True)
            self.round_weights(scores, weights)
            cute.arch.mbarrier_wait(v_full, 0)
            self.zero_values(values_address, end - first_key, group, thread)

            masked = cutlass.max(tiles - all_see // TILE_KEYS, 1)
            k_stage, k_phase = self.advance(Int32(0), Int32(0))
            v_stage = Int32(0)
            v_phase = Int32(0)
            for section in cutlass.range_constexpr(2):
                start = masked if section else Int32(1)
                stop = tiles if section else masked
                for turn in cutlass.range(stop - start, unroll=1):
                    first_key = (tiles - 1 - start - turn) * TILE_KEYS
                    cute.arch.mbarrier_wait(k_full + k_stage, k_phase)
                    cute.arch.mbarrier_wait(v_full + v_stage, v_phase)
                    self.issue_sums(sum_product, sums, weights, v_fragment, v_stage)
                    self.issue_scores(score_products, scores, q_fragment, k_fragment, k_stage)
                    warpgroup.wait_group(0)
                    device.arrive_if((k_empty + k_stage).toint(), leads)
                    device.arrive_if((v_empty + v_stage).toint(), leads)
                    self.soften(scores, tops, totals, scales, newest, first_key, lane, not section)
                    self.round_weights(scores, weights)
                    self.rescale(sums, scales)
                    k_stage, k_phase = self.advance(k_stage, k_phase)
                    v_stage, v_phase = self.advance(v_stage, v_phase)
            cute.arch.mbarrier_wait(v_full + v_stage, v_phase)
            self.issue_sums(sum_product, sums, weights, v_fragment, v_stage)
            warpgroup.wait_group(0)
        self.store(sums, totals, newest, out, first_row, lane)

    @cute.jit
    def issue_scores(
        self,
        products: list[cute.TiledMma],
        scores: cute.Tensor,
        queries: cute.Tensor,
        keys: cute.Tensor,
        stage: Int32,
    ) -> None:
        """A group of wgmmas: scores = queries keys^T."""
        warpgroup.fence()
        for step in cutlass.range_constexpr(HEAD_DIM // 16):
            product = products[min(step, 1)]
            cute.gemm(product, scores, queries[None, None, step], keys[None, None, step, stage], scores)
        warpgroup.commit_group()

    @cute.jit
    def issue_sums(
        self,
        product: cute.TiledMma,
        sums: cute.Tensor,
        weights: cute.Tensor,
        values: cute.Tensor,
        stage: Int32,
    ) -> None:
        """A group of wgmmas: sums += weights values."""
        warpgroup.fence()
        for step in cutlass.range_constexpr(TILE_KEYS // 16):
            cute.gemm(product, sums, weights[None, None, step], values[None, None, step, stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def soften(
        self,
        scores: cute.Tensor,
        tops: cute.Tensor,
        totals: cute.Tensor,
        scales: cute.Tensor,
        newest: list[Int32],
        first_key: Int32,
        lane: Int32,
        masked: cutlass.Constexpr,
    ) -> None:
        """Scores become weights; `scales` what the sums before them are to be multiplied with."""
        flat = cute.make_tensor(scores.iterator, cute.make_layout(TILE_KEYS // 2))
        # Of each eight keys a lane holds two of a row: elements 0 and 1 of row lane / 4, 2 and 3 of that + 8.
        if cutlass.const_expr(masked):
            for place in cutlass.range_constexpr(TILE_KEYS // 2):
                seen = newest[place // 2 % 2] - first_key - lane % 4 * 2
                flat[place] = self.visible_or_never(flat[place], seen, place // 4 * 8 + place % 2)
        # Four chains of dependent instructions at once: two warps of a scheduler do not hide the latency of one.
        chains = [flat[place] for place in range(4)]
        for place in cutlass.range_constexpr(4, TILE_KEYS // 2):
            chains[place % 4] = warp_mma.maximum(chains[place % 4], flat[place])
        shifts = []
        for half in cutlass.range_constexpr(2):
            top = warp_mma.maximum(chains[half * 2], chains[half * 2 + 1])
            top = warp_mma.row_maximum(warp_mma.maximum(top, tops[half]))
            shift = top * Float32(self.factor)
            if cutlass.const_expr(masked):
                # A row that sees none of the keys so far: -inf less -inf would be NaN.
                shift = warp_mma.maximum(shift, Float32(-1e30))
            scales[half] = warp_mma.exp2(tops[half] * Float32(self.factor) - shift)
            tops[half] = top
            shifts.append(shift)
        for place in cutlass.range_constexpr(TILE_KEYS // 2):
            weight = warp_mma.exp2(flat[place] * Float32(self.factor) - shifts[place // 2 % 2])
            flat[place] = weight
            chains[place % 4] = weight if place < 4 else chains[place % 4] + weight
        for half in cutlass.range_constexpr(2):
            totals[half] = totals[half] * scales[half] + (chains[half * 2] + chains[half * 2 + 1])

    @cute.jit
    def visible_or_never(self, score: Float32, seen: Int32, offset: cutlass.Constexpr) -> Float32:
        """The score where the offset is at most `seen`, else minus infinity."""
        return cute.arch.inline_ptx(
            f"{{\n.reg .pred sees;\nsetp.ge.s32 sees, {{$r1}}, {offset};\n"
            "selp.f32 {$w0}, {$r0}, 0fFF800000, sees;\n}",
            write_only_types=[Float32],
            read_only_args=[score, seen],
        )

    @cute.jit
    def round_weights(self, scores: cute.Tensor, weights: cute.Tensor) -> None:
        """Accumulators of 16 keys lie as the A operand of a product over these keys has them."""
        flat = cute.make_tensor(scores.iterator, cute.make_layout(TILE_KEYS // 2))
        words = cute.make_tensor(cute.recast_tensor(weights, Uint32).iterator, cute.make_layout(TILE_KEYS // 4))
        for pair in cutlass.range_constexpr(TILE_KEYS // 4):
            words[pair] = vectors.words_of([flat[2 * pair], flat[2 * pair + 1]], self.dtype)[0]

    @cute.jit
    def rescale(self, sums: cute.Tensor, scales: cute.Tensor) -> None:
        """Multiplies the sums with their row's scale."""
        flat = cute.make_tensor(sums.iterator, cute.make_layout(HEAD_DIM // 2))
        for place in cutlass.range_constexpr(HEAD_DIM // 2):
            flat[place] = flat[place] * scales[place // 2 % 2]

    @cute.jit
    def zero_values(self, address: Int32, count: Int32, group: Int32, thread: Int32) -> None:
        """Zeros for the values of a tile's keys from `count` on: their weight is zero, but 0 * NaN is NaN.

        Each warpgroup writes them all and so needs to wait for no other.
        """
        if count < TILE_KEYS:
            row_vectors = SWIZZLE_COLUMNS * 2 // 16
            for turn in cutlass.range((TILE_KEYS - count) * (HALVES * row_vectors) // WARPGROUP + 1, unroll=1):
                index = turn * WARPGROUP + thread
                row = count + index // (HALVES * row_vectors)
                place = index % (HALVES * row_vectors)
                if row < TILE_KEYS:
                    line = address + place // row_vectors * (TILE_BYTES // HALVES) + row * (SWIZZLE_COLUMNS * 2)
                    for word in cutlass.range_constexpr(2):
                        device.store_shared_v2_f32(
                            line + place % row_vectors * 16 + word * 8, Float32(0.0), Float32(0.0)
                        )
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=ZEROS + group, number_of_threads=WARPGROUP)

    @cute.jit
    def store(
        self, sums: cute.Tensor, totals: cute.Tensor, newest: list[Int32], out: Int64, first_row: Int32, lane: Int32
    ) -> None:
        """The results of the warpgroup's rows; zeros for padding."""
        flat = cute.make_tensor(sums.iterator, cute.make_layout(HEAD_DIM // 2))
        for half in cutlass.range_constexpr(2):
            total = warp_mma.row_sum(totals[half])
            valid = newest[half] >= 0
            inverse = Float32(1.0) / total if valid else Float32(0.0)
            row = first_row + half * 8
            address = out + Int64(row) * (self.q_heads * HEAD_DIM * 2) + Int64(lane % 4 * 4)
            for column in cutlass.range_constexpr(HEAD_DIM // 8):
                place = column * 4 + half * 2
                word = vectors.words_of([flat[place] * inverse, flat[place + 1] * inverse], self.dtype)[0]
                word = word if valid else Uint32(0)
                device.store_global_if(address, column * 16, word, self.tokens - row, 0)
