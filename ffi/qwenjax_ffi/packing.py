"""MXFP8 weights in the order that the grouped GEMM kernels read: the pytree, and the way there and back.

Packing is done once, at load. `pack` and `unpack` are plain jnp, so that they run anywhere and shard over the leading
axes, and the round trip is exact to the bit. There are two layouts: "fragments", which the Hopper kernel reads
(`qwenjax_kernels.fragments` defines the bytes of a unit), and "block_scaled", for Blackwell
(`qwenjax_kernels.block_scaled`, its tiles are the units).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from qwenjax_ffi import blackwell_packing
from qwenjax_ffi.weights import MX_BLOCK, MXFP8Weight, Weight, select_layer
from qwenjax_kernels import fragments

RowOrder = Literal["plain", "gate_up"]
PackedLayout = Literal["fragments", "block_scaled"]

_UNIT_SCALE = 127  # 2^0, the scale of padding
_NAN_SCALE = 255
_WARPS, _GROUPS, _PAIRS, _HALVES = 4, 8, 4, 2  # of a warpgroup, a warp's 16 rows, a quad, a fragment
_STEPS = 2  # k16 steps of an MX block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMXFP8Weight:
    """An MXFP8 weight as the kernels read it.

    data: uint8 [..., row units, k units, 8448] of the layout "fragments", 16896 of "block_scaled".
    part_out, part_in: the last two axes of a part. A weight whose rows or columns are split over ranks is packed part
    by part, each rank its own, so that the split falls between units and a rank's share is a packed weight by itself.
    row_order: "plain", or "gate_up" where a gate row and its up row are neighbours, for the fused SwiGLU.
    """

    data: jax.Array
    part_out: int = field(metadata={"static": True})
    part_in: int = field(metadata={"static": True})
    row_order: RowOrder = field(metadata={"static": True})
    layout: PackedLayout = field(default="fragments", metadata={"static": True})

    @property
    def parts(self) -> tuple[int, int]:
        """Into how many parts the rows and the columns are split."""
        row_units, k_units, _ = packed_shape((self.part_out, self.part_in), self.row_order, self.layout)
        return self.data.shape[-3] // row_units, self.data.shape[-2] // k_units

    @property
    def out_features(self) -> int:
        return self.parts[0] * self.part_out

    @property
    def in_features(self) -> int:
        return self.parts[1] * self.part_in

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-3], self.out_features, self.in_features)

    @property
    def ndim(self) -> int:
        return self.data.ndim - 1

    def __getitem__(self, index: Any) -> PackedMXFP8Weight:
        """Part of a stack: `index` selects on the axes before the last two of the weight."""
        return replace(self, data=self.data[index])


AnyWeight = Weight | PackedMXFP8Weight


def packed_shape(shape: tuple[int, ...], row_order: RowOrder, layout: PackedLayout = "fragments") -> tuple[int, ...]:
    """The shape of `PackedMXFP8Weight.data` for a logical weight [..., out, in]; checks that it can be packed."""
    *lead, rows, k = shape
    if k % MX_BLOCK:
        raise ValueError(f"the contraction has {k} elements; MXFP8 needs a multiple of {MX_BLOCK}")
    gate_up = row_order == "gate_up"
    if gate_up and rows % 2:
        raise ValueError(f"gate and up have {rows} rows together; they must be as many each")
    if layout == "block_scaled":
        return (*lead, *blackwell_packing.weight_tiles_shape(rows, k, gate_up))
    if gate_up:
        rows = 2 * _round_up(rows // 2, fragments.UNIT_ROWS // 2)
    return (*lead, *fragments.units(rows, k), fragments.UNIT_BYTES)


def empty_packed(shape: tuple[int, ...], row_order: RowOrder, layout: PackedLayout = "fragments") -> PackedMXFP8Weight:
    """A packed weight of zero bytes for a logical weight [..., out, in], to be filled by `pack_into`."""
    data = jnp.zeros(packed_shape(shape, row_order, layout), jnp.uint8)
    return PackedMXFP8Weight(data, shape[-2], shape[-1], row_order, layout)


@functools.partial(jax.jit, static_argnames=("row_order", "layout"))
def pack(weight: MXFP8Weight, row_order: RowOrder = "plain", layout: PackedLayout = "fragments") -> PackedMXFP8Weight:
    """Packs a weight [..., out, in]; "gate_up" takes gate rows first, then up rows, as checkpoints are read.

    In fragments, a block that holds a NaN element gets the NaN scale (255): that kernel knows no NaN elements, and one
    NaN in a block makes NaN of every sum that the block enters anyhow. `unpack` gives back everything else to the bit.
    """
    data_shape = packed_shape(weight.shape, row_order, layout)
    if layout == "block_scaled":
        data = blackwell_packing.pack_weight(weight, row_order == "gate_up")
        return PackedMXFP8Weight(data, weight.shape[-2], weight.shape[-1], row_order, layout)
    lead, (row_units, k_units) = data_shape[:-3], data_shape[-3:-1]
    elements = jax.lax.bitcast_convert_type(weight.elements, jnp.uint8)
    blocks = elements.reshape(*elements.shape[:-1], -1, MX_BLOCK)
    has_nan = jnp.any((blocks & 0x7F) == 0x7F, axis=-1)
    scales = jnp.where(has_nan, jnp.uint8(_NAN_SCALE), weight.scales)

    elements = _to_fragment_rows(elements, row_order, k_units * fragments.UNIT_K, 0)
    scales = _to_fragment_rows(scales, row_order, k_units * fragments.UNIT_VECTORS, _UNIT_SCALE)

    # [..., unit, warp, half, group, k unit, vector, step, register, pair, element]
    split = elements.reshape(*elements.shape[:-1], k_units, fragments.UNIT_VECTORS, _STEPS, 2, _PAIRS, 2)
    words = _spread(split[..., 0, :, :], split[..., 1, :, :])
    n = len(lead)
    unit, warp, half, group, k_unit, vector, step, pair, element = range(n, n + 9)
    order = (*range(n), unit, k_unit, vector, warp, group, pair, step, half, element)
    element_bytes = jax.lax.bitcast_convert_type(words.transpose(order), jnp.uint8)
    element_bytes = element_bytes.reshape(*lead, row_units, k_units, fragments.UNIT_ELEMENT_BYTES)

    scales = scales.reshape(*scales.shape[:-1], k_units, fragments.UNIT_VECTORS)
    scale_bytes = scales.transpose((*range(n), unit, k_unit, warp, group, half, vector))
    scale_bytes = scale_bytes.reshape(*lead, row_units, k_units, -1)
    data = jnp.concatenate([element_bytes, scale_bytes], axis=-1)
    return PackedMXFP8Weight(data, weight.shape[-2], weight.shape[-1], row_order)


@jax.jit
def unpack(packed: PackedMXFP8Weight) -> MXFP8Weight:
    """The logical weight of a packed one. Raises ValueError for several parts: each rank unpacks its own."""
    if packed.parts != (1, 1):
        raise ValueError(
            f"the weight is packed in {packed.parts} parts, one for each rank; unpack them under shard_map"
        )
    if packed.layout == "block_scaled":
        return blackwell_packing.unpack_weight(
            packed.data, packed.part_out, packed.part_in, packed.row_order == "gate_up"
        )
    *lead, row_units, k_units, _ = packed.data.shape
    n = len(lead)
    element_bytes, scale_bytes = jnp.split(packed.data, [fragments.UNIT_ELEMENT_BYTES], axis=-1)

    # [..., unit, k unit, vector, warp, group, pair, step, half, element] back to the order of `pack`.
    words = jax.lax.bitcast_convert_type(
        element_bytes.reshape(
            *lead, row_units, k_units, fragments.UNIT_VECTORS, _WARPS, _GROUPS, _PAIRS, _STEPS, _HALVES, 2, 2
        ),
        jnp.uint16,
    )
    unit, k_unit, vector, warp, group, pair, step, half, element = range(n, n + 9)
    words = words.transpose((*range(n), unit, warp, half, group, k_unit, vector, step, pair, element))
    elements = jnp.stack(_gather_bits(words), axis=-3)
    elements = elements.reshape(*elements.shape[: n + 4], k_units * fragments.UNIT_K)

    scales = scale_bytes.reshape(*lead, row_units, k_units, _WARPS, _GROUPS, _HALVES, fragments.UNIT_VECTORS)
    unit, k_unit, warp, group, half, vector = range(n, n + 6)
    scales = scales.transpose((*range(n), unit, warp, half, group, k_unit, vector))
    scales = scales.reshape(*scales.shape[: n + 4], k_units * fragments.UNIT_VECTORS)

    elements = _from_fragment_rows(elements, packed, packed.part_in)
    scales = _from_fragment_rows(scales, packed, packed.part_in // MX_BLOCK)
    return MXFP8Weight(jax.lax.bitcast_convert_type(elements, jnp.float8_e4m3fn), scales)


@functools.partial(jax.jit, donate_argnames="packed")
def pack_into(packed: PackedMXFP8Weight, weight: MXFP8Weight, layer: jax.Array) -> PackedMXFP8Weight:
    """Packs one layer's weight, [groups, out, in] or [out, in], into a stack [layers, ...], which is donated.

    layer: int32 scalar. Filling an `empty_packed` stack so, as the layers are read, never holds more than one layer
    beside the stack: groups are packed one after the other, since packing takes twice the memory of what it packs.
    """
    if weight.shape != packed.shape[1:]:
        raise ValueError(f"a layer of shape {weight.shape} does not fit a stack of shape {packed.shape}")

    def pack_group(group: jax.Array, data: jax.Array) -> jax.Array:
        one = pack(select_layer(weight, group), packed.row_order, packed.layout).data
        return jax.lax.dynamic_update_slice(data, one[None, None], (layer, group, 0, 0, 0))

    if weight.ndim == 2:
        one = pack(weight, packed.row_order, packed.layout).data
        return replace(packed, data=jax.lax.dynamic_update_index_in_dim(packed.data, one, layer, 0))
    return replace(packed, data=jax.lax.fori_loop(0, weight.shape[0], pack_group, packed.data))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pad(x: jax.Array, rows: int, columns: int, fill: int) -> jax.Array:
    widths = [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, columns - x.shape[-1])]
    return jnp.pad(x, widths, constant_values=fill)


def _to_fragment_rows(x: jax.Array, row_order: RowOrder, columns: int, fill: int) -> jax.Array:
    """[..., out, columns] as [..., unit, warp, half, group, columns], padded: `plain_row` and `gate_up_row`."""
    *lead, rows, _ = x.shape
    n = len(lead)
    if row_order == "gate_up":
        width = _round_up(rows // 2, fragments.UNIT_ROWS // 2)
        x = jnp.stack([_pad(part, width, columns, fill) for part in jnp.split(x, 2, axis=-2)], axis=n)
        x = x.reshape(*lead, _HALVES, -1, _WARPS, _GROUPS, columns)
        return x.transpose((*range(n), n + 1, n + 2, n, n + 3, n + 4))
    x = _pad(x, _round_up(rows, fragments.UNIT_ROWS), columns, fill)
    x = x.reshape(*lead, -1, _WARPS, _GROUPS, _HALVES, columns)
    return x.transpose((*range(n), n, n + 1, n + 3, n + 2, n + 4))


def _from_fragment_rows(x: jax.Array, packed: PackedMXFP8Weight, columns: int) -> jax.Array:
    """The way back of `_to_fragment_rows`, without the padding."""
    *lead, _, _, _, _, padded_columns = x.shape
    n = len(lead)
    if packed.row_order == "gate_up":
        x = x.transpose((*range(n), n + 2, n, n + 1, n + 3, n + 4)).reshape(*lead, _HALVES, -1, padded_columns)
        x = x[..., : packed.part_out // 2, :columns]
        return x.reshape(*lead, packed.part_out, columns)
    x = x.transpose((*range(n), n, n + 1, n + 3, n + 2, n + 4)).reshape(*lead, -1, padded_columns)
    return x[..., : packed.part_out, :columns]


def _spread(first: jax.Array, second: jax.Array) -> jax.Array:
    """Two e4m3 bytes as the 16 bits of `qwenjax_kernels.fragments`."""
    p, q = first.astype(jnp.uint16), second.astype(jnp.uint16)
    p_bits = (p & 0x80) << 8 | (p & 0x7F) << 4
    q_bits = (q & 0x80) << 4 | (q & 0x70) << 8 | (q & 0x0F)
    return p_bits | q_bits


def _gather_bits(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two bytes of each word of `_spread`."""
    first = (words >> 8 & 0x80) | (words >> 4 & 0x7F)
    second = (words >> 4 & 0x80) | (words >> 8 & 0x70) | (words & 0x0F)
    return first.astype(jnp.uint8), second.astype(jnp.uint8)
