"""The work of paged attention, found on the device: only it knows how long the sequences are.

Tiles of keys are numbered by sequence, then kv head, then position. A block takes the splits that begin in its share
of the numbers, which are equal: blocks get as much work as each other but for a split.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from qwenjax_kernels import device
from qwenjax_kernels.attention_splits import TILE_KEYS, WARP, Splits


class AttentionWork:
    """Tables in shared memory, an int32 a sequence: `tile_end`, the inclusive sum of tiles, and `lengths`, of keys."""

    def __init__(self, *, batch: int, tokens: int, kv_heads: int, max_keys: int, splits: Splits) -> None:
        self.batch = batch
        self.max_keys = max_keys
        self.tokens = tokens
        self.kv_heads = kv_heads
        self.splits = splits

    @cute.jit
    def length(self, positions: Int64, sequence: Int32) -> Int32:
        """Keys of a sequence: its newest position and those before it, as far as its pages go."""
        length = Int32(0)
        for token in cutlass.range_constexpr(self.tokens):
            position = device.load_global(positions + (Int64(sequence) * self.tokens + token) * 4)
            length = cutlass.max(length, position + 1)
        return cutlass.min(length, Int32(self.max_keys))

    @cute.jit
    def tiles_each(self, tiles: Int32) -> Int32:
        """`Splits.tiles_each`."""
        wanted = (tiles + (self.splits.min_tiles - 1)) // self.splits.min_tiles
        count = cutlass.max(cutlass.min(wanted, Int32(self.splits.max_splits)), Int32(1))
        return (tiles + count - 1) // count

    @cute.jit
    def write_tables(self, positions: Int64, tile_end: Int32, lengths: Int32, lane: Int32) -> None:
        """By one warp."""
        chunks = -(-self.batch // WARP)
        loaded = []
        for chunk in cutlass.range_constexpr(chunks):
            length = Int32(0)
            if chunk * WARP + lane < self.batch:
                length = self.length(positions, chunk * WARP + lane)
            loaded.append(length)
        before = Int32(0)
        for chunk in cutlass.range_constexpr(chunks):
            tiles = (loaded[chunk] + (TILE_KEYS - 1)) // TILE_KEYS
            for step in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(tiles, 1 << step, mask_and_clamp=0)
                if lane >= 1 << step:
                    tiles += lower
            tiles += before
            sequence = chunk * WARP + lane
            if sequence < self.batch:
                device.store_shared(tile_end + 4 * sequence, tiles)
                device.store_shared(lengths + 4 * sequence, loaded[chunk])
            before = cute.arch.shuffle_sync(tiles, WARP - 1)

    @cute.jit
    def total(self, tile_end: Int32) -> Int32:
        """How many tiles there are."""
        return device.load_shared(tile_end + 4 * (self.batch - 1)) * self.kv_heads

    @cute.jit
    def find(self, number: Int32, tile_end: Int32, lane: Int32) -> tuple[Int32, Int32, Int32]:
        """A tile's sequence, the number of its first tile and its tiles of a kv head; by a warp."""
        sequence = Int32(0)
        for chunk in cutlass.range_constexpr(-(-self.batch // WARP)):
            passed = Boolean(False)
            if chunk * WARP + lane < self.batch:
                passed = device.load_shared(tile_end + 4 * (chunk * WARP + lane)) * self.kv_heads <= number
            sequence += cute.arch.popc(cute.arch.vote_ballot_sync(passed))
        before = Int32(0)
        if sequence > 0:
            before = device.load_shared(tile_end + 4 * sequence - 4)
        tiles = device.load_shared(tile_end + 4 * sequence) - before
        return sequence, before * self.kv_heads, tiles

    @cute.jit
    def share(self, block: Int32, blocks: int, tile_end: Int32, lane: Int32) -> tuple[Int32, Int32]:
        """A block's numbers: the first that begins a split, and the end, at which it begins no other."""
        total = self.total(tile_end)
        quota = (total + (blocks - 1)) // blocks
        start = block * quota
        stop = cutlass.min(start + quota, total)
        if start < stop:
            _, first, tiles = self.find(start, tile_end, lane)
            each = self.tiles_each(tiles)
            head = (start - first) // tiles
            place = start - first - head * tiles
            begin = (place + each - 1) // each * each
            start = first + head * tiles + cutlass.min(begin, tiles)
        return start, stop

    @cute.jit
    def locate(
        self, start: Int32, tile_end: Int32, lengths: Int32, lane: Int32
    ) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
        """The split that begins at a number: sequence, kv head, split, its first tile, tiles, keys of the sequence."""
        sequence, first, tiles = self.find(start, tile_end, lane)
        each = self.tiles_each(tiles)
        head = (start - first) // tiles
        place = start - first - head * tiles
        count = cutlass.min(each, tiles - place)
        return sequence, head, place // each, place, count, device.load_shared(lengths + 4 * sequence)
