"""The 4-bit formats, for comparison: MXFP4 (OCP MX v1.0) and NVFP4 (NVIDIA's two-level scaling).

Elements are e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives), kept as ml_dtypes.float4_e2m1fn: one byte each in
memory, two a byte in a checkpoint.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.quant.bits import (
    E2M1,
    E4M3,
    INFINITY,
    MAGNITUDE,
    Array,
    bitcast,
    decode,
    divide,
    divide_exactly,
    namespace,
    normalise,
    pack_float32,
    round_to,
    split,
)
from qwenjax.quant.format import Format, check_multiple, checked_bits
from qwenjax.quant.mxfp8 import NAN_SCALE
from qwenjax_ffi.weights import MIN_EXACT_SCALE

NAN_BITS = 0x7FC00000
MIN_GLOBAL_BITS = (127 - 100) << 23  # keeps e2m1 * e4m3 * global (down to 0.5 * 2^-9) normal
MAX_GLOBAL_BITS = 0x79C30C30  # the largest float32 whose product with 448 * 6 is finite


class MXFP4(Format):
    """e2m1 elements [..., in] and uint8 UE8M0 scales [..., in / 32].

    The scale is the smallest 2^k with amax / 2^k <= 6, so that nothing clips, as in our MXFP8. Here OCP's floor does as
    well: relative RMSE on N(0, 1) 0.1150, this rule 0.1154.
    """

    name = "mxfp4"
    block = 32
    bytes_per_element = 0.5 + 1 / 32

    def quantise(self, array: Array) -> tuple[Array, Array]:
        check_multiple(array, self.block, self.name)
        xp = namespace(array)
        bits = checked_bits(array).reshape(*array.shape[:-1], array.shape[-1] // self.block, self.block)
        amax = (bits & MAGNITUDE).max(-1)
        # 6 is 1.5 * 2^2.
        above = (amax & 0x7FFFFF) > 0x400000
        scale = xp.maximum((amax >> 23).astype(xp.int32) - 2 + above.astype(xp.int32), MIN_EXACT_SCALE)
        mantissa, exponent = split(bits)
        codes = round_to(E2M1, mantissa, exponent - (scale - 127)[..., None])
        # 4 * 2^126 would be infinite: beyond 3.5 * 2^126, round down to 3.
        codes = xp.minimum(codes, xp.where(scale == 127 + 126, xp.uint32(0x5), xp.uint32(0x7))[..., None])
        codes = codes | (bits >> 28) & E2M1.sign_bit
        scale = xp.where(amax >= INFINITY, NAN_SCALE, scale)
        return to_e2m1(codes.reshape(array.shape)), scale.astype(xp.uint8)

    def dequantise(self, elements: Array, *scales: Array) -> Array:
        xp = namespace(elements)
        (scale,) = scales
        codes = from_e2m1(elements).reshape(*scale.shape, self.block)
        mantissa, exponent = decode(E2M1, codes)
        magnitude = pack_float32(mantissa, exponent + (scale.astype(xp.int32) - 127)[..., None])
        bits = magnitude | (codes & E2M1.sign_bit) << 28
        bits = xp.where((scale == NAN_SCALE)[..., None], xp.uint32(NAN_BITS), bits)
        return bitcast(bits, xp.float32).reshape(elements.shape)


class NVFP4(Format):
    """e2m1 elements [..., in], e4m3fn scales [..., in / 16] and one float32 scale for the whole array, [].

    value = element * float32(block scale * global scale); global = amax / (448 * 6), block scale =
    (block amax / (6 * global)) rounded to e4m3, at least its smallest number. NVIDIA, "Introducing NVFP4" (2025).
    """

    name = "nvfp4"
    block = 16
    bytes_per_element = 0.5 + 1 / 16

    def quantise(self, array: Array) -> tuple[Array, Array, Array]:
        check_multiple(array, self.block, self.name)
        xp = namespace(array)
        bits = checked_bits(array).reshape(*array.shape[:-1], array.shape[-1] // self.block, self.block)
        amax = (bits & MAGNITUDE).max(-1)
        peak = amax.max()
        whole = divide_exactly(*normalise(*split(peak)), 448 * 6)
        whole = xp.clip(whole, xp.uint32(MIN_GLOBAL_BITS), xp.uint32(MAX_GLOBAL_BITS))
        mantissa, exponent = split(whole)
        six = normalise(*split(pack_float32(mantissa * 3, exponent + 1)))
        scale = xp.maximum(round_to(E4M3, *divide(normalise(*split(amax)), six)), xp.uint32(1))
        each = _times_global(scale, whole)[..., None]
        quotient = divide(normalise(*split(bits)), split(each))
        codes = round_to(E2M1, *quotient) | (bits >> 28) & E2M1.sign_bit
        scale = xp.where(amax >= INFINITY, xp.uint32(0x7F), scale)
        elements = to_e2m1(codes.reshape(array.shape))
        return elements, bitcast(scale.astype(xp.uint8), E4M3.dtype), bitcast(whole, xp.float32)

    def dequantise(self, elements: Array, *scales: Array) -> Array:
        xp = namespace(elements)
        scale = bitcast(scales[0], xp.uint8).astype(xp.uint32)
        codes = from_e2m1(elements).reshape(*scale.shape, self.block)
        each = _times_global(scale, bitcast(scales[1], xp.uint32))[..., None]
        mantissa, exponent = decode(E2M1, codes)
        scale_mantissa, scale_exponent = split(each)
        magnitude = pack_float32(mantissa * scale_mantissa, exponent - 23 + scale_exponent)
        bits = magnitude | (codes & E2M1.sign_bit) << 28
        bits = xp.where((scale == 0x7F)[..., None], xp.uint32(NAN_BITS), bits)
        return bitcast(bits, xp.float32).reshape(elements.shape)


def _times_global(scale: Array, whole_bits: Array) -> Array:
    """Float32 bits of e4m3 codes (uint32) times the float32 global scale (bits)."""
    mantissa, exponent = decode(E4M3, scale)
    whole_mantissa, whole_exponent = split(whole_bits)
    return pack_float32(mantissa * whole_mantissa, exponent - 23 + whole_exponent)


def to_e2m1(codes: Array) -> Array:
    """4-bit codes (any integer type) as float4_e2m1fn."""
    if isinstance(codes, jax.Array):
        return bitcast(codes.astype(jnp.uint4), jnp.float4_e2m1fn)
    return codes.astype(np.uint8).view(E2M1.dtype)


def from_e2m1(elements: Array) -> Array:
    """float4_e2m1fn as 4-bit codes, uint32."""
    if isinstance(elements, jax.Array):
        return bitcast(elements, jnp.uint4).astype(jnp.uint32)
    return elements.view(np.uint8).astype(np.uint32) & 0xF
