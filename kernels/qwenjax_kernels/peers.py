"""Every rank's memory, as a kernel sees it: the table of bases, and sums over and stores to all ranks.

`PeerTransport` writes to each rank's memory over plain NVLink and sums in float32 in rank order; `MulticastTransport`
leaves both to the switch (NVLink SHARP, `multimem`): one load returns the sum of all ranks, in the switch's order, and
one store reaches all. They have the same methods, so that a kernel is written once.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32

from qwenjax_kernels import vectors
from qwenjax_kernels.heap_layout import BASES_WORD, RANK_WORD, RECORD_WORD, VECTOR, multicast_word
from qwenjax_kernels.vectors import Words

LOADS_IN_FLIGHT = 8  # vectors a thread asks for before it adds the first


def table_address(table: Int64, word: Any) -> Int64:
    """The address that lies in two words of the epoch array at `table`."""
    low = load_table(table, word)
    return (Int64(load_table(table, word + 1)) << 32) | Int64(low)


def load_table(table: Int64, word: Any) -> Uint32:
    """A word of the epoch array other than the count, which the kernel advances."""
    return cute.arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[table + word * 4]
    )


def this_rank(table: Int64) -> Int32:
    """This rank; negative where the kernel is to return at once."""
    return Int32(load_table(table, RANK_WORD))


def failure_record(table: Int64) -> Int64:
    """The address of this rank's failure record in host memory."""
    return table_address(table, RECORD_WORD)


def count_collective(table: Int64) -> None:
    """Advances the epoch array's count of collectives; one thread of a launch does."""
    cute.arch.inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[table])


class Bases:
    """Every rank's base address, in a block's shared memory: as registers they would be 64 of 128 at 16 ranks."""

    def __init__(self, shared: Int32, ranks: int) -> None:
        self.shared, self.ranks = shared, ranks

    @cute.jit
    def fill(self, table: Int64) -> None:
        """Fills the table; threads below `ranks` do, and all see it after the block's next barrier."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < self.ranks:
            cute.arch.inline_ptx(
                "st.shared.b64 [{$r0}], {$r1};",
                read_only_args=[self.shared + thread * 8, table_address(table, BASES_WORD + 2 * thread)],
            )

    @cute.jit
    def load(self, table: Int64) -> None:
        """Fills the table; every thread of the block takes part, and sees it afterwards."""
        self.fill(table)
        cute.arch.sync_threads()

    def base(self, rank: Any) -> Int64:
        """Where a rank's memory begins."""
        return cute.arch.inline_ptx(
            "ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[self.shared + rank * 8]
        )


class PeerTransport:
    """Each rank stores what another is to add straight into that rank's memory: nothing is read over NVLink, so that no
    load waits for a trip there and back."""

    def __init__(self, bases: Bases, table: Int64, rank: Int32, ranks: int, dtype: Any) -> None:
        self.bases, self.rank, self.ranks, self.dtype = bases, rank, ranks, dtype
        self.own = bases.base(rank)

    keeps_own = True  # what a rank adds itself it reads from its operand

    @property
    def unroll(self) -> int:
        """Vectors that one reduce_from_peers should be given."""
        return max(1, LOADS_IN_FLIGHT // self.ranks)

    def staging_address(self, ring: Int64, vector: Any, each: Any) -> Int64:
        """Where a vector of a tile is staged: at the rank that adds it, in the share of this one."""
        owner = vector // each
        return self.bases.base(owner) + ring + Int64(self.rank * each + vector - owner * each) * VECTOR

    def reduce_from_peers(self, ring: Int64, places: list[Any], each: Any, own: list[Any]) -> list[Words]:
        """The sums over all ranks of these vectors of the own slice, added in float32 in rank order, rounded once.

        own: this rank's.
        """
        sums: list[Any] = [None] * len(places)
        for first in range(0, self.ranks, LOADS_IN_FLIGHT):
            ranks = range(first, min(first + LOADS_IN_FLIGHT, self.ranks))
            loaded = [
                [vectors.load_shared_memory(self.own + ring + Int64(rank * each + place) * VECTOR) for rank in ranks]
                for place in places
            ]
            for i, words_by_rank in enumerate(loaded):
                for rank, words in zip(ranks, words_by_rank, strict=True):
                    chosen = vectors.select(self.rank == rank, own[i], words)
                    sums[i] = add(sums[i], vectors.floats(chosen, self.dtype))
        return [vectors.words_of(values, self.dtype) for values in sums]

    def broadcast_to_peers(self, offset: Int64, words: Words, others_only: bool = False) -> None:
        """Stores a vector at this offset of every rank's memory, this one's last or not at all."""
        # Each rank begins at another one, so that they do not all write to the same.
        for step in range(1, self.ranks + (not others_only)):
            vectors.store_shared_memory(self.bases.base((self.rank + step) % self.ranks) + offset, words)

    def fence(self) -> None:
        """Between this block's accesses and a signal, or a wait and them: nothing beyond release and acquire."""


class MulticastTransport:
    """The same through the multicast mapping, whose base follows the ranks' in the table. Tiles are staged in the own
    memory, and the switch reads them."""

    unroll = 4
    keeps_own = False

    _LOAD_REDUCE = {  # noqa: RUF012, a constant table
        BFloat16: "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
        Float16: "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2",
        Float32: "multimem.ld_reduce.relaxed.sys.global.add.v4.f32",
    }
    _STORE = {  # noqa: RUF012
        BFloat16: "multimem.st.relaxed.sys.global.v4.bf16x2",
        Float16: "multimem.st.relaxed.sys.global.v4.f16x2",
        Float32: "multimem.st.relaxed.sys.global.v4.f32",
    }

    def __init__(self, bases: Bases, table: Int64, rank: Int32, ranks: int, dtype: Any) -> None:
        self.base, self.dtype = table_address(table, multicast_word(ranks)), dtype
        self.rank, self.own = rank, bases.base(rank)
        # multimem's operands are floats where its type is f32, else 32-bit words.
        self.register = Float32 if dtype is Float32 else Uint32

    def staging_address(self, ring: Int64, vector: Any, each: Any) -> Int64:
        """Where a vector of a tile is staged."""
        return self.own + ring + Int64(vector) * VECTOR

    def reduce_from_peers(self, ring: Int64, places: list[Any], each: Any, own: list[Any]) -> list[Words]:
        """The sums over all ranks of these vectors of the own slice, added by the switch in float32, rounded once."""
        loaded = [
            cute.arch.inline_ptx(
                self._LOAD_REDUCE[self.dtype] + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[self.register] * 4,
                read_only_args=[self.base + ring + Int64(self.rank * each + place) * VECTOR],
            )
            for place in places
        ]
        return [list(words) for words in loaded]

    def broadcast_to_peers(self, offset: Int64, words: Words, others_only: bool = False) -> None:
        """Stores a vector at this offset of every rank's memory; the switch leaves none out."""
        cute.arch.inline_ptx(
            self._STORE[self.dtype] + " [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[self.base + offset, *words],
        )

    def fence(self) -> None:
        """The multicast address is another name of memory that is written and read by its own name too."""
        cute.arch.inline_ptx("fence.proxy.alias;")


def add(total: list[Any] | None, values: list[Any]) -> list[Any]:
    """total + values, element by element; values where there is no total yet."""
    return values if total is None else [a + b for a, b in zip(total, values, strict=True)]
