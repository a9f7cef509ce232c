"""What one block of an all-reduce does in each step of `all_reduce_protocol`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from qwenjax_kernels import all_reduce_protocol as protocol
from qwenjax_kernels import peers, signals, vectors
from qwenjax_kernels.heap_layout import (
    INBOX_BYTES,
    MAX_BLOCKS,
    MAX_RANKS,
    STAGED_BYTES,
    THREADS,
    TILE_BYTES,
    VECTOR,
    HeapLayout,
)
from qwenjax_kernels.vectors import Words

WARP = 32
UNROLL = 8  # vectors of a copy in flight a thread: a whole tile of 64 KiB at once
LAST_WARP = THREADS - WARP  # compares the call with the peers', while the others wait for data


class Operands:
    """The operands and results of a call, at any alignment: (x, residual, weight, out, normed)."""

    def __init__(self, spec: Any, addresses: tuple[Any, ...]) -> None:
        self.spec = spec
        self.x, self.residual, self.weight, self.out, self.normed = addresses
        together = self.x | self.out
        if spec.row:
            together = together | self.residual | self.weight | self.normed
        self.aligned = together % VECTOR == 0

    @cute.jit
    def first_vector(self, block: Int32, thread: Int32) -> Words:
        """The vector of x with which a one-shot thread begins; zeros where it has none."""
        words = [Uint32(0), Uint32(0), Uint32(0), Uint32(0)]
        vector = block * self.spec.tile_vectors + thread
        if thread < self.spec.tile_vectors and vector < self.spec.vectors:
            words = self.load(self.x, vector, self.spec.elements)
        return words

    @cute.jit
    def load(self, operand: Int64, vector: Int32, limit: cutlass.Constexpr) -> Words:
        """A vector of an operand of `limit` elements; zeros past its end."""
        words = [Uint32(0), Uint32(0), Uint32(0), Uint32(0)]
        address = operand + Int64(vector) * VECTOR
        left = limit - vector * self.spec.per_vector
        whole = self.aligned
        if left < self.spec.per_vector:
            whole = cutlass.Boolean(False)
        if whole:  # noqa: SIM108, CuTeDSL stages no conditional expression
            words = vectors.load_operand(address)
        else:
            words = vectors.gather_operand(address, left, self.spec.width)
        return words

    @cute.jit
    def store(self, result: Int64, vector: Int32, words: Words) -> None:
        """A vector of a result; what lies past its end is left alone."""
        address = result + Int64(vector) * VECTOR
        left = self.spec.elements - vector * self.spec.per_vector
        whole = self.aligned
        if left < self.spec.per_vector:
            whole = cutlass.Boolean(False)
        if whole:
            vectors.store_result(address, words)
        else:
            vectors.scatter_result(address, left, words, self.spec.width)


class Part(Operands):
    """A block's view of a call, and what follows the sum: a store, or residual addition and RMSNorm."""

    def __init__(self, common: tuple[Any, ...], addresses: tuple[Any, ...]) -> None:
        spec, self.bases, self.watch, self.rank, self.own, self.epoch, self.block, self.thread, self.shared_sums = (
            common
        )
        super().__init__(spec, addresses)

    def add_residual(self, sums: Words, vector: Int32) -> Any:
        """Stores residual + sum, rounded, to out; returns the sum of its squares."""
        dtype = self.spec.dtype
        residual = vectors.floats(self.load(self.residual, vector, self.spec.elements), dtype)
        words = vectors.words_of(peers.add(residual, vectors.floats(sums, dtype)), dtype)
        self.store(self.out, vector, words)
        squares = Float32(0.0)
        for value in vectors.floats(words, dtype):
            squares = squares + value * value
        return squares

    def scale_row(self, vector: Int32, column: Int32, factor: Float32) -> None:
        """Stores out * factor, rounded, times weight, rounded again, to normed; qwenjax_ffi.norm rounds so too."""
        spec, dtype = self.spec, self.spec.dtype
        values = vectors.floats(self.load(self.out, vector, spec.elements), dtype)
        weight = vectors.floats(self.load(self.weight, column, spec.row), dtype)
        scaled = vectors.rounded([value * factor for value in values], dtype)
        products = [a * b for a, b in zip(scaled, weight, strict=True)]
        self.store(self.normed, vector, vectors.words_of(products, dtype))

    def factor(self, squares: Float32) -> Float32:
        """1 / sqrt(mean of the squares + eps)."""
        mean = squares * Float32(1.0 / self.spec.row)
        return cute.math.rsqrt(mean + Float32(self.spec.eps))

    @cute.jit
    def warp_sum(self, value: Float32) -> Float32:
        for step in cutlass.range_constexpr(5):
            value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
        return value

    @cute.jit
    def block_sum(self, value: Float32) -> Float32:
        """The same sum in every thread of the block."""
        value = self.warp_sum(value)
        if self.thread % WARP == 0:
            cute.arch.inline_ptx(
                "st.shared.f32 [{$r0}], {$r1};", read_only_args=[self.shared_sums + self.thread // WARP * 4, value]
            )
        cute.arch.sync_threads()
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(THREADS // WARP):
            total = total + cute.arch.inline_ptx(
                "ld.shared.f32 {$w0}, [{$r0}];",
                write_only_types=[Float32],
                read_only_args=[self.shared_sums + warp * 4],
            )
        cute.arch.sync_threads()
        return total


class OneShotPart(Part):
    """Round i of a block is the tile i * grid + block: as many vectors as threads, or one row."""

    def __init__(self, common: tuple[Any, ...], addresses: tuple[Any, ...]) -> None:
        super().__init__(common, addresses)
        self.flag = Uint32(self.epoch)
        self.half = self.spec.layout.one_shot_bytes
        self.rank_bytes = 2 * self.half
        self.inbox = self.spec.layout.inboxes + Int64(protocol.inbox(self.epoch)) * INBOX_BYTES

    @cute.jit
    def run(self, rounds: Int32, first_words: Words) -> None:
        """`all_reduce_protocol.ONE_SHOT`; first_words: what `first_vector` gave."""
        if self.block == 0:
            self.watch.tell(self.thread - LAST_WARP)
        self.push_first(first_words)
        for i in range(1, rounds):
            self.push(i)
        if self.block == 0:
            self.watch.agree(self.thread - LAST_WARP)
        for i in range(rounds):
            self.collect(i)

    @cute.jit
    def push_first(self, words: Words) -> None:
        """Round 0: a thread's first vector, loaded before the epoch was known, and the rest of a long row."""
        vector = self.block * self.spec.tile_vectors + self.thread
        if self.thread < self.spec.tile_vectors and vector < self.spec.vectors:
            self.send(vector, words)
        if cutlass.const_expr(self.spec.tile_vectors > THREADS):
            self.push_columns(Int32(0), self.thread + THREADS)

    @cute.jit
    def push(self, i: Int32) -> None:
        """Stores this rank's words of round i, each beside the epoch, to its place in every rank's inbox."""
        self.push_columns(i, Int32(self.thread))

    @cute.jit
    def push_columns(self, i: Int32, column: Int32) -> None:
        spec = self.spec
        first = (i * spec.grid + self.block) * spec.tile_vectors
        while column < spec.tile_vectors:
            vector = first + column
            if vector < spec.vectors:
                self.send(vector, self.load(self.x, vector, spec.elements))
            column += THREADS

    def send(self, vector: Int32, words: Words) -> None:
        place = self.inbox + Int64(self.rank) * self.rank_bytes + Int64(vector) * VECTOR
        for step in range(1, self.spec.ranks + 1):
            there = self.bases.base((self.rank + step) % self.spec.ranks) + place
            vectors.store_flagged(there, there + self.half, words, self.flag)

    @cute.jit
    def collect(self, i: Int32) -> None:
        """Waits for the words of round i of every rank and writes their sums."""
        spec = self.spec
        first = (i * spec.grid + self.block) * spec.tile_vectors
        squares = Float32(0.0)
        column = Int32(self.thread)
        while column < spec.tile_vectors:
            vector = first + column
            if vector < spec.vectors:
                sums = self.arrived(vector)
                if cutlass.const_expr(spec.row > 0):
                    squares = squares + self.add_residual(sums, vector)
                else:
                    self.store(self.out, vector, sums)
            column += THREADS
        if cutlass.const_expr(spec.row > 0):
            factor = self.factor(self.block_sum(squares))
            column = Int32(self.thread)
            while column < spec.tile_vectors:
                self.scale_row(first + column, column, factor)
                column += THREADS

    def arrived(self, vector: Int32) -> Words:
        """The sum over all ranks of a vector, added in float32 in rank order, once all have sent it."""
        spec = self.spec
        total = None
        group = peers.LOADS_IN_FLIGHT // 2  # a flagged vector is two loads
        for first in range(0, spec.ranks, group):
            ranks = range(first, min(first + group, spec.ranks))
            places = [self.own + self.inbox + rank * self.rank_bytes + Int64(vector) * VECTOR for rank in ranks]
            loaded = [vectors.load_flagged(place, place + self.half) for place in places]
            for rank, place, (words, flags) in zip(ranks, places, loaded, strict=True):
                total = peers.add(total, vectors.floats(self.complete(place, words, flags, rank), spec.dtype))
        assert total is not None
        return vectors.words_of(total, spec.dtype)

    @cute.jit
    def complete(self, place: Int64, words: Words, flags: Words, peer: cutlass.Constexpr) -> Words:
        """The words of a vector, loaded again until the epoch lies beside each of them."""
        late = self.lateness(flags)
        if late != Uint32(0):
            started = cute.arch.globaltimer()
            polls = Int32(0)
            while late != Uint32(0):
                words, flags = vectors.load_flagged(place, place + self.half)
                late = self.lateness(flags)
                polls += 1
                if polls % signals.POLLS_BETWEEN_CHECKS == 0 and late != Uint32(0):
                    given_up = self.watch.gives_up(Int32(peer), started)
                    if given_up:
                        late = Uint32(0)
        return words

    def lateness(self, flags: Words) -> Uint32:
        """0 where all four flags are this epoch."""
        late = flags[0] ^ self.flag
        for flag in flags[1:]:
            late = late | (flag ^ self.flag)
        return late


class TwoShotPart(Part):
    """Tile i of a block is the tile i * grid + block of the message, in slot i % SLOTS of the block's rings."""

    def __init__(self, common: tuple[Any, ...], addresses: tuple[Any, ...], transport: Any) -> None:
        super().__init__(common, addresses)
        self.transport = transport
        self.direct = transport.keeps_own and not self.spec.row  # whether reduce writes its own slice out itself
        slots = Int64(self.block) * protocol.SLOTS
        self.staged = self.spec.layout.staged + slots * STAGED_BYTES
        self.results = self.spec.layout.results + slots * TILE_BYTES

    @cute.jit
    def run(self, tiles: Int32) -> None:
        """`all_reduce_protocol.TWO_SHOT`."""
        if self.block == 0:
            self.watch.tell(self.thread - LAST_WARP)
        for i in range(tiles + protocol.LAST_LAG):
            for step in cutlass.range_constexpr(len(protocol.TWO_SHOT)):
                self.take(protocol.TWO_SHOT[step], i - protocol.TWO_SHOT[step].lag, tiles)
            self.signal(i, tiles)
        if self.block == 0:
            self.watch.agree(self.thread - LAST_WARP)

    @cute.jit
    def take(self, step: cutlass.Constexpr, tile: Int32, tiles: Int32) -> None:
        """A step of the protocol, where the tile is one of the block's."""
        if tile >= 0 and tile < tiles:
            if cutlass.const_expr(step.waits_for is not None):
                self.wait(step.waits_for, tile)
            getattr(self, step.action)(tile)

    @cute.jit
    def signal(self, turn: Int32, tiles: Int32) -> None:
        """Tells this block of every rank which phases this one has done in a turn."""
        cute.arch.sync_threads()
        if self.thread < self.spec.ranks:
            self.transport.fence()
            cute.arch.fence_acq_rel_sys()
            peer = self.bases.base(self.thread) + Int64(self.rank) * 8
            for index in cutlass.range_constexpr(len(protocol.TWO_SHOT)):
                step = protocol.TWO_SHOT[index]
                if cutlass.const_expr(step.signals is not None):
                    tile = turn - step.lag
                    if tile >= 0 and tile < tiles:
                        value = protocol.signal_value(self.epoch, Int64(tile))
                        signals.store_release(peer + self.signal_place(step.signals), value)

    def extent(self, i: Int32) -> tuple[Int32, Int32]:
        """The first vector of tile i, and how many it has."""
        first = (i * self.spec.grid + self.block) * self.spec.tile_vectors
        return first, cutlass.min(self.spec.vectors - first, self.spec.tile_vectors)

    @cute.jit
    def fast(self, first: Int32, count: Int32) -> Int32:
        """How many of a tile's vectors are whole and aligned: they come first."""
        fast = Int32(0)
        if self.aligned:
            fast = cutlass.min(self.spec.full_vectors - first, count)
        return fast

    def slices(self, count: Int32) -> tuple[Int32, Int32, Int32]:
        """Of a tile of `count` vectors: what each rank reduces (the last ones may less), where this rank's own slice
        begins, and how many it has."""
        each = (count + (self.spec.ranks - 1)) // self.spec.ranks
        start = cutlass.min(self.rank * each, count)
        return each, start, cutlass.min(each, count - start)

    @cute.jit
    def stage(self, i: Int32) -> None:
        """Brings tile i of x to where it is reduced: this rank's own slice stays where it is, where that is allowed."""
        first, count = self.extent(i)
        each, start, mine = self.slices(count)
        skipped = mine if self.transport.keeps_own else Int32(0)
        fast = self.fast(first, count)
        fast = fast - cutlass.max(cutlass.min(fast - start, skipped), 0)
        ring = self.staged + Int64(protocol.slot(i)) * STAGED_BYTES
        v = Int32(self.thread)
        while v < fast:
            places = [self.past(cutlass.min(v + u * THREADS, fast - 1), start, skipped) for u in range(UNROLL)]
            loaded = [vectors.load_operand(self.x + Int64(first + place) * VECTOR) for place in places]
            for u in cutlass.range_constexpr(UNROLL):
                if v + u * THREADS < fast:
                    vectors.store_shared_memory(self.transport.staging_address(ring, places[u], each), loaded[u])
            v += UNROLL * THREADS
        v = fast + self.thread
        while v < count - skipped:
            place = self.past(v, start, skipped)
            words = self.load(self.x, first + place, self.spec.elements)
            vectors.store_shared_memory(self.transport.staging_address(ring, place, each), words)
            v += THREADS

    def past(self, index: Int32, start: Int32, skipped: Int32) -> Int32:
        """The vector of this index among those of a tile without the `skipped` ones that begin at start."""
        return index + skipped * Int32(index >= start)

    @cute.jit
    def reduce(self, i: Int32) -> None:
        """Sums this rank's slice of tile i over all ranks and stores it to the results."""
        first, count = self.extent(i)
        _, start, mine = self.slices(count)
        if start + mine <= self.fast(first, count):
            self.reduce_slice(i, vectors.load_operand, vectors.store_result)
        else:
            self.reduce_slice(i, None, None)

    @cute.jit
    def reduce_slice(self, i: Int32, load: cutlass.Constexpr, store: cutlass.Constexpr) -> None:
        """`reduce`, with the accesses of the own operand and result: None where they may be ragged."""
        first, count = self.extent(i)
        each, start, mine = self.slices(count)
        ring = self.staged + Int64(protocol.slot(i)) * STAGED_BYTES
        results = self.results + Int64(protocol.slot(i)) * TILE_BYTES + Int64(start) * VECTOR
        unroll = self.transport.unroll
        v = Int32(self.thread)
        while v < mine:
            places = [cutlass.min(v + u * THREADS, mine - 1) for u in range(unroll)]
            own = [self.own_words(first + start + place, load) for place in places]
            sums = self.transport.reduce_from_peers(ring, places, each, own)
            for u in cutlass.range_constexpr(unroll):
                if v + u * THREADS < mine:
                    self.transport.broadcast_to_peers(results + Int64(places[u]) * VECTOR, sums[u], self.direct)
                    if cutlass.const_expr(self.direct):
                        if cutlass.const_expr(store is None):
                            self.store(self.out, first + start + places[u], sums[u])
                        else:
                            store(self.out + Int64(first + start + places[u]) * VECTOR, sums[u])
            v += unroll * THREADS

    def own_words(self, vector: Int32, load: Any) -> Words | None:
        """This rank's vector of its own slice, where it was not staged."""
        if not self.transport.keeps_own:
            return None
        if load is None:
            return self.load(self.x, vector, self.spec.elements)
        return load(self.x + Int64(vector) * VECTOR)

    @cute.jit
    def collect(self, i: Int32) -> None:
        """Writes tile i of the results out, but for what `reduce` wrote there itself."""
        first, count = self.extent(i)
        ring = self.own + self.results + Int64(protocol.slot(i)) * TILE_BYTES
        if cutlass.const_expr(self.spec.row > 0):
            self.collect_rows(ring, first, count)
        else:
            self.collect_vectors(ring, first, count)

    @cute.jit
    def collect_vectors(self, ring: Int64, first: Int32, count: Int32) -> None:
        _, start, mine = self.slices(count)
        skipped = mine if self.direct else Int32(0)
        fast = self.fast(first, count)
        fast = fast - cutlass.max(cutlass.min(fast - start, skipped), 0)
        v = Int32(self.thread)
        while v < fast:
            places = [self.past(cutlass.min(v + u * THREADS, fast - 1), start, skipped) for u in range(UNROLL)]
            loaded = [vectors.load_shared_memory(ring + Int64(place) * VECTOR) for place in places]
            for u in cutlass.range_constexpr(UNROLL):
                if v + u * THREADS < fast:
                    vectors.store_result(self.out + Int64(first + places[u]) * VECTOR, loaded[u])
            v += UNROLL * THREADS
        v = fast + self.thread
        while v < count - skipped:
            place = self.past(v, start, skipped)
            self.store(self.out, first + place, vectors.load_shared_memory(ring + Int64(place) * VECTOR))
            v += THREADS

    @cute.jit
    def collect_rows(self, ring: Int64, first: Int32, count: Int32) -> None:
        """A warp a row, so that no row waits for the whole block."""
        columns = self.spec.row_vectors
        lane = self.thread % WARP
        row = self.thread // WARP * columns
        while row < count:
            squares = Float32(0.0)
            column = Int32(lane)
            while column < columns:
                sums = vectors.load_shared_memory(ring + Int64(row + column) * VECTOR)
                squares = squares + self.add_residual(sums, first + row + column)
                column += WARP
            factor = self.factor(self.warp_sum(squares))
            column = Int32(lane)
            while column < columns:
                self.scale_row(first + row + column, column, factor)
                column += WARP
            row += THREADS // WARP * columns

    @cute.jit
    def wait(self, phase: cutlass.Constexpr, i: Int32) -> None:
        """Waits until this block of every rank has done a phase of tile i."""
        if self.thread < self.spec.ranks:
            place = self.signal_place(phase) + Int64(self.thread) * 8
            target = protocol.signal_value(self.epoch, Int64(i))
            self.watch.wait(place, target, self.thread)
            self.transport.fence()
        cute.arch.sync_threads()

    def signal_place(self, phase: Any) -> Int64:
        """Where this block's signals of a phase lie, one a rank."""
        return Int64(HeapLayout.signals) + (Int64(self.block) + phase * MAX_BLOCKS) * (8 * MAX_RANKS)
