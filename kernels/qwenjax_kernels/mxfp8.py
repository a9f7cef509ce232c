"""Rounding to MXFP8 on the device: the rule of `block_scaled.scale_byte` in a kernel's integers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from qwenjax_kernels import block_scaled, device


@cute.jit
def scale_byte(amax_bits: Int32) -> Int32:
    """`block_scaled.scale_byte` of the bits of a float32 magnitude."""
    carry = Int32(1) if (amax_bits & 0x7FFFFF) > block_scaled.E4M3_MAX_MANTISSA else Int32(0)
    exponent = (amax_bits >> 23) + carry - block_scaled.E4M3_MAX_EXPONENT
    scale = cutlass.min(cutlass.max(exponent, block_scaled.MIN_SCALE), block_scaled.MAX_SCALE)
    return Int32(block_scaled.NAN_SCALE) if amax_bits >= 0x7F800000 else scale


@cute.jit
def scale_of(byte: Int32) -> Float32:
    """The power of two that a scale byte stands for, and NaN for the NaN scale."""
    bits = Int32(0x7FC00000) if byte == block_scaled.NAN_SCALE else byte << 23
    return device.float_of(bits)


@cute.jit
def inverse_scale(scale: Int32) -> Float32:
    """2^(127 - scale), exact. What it is for the NaN scale does not matter."""
    return device.float_of((Int32(254) - scale) << 23)
