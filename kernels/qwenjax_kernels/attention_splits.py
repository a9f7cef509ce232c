"""How paged attention divides its work: pure Python, importable without CuTeDSL.

A sequence's keys are walked in tiles of TILE_KEYS. The tiles of a long sequence are divided into splits, which
different blocks walk; how many follows from the sequence's own length and from static sizes alone, so that its bits do
not depend on the other sequences of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_KEYS = 64
MMA_ROWS = 16  # query rows of one product: query tokens times query heads of a kv head
MAX_ROWS = 128
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_BATCH = 1024  # tables of 8 bytes a sequence lie in shared memory
WARP = 32
PRODUCER_WARPS = 4
CONSUMER_WARPS = 8  # at most
# Registers a thread where CONSUMER_WARPS are there: a block of 384 threads starts with 168 each.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 88, 208
SHARED_BYTES = 227 * 1024
MAX_STAGES = 6


@dataclass(frozen=True)
class Splits:
    """A sequence of n tiles has at most min(max_splits, ceil(n / min_tiles)) splits, equal but for the last."""

    min_tiles: int
    max_splits: int

    def tiles_each(self, tiles: int) -> int:
        """Tiles of a split, the last of which may have fewer."""
        return -(-tiles // max(min(-(-tiles // self.min_tiles), self.max_splits), 1))


def choose_splits(pairs: int) -> Splits:
    """For so many pairs of a sequence and a kv head.

    Small splits spread the keys of a few pairs over the multiprocessors; larger and fewer ones cost less to add up, and
    less memory: 4 bytes an element of the sums of each of max_splits. Chosen from times at 2,048 keys, of sequences of
    one length and of many (bench/results/paged_attention.md).
    """
    min_tiles = 2 if pairs <= 4 else 4 if pairs <= 8 else 8 if pairs <= 64 else 16 if pairs <= 512 else 32
    return Splits(min_tiles, max_splits=max(8, min(32, 4096 // pairs)))


def row_tiles(rows: int) -> int:
    """Tiles of query rows, a power of two, so that consumer warps are whole warpgroups."""
    return 1 << (-(-rows // MMA_ROWS) - 1).bit_length()


def key_warps(rows: int) -> int:
    """Warps that share the keys of a tile, for each tile of query rows."""
    return min(4, CONSUMER_WARPS // row_tiles(rows))


def exchange_stride(head_dim: int) -> int:
    """Floats from a row to the next where warps exchange sums: eight lanes of pairs then meet no bank twice."""
    return head_dim + 8


def exchange_bytes(rows: int, head_dim: int) -> int:
    """Shared memory in which the warps that share keys add their sums."""
    warps = key_warps(rows)
    held = 8 if rows <= 8 else MMA_ROWS
    return row_tiles(rows) * warps * held * exchange_stride(head_dim) * 4 if warps > 1 else 0


def stages(rows: int, head_dim: int, batch: int) -> int:
    """Tiles of keys and values that fit in shared memory."""
    spare = 1024 + 8 * batch + 16 * MAX_STAGES + 128 * CONSUMER_WARPS + exchange_bytes(rows, head_dim)
    return min(MAX_STAGES * 128 // head_dim, (SHARED_BYTES - spare) // (2 * TILE_KEYS * head_dim * 2))
