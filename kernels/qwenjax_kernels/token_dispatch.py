"""Dispatch of the decode all-to-all: each token goes once to every rank that has one of its experts, in one launch.

Slots are given out in token order, so that the same routing gives the same bits. Every block finds them for itself from
all ids: a warp ballots 32 tokens for each rank, and a token's slot at a rank is the number of set bits before it.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from qwenjax_kernels import peers
from qwenjax_kernels import token_exchange_protocol as protocol
from qwenjax_kernels.device import load_shared, store_shared
from qwenjax_kernels.token_exchange import WARP, Block, TokenExchange, load_epoch, load_int, store_int
from qwenjax_kernels.token_exchange_layout import row_bytes
from qwenjax_kernels.vectors import Words


class TokenDispatch(TokenExchange):
    """The kernel for one call; call `launch` from a `@cute.jit` function.

    top_k: experts of a token; experts_per_rank: of which rank r has r * experts_per_rank and those that follow.
    sent_bytes: of a row on its way, by default as it is. The rest: see TokenExchange.
    """

    def __init__(
        self, *, hidden: int, dtype: Any, top_k: int, experts_per_rank: int, sent_bytes: int = 0, **sizes: Any
    ) -> None:
        self.sent_bytes = sent_bytes or hidden * dtype.width // 8
        super().__init__(hidden=hidden, dtype=dtype, slot_bytes=row_bytes(self.sent_bytes, top_k), **sizes)
        self.name = f"dispatch {top_k} {experts_per_rank}"
        self.top_k, self.experts_per_rank = top_k, experts_per_rank
        if top_k < 1 or experts_per_rank < 1:
            raise ValueError(f"top_k is {top_k} and experts_per_rank {experts_per_rank}; both are at least 1")
        self.chunks = -(-self.tokens // WARP)

    def encode_row(self, words: Words) -> Words:
        """What push_row sends of a thread's words."""
        return words

    def decode_row(self, sent: Words) -> Words:
        """The words that arrive of it."""
        return sent

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        x: Int64,
        ids: Int64,
        weights: Int64,
        table: Int64,
        out_x: Int64,
        out_ids: Int64,
        out_weights: Int64,
        out_counts: Int64,
        out_slots: Int64,
    ) -> None:
        """Enqueues the kernel. All are addresses.

        x: dtype [tokens, hidden] and out_x [ranks, tokens, hidden], at multiples of 16; ids int32, weights float32
        [tokens, top_k], out_ids and out_weights [ranks, tokens, top_k]; table: the epoch array, whose count is
        advanced; out_counts: int32 [ranks]; out_slots: int32 [tokens, ranks]. Unused slots get ids -1 and weights 0;
        their rows are not written.
        """
        operands = (x, ids, weights, table, out_x, out_ids, out_weights, out_counts, out_slots)
        self.kernel(*operands).launch(
            grid=[self.grid, 1, 1], block=[self.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        ids: Int64,
        weights: Int64,
        table: Int64,
        out_x: Int64,
        out_ids: Int64,
        out_weights: Int64,
        out_counts: Int64,
        out_slots: Int64,
    ) -> None:
        @cute.struct
        class Storage:
            bases: cute.struct.MemRange[Int64, self.ranks]
            epoch: cute.struct.MemRange[Int64, 1]
            ballots: cute.struct.MemRange[Int32, self.ranks * self.chunks]
            places: cute.struct.MemRange[Int32, self.block_tokens * self.ranks]
            sent: cute.struct.MemRange[Int32, self.ranks]
            received: cute.struct.MemRange[Int32, self.ranks]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        shared = (
            storage.bases.data_ptr().toint(),
            storage.epoch.data_ptr().toint(),
            storage.places.data_ptr().toint(),
            storage.ballots.data_ptr().toint(),
            storage.sent.data_ptr().toint(),
            storage.received.data_ptr().toint(),
        )
        operands = (x, ids, weights, out_x, out_ids, out_weights, out_counts, out_slots)
        if peers.this_rank(table) >= 0:
            self.run(table, operands, shared)

    @cute.jit
    def run(self, table: Int64, operands: tuple[Int64, ...], shared: tuple[Int32, ...]) -> None:
        """What a block does."""
        bases = peers.Bases(shared[0], self.ranks)
        self.begin(bases, table, shared[1])
        self.ballot(operands[1], shared[3])
        block, _, _ = cute.arch.block_idx()
        first = self.load_row(operands[0] + Int64(cutlass.min(block, self.tokens - 1)) * self.hidden_bytes)
        cute.arch.sync_threads()
        common = (self, bases, table, peers.this_rank(table), load_epoch(shared[1]), shared[2])
        DispatchBlock(common, operands, shared[3:], first).run()

    @cute.jit
    def ballot(self, ids: Int64, ballots: Int32) -> None:
        """Bit i of ballots[rank, chunk]: whether token 32 chunk + i has an expert at the rank."""
        thread, _, _ = cute.arch.thread_idx()
        lane, chunk = thread % WARP, thread // WARP
        while chunk < self.chunks:
            token = chunk * WARP + lane
            ranks = Int32(0)
            if token < self.tokens:
                row = ids + Int64(token) * (4 * self.top_k)
                experts = [load_int(row + 4 * choice) for choice in range(self.top_k)]
                for choice in cutlass.range_constexpr(self.top_k):
                    if experts[choice] >= 0:
                        ranks = ranks | bit(experts[choice] // self.experts_per_rank)
            for to in cutlass.range_constexpr(self.ranks):
                votes = cute.arch.vote_ballot_sync((ranks >> to) & 1 != 0)
                if lane == to % WARP:
                    store_shared(ballots + (to * self.chunks + chunk) * 4, votes)
            chunk += self.threads // WARP


class DispatchBlock(Block):
    """`token_exchange_protocol.DISPATCH`."""

    actions = protocol.DISPATCH

    def __init__(
        self, common: tuple[Any, ...], operands: tuple[Int64, ...], shared: tuple[Int32, ...], first: Words
    ) -> None:
        super().__init__(*common)
        self.first = first  # the thread's words of the block's first token
        self.x, self.ids, self.weights, self.out_x, self.out_ids, self.out_weights, *outs = operands
        self.out_counts, self.out_slots = outs
        self.ballots, self.sent, self.received = shared

    @cute.jit
    def count(self) -> None:
        """Fills `places` and `sent`, writes the own tokens' slots out, and tells peers what they will get."""
        spec = self.spec
        pair = Int32(self.thread)
        while pair < self.rounds(spec.tokens) * spec.ranks:
            token, to = pair // spec.ranks * spec.grid + self.block, pair % spec.ranks
            slot = self.bits_before(to, token)
            if not self.goes(to, token):
                slot = Int32(-1)
            store_shared(self.places + pair * 4, slot)
            store_int(self.out_slots + (Int64(token) * spec.ranks + to) * 4, slot)
            pair += spec.threads
        if self.thread < spec.ranks:
            total = self.bits_before(self.thread, Int32(spec.tokens))
            store_shared(self.sent + self.thread * 4, total)
            if self.block == 0 and self.thread != self.rank:
                place = self.bases.base(self.thread) + self.counts + Int64(self.rank) * 8
                word = protocol.count_word(self.epoch, Int64(total))
                cute.arch.inline_ptx("st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[place, word])
        cute.arch.sync_threads()

    def votes(self, to: Any, chunk: Any) -> Int32:
        return load_shared(self.ballots + (to * self.spec.chunks + chunk) * 4)

    def goes(self, to: Int32, token: Int32) -> Boolean:
        """Whether a token is sent to a rank."""
        return (self.votes(to, token // WARP) >> (token % WARP)) & 1 != 0

    @cute.jit
    def bits_before(self, to: Int32, token: Int32) -> Int32:
        """How many tokens before this one are sent to a rank."""
        total = Int32(0)
        for chunk in range(token // WARP):
            total += cute.arch.popc(self.votes(to, chunk))
        if token % WARP != 0:
            total += cute.arch.popc(self.votes(to, token // WARP) & (bit(token % WARP) - 1))
        return total

    @cute.jit
    def push(self) -> None:
        """Stores the rows, ids and weights of the block's tokens to the ranks that they go to."""
        spec = self.spec
        words = self.first
        for i in range(self.rounds(spec.tokens)):
            token = i * spec.grid + self.block
            if i > 0:
                words = self.spec.load_row(self.x + Int64(token) * spec.hidden_bytes)
            sent = self.spec.encode_row(words)
            # Each rank begins at another one, so that they do not all write to the same; this one is last.
            for step in cutlass.range_constexpr(1, spec.ranks + 1):
                to = (self.rank + step) % spec.ranks
                slot = load_shared(self.place(i, to))
                if slot >= 0:
                    if cutlass.const_expr(step == spec.ranks):
                        words_here = self.spec.decode_row(sent)
                        self.spec.store_row(self.out_x + self.result(to, slot) * spec.hidden_bytes, words_here)
                    else:
                        self.spec.push_row(self.bases.base(to) + self.row(self.rank, slot), sent)
            self.push_choices(i, token)

    @cute.jit
    def push_choices(self, i: Int32, token: Int32) -> None:
        """The ids and weights of a token: thread `choice` an id, thread top_k + choice a weight."""
        spec = self.spec
        word = Int32(self.thread)
        while word < 2 * spec.top_k:
            source, result = self.choices(word)
            value = load_int(source + Int64(token) * (4 * spec.top_k))
            for step in cutlass.range_constexpr(1, spec.ranks + 1):
                to = (self.rank + step) % spec.ranks
                slot = load_shared(self.place(i, to))
                if slot >= 0:
                    if cutlass.const_expr(step == spec.ranks):
                        store_int(result + self.result(to, slot) * (4 * spec.top_k), value)
                    else:
                        there = self.bases.base(to) + self.row(self.rank, slot) + spec.sent_bytes + Int64(word) * 4
                        cute.arch.inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[there, value])
            word += spec.threads

    @cute.jit
    def choices(self, word: Int32) -> tuple[Int64, Int64]:
        """Where word `word` of a token's ids and weights comes from and goes to, of the first token."""
        source, result = self.ids + Int64(word) * 4, self.out_ids + Int64(word) * 4
        if word >= self.spec.top_k:
            source = self.weights + Int64(word - self.spec.top_k) * 4
            result = self.out_weights + Int64(word - self.spec.top_k) * 4
        return source, result

    def result(self, source: Any, slot: Any) -> Int64:
        """The index of a slot in the results' first two dimensions together."""
        return Int64(source) * self.spec.tokens + Int64(slot)

    @cute.jit
    def signal(self) -> None:
        """One fence, then a flag for each row that the block has pushed to a peer."""
        spec = self.spec
        cute.arch.sync_threads()
        pair = Int32(self.thread)
        if pair < self.rounds(spec.tokens) * spec.ranks:
            cute.arch.fence_acq_rel_sys()
        while pair < self.rounds(spec.tokens) * spec.ranks:
            to, slot = pair % spec.ranks, load_shared(self.places + pair * 4)
            if slot >= 0 and to != self.rank:
                self.raise_flag(to, slot)
            pair += spec.threads

    @cute.jit
    def expect(self) -> None:
        """Waits for the count of every peer; block 0 writes the counts out."""
        spec = self.spec
        if self.thread < spec.ranks:
            count = load_shared(self.sent + self.thread * 4)
            if self.thread != self.rank:
                place = self.counts + Int64(self.thread) * 8
                word = self.watch.wait(place, protocol.row_flag(self.epoch), self.thread)
                count = Int32(protocol.count_of(word, self.epoch))
            store_shared(self.received + self.thread * 4, count)
            if self.block == 0:
                store_int(self.out_counts + Int64(self.thread) * 4, count)
        cute.arch.sync_threads()

    @cute.jit
    def wait(self) -> None:
        """Waits for the rows of the block's items, each thread for others."""
        spec = self.spec
        i = Int32(self.thread)
        while i < self.rounds(spec.items):
            source, slot, used = self.item(i)
            if used:
                self.wait_for_row(source, slot)
            i += spec.threads
        cute.arch.sync_threads()

    @cute.jit
    def collect(self) -> None:
        """Copies the rows of the block's items out, and marks the slots that have none; so also the own ones."""
        spec = self.spec
        for i in range(self.rounds(spec.items)):
            source, slot, used = self.item(i)
            if used:
                row = self.own + self.row(source, slot)
                self.spec.store_row(
                    self.out_x + self.result(source, slot) * spec.hidden_bytes, self.spec.arrived_row(row)
                )
                word = Int32(self.thread)
                while word < 2 * spec.top_k:
                    _, result = self.choices(word)
                    value = cute.arch.inline_ptx(
                        "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];",
                        write_only_types=[Int32],
                        read_only_args=[row + spec.sent_bytes + Int64(word) * 4],
                    )
                    store_int(result + self.result(source, slot) * (4 * spec.top_k), value)
                    word += spec.threads
            else:
                self.mark_empty(source, slot)
        for i in range(self.rounds(spec.tokens)):
            slot = i * spec.grid + self.block
            if slot >= load_shared(self.sent + self.rank * 4):
                self.mark_empty(self.rank, slot)

    @cute.jit
    def mark_empty(self, source: Int32, slot: Int32) -> None:
        """ids -1 and weights 0."""
        word = Int32(self.thread)
        while word < 2 * self.spec.top_k:
            _, result = self.choices(word)
            value = Int32(-1)
            if word >= self.spec.top_k:
                value = Int32(0)
            store_int(result + self.result(source, slot) * (4 * self.spec.top_k), value)
            word += self.spec.threads


def bit(place: Int32) -> Int32:
    """1 << place, and 0 where that is beyond the word."""
    return cute.arch.inline_ptx("shl.b32 {$w0}, 1, {$r0};", write_only_types=[Int32], read_only_args=[place])
