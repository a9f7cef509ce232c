"""What one block of an all-reduce does in each step of `all_reduce_protocol`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from qwenjax_kernels import all_reduce_protocol as protocol
from qwenjax_kernels import device, peers, signals, vectors
from qwenjax_kernels.heap_layout import (
    INBOX_BYTES,
    MAX_RANKS,
    TEAMS,
    THREADS,
    TILE_BYTES,
    VECTOR,
    HeapLayout,
)
from qwenjax_kernels.sum_rows import sums_of_rows
from qwenjax_kernels.vectors import Words

WARP = 32
UNROLL = 4  # vectors of a copy in flight a thread: of two ranks, a team's whole slice at once
ROWS_AT_A_TIME = 2  # of a token's, where the message is their sums: 436 us for 16K tokens, 444 with one
LAST_WARP = THREADS - WARP  # compares the call with the peers', while the others wait for data


class Operands:
    """The operands and results of a call, at any alignment: (x, token_rows, residual, weight, out, normed)."""

    def __init__(self, spec: Any, addresses: tuple[Any, ...]) -> None:
        self.spec = spec
        self.x, self.token_rows, self.residual, self.weight, self.out, self.normed = addresses
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
    """What a team of a block's threads sees of a call, and what follows the sum: a store, or residual addition and
    RMSNorm. In one-shot the block is one team."""

    def __init__(self, common: tuple[Any, ...], addresses: tuple[Any, ...]) -> None:
        spec, self.bases, self.rank, self.own, self.block, block_thread, self.shared_sums = common
        super().__init__(spec, addresses)
        self.threads = THREADS // spec.teams
        self.team, self.thread = block_thread // self.threads, block_thread % self.threads
        self.watcher = block_thread - LAST_WARP

    def begin(self, watch: signals.Watch) -> None:
        """Before anything that needs the epoch."""
        self.watch, self.epoch = watch, watch.epoch

    @cute.jit
    def barrier(self) -> None:
        """Of the team's threads."""
        if cutlass.const_expr(self.threads == THREADS):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=self.team + 1, number_of_threads=self.threads)

    def load_with(self, load: Any, operand: Int64, vector: Int32, limit: int = 0) -> Words:
        """A vector of an operand of `limit` elements, of the message's where 0; load: None where it may be ragged."""
        if load is None:
            return self.load(operand, vector, limit or self.spec.elements)
        return load(operand + Int64(vector) * VECTOR)

    def store_with(self, store: Any, result: Int64, vector: Int32, words: Words) -> None:
        if store is None:
            self.store(result, vector, words)
        else:
            store(result + Int64(vector) * VECTOR, words)

    def add_residual(self, sums: Words, residual: Words, vector: Int32, store: Any = None) -> Any:
        """Stores residual + sum, rounded, to out; returns the sum of its squares."""
        dtype = self.spec.dtype
        words = vectors.words_of(peers.add(vectors.floats(residual, dtype), vectors.floats(sums, dtype)), dtype)
        self.store_with(store, self.out, vector, words)
        squares = Float32(0.0)
        for value in vectors.floats(words, dtype):
            squares = squares + value * value
        return squares

    def scale(self, added: Words, weight: Words, factor: Float32, vector: Int32, store: Any = None) -> None:
        """Stores added * factor, rounded, times weight, rounded again, to normed; qwenjax_ffi.norm rounds so too."""
        dtype = self.spec.dtype
        scaled = vectors.rounded([value * factor for value in vectors.floats(added, dtype)], dtype)
        products = [a * b for a, b in zip(scaled, vectors.floats(weight, dtype), strict=True)]
        self.store_with(store, self.normed, vector, vectors.words_of(products, dtype))

    def factor(self, squares: Float32) -> Float32:
        """1 / sqrt(mean of the squares + eps)."""
        mean = squares * Float32(1.0 / self.spec.row)
        return cute.math.rsqrt(mean + Float32(self.spec.eps))

    @cute.jit
    def team_sum(self, value: Float32) -> Float32:
        """The same sum in every thread of the team."""
        value = device.warp_sum(value)
        sums = self.shared_sums + self.team * (self.threads // WARP * 4)
        if self.thread % WARP == 0:
            cute.arch.inline_ptx(
                "st.shared.f32 [{$r0}], {$r1};", read_only_args=[sums + self.thread // WARP * 4, value]
            )
        self.barrier()
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(self.threads // WARP):
            total = total + cute.arch.inline_ptx(
                "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[sums + warp * 4]
            )
        self.barrier()
        return total


class OneShotPart(Part):
    """Round i of a block is the tile i * grid + block: as many vectors as threads, or one row."""

    def begin(self, watch: signals.Watch) -> None:
        super().begin(watch)
        self.flag = Uint32(self.epoch)
        self.half = self.spec.layout.one_shot_bytes
        self.rank_bytes = 2 * self.half
        self.inbox = self.spec.layout.inboxes + Int64(protocol.inbox(self.epoch)) * INBOX_BYTES

    @cute.jit
    def run(self, first_words: Words) -> None:
        """`all_reduce_protocol.ONE_SHOT`; first_words: what `first_vector` gave."""
        rounds = (self.spec.tiles - self.block + (self.spec.grid - 1)) // self.spec.grid
        if self.block == 0:
            self.watch.tell(self.watcher)
        self.push_first(first_words)
        for i in range(1, rounds):
            self.push(i)
        if self.block == 0:
            self.watch.agree(self.watcher)
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
                    residual = self.load(self.residual, vector, spec.elements)
                    squares = squares + self.add_residual(sums, residual, vector)
                else:
                    self.store(self.out, vector, sums)
            column += THREADS
        if cutlass.const_expr(spec.row > 0):
            factor = self.factor(self.team_sum(squares))
            column = Int32(self.thread)
            while column < spec.tile_vectors:
                added = self.load(self.out, first + column, spec.elements)
                self.scale(added, self.load(self.weight, column, spec.row), factor, first + column)
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
    """A team of a block's warps: all that it does is ordered by its own barriers, and no team waits for another of its
    block. Tile i of a team is the tile i * (grid * teams) + number of the message, in slot i % SLOTS of its rings."""

    def __init__(self, common: tuple[Any, ...], addresses: tuple[Any, ...], transport: Any) -> None:
        super().__init__(common, addresses)
        self.transport = transport
        self.direct = transport.keeps_own and not self.spec.row  # whether reduce writes its own slice out itself
        # Tiles go to all blocks before they go to a block's next team.
        self.number = self.team * self.spec.grid + self.block
        self.tile_bytes = TILE_BYTES // self.spec.teams
        self.staged_bytes = self.tile_bytes + MAX_RANKS * VECTOR
        rings = (Int64(self.block) * self.spec.teams + Int64(self.team)) * protocol.SLOTS
        self.staged = self.spec.layout.staged + rings * self.staged_bytes
        self.results = self.spec.layout.results + rings * self.tile_bytes
        place = Int64(self.block) * TEAMS + Int64(self.team)
        self.signals = Int64(HeapLayout.signals) + place * (8 * MAX_RANKS)  # one a rank

    @cute.jit
    def stage_first(self) -> None:
        """Turn 0 stages its tile before the epoch is known: nothing of it depends on that."""
        if self.number < self.spec.tiles:
            self.stage(Int32(0))

    @cute.jit
    def run(self) -> None:
        """`all_reduce_protocol.TWO_SHOT`, all but what `stage_first` did."""
        spec = self.spec
        tiles = (spec.tiles - self.number + (spec.grid * spec.teams - 1)) // (spec.grid * spec.teams)
        if self.block == 0:
            self.watch.tell(self.watcher)
        for turn in range(tiles + protocol.LAST_LAG):
            for step in cutlass.range_constexpr(len(protocol.TWO_SHOT)):
                self.take(protocol.TWO_SHOT[step], turn, turn - protocol.TWO_SHOT[step].lag, tiles)
            if turn <= tiles:
                self.signal(turn)
        if self.block == 0:
            self.watch.agree(self.watcher)

    @cute.jit
    def take(self, step: cutlass.Constexpr, turn: Int32, i: Int32, tiles: Int32) -> None:
        """A step of the protocol: a wait for turn i, or what is done with tile i where the team has one."""
        if cutlass.const_expr(step.action == "wait"):
            if i >= 0:
                self.wait(i)
        elif i >= 0 and i < tiles and (turn > 0 or step.action != "stage"):
            getattr(self, step.action)(i)

    @cute.jit
    def signal(self, turn: Int32) -> None:
        """Tells this team of every rank that this one has ended a turn."""
        self.barrier()
        if self.thread < self.spec.ranks:
            self.transport.fence()
            cute.arch.fence_acq_rel_sys()
            place = self.bases.base(self.thread) + self.signals + Int64(self.rank) * 8
            signals.store_signal(place, protocol.signal_value(self.epoch, Int64(turn)))

    @cute.jit
    def wait(self, turn: Int32) -> None:
        """Waits until this team of every rank has ended a turn."""
        if self.thread < self.spec.ranks:
            target = protocol.signal_value(self.epoch, Int64(turn))
            self.watch.wait(self.signals + Int64(self.thread) * 8, target, self.thread)
            self.transport.fence()
        self.barrier()

    def extent(self, i: Int32) -> tuple[Int32, Int32]:
        """The first vector of tile i, and how many it has."""
        first = (i * (self.spec.grid * self.spec.teams) + self.number) * self.spec.tile_vectors
        return first, cutlass.min(self.spec.vectors - first, self.spec.tile_vectors)

    @cute.jit
    def fast(self, first: Int32, count: Int32) -> Int32:
        """How many of a tile's vectors are whole and aligned: they come first."""
        fast = Int32(0)
        if cutlass.const_expr(self.spec.top_k > 0):
            fast = count
        elif self.aligned:
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
        ring = self.staged + Int64(protocol.slot(i)) * self.staged_bytes
        done = Int32(0)
        while done < fast:
            turn = [done + self.thread + u * self.threads for u in range(UNROLL)]
            places = [self.past(cutlass.min(index, fast - 1), start, skipped) for index in turn]
            loaded = self.operands([first + place for place in places], vectors.load_operand)
            for u in cutlass.range_constexpr(UNROLL):
                if turn[u] < fast:
                    vectors.store_shared_memory(self.transport.staging_address(ring, places[u], each), loaded[u])
            done += UNROLL * self.threads
        v = fast + self.thread
        while v < count - skipped:
            place = self.past(v, start, skipped)
            words = self.load(self.x, first + place, self.spec.elements)
            vectors.store_shared_memory(self.transport.staging_address(ring, place, each), words)
            v += self.threads

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
        ring = self.staged + Int64(protocol.slot(i)) * self.staged_bytes
        results = self.results + Int64(protocol.slot(i)) * self.tile_bytes + Int64(start) * VECTOR
        unroll = self.transport.unroll
        done = Int32(0)
        while done < mine:
            turn = [done + self.thread + u * self.threads for u in range(unroll)]
            places = [cutlass.min(index, mine - 1) for index in turn]
            own: list[Words | None] = [None] * unroll
            if cutlass.const_expr(self.transport.keeps_own):
                own = [*self.operands([first + start + place for place in places], load)]
            sums = self.transport.reduce_from_peers(ring, places, each, own)
            for u in cutlass.range_constexpr(unroll):
                if turn[u] < mine:
                    self.transport.broadcast_to_peers(results + Int64(places[u]) * VECTOR, sums[u], self.direct)
                    if cutlass.const_expr(self.direct):
                        self.store_with(store, self.out, first + start + places[u], sums[u])
            done += unroll * self.threads

    def operands(self, places: list[Int32], load: Any) -> list[Words]:
        """This rank's vectors of the message. load: None where they may be ragged."""
        if self.spec.top_k:
            return self.sums_of_rows(places)
        return [self.load_with(load, self.x, vector) for vector in places]

    @cute.jit
    def sums_of_rows(self, places: list[Int32]) -> list[Words]:
        """The same where a vector is the sum of a token's rows: these are of one token."""
        features, top_k = self.spec.features, self.spec.top_k
        elements = self.spec.per_vector
        token = places[0] * elements // features
        lane = cute.arch.lane_idx()
        row = Int32(-1)
        if lane < top_k:
            row = device.load_global(self.token_rows + (Int64(token) * top_k + Int64(lane)) * 4)
        columns = [place * elements - token * features for place in places]
        sums = sums_of_rows(self.x, row, columns, features, ROWS_AT_A_TIME)
        return [vectors.words_of([part[i] for i in range(elements)], self.spec.dtype) for part in sums]

    @cute.jit
    def collect(self, i: Int32) -> None:
        """Writes tile i of the results out, but for what `reduce` wrote there itself."""
        first, count = self.extent(i)
        ring = self.own + self.results + Int64(protocol.slot(i)) * self.tile_bytes
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
            places = [self.past(cutlass.min(v + u * self.threads, fast - 1), start, skipped) for u in range(UNROLL)]
            loaded = [vectors.load_shared_memory(ring + Int64(place) * VECTOR) for place in places]
            for u in cutlass.range_constexpr(UNROLL):
                if v + u * self.threads < fast:
                    vectors.store_result(self.out + Int64(first + places[u]) * VECTOR, loaded[u])
            v += UNROLL * self.threads
        v = fast + self.thread
        while v < count - skipped:
            place = self.past(v, start, skipped)
            self.store(self.out, first + place, vectors.load_shared_memory(ring + Int64(place) * VECTOR))
            v += self.threads

    @cute.jit
    def collect_rows(self, ring: Int64, first: Int32, count: Int32) -> None:
        if count <= self.fast(first, count):
            self.normalise(ring, first, count, vectors.load_operand, vectors.store_result)
        else:
            self.normalise(ring, first, count, None, None)

    @cute.jit
    def normalise(
        self, ring: Int64, first: Int32, count: Int32, load: cutlass.Constexpr, store: cutlass.Constexpr
    ) -> None:
        """A row after the other, with the accesses of operands and results: None where they may be ragged."""
        columns = self.spec.row_vectors
        unroll = 2 if self.spec.ranks <= 8 else 1  # 24 bytes of float32 are spilled at 16 ranks with two
        row = Int32(0)
        while row < count:
            squares = Float32(0.0)
            done = Int32(0)
            while done < columns:
                turn = [done + self.thread + u * self.threads for u in range(unroll)]
                places = [row + cutlass.min(index, columns - 1) for index in turn]
                sums = [vectors.load_shared_memory(ring + Int64(place) * VECTOR) for place in places]
                residuals = [self.load_with(load, self.residual, first + place) for place in places]
                for u in cutlass.range_constexpr(unroll):
                    if turn[u] < columns:
                        squares = squares + self.add_residual(sums[u], residuals[u], first + places[u], store)
                done += unroll * self.threads
            factor = self.factor(self.team_sum(squares))
            done = Int32(0)
            while done < columns:
                turn = [done + self.thread + u * self.threads for u in range(unroll)]
                places = [cutlass.min(index, columns - 1) for index in turn]
                added = [self.load_with(load, self.out, first + row + place) for place in places]
                weights = [self.load_with(load, self.weight, place, self.spec.row) for place in places]
                for u in cutlass.range_constexpr(unroll):
                    if turn[u] < columns:
                        self.scale(added[u], weights[u], factor, first + row + places[u], store)
                done += unroll * self.threads
            row += columns
