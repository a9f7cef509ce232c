"""Rows that are sorted by group, cut into blocks of one group each: what a loop of plain matmuls runs over."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A block of rows is one small matmul. Larger blocks copy an expert's weights less often, smaller ones waste less on the
# last, partly filled block of each expert.
_MAX_BLOCK_ROWS = 128


class Block(NamedTuple):
    """rows: int32 [size], from `start` on, kept within the array; inside: bool [size], which are of the group."""

    group: jax.Array
    start: jax.Array
    rows: jax.Array
    inside: jax.Array


class RowBlocks:
    """The blocks of `num_rows` rows in groups of `group_sizes` (int32 [groups], on device).

    size: rows of a block, by shape alone. count: int32, how many blocks there are: as many as the rows fill and the
    groups leave partly filled.
    """

    def __init__(self, group_sizes: jax.Array, num_rows: int) -> None:
        self.size = 1
        while self.size < min(_MAX_BLOCK_ROWS, num_rows / group_sizes.shape[0]):
            self.size *= 2
        self._group_sizes, self._num_rows = group_sizes, num_rows
        self._ends = jnp.cumsum(group_sizes)
        self._blocks_end = jnp.cumsum((group_sizes + self.size - 1) // self.size)
        self.count = self._blocks_end[-1]

    def at(self, index: jax.Array) -> Block:
        """Block `index` (int32 scalar) of `count`."""
        group = jnp.searchsorted(self._blocks_end, index, side="right").astype(jnp.int32)
        first_block = jnp.where(group > 0, self._blocks_end[group - 1], 0)
        start = self._ends[group] - self._group_sizes[group] + (index - first_block) * self.size
        rows = start + jnp.arange(self.size, dtype=jnp.int32)
        return Block(group, start, jnp.minimum(rows, self._num_rows - 1), rows < self._ends[group])
