"""MXFP8: e4m3 elements, one power-of-two scale per 32 of them (OCP Microscaling Formats v1.0, section 5.2).

The scale is the smallest 2^k with amax / 2^k <= 448, so that no element clips. OCP's own rule takes
floor(log2(amax)) - 8 for k and clips what lies between 448 and 512: whenever the largest weight of a block falls
there, it, the most important one, is off by up to 12.5%. Measured on N(0, 1), relative RMSE: 0.0265 with this
rule, 0.0294 with OCP's (tests/qwenjax/quant/test_mxfp8.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax.quant.bits import (
    E4M3,
    INFINITY,
    MAGNITUDE,
    Array,
    bitcast,
    decode,
    namespace,
    pack_float32,
    round_to,
    split,
)
from qwenjax.quant.format import Format, check_multiple, checked_bits
from qwenjax_ffi.weights import MIN_EXACT_SCALE, MX_BLOCK, MXFP8Weight

NAN_SCALE = 0xFF  # OCP MX v1.0, section 5.4.1


def scale_bytes(amax_bits: Array) -> Array:
    """UE8M0 bytes, int32 and before the clamp, of block maxima given as float32 bits: smallest 2^k >= amax / 448.

    448 is 1.75 * 2^8: k is amax's exponent less 8, and one more where its mantissa is above 1.75.
    """
    xp = namespace(amax_bits)
    above = (amax_bits & 0x7FFFFF) > 0x600000
    return (amax_bits >> 23).astype(xp.int32) - 8 + above.astype(xp.int32)


def encode_blocks(bits: Array) -> tuple[Array, Array]:
    """Element codes uint8 [..., 32] and UE8M0 bytes uint8 [...] of blocks of float32 bits [..., 32]."""
    xp = namespace(bits)
    amax = (bits & MAGNITUDE).max(-1)
    # Under 2^-117 an element times its scale would be subnormal in bf16: such scales are clamped up.
    scale = xp.maximum(scale_bytes(amax), MIN_EXACT_SCALE)
    mantissa, exponent = split(bits)
    codes = round_to(E4M3, mantissa, exponent - (scale - 127)[..., None])
    # 256 * 2^120 would be infinite: beyond 248 * 2^120, round down to 240.
    codes = xp.minimum(codes, xp.where(scale == 127 + 120, xp.uint32(0x77), xp.uint32(0x7E))[..., None])
    codes = codes | (bits >> 24) & E4M3.sign_bit
    scale = xp.where(amax >= INFINITY, NAN_SCALE, scale)
    return codes.astype(xp.uint8), scale.astype(xp.uint8)


class MXFP8(Format):
    """e4m3fn elements [..., in] and uint8 UE8M0 scales [..., in / 32].

    Scales are at least 2^-117, so that every element decodes exactly to a normal bfloat16; blocks of zeros get
    that scale too. No element is 0x7f or 0xff (NaN) and no scale 0xff, save for non-finite input under JAX.
    """

    name = "mxfp8"
    bytes_per_element = 1 + 1 / MX_BLOCK

    def quantise(self, array: Array) -> tuple[Array, Array]:
        check_multiple(array, MX_BLOCK, self.name)
        blocks = checked_bits(array).reshape(*array.shape[:-1], array.shape[-1] // MX_BLOCK, MX_BLOCK)
        codes, scales = encode_blocks(blocks)
        return bitcast(codes.reshape(array.shape), E4M3.dtype), scales

    def dequantise(self, elements: Array, *scales: Array) -> Array:
        xp = namespace(elements)
        (scale,) = scales
        codes = bitcast(elements, xp.uint8).astype(xp.uint32)
        blocks = codes.reshape(*scale.shape, MX_BLOCK)
        mantissa, exponent = decode(E4M3, blocks)
        magnitude = pack_float32(mantissa, exponent + (scale.astype(xp.int32) - 127)[..., None])
        nan = (blocks & 0x7F == 0x7F) | (scale == NAN_SCALE)[..., None]
        bits = xp.where(nan, xp.uint32(0x7FC00000), magnitude | (blocks & E4M3.sign_bit) << 24)
        return bitcast(bits, xp.float32).reshape(elements.shape)


@jax.jit
def quantise_weight(weight: jax.Array) -> MXFP8Weight:
    """An array [..., out, in] as the parameter that every matmul in qwenjax_ffi takes."""
    elements, scales = MXFP8().quantise(jnp.asarray(weight))
    return MXFP8Weight(elements, scales)
