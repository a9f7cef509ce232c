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
from cutlass import Int32, Int64

from qwenjax_kernels import peers, signals, vectors
from qwenjax_kernels import token_exchange_protocol as protocol
from qwenjax_kernels.heap_layout import MAX_RANKS, VECTOR
from qwenjax_kernels.token_exchange_layout import MAX_TOKENS, ExchangeLayout
from qwenjax_kernels.vectors import Words

WARP = 32
MAX_THREADS = 512
MAX_BLOCKS = 128  # all resident on the 132 multiprocessors of an H200, and on more
UNROLL = 4  # vectors of a row in flight a thread


class TokenExchange:
    """One call's sizes. ranks, units: of the heap (`token_exchange_layout`). dtype: BFloat16, Float16 or Float32 of the
    rows, of `hidden` elements; tokens: the maximum of a rank. extra_bytes: what travels behind a row.
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
        extra_bytes: int = 0,
        timeout_ns: int = 60 * 10**9,
        trap: bool = True,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.layout = ExchangeLayout(ranks, units)
        self.ranks, self.dtype, self.tokens, self.hidden = ranks, dtype, tokens, hidden
        self.timeout_ns, self.trap = timeout_ns, trap
        self.hidden_bytes = hidden * dtype.width // 8
        self.slot_bytes = self.hidden_bytes + extra_bytes
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} tokens a rank; the kernel is for 1 to {MAX_TOKENS}")
        if self.hidden_bytes % VECTOR or self.hidden_bytes == 0:
            raise ValueError(f"rows of {self.hidden_bytes} bytes; they must be whole vectors of {VECTOR}")
        if tokens * self.slot_bytes > self.layout.source_bytes:
            raise ValueError(
                f"{tokens} rows of {self.slot_bytes} bytes; the heap has room for {self.layout.source_bytes:,} bytes "
                "from each rank"
            )
        if not 1 <= max_blocks <= MAX_BLOCKS:
            raise ValueError(f"max_blocks is {max_blocks}; at most {MAX_BLOCKS} are resident together")
        self.row_vectors = self.hidden_bytes // VECTOR
        self.threads = min(MAX_THREADS, max(128, -(-self.row_vectors // WARP) * WARP))
        self.unroll = min(UNROLL, -(-self.row_vectors // self.threads))
        self.items = tokens * (ranks - 1)  # slots of all peers
        self.grid = min(max_blocks, self.items)
        self.block_tokens = -(-tokens // self.grid)

    @property
    def tag(self) -> int:
        """1 to STEPS - 1, by which ranks find out that they run different calls."""
        call = f"{self.name} {self.dtype.__name__} {self.tokens} {self.hidden} {self.slot_bytes} {self.grid}"
        return zlib.crc32(call.encode()) % (protocol.STEPS - 1) + 1


class Block:
    """A block's view of the heap in one call.

    places: the address in shared memory of int32 [block_tokens, ranks], the slots of the block's own tokens at each
    rank, -1 where a token does not go there.
    """

    actions: tuple[str, ...]

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
            self.watch.tell()

    @cute.jit
    def agree(self) -> None:
        if self.block == 0:
            self.watch.agree()

    def rounds(self, items: int) -> Int32:
        """How many of `items` items are this block's."""
        return (items - self.block + (self.spec.grid - 1)) // self.spec.grid

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

    def vectors_from(self, first: Int32) -> list[Int32]:
        """The vectors of a row that a thread moves together; past the end the last one once more, of the same bytes."""
        last = self.spec.row_vectors - 1
        return [cutlass.min(first + u * self.spec.threads, last) for u in range(self.spec.unroll)]

    @cute.jit
    def copy_row(self, source: Int64, target: Int64) -> None:
        """Copies a row of the own inbox to a result."""
        v = Int32(self.thread)
        while v < self.spec.row_vectors:
            places = self.vectors_from(v)
            loaded = [vectors.load_shared_memory(source + Int64(place) * VECTOR) for place in places]
            for u in cutlass.range_constexpr(self.spec.unroll):
                vectors.store_result(target + Int64(places[u]) * VECTOR, loaded[u])
            v += self.spec.unroll * self.spec.threads

    def load_row(self, row: Int64, first: Int32) -> tuple[list[Int32], list[Words]]:
        """A thread's vectors of an operand's row, and where they lie in it."""
        places = self.vectors_from(first)
        return places, [vectors.load_operand(row + Int64(place) * VECTOR) for place in places]


@cute.jit
def begin(table: Int64, own: Int64, grid: cutlass.Constexpr, shared: Int32) -> Int64:
    """Every thread of every block calls it; returns the epoch. shared: 8 bytes of the block's shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread == 0:
        store_shared_long(shared, signals.arrive(own, block, grid))
        if block == 0:
            peers.count_collective(table)
    cute.arch.sync_threads()
    return cute.arch.inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[shared])


def store_shared_long(address: Int32, value: Int64) -> None:
    cute.arch.inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def store_shared(address: Int32, value: Any) -> None:
    """A 32-bit word of the block's shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_shared(address: Int32) -> Int32:
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_int(address: Int64) -> Int32:
    """A 32-bit word of an operand."""
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_int(address: Int64, value: Any) -> None:
    """A 32-bit word of a result."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])
