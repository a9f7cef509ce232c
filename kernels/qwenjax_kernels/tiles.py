"""The tile choices of the Hopper grouped GEMM and what follows from them: pure Python, importable without CuTeDSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwenjax_kernels import fragments

Epilogue = Literal["plain", "swiglu", "row_weight"]

WARPGROUP = 128
SHARED_BYTES = 227 * 1024  # of one block on sm_90
REGISTERS = 65536  # of one multiprocessor


@dataclass(frozen=True)
class Tile:
    """One tile choice.

    rows: rows of a group in a tile, wgmma's N (a multiple of 8 up to 256).
    warpgroups: consumer warpgroups; units: 64-row weight units a warpgroup. tile_m is 64 times their product.
    """

    rows: int
    warpgroups: int = 2
    units: int = 1

    @property
    def m_units(self) -> int:
        return self.warpgroups * self.units

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.warpgroups)

    @property
    def weight_stage_bytes(self) -> int:
        return self.m_units * fragments.UNIT_BYTES

    @property
    def row_stage_bytes(self) -> int:
        return self.rows * fragments.UNIT_K * 2

    def stages(self, num_groups: int) -> int:
        """As many as fit beside the group tables: the more bytes in flight, the closer to the memory's rate."""
        spare = 1024 + 8 * num_groups + 512  # alignment, the two tables, barriers
        budget = SHARED_BYTES - spare
        return min(12, budget // (self.weight_stage_bytes + self.row_stage_bytes))

    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producers and of the consumers.

        A block starts with the largest multiple of 8 that all its threads can have, and setmaxnreg only moves those
        about: a sum above them leaves the last warpgroup waiting for ever.
        """
        producer = 40 if self.rows <= 32 else 56
        consumer = (self.register_pool - producer) // self.warpgroups // 8 * 8
        return producer, min(240, consumer)

    @property
    def register_pool(self) -> int:
        """Registers a thread summed over the warpgroups, as the block is launched."""
        return min(255, REGISTERS // self.threads) // 8 * 8 * (1 + self.warpgroups)
