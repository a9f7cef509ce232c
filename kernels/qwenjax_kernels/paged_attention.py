"""Decode attention over a paged KV cache, for GPUs from compute capability 9.0.

The query heads of a kv head times the query tokens are the rows of a product; its columns are keys. A persistent block
walks the splits of its share (`attention_work`): four warps copy tiles of keys and values to shared memory, `stages`
deep, the others multiply, some row tiles each and within these some keys of each tile, with a running softmax (Milakov
and Gimelshein 2018, arXiv:1805.02867). They add their sums at the end of a split, and `attention_combine` adds those of
a sequence's splits.

A row of a tile is XORed, in chunks of 16 bytes, with its number modulo 8: then neither the copies nor ldmatrix meet a
bank twice. Keys past a sequence's newest position, left by earlier sequences, may be NaN: they change nothing.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from qwenjax_kernels import attention_splits, device, vectors, warp_mma
from qwenjax_kernels.attention_combine import AttentionCombine
from qwenjax_kernels.attention_splits import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPS,
    MMA_ROWS,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    TILE_KEYS,
    WARP,
    Splits,
)
from qwenjax_kernels.attention_work import AttentionWork

PRODUCERS = PRODUCER_WARPS * WARP
MASKED = -1e30  # far below any score, and finite: a row of padding has no key at all and must not become NaN
STEP_KEYS = 32  # that a warp takes at once, at most: with 64, registers spill
EXCHANGE = 1  # named barriers, one for each tile of rows from here on


class PagedAttention:
    """The kernels for one problem; call `launch` from a `@cute.jit` function.

    Shapes: q [batch, tokens, q_heads, head_dim] and out alike; caches [layers, num_pages, kv_heads, page_size,
    head_dim], of any number of layers; page_table int32 [batch, max_pages]; positions int32 [batch, tokens]; layer
    int32 [1]; partial float32 [batch, kv_heads, max_splits, rows, head_dim] and its stats [..., rows, 2], which need no
    initial value. rows, a kv head's query tokens times its group of query heads, are at most MAX_ROWS. A position past
    the table is taken for the table's last.
    """

    def __init__(
        self,
        *,
        dtype: Any,
        batch: int,
        tokens: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        max_pages: int,
        splits: Splits,
        num_blocks: int,
        follows: bool = False,
    ) -> None:
        """follows: the kernels that make q and write new keys and values to the caches may still run at the launch."""
        self.dtype = dtype
        self.tokens = tokens
        self.q_heads = q_heads
        self.kv_heads = kv_heads
        self.group = q_heads // kv_heads
        self.rows = tokens * self.group
        self.head_dim = head_dim
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_pages = max_pages
        self.batch = batch
        self.splits = splits
        self.num_blocks = num_blocks
        self.follows = follows
        self.row_tiles = attention_splits.row_tiles(self.rows)
        self.halves = 1 if self.rows <= MMA_ROWS // 2 else 2  # of a row tile that hold rows
        self.key_warps = attention_splits.key_warps(self.rows)
        self.warp_keys = TILE_KEYS // self.key_warps
        self.step_keys = min(self.warp_keys, STEP_KEYS)
        self.consumers = self.row_tiles * self.key_warps
        self.active = -(-self.rows // MMA_ROWS) * self.key_warps  # consumers whose row tiles hold rows
        self.row_bytes = head_dim * 2
        self.tile_bytes = TILE_KEYS * self.row_bytes
        self.stages = attention_splits.stages(self.rows, head_dim, batch)
        self.exchange_bytes = attention_splits.exchange_bytes(self.rows, head_dim)
        self.work = AttentionWork(
            batch=batch, tokens=tokens, kv_heads=kv_heads, max_keys=max_pages * page_size, splits=splits
        )
        self.combine = AttentionCombine(
            dtype=dtype,
            batch=batch,
            tokens=tokens,
            q_heads=q_heads,
            head_dim=head_dim,
            work=self.work,
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
        partial: cute.Tensor,
        stats: cute.Tensor,
    ) -> None:
        """Enqueues both kernels on the stream."""
        self.kernel(q, k_cache, v_cache, page_table, positions, layer, partial, stats).launch(
            grid=[self.num_blocks, 1, 1],
            block=[PRODUCERS + self.consumers * WARP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.follows,
        )
        self.combine.launch(stream, partial, stats, positions, out)

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        page_table: cute.Tensor,
        positions: cute.Tensor,
        layer: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
    ) -> None:
        @cute.struct
        class Storage:
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, self.stages * 2 * self.tile_bytes // 4], 1024]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, max(self.exchange_bytes // 4, 4)], 16]
            warp_stats: cute.struct.Align[cute.struct.MemRange[Float32, self.consumers * MMA_ROWS * 2], 16]
            barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            tile_end: cute.struct.MemRange[Int32, self.batch]
            lengths: cute.struct.MemRange[Int32, self.batch]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        tiles = storage.tiles.data_ptr().toint()
        exchange = storage.exchange.data_ptr().toint()
        warp_stats = storage.warp_stats.data_ptr().toint()
        full = storage.barriers.data_ptr()
        empty = full + self.stages
        tile_end = storage.tile_end.data_ptr().toint()
        lengths = storage.lengths.data_ptr().toint()

        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        if warp == 0:
            self.work.write_tables(positions.iterator.toint(), tile_end, lengths, lane)
        if warp == 1:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + stage, PRODUCERS)
                    cute.arch.mbarrier_init(empty + stage, self.active)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # the second kernel's blocks wait beside these

        if warp < PRODUCER_WARPS:
            if cutlass.const_expr(self.consumers == CONSUMER_WARPS):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            start, stop = self.work.share(block, self.num_blocks, tile_end, lane)
            first_page = Int64(layer[0]) * self.num_pages
            self.copy_splits(
                k_cache.iterator.toint(),
                v_cache.iterator.toint(),
                page_table.iterator.toint(),
                first_page,
                tiles,
                full,
                empty,
                tile_end,
                lengths,
                start,
                stop,
                thread,
                lane,
            )
        else:
            if cutlass.const_expr(self.consumers == CONSUMER_WARPS):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp < PRODUCER_WARPS + self.active:
                start, stop = self.work.share(block, self.num_blocks, tile_end, lane)
                self.multiply_splits(
                    q.iterator.toint(),
                    positions.iterator.toint(),
                    partial.iterator.toint(),
                    stats.iterator.toint(),
                    tiles,
                    exchange,
                    warp_stats,
                    full,
                    empty,
                    tile_end,
                    lengths,
                    start,
                    stop,
                    warp - PRODUCER_WARPS,
                    lane,
                )

    @cute.jit
    def copy_splits(
        self,
        keys: Int64,
        values: Int64,
        page_table: Int64,
        first_page: Int64,
        tiles: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        lengths: Int32,
        start: Int32,
        stop: Int32,
        thread: Int32,
        lane: Int32,
    ) -> None:
        """The producers: a page's rows of a kv head are contiguous, and each thread copies 16 bytes of every 2 KiB."""
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        row_lanes = self.row_bytes // 16
        turn_rows = PRODUCERS // row_lanes
        turn_bytes = PRODUCERS * 16
        row = thread // row_lanes
        target = tiles + row * self.row_bytes + ((thread % row_lanes) ^ (row % 8)) * 16
        block_bytes = self.page_size * self.row_bytes  # of a page and kv head
        piece_keys = min(self.page_size, TILE_KEYS)  # of a tile that lie in one page
        tile_pieces = TILE_KEYS // piece_keys
        page_tiles = WARP // tile_pieces  # whose pages the lanes of a warp look up together: one wait, not one a tile
        stage = Int32(0)
        phase = Int32(1)
        while start < stop:
            sequence, head, _, first, count, length = self.work.locate(start, tile_end, lengths, lane)
            table = page_table + Int64(sequence) * (self.max_pages * 4)
            pages = Int32(0)
            for tile in cutlass.range(count, unroll=1):
                first_key = (first + tile) * TILE_KEYS
                if tile % page_tiles == 0:
                    key = first_key + lane * piece_keys
                    pages = Int32(0)  # one a lane; a page of the table past the sequence's end means nothing
                    if key < length:
                        pages = device.load_global(table + Int64(key // self.page_size) * 4)
                pieces = []
                for piece in cutlass.range_constexpr(tile_pieces):
                    key = first_key + piece * piece_keys
                    page = cute.arch.shuffle_sync(pages, tile % page_tiles * tile_pieces + piece)
                    source = ((first_page + Int64(page)) * self.kv_heads + Int64(head)) * block_bytes
                    source += Int64(key % self.page_size * self.row_bytes + thread * 16)
                    pieces.append((source, length - 1 - key))
                cute.arch.mbarrier_wait(empty + stage, phase)
                here = target + stage * (2 * self.tile_bytes)
                for tensor in cutlass.range_constexpr(2):
                    base = values if tensor else keys
                    for turn in cutlass.range_constexpr(TILE_KEYS // turn_rows):
                        piece = turn * turn_rows // piece_keys
                        source, there = pieces[piece]
                        address = base + source + (turn * turn_bytes - piece * piece_keys * self.row_bytes)
                        place = here + (tensor * self.tile_bytes + turn * turn_bytes)
                        if cutlass.const_expr(piece == 0):
                            device.copy_16(place, address)
                        else:
                            device.copy_16_if(there, place, address)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage, phase = self.advance(stage, phase)
            start += count

    @cute.jit
    def advance(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The next stage and its phase."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def multiply_splits(
        self,
        q: Int64,
        positions: Int64,
        partial: Int64,
        stats: Int64,
        tiles: Int32,
        exchange: Int32,
        warp_stats: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile_end: Int32,
        lengths: Int32,
        start: Int32,
        stop: Int32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """A consumer warp: its row tile and its keys of each tile. A lane holds rows lane / 4 and that + 8."""
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        row_tile = warp // self.key_warps
        key_warp = warp % self.key_warps
        rows = [cutlass.min(row_tile * MMA_ROWS + half * 8 + lane // 4, self.rows - 1) for half in range(2)]
        queries = cute.make_rmem_tensor((self.head_dim // 4,), Uint32)
        sums = cute.make_rmem_tensor((self.head_dim // 2,), Float32)
        tops = cute.make_rmem_tensor((2,), Float32)
        totals = cute.make_rmem_tensor((2,), Float32)
        stage = Int32(0)
        phase = Int32(0)
        while start < stop:
            sequence, head, split, first, count, length = self.work.locate(start, tile_end, lengths, lane)
            newest = []
            for half in cutlass.range_constexpr(2):
                token = rows[half] // self.group
                query = Int64(sequence) * self.tokens + Int64(token)
                newest.append(cutlass.min(device.load_global(positions + query * 4), length - 1))
                query_head = head * self.group + rows[half] - token * self.group
                address = q + (query * self.q_heads + Int64(query_head)) * self.row_bytes + Int64(lane % 4 * 4)
                for pair in cutlass.range_constexpr(self.head_dim // 8):
                    word = Uint32(0)
                    if cutlass.const_expr(half < self.halves):
                        word = Uint32(device.load_global(address + pair * 16, not self.follows))
                    queries[pair // 2 * 4 + pair % 2 * 2 + half] = word
                tops[half] = Float32(MASKED)
                totals[half] = Float32(0.0)
            sums.fill(0.0)
            # Tiles of which every row of the warp sees every key need no masks.
            lowest = cutlass.min(newest[0], newest[1])
            for distance in (4, 8, 16):
                lowest = cutlass.min(lowest, cute.arch.shuffle_sync_bfly(lowest, distance))
            plain = cutlass.min(cutlass.max((lowest + 1) // TILE_KEYS - first, Int32(0)), count)
            for masked in cutlass.range_constexpr(2):
                for tile in cutlass.range(plain if masked else Int32(0), count if masked else plain, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    for step in cutlass.range_constexpr(self.warp_keys // self.step_keys):
                        key = key_warp * self.warp_keys + step * self.step_keys  # of the tile
                        here = tiles + stage * (2 * self.tile_bytes) + key * self.row_bytes
                        key = (first + tile) * TILE_KEYS + key + lane % 4 * 2
                        self.add_keys(queries, sums, tops, totals, newest, here, key, length, masked, lane)
                    device.arrive_if((empty + stage).toint(), Int32(lane == 0))
                    stage, phase = self.advance(stage, phase)
            for half in cutlass.range_constexpr(self.halves):
                totals[half] = warp_mma.row_sum(totals[half])
            item = (Int64(sequence) * self.kv_heads + Int64(head)) * self.splits.max_splits + Int64(split)
            self.store(
                sums,
                tops,
                totals,
                partial + item * (self.rows * self.head_dim * 4),
                stats + item * (self.rows * 8),
                exchange,
                warp_stats,
                row_tile,
                key_warp,
                lane,
            )
            start += count

    @cute.jit
    def add_keys(
        self,
        queries: cute.Tensor,
        sums: cute.Tensor,
        tops: cute.Tensor,
        totals: cute.Tensor,
        newest: list[Int32],
        tile: Int32,
        key: Int32,
        length: Int32,
        masked: cutlass.Constexpr,
        lane: Int32,
    ) -> None:
        """Adds step_keys of a warp's keys. `tile`: address of the first; `key`: position of the lane's first.

        All loads of a step come before its products: one after the other, their latencies would add up.
        """
        factor = self.head_dim**-0.5 * math.log2(math.e)
        blocks = self.step_keys // 8
        scores = []
        for step in cutlass.range_constexpr(blocks // 2):
            words = [self.load_keys(tile, step * 2 + block, lane) for block in range(2)]
            if cutlass.const_expr(blocks == 2):  # with more, registers would spill
                values = self.load_values(tile, 0, lane)
            for block in cutlass.range_constexpr(2):
                chains = [[Float32(0.0) for _ in range(4)] for _ in range(2)]  # of products that wait for one another
                for part in cutlass.range_constexpr(self.head_dim // 16):
                    a = [queries[part * 4 + i] for i in range(4)]
                    b = words[block][part * 2 : part * 2 + 2]
                    chains[part % 2] = warp_mma.multiply(chains[part % 2], a, b, self.dtype)
                scores.append([x + y for x, y in zip(*chains, strict=True)])
        packed = []
        for half in cutlass.range_constexpr(self.halves):
            shown = []
            top = tops[half]
            for index in cutlass.range_constexpr(2 * blocks):
                score = scores[index // 2][half * 2 + index % 2] * Float32(factor)
                if cutlass.const_expr(masked):
                    score = score if key + (index // 2 * 8 + index % 2) <= newest[half] else Float32(MASKED)
                shown.append(score)
                top = warp_mma.maximum(top, score)
            top = warp_mma.row_maximum(top)
            weights = []
            total = Float32(0.0)
            for index in cutlass.range_constexpr(2 * blocks):
                weight = warp_mma.exp2(shown[index] - top)
                if cutlass.const_expr(masked):
                    weight = weight if key + (index // 2 * 8 + index % 2) <= newest[half] else Float32(0.0)
                total = total + weight
                weights.append(weight)
            scale = warp_mma.exp2(tops[half] - top)
            totals[half] = totals[half] * scale + total
            tops[half] = top
            for column in cutlass.range_constexpr(self.head_dim // 8):
                for i in cutlass.range_constexpr(2):
                    sums[column * 4 + half * 2 + i] = sums[column * 4 + half * 2 + i] * scale
            packed.append(vectors.words_of(weights, self.dtype))
        for step in cutlass.range_constexpr(blocks // 2):
            a = []
            for block in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    a.append(packed[half][step * 2 + block] if half < self.halves else Uint32(0))
            words = values if blocks == 2 else self.load_values(tile, step, lane)
            if cutlass.const_expr(masked):
                # Values past the end get no weight, but 0 * NaN is NaN.
                masks = [self.mask(length - key - step * 16 - block * 8) for block in range(2)]
                words = [word & masks[index % 2] for index, word in enumerate(words)]
            for column in cutlass.range_constexpr(self.head_dim // 8):
                place = column * 4
                b = words[column * 2 : column * 2 + 2]
                products = warp_mma.multiply([sums[place + i] for i in range(4)], a, b, self.dtype)
                for i in cutlass.range_constexpr(4):
                    sums[place + i] = products[i]

    @cute.jit
    def load_keys(self, tile: Int32, block: cutlass.Constexpr, lane: Int32) -> list[Uint32]:
        """Eight keys as B operands: two words for each 16 of head_dim."""
        line = tile + (block * 8 + lane % 8) * self.row_bytes
        chunk = ((lane // 8) ^ (lane % 8)) * 16
        words = []
        for part in cutlass.range_constexpr(self.head_dim // 32):
            words += warp_mma.load_matrices(line + (chunk ^ (part * 64)))
        return words

    @cute.jit
    def load_values(self, tile: Int32, step: cutlass.Constexpr, lane: Int32) -> list[Uint32]:
        """Sixteen values as B operands: two words for each 8 of head_dim."""
        line = tile + self.tile_bytes + (step * 16 + lane % 16) * self.row_bytes
        chunk = ((lane // 16) ^ (lane % 8)) * 16
        words = []
        for pair in cutlass.range_constexpr(self.head_dim // 16):
            words += warp_mma.load_matrices(line + (chunk ^ (pair * 32)), transposed=True)
        return words

    @cute.jit
    def mask(self, count: Int32) -> Uint32:
        """Ones over the halves of a word that are elements below count."""
        low = Uint32(0x0000FFFF) if count > 0 else Uint32(0)
        high = Uint32(0xFFFF0000) if count > 1 else Uint32(0)
        return low | high

    @cute.jit
    def store(
        self,
        sums: cute.Tensor,
        tops: cute.Tensor,
        totals: cute.Tensor,
        partial: Int64,
        stats: Int64,
        exchange: Int32,
        warp_stats: Int32,
        row_tile: Int32,
        key_warp: Int32,
        lane: Int32,
    ) -> None:
        """Adds the sums of the warps that share keys, in their order, and stores the split's."""
        held = self.halves * 8
        first_row = row_tile * MMA_ROWS
        if cutlass.const_expr(self.key_warps == 1):
            for half in cutlass.range_constexpr(self.halves):
                row = first_row + half * 8 + lane // 4
                if row < self.rows:
                    if lane % 4 == 0:
                        device.store_global_v2_f32(stats + Int64(row) * 8, tops[half], totals[half])
                    address = partial + (Int64(row) * self.head_dim + Int64(lane % 4 * 2)) * 4
                    for column in cutlass.range_constexpr(self.head_dim // 8):
                        place = column * 4 + half * 2
                        device.store_global_v2_f32(address + column * 32, sums[place], sums[place + 1])
        else:
            threads = self.key_warps * WARP
            stride = attention_splits.exchange_stride(self.head_dim)
            shared_stats = warp_stats + row_tile * (self.key_warps * MMA_ROWS * 8) + lane // 4 * 8
            shared_sums = exchange + row_tile * (self.key_warps * held * stride * 4)
            for half in cutlass.range_constexpr(self.halves):
                if lane % 4 == 0:
                    place = shared_stats + key_warp * (MMA_ROWS * 8) + half * 64
                    device.store_shared_v2_f32(place, tops[half], totals[half])
            cute.arch.barrier(barrier_id=EXCHANGE + row_tile, number_of_threads=threads)
            for half in cutlass.range_constexpr(self.halves):
                theirs = [
                    device.load_shared_v2_f32(shared_stats + other * (MMA_ROWS * 8) + half * 64)
                    for other in range(self.key_warps)
                ]
                top = theirs[0][0]
                for other in cutlass.range_constexpr(1, self.key_warps):
                    top = warp_mma.maximum(top, theirs[other][0])
                total = Float32(0.0)
                for other in cutlass.range_constexpr(self.key_warps):
                    total = total + theirs[other][1] * warp_mma.exp2(theirs[other][0] - top)
                row = first_row + half * 8 + lane // 4
                if lane % 4 == 0 and key_warp == 0 and row < self.rows:
                    device.store_global_v2_f32(stats + Int64(row) * 8, top, total)
                scale = warp_mma.exp2(tops[half] - top)
                line = shared_sums + (key_warp * held + half * 8 + lane // 4) * (stride * 4) + lane % 4 * 8
                for column in cutlass.range_constexpr(self.head_dim // 8):
                    place = column * 4 + half * 2
                    device.store_shared_v2_f32(line + column * 32, sums[place] * scale, sums[place + 1] * scale)
            cute.arch.barrier(barrier_id=EXCHANGE + row_tile, number_of_threads=threads)
            vector_count = self.head_dim // 4
            for turn in cutlass.range_constexpr(held * vector_count // threads):
                index = turn * threads + key_warp * WARP + lane
                row = index // vector_count
                column = index % vector_count
                added = [Float32(0.0) for _ in range(4)]
                for other in cutlass.range_constexpr(self.key_warps):
                    line = shared_sums + (other * held + row) * (stride * 4) + column * 16
                    words = list(device.load_shared_v4(line))
                    added = [a + b for a, b in zip(added, vectors.floats(words, Float32), strict=True)]
                if first_row + row < self.rows:
                    address = partial + (Int64(first_row + row) * self.head_dim + Int64(column * 4)) * 4
                    vectors.store_result(address, vectors.words_of(added, Float32))
