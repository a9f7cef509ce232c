"""Weights as the operations take them: plain arrays, or MXFP8 elements with their block scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

MX_BLOCK = 32  # elements that share one scale, along the contraction (last) axis: OCP MX v1.0, section 5.2
MIN_EXACT_SCALE = 127 - 117  # smallest UE8M0 byte for which every e4m3 element decodes exactly to a normal bf16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MXFP8Weight:
    """A weight in MXFP8 (OCP Microscaling v1.0): value = element * 2^(scale - 127).

    elements: float8_e4m3fn [..., out, in]; the contraction axis is last and a multiple of 32.
    scales: uint8 [..., out, in / 32], UE8M0 bytes.
    """

    elements: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def ndim(self) -> int:
        return self.elements.ndim

    def __getitem__(self, index: Any) -> MXFP8Weight:
        """Part of a stack: `index` selects on the axes before the last, alike in elements and scales."""
        return MXFP8Weight(self.elements[index], self.scales[index])


Weight = jax.Array | MXFP8Weight
AnyPytree = TypeVar("AnyPytree")


def select_layer(weight: AnyPytree, layer: jax.Array | int | None) -> AnyPytree:
    """One layer of a stacked weight [layers, ...], of any kind; the weight itself where `layer` is None."""
    if layer is None:
        return weight
    index = jnp.asarray(layer, jnp.int32).reshape(())
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), weight)


def decode_scales(scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """UE8M0 bytes as 2^(byte - 127), built from exponent bits so that no rounding or flush can happen.

    0xff is NaN, as OCP MX defines it. Byte 0, 2^-127, is a float32 subnormal, which backends that flush those read as
    zero; the quantiser writes nothing under 2^-117.
    """
    bits = scales.astype(jnp.uint32)
    # Byte 0 is 2^-127, a float32 subnormal: mantissa bit 22. Byte 255 is NaN in the OCP specification.
    exponent = jnp.where(bits == 0, jnp.uint32(1 << 22), bits << 23)
    exponent = jnp.where(bits == 255, jnp.uint32(0x7FC00000), exponent)
    return jax.lax.bitcast_convert_type(exponent, jnp.float32).astype(dtype)


def decode(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """The weight as a plain array of `dtype`, [..., out, in]. Plain arrays are cast."""
    if not isinstance(weight, MXFP8Weight):
        return weight.astype(dtype)
    elements = weight.elements.astype(jnp.float32)
    blocks = elements.reshape(*elements.shape[:-1], elements.shape[-1] // MX_BLOCK, MX_BLOCK)
    values = blocks * decode_scales(weight.scales, jnp.float32)[..., None]
    return values.reshape(elements.shape).astype(dtype)
