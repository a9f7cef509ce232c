"""Combine of the decode all-to-all: the experts' sums of each token come home and are added, in one launch.

Each rank has added up what its own experts make of a token, so that at most one row comes from a rank. They are pushed
to the token's rank, which adds them in float32 in rank order: the same partial sums give the same bits.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from qwenjax_kernels import peers, vectors
from qwenjax_kernels import token_exchange_protocol as protocol
from qwenjax_kernels.device import load_shared, store_shared
from qwenjax_kernels.heap_layout import VECTOR
from qwenjax_kernels.peers import LOADS_IN_FLIGHT
from qwenjax_kernels.token_exchange import Block, TokenExchange, load_epoch, load_int
from qwenjax_kernels.vectors import Words


class TokenCombine(TokenExchange):
    """The kernel for one call; call `launch` from a `@cute.jit` function. See TokenExchange."""

    name = "combine"

    @cute.jit
    def launch(
        self, stream: cuda.CUstream, partial: Int64, counts: Int64, slots: Int64, table: Int64, out: Int64
    ) -> None:
        """Enqueues the kernel. All are addresses.

        partial: dtype [ranks, tokens, hidden] and out [tokens, hidden], at multiples of 16; counts int32 [ranks] and
        slots int32 [tokens, ranks], of the dispatch; table: the epoch array, whose count is advanced. Rows of partial
        at and after a rank's count enter no sum (a block loads its first row before it knows the count, and leaves it
        unused). A token that went nowhere gets zeros.
        """
        self.kernel(partial, counts, slots, table, out).launch(
            grid=[self.grid, 1, 1], block=[self.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, partial: Int64, counts: Int64, slots: Int64, table: Int64, out: Int64) -> None:
        @cute.struct
        class Storage:
            bases: cute.struct.MemRange[Int64, self.ranks]
            epoch: cute.struct.MemRange[Int64, 1]
            places: cute.struct.MemRange[Int32, self.block_tokens * self.ranks]
            received: cute.struct.MemRange[Int32, self.ranks]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        shared = (
            storage.bases.data_ptr().toint(),
            storage.epoch.data_ptr().toint(),
            storage.places.data_ptr().toint(),
            storage.received.data_ptr().toint(),
        )
        if peers.this_rank(table) >= 0:
            self.run(table, (partial, counts, slots, out), shared)

    @cute.jit
    def run(self, table: Int64, operands: tuple[Int64, ...], shared: tuple[Int32, ...]) -> None:
        """What a block does."""
        bases = peers.Bases(shared[0], self.ranks)
        self.begin(bases, table, shared[1])
        partial, counts, slots, _ = operands
        self.read_places(counts, slots, shared[2], shared[3])
        rank = peers.this_rank(table)
        block, _, _ = cute.arch.block_idx()
        peer, slot = protocol.peer_of(block, rank, self.ranks), protocol.slot_of(block, self.ranks)
        first = self.load_row(self.partial_row(partial, peer, slot))
        cute.arch.sync_threads()
        common = (self, bases, table, rank, load_epoch(shared[1]), shared[2])
        CombineBlock(common, operands, shared[3], first).run()

    @cute.jit
    def read_places(self, counts: Int64, slots: Int64, places: Int32, received: Int32) -> None:
        """Copies the slots of the block's own tokens, and the counts, to shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pair = Int32(thread)
        while pair < (self.tokens - block + (self.grid - 1)) // self.grid * self.ranks:
            token = pair // self.ranks * self.grid + block
            slot = load_int(slots + (Int64(token) * self.ranks + pair % self.ranks) * 4)
            store_shared(places + pair * 4, slot)
            pair += self.threads
        if thread < self.ranks:
            store_shared(received + thread * 4, load_int(counts + Int64(thread) * 4))

    def partial_row(self, partial: Int64, peer: Any, slot: Any) -> Int64:
        """The address of what this rank made of a peer's token."""
        return partial + (Int64(peer) * self.tokens + Int64(slot)) * self.hidden_bytes


class CombineBlock(Block):
    """`token_exchange_protocol.COMBINE`."""

    actions = protocol.COMBINE

    def __init__(self, common: tuple[Any, ...], operands: tuple[Int64, ...], received: Int32, first: Words) -> None:
        super().__init__(*common)
        self.partial, _, _, self.out = operands
        self.received, self.first = received, first  # first: the thread's words of the block's first item

    @cute.jit
    def push(self) -> None:
        """Stores the sums of the block's items to the ranks whose tokens they are."""
        spec = self.spec
        words = self.first
        for i in range(self.rounds(spec.items)):
            peer, slot, used = self.item(i)
            if used:
                if i > 0:
                    words = self.spec.load_row(self.spec.partial_row(self.partial, peer, slot))
                self.spec.push_row(self.bases.base(peer) + self.row(self.rank, slot), words)

    @cute.jit
    def signal(self) -> None:
        """One fence, then a flag for each row that the block has pushed."""
        cute.arch.sync_threads()
        i = Int32(self.thread)
        if i < self.rounds(self.spec.items):
            cute.arch.fence_acq_rel_sys()
        while i < self.rounds(self.spec.items):
            peer, slot, used = self.item(i)
            if used:
                self.raise_flag(peer, slot)
            i += self.spec.threads

    @cute.jit
    def wait(self) -> None:
        """Waits for the rows of the block's tokens, each thread for others."""
        spec = self.spec
        pair = Int32(self.thread)
        while pair < self.rounds(spec.tokens) * spec.ranks:
            source, slot = pair % spec.ranks, load_shared(self.places + pair * 4)
            if slot >= 0 and source != self.rank:
                self.wait_for_row(source, slot)
            pair += spec.threads
        cute.arch.sync_threads()

    @cute.jit
    def collect(self) -> None:
        """Adds the rows of each of the block's tokens."""
        spec = self.spec
        for i in range(self.rounds(spec.tokens)):
            result = self.out + (Int64(i) * spec.grid + self.block) * spec.hidden_bytes
            v = Int32(self.thread)
            while v < spec.row_vectors:
                vectors.store_result(result + Int64(v) * VECTOR, self.total(i, v))
                v += spec.threads

    @cute.jit
    def total(self, i: Int32, vector: Int32) -> Words:
        """A vector of the sum of a token's rows, in float32 in rank order from zero, rounded once."""
        spec = self.spec
        total = [Float32(0.0)] * (VECTOR * 8 // spec.dtype.width)
        for first in cutlass.range_constexpr(0, spec.ranks, LOADS_IN_FLIGHT):
            ranks = range(first, min(first + LOADS_IN_FLIGHT, spec.ranks))
            for words in [self.load_term(i, vector, source) for source in ranks]:
                total = peers.add(total, vectors.floats(words, spec.dtype))
        return vectors.words_of(total, spec.dtype)

    @cute.jit
    def load_term(self, i: Int32, vector: Int32, source: cutlass.Constexpr) -> Words:
        """A vector of what a rank made of a token; zeros, which change no sum, where it has not been there."""
        slot = load_shared(self.place(i, source))
        words = [Uint32(0), Uint32(0), Uint32(0), Uint32(0)]
        if slot >= 0:
            row = self.own + self.row(source, slot)
            if self.rank == source:
                row = self.spec.partial_row(self.partial, source, slot)
            words = vectors.load_shared_memory(row + Int64(vector) * VECTOR)
        return words
