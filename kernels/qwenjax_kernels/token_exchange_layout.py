"""Where the decode all-to-all's inboxes lie in the symmetric heap: behind what the all-reduce uses. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from qwenjax_kernels.heap_layout import LINE, MAX_RANKS, VECTOR, HeapLayout
from qwenjax_kernels.token_exchange_protocol import INBOXES

MAX_TOKENS = 1024  # tokens of a rank in one call
MAX_THREADS = 512  # of a block
MAX_VECTORS = 8  # of a row in a thread's registers
MAX_ROW_BYTES = MAX_VECTORS * MAX_THREADS * VECTOR
UNIT = 1 << 20  # bytes; the rows that one rank may send to another in one call are a whole number of these


@dataclass(frozen=True)
class ExchangeLayout:
    """The part of a heap of `ranks` ranks that dispatch and combine use; each source has `units` for its rows.

    counts: uint64 [inboxes, ranks], rows that the rank of that index sends, and the epoch.
    flags: uint64 [inboxes, ranks, MAX_TOKENS], the epoch in which the rank of that index wrote the row in that slot.
    rows: [inboxes, ranks, units of 1 MiB], the rows in their slots, one behind the other.
    """

    ranks: int
    units: int

    def __post_init__(self) -> None:
        HeapLayout(self.ranks)  # which refuses another number of ranks
        if self.units < 1:
            raise ValueError(f"{self.units} units of rows; at least 1 is needed")

    @property
    def counts(self) -> int:
        return -(-HeapLayout(self.ranks).num_bytes // LINE) * LINE

    @property
    def flags(self) -> int:
        return self.counts + INBOXES * MAX_RANKS * 8

    @property
    def rows(self) -> int:
        return self.flags + INBOXES * self.ranks * MAX_TOKENS * 8

    @property
    def source_bytes(self) -> int:
        return self.units * UNIT

    @property
    def num_bytes(self) -> int:
        """The end of it, which is the size of a heap that holds nothing else."""
        return self.rows + INBOXES * self.ranks * self.source_bytes


def row_bytes(sent_bytes: int, top_k: int) -> int:
    """What a dispatched token takes of its source's part of an inbox: the row, then ids and weights, 4 bytes each."""
    return sent_bytes + -(-8 * top_k // VECTOR) * VECTOR


def mxfp8_bytes(hidden: int) -> int:
    """What a row of `hidden` elements takes as MXFP8: a byte an element, then a scale for each 32, in whole vectors."""
    return hidden + -(-hidden // (32 * VECTOR)) * VECTOR


def units_for(tokens: int, hidden_bytes: int, top_k: int) -> int:
    """The units with which a heap holds `tokens` tokens a rank, at most MAX_TOKENS, of rows of hidden_bytes."""
    return max(1, -(-min(tokens, MAX_TOKENS) * row_bytes(hidden_bytes, top_k) // UNIT))
