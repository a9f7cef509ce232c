"""MXFP8 weights and rows in the tiles that the Blackwell kernels read, there and back.

`qwenjax_kernels.block_scaled` defines the bytes of a tile. All of this is plain jnp and runs anywhere. Weights keep
every bit (`packing` calls these functions for its layout "block_scaled"); rows are quantised as
`activations.quantise_activations` does for "mxfp8".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.activations import quantise_mxfp8
from qwenjax_ffi.weights import MX_BLOCK, MXFP8Weight, decode
from qwenjax_kernels import block_scaled
from qwenjax_kernels.block_scaled import BLOCKS, MIN_SCALE, SCALE_TILE_ROWS, TILE_K, WEIGHT_ROWS

_UNIT_SCALE = 127  # 2^0, the scale of a weight's padding
_LINES, _CHUNKS, _CHUNK = 8, 8, 16  # of the 128-byte swizzle: eight lines of eight chunks of 16 bytes
_SCALE_LINES = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaledRows:
    """Rows in MXFP8, sorted by group and cut into tiles of one group each, as the Blackwell kernels read them.

    data: uint8 [row tiles, k tiles, 128 * tile_rows + 512], see `qwenjax_kernels.block_scaled`. How many tiles are in
    use follows from the group sizes; the others hold anything.
    rows, features: the logical shape. dtype: of the values before they were quantised.
    """

    data: jax.Array
    rows: int = field(metadata={"static": True})
    features: int = field(metadata={"static": True})
    tile_rows: int = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.features


def weight_tiles_shape(out_features: int, in_features: int, gate_up: bool) -> tuple[int, int, int]:
    """[row tiles, k tiles, 16896] of a weight [out, in]."""
    tiles = block_scaled.weight_row_tiles(out_features // 2 if gate_up else out_features, gate_up)
    return tiles, block_scaled.k_tiles(in_features), block_scaled.tile_bytes(WEIGHT_ROWS)


def rows_shape(rows: int, features: int, num_groups: int, tile_rows: int) -> tuple[int, int, int]:
    """The shape of `BlockScaledRows.data` with room for any split of the rows over the groups."""
    if features % MX_BLOCK:
        raise ValueError(f"the rows have {features} features; MXFP8 needs a multiple of {MX_BLOCK}")
    tiles = block_scaled.max_row_tiles(rows, num_groups, tile_rows)
    return tiles, block_scaled.k_tiles(features), block_scaled.tile_bytes(tile_rows)


def pack_weight(weight: MXFP8Weight, gate_up: bool = False) -> jax.Array:
    """uint8 [..., row tiles, k tiles, 16896] of a weight [..., out, in]; gate_up: gate rows first, then up rows."""
    elements = jax.lax.bitcast_convert_type(weight.elements, jnp.uint8)
    elements = _to_row_tiles(elements, gate_up, TILE_K, 0)
    return _to_tiles(elements, _to_row_tiles(weight.scales, gate_up, BLOCKS, _UNIT_SCALE))


def unpack_weight(data: jax.Array, out_features: int, in_features: int, gate_up: bool = False) -> MXFP8Weight:
    """The logical weight [..., out, in] of its tiles."""
    elements, scales = _from_tiles(data, WEIGHT_ROWS)
    elements = _from_row_tiles(elements, gate_up, out_features, in_features)
    scales = _from_row_tiles(scales, gate_up, out_features, in_features // MX_BLOCK)
    return MXFP8Weight(jax.lax.bitcast_convert_type(elements, jnp.float8_e4m3fn), scales)


def row_places(group_sizes: jax.Array, rows: int, tile_rows: int) -> jax.Array:
    """The place of each row, tile * tile_rows + slot, as int32 [rows]; past all places for the rows of no group."""
    tiles_end = jnp.cumsum(-(-group_sizes // tile_rows))
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    own = jnp.minimum(group, group_sizes.shape[0] - 1)
    in_group = row - (ends[own] - group_sizes[own])
    place = (tiles_end[own] - -(-group_sizes[own] // tile_rows)) * tile_rows + in_group
    past = block_scaled.max_row_tiles(rows, group_sizes.shape[0], tile_rows) * tile_rows
    return jnp.where(group < group_sizes.shape[0], place, past)


@functools.partial(jax.jit, static_argnames="tile_rows")
def pack_rows(x: jax.Array, group_sizes: jax.Array, tile_rows: int) -> BlockScaledRows:
    """Quantises rows x [rows, features] and puts them into tiles: what the kernels that write such rows must give.

    Rows that fill up a tile, and tiles that are not in use, are zeros here.
    """
    rows, features = x.shape
    tiles, tiles_k, _ = rows_shape(rows, features, group_sizes.shape[0], tile_rows)
    quantised = quantise_mxfp8(x)
    places = row_places(group_sizes, rows, tile_rows)

    def placed(values: jax.Array, columns: int, fill: int) -> jax.Array:
        padded = jnp.full((tiles * tile_rows, tiles_k * columns), fill, jnp.uint8)
        padded = padded.at[places, : values.shape[1]].set(values, mode="drop")
        return padded.reshape(tiles, tile_rows, tiles_k, columns)

    elements = placed(jax.lax.bitcast_convert_type(quantised.elements, jnp.uint8), TILE_K, 0)
    scales = placed(quantised.scales, BLOCKS, MIN_SCALE)
    return BlockScaledRows(_to_tiles(elements, scales), rows, features, tile_rows, x.dtype)


@jax.jit
def unpack_rows(packed: BlockScaledRows, group_sizes: jax.Array) -> jax.Array:
    """The values of the rows, [rows, features] of the dtype they had; zeros for the rows of no group."""
    elements, scales = _from_tiles(packed.data, packed.tile_rows)
    places = row_places(group_sizes, packed.rows, packed.tile_rows)

    def taken(values: jax.Array, columns: int) -> jax.Array:
        flat = values.reshape(values.shape[0] * values.shape[1], -1)
        return flat.at[places, :columns].get(mode="fill", fill_value=0)

    elements = jax.lax.bitcast_convert_type(taken(elements, packed.features), jnp.float8_e4m3fn)
    values = decode(MXFP8Weight(elements, taken(scales, packed.features // MX_BLOCK)), packed.dtype)
    return jnp.where((places < packed.data.shape[0] * packed.tile_rows)[:, None], values, 0)


def _swizzled(x: jax.Array) -> jax.Array:
    """Exchanges the chunks of [..., line, chunk, 16] within their lines; its own inverse."""
    line = jnp.arange(_LINES)[:, None]
    return x[..., line, line ^ jnp.arange(_CHUNKS), :]


def _to_tiles(elements: jax.Array, scales: jax.Array) -> jax.Array:
    """uint8 [..., rows, k tiles, 128] and [..., rows, k tiles, 4] as [..., k tiles, tile bytes]."""
    *lead, rows, k_tiles, _ = elements.shape
    elements = jnp.moveaxis(elements, -3, -2).reshape(*lead, k_tiles, rows // _LINES, _LINES, _CHUNKS, _CHUNK)
    elements = _swizzled(elements).reshape(*lead, k_tiles, rows * TILE_K)
    scales = jnp.moveaxis(scales, -3, -2)
    scales = jnp.pad(scales, [(0, 0)] * (scales.ndim - 2) + [(0, SCALE_TILE_ROWS - rows), (0, 0)])
    scales = scales.reshape(*lead, k_tiles, -1, _SCALE_LINES, BLOCKS)
    scales = jnp.moveaxis(scales, -3, -2).reshape(*lead, k_tiles, -1)
    return jnp.concatenate([elements, scales], axis=-1)


def _from_tiles(data: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The way back: [..., rows, k tiles * 128] and [..., rows, k tiles * 4]."""
    *lead, k_tiles, _ = data.shape
    elements, scales = jnp.split(data, [rows * TILE_K], axis=-1)
    elements = _swizzled(elements.reshape(*lead, k_tiles, rows // _LINES, _LINES, _CHUNKS, _CHUNK))
    elements = jnp.moveaxis(elements.reshape(*lead, k_tiles, rows, TILE_K), -3, -2)
    scales = jnp.moveaxis(scales.reshape(*lead, k_tiles, _SCALE_LINES, -1, BLOCKS), -3, -2)
    scales = jnp.moveaxis(scales.reshape(*lead, k_tiles, SCALE_TILE_ROWS, BLOCKS)[..., :rows, :], -3, -2)
    return elements.reshape(*lead, rows, -1), scales.reshape(*lead, rows, -1)


def _to_row_tiles(x: jax.Array, gate_up: bool, columns: int, fill: int) -> jax.Array:
    """[..., out, columns in all] as [..., row tile, 128, k tile, columns], padded: `block_scaled.weight_row`."""
    *lead, rows, width = x.shape
    parts = jnp.split(x, 2, axis=-2) if gate_up else [x]
    pad = [(0, 0)] * len(lead) + [(0, -(rows // len(parts)) % WEIGHT_ROWS), (0, -width % columns)]
    tiles = [
        jnp.pad(part, pad, constant_values=fill).reshape(*lead, -1, WEIGHT_ROWS, -(-width // columns), columns)
        for part in parts
    ]
    taking_turns = jnp.stack(tiles, axis=len(lead) + 1)
    return taking_turns.reshape(*lead, -1, *taking_turns.shape[-3:])


def _from_row_tiles(x: jax.Array, gate_up: bool, rows: int, columns: int) -> jax.Array:
    """The way back of `_to_row_tiles`, without the padding: [..., rows, columns]."""
    *lead, _, _, width = x.shape
    parts = 2 if gate_up else 1
    x = jnp.moveaxis(x.reshape(*lead, -1, parts, WEIGHT_ROWS, width), -3, -4)
    x = x.reshape(*lead, parts, -1, width)[..., : rows // parts, :columns]
    return x.reshape(*lead, rows, columns)
