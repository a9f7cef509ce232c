"""What dispatch and combine share: sizes, the block's view of the heap, flags and rows.

A block pushes the rows of its items to the peers' inboxes, fences once, raises a flag for each row, then waits for the
flags of the rows that it collects. A flag a row costs a fence (about a round trip) where words that carry their epoch
would not, and half of their bytes: 64 rows of 8 KiB are 512 KiB over the link, 1.4 us at 370 GB/s, instead of twice.
"""

from __future__ import annotations

import zlib
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from qwenjax_kernels import peers, signals, vectors
from qwenjax_kernels import token_exchange_protocol as protocol
from qwenjax_kernels.device import load_shared
from qwenjax_kernels.heap_layout import BASES_WORD, MAX_RANKS, VECTOR
from qwenjax_kernels.token_exchange_layout import MAX_ROW_BYTES, MAX_THREADS, MAX_TOKENS, ExchangeLayout
from qwenjax_kernels.vectors import Words

WARP = 32
MAX_BLOCKS = 128  # all resident on the 132 multiprocessors of an H200, and on more


class TokenExchange:
    """One call's sizes. ranks, units: of the heap (`token_exchange_layout`). dtype: BFloat16, Float16 or Float32 of the
    rows, of `hidden` elements; tokens: the maximum of a rank. slot_bytes: what travels of one, by default the row.
    timeout_ns: of each wait; trap: whether a failure stops the context (see `signals`).

    Raises ValueError for a call that the heap has no room for.
    """

    name: str

    def __init__(
        self,
        *,
        ranks: int,
        units: int,
        dtype: Any,
        tokens: int,
        hidden: int,
        slot_bytes: int = 0,
        timeout_ns: int = 60 * 10**9,
        trap: bool = True,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.layout = ExchangeLayout(ranks, units)
        self.ranks, self.dtype, self.tokens, self.hidden = ranks, dtype, tokens, hidden
        self.timeout_ns, self.trap = timeout_ns, trap
        self.hidden_bytes = hidden * dtype.width // 8
        self.slot_bytes = slot_bytes or self.hidden_bytes
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} tokens a rank; the kernel is for 1 to {MAX_TOKENS}")
        if self.hidden_bytes % VECTOR or self.hidden_bytes == 0:
            raise ValueError(f"rows of {self.hidden_bytes} bytes; they must be whole vectors of {VECTOR}")
        if tokens * self.slot_bytes > self.layout.source_bytes:
            raise ValueError(
                f"{tokens} rows of {self.slot_bytes} bytes; the heap has room for {self.layout.source_bytes:,} bytes "
                "from each rank"
            )
        if self.hidden_bytes > MAX_ROW_BYTES:
            raise ValueError(f"rows of {self.hidden_bytes} bytes; at most {MAX_ROW_BYTES}")
        if not 1 <= max_blocks <= MAX_BLOCKS:
            raise ValueError(f"max_blocks is {max_blocks}; at most {MAX_BLOCKS} are resident together")
        self.row_vectors = self.hidden_bytes // VECTOR
        self.threads = min(MAX_THREADS, max(128, -(-self.row_vectors // WARP) * WARP))
        self.thread_vectors = -(-self.row_vectors // self.threads)
        self.items = tokens * (ranks - 1)  # slots of all peers
        self.grid = min(max_blocks, self.items)
        self.block_tokens = -(-tokens // self.grid)

    @cute.jit
    def begin(self, bases: peers.Bases, table: Int64, shared_epoch: Int32) -> None:
        """Fills the bases and the epoch, 8 bytes, in the block's shared memory; they are there after its next barrier.

        Every thread of every block calls it. A thread of the last warp takes the epoch, so that the trip to the
        counter hides behind what the first warps do meanwhile.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        bases.fill(table)
        if thread == self.threads - WARP:
            own = peers.table_address(table, BASES_WORD + 2 * peers.this_rank(table))
            begun = signals.arrive(own, block, self.grid)
            cute.arch.inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[shared_epoch, begun])
            if block == 0:
                peers.count_collective(table)

    def places(self) -> list[Int32]:
        """The vectors of a thread; past the row's end the last one once more, of the same bytes."""
        thread, _, _ = cute.arch.thread_idx()
        places = [thread + u * self.threads for u in range(self.thread_vectors)]
        return [cutlass.min(place, self.row_vectors - 1) for place in places]

    def offsets(self) -> list[Int64]:
        """Where they lie in a row of dtype."""
        return [Int64(place) * VECTOR for place in self.places()]

    def load_row(self, row: Int64) -> Words:
        """A thread's words of an operand's row."""
        return [word for offset in self.offsets() for word in vectors.load_operand(row + offset)]

    def push_row(self, row: Int64, words: Words) -> None:
        """Stores them to a row of an inbox."""
        for u, offset in enumerate(self.offsets()):
            vectors.store_shared_memory(row + offset, words[4 * u : 4 * u + 4])

    def store_row(self, row: Int64, words: Words) -> None:
        """Stores them to a row of a result."""
        for u, offset in enumerate(self.offsets()):
            vectors.store_result(row + offset, words[4 * u : 4 * u + 4])

    def arrived_row(self, row: Int64) -> Words:
        """A thread's words of a row of the own inbox."""
        return [word for offset in self.offsets() for word in vectors.load_shared_memory(row + offset)]

    @property
    def tag(self) -> int:
        """1 to STEPS - 1, by which ranks find out that they run different calls."""
        call = f"{self.name} {self.dtype.__name__} {self.tokens} {self.hidden} {self.slot_bytes} {self.grid}"
        return zlib.crc32(call.encode()) % (protocol.STEPS - 1) + 1


class Block:
    """A block's view of the heap in one call.

    In shared memory: places, int32 [block_tokens, ranks], the slots of the block's own tokens at each rank, -1 where a
    token does not go there; received, int32 [ranks], how many tokens each rank has dispatched to this one.
    """

    actions: tuple[str, ...]
    received: Int32

    def __init__(self, spec: Any, bases: peers.Bases, table: Int64, rank: Int32, epoch: Int64, places: Int32) -> None:
        self.spec, self.bases, self.rank, self.epoch, self.places = spec, bases, rank, epoch, places
        self.thread, _, _ = cute.arch.thread_idx()
        self.block, _, _ = cute.arch.block_idx()
        self.own = bases.base(rank)
        record = peers.failure_record(table)
        self.watch = signals.Watch(bases, self.own, record, rank, epoch, spec.tag, spec.timeout_ns, spec.trap)
        layout = spec.layout
        inbox = Int64(protocol.inbox(epoch))
        self.counts = layout.counts + inbox * (8 * MAX_RANKS)
        self.flags = layout.flags + inbox * (8 * MAX_TOKENS * layout.ranks)
        self.rows = layout.rows + inbox * (layout.ranks * layout.source_bytes)

    def run(self) -> None:
        """The actions of the protocol in their order."""
        for action in self.actions:
            getattr(self, action)()

    @cute.jit
    def tell(self) -> None:
        if self.block == 0:
            self.watch.tell(self.thread - (self.spec.threads - WARP))

    @cute.jit
    def agree(self) -> None:
        if self.block == 0:
            self.watch.agree(self.thread - (self.spec.threads - WARP))

    def rounds(self, items: int) -> Int32:
        """How many of `items` items are this block's."""
        return (items - self.block + (self.spec.grid - 1)) // self.spec.grid

    def item(self, i: Int32) -> tuple[Int32, Int32, Boolean]:
        """The block's i-th item: whose token, which slot of theirs, and whether there is one in it."""
        item = i * self.spec.grid + self.block
        source = protocol.peer_of(item, self.rank, self.spec.ranks)
        slot = protocol.slot_of(item, self.spec.ranks)
        return source, slot, slot < load_shared(self.received + source * 4)

    def row(self, source: Any, slot: Any) -> Int64:
        """The offset of a row in the inbox of the rank that it goes to."""
        return self.rows + Int64(source) * self.spec.layout.source_bytes + Int64(slot) * self.spec.slot_bytes

    def flag(self, source: Any, slot: Any) -> Int64:
        """The offset of a row's flag."""
        return self.flags + (Int64(source) * MAX_TOKENS + Int64(slot)) * 8

    def place(self, round: Any, rank: Any) -> Int32:
        """The address of an element of `places`."""
        return self.places + (round * self.spec.ranks + rank) * 4

    @cute.jit
    def raise_flag(self, peer: Int32, slot: Int32) -> None:
        """Tells a peer that the row in a slot has come; the thread has fenced after the block's last barrier."""
        place = self.bases.base(peer) + self.flag(self.rank, slot)
        cute.arch.inline_ptx(
            "st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[place, protocol.row_flag(self.epoch)]
        )

    def wait_for_row(self, source: Int32, slot: Int32) -> None:
        """Waits until a row lies in the own inbox."""
        self.watch.wait(self.flag(source, slot), protocol.row_flag(self.epoch), source)


def load_epoch(shared: Int32) -> Int64:
    return cute.arch.inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[shared])


def load_int(address: Int64) -> Int32:
    """A 32-bit word of an operand."""
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_int(address: Int64, value: Any) -> None:
    """A 32-bit word of a result."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])
