"""The tile choices of the Blackwell grouped GEMM and what follows from them: pure Python, without CuTeDSL."""

from __future__ import annotations

from dataclasses import dataclass

from qwenjax_kernels import block_scaled

SHARED_BYTES = 227 * 1024  # of one block on sm_100
TENSOR_MEMORY_COLUMNS = 512
SCALE_COLUMNS = 4  # of a 128 x 4 tile of scales in tensor memory

TILE_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Tile:
    """One tile choice.

    rows: rows of a group in a tile, the N of the instruction. units: 128-row weight tiles, each with its accumulator;
    two for SwiGLU, gate and up.
    """

    rows: int
    units: int = 1

    def __post_init__(self) -> None:
        if self.rows not in TILE_ROWS or self.units not in (1, 2):
            raise ValueError(f"{self} is no tile: rows are one of {TILE_ROWS}, units 1 or 2")

    @property
    def weight_bytes(self) -> int:
        """Of one stage."""
        return self.units * block_scaled.tile_bytes(block_scaled.WEIGHT_ROWS)

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + block_scaled.tile_bytes(self.rows)

    def stages(self, num_groups: int) -> int:
        """As many as fit beside the group tables."""
        spare = 2 * 1024 + 8 * num_groups + 1024  # alignment, the two tables, barriers and records
        return min(12, (SHARED_BYTES - spare) // self.stage_bytes)

    @property
    def scale_columns(self) -> int:
        return (self.units + 1) * SCALE_COLUMNS

    @property
    def accumulators(self) -> int:
        """Two where they fit, so that a tile is multiplied while the one before is stored."""
        return min(2, (TENSOR_MEMORY_COLUMNS - self.scale_columns) // (self.units * self.rows))

    @property
    def columns(self) -> int:
        """Columns of tensor memory to allocate: a power of two."""
        used = self.accumulators * self.units * self.rows + self.scale_columns
        return 1 << (used - 1).bit_length()


def choose_tile_rows(rows: int, num_groups: int) -> int:
    """The smallest tile that the mean group fits in. Not measured: no Blackwell GPU has run this.

    A layer's two matmuls share it, since the first writes its result in tiles of the second.
    """
    mean = rows / num_groups
    return next((size for size in TILE_ROWS if mean <= size), TILE_ROWS[-1])
