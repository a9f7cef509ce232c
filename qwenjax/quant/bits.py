"""Floating point by integer code, written once for numpy and jax.numpy: `xp` is the array's namespace.

Every function is exact or rounds once, and none touches a float unit: XLA's CPU backend flushes float32
subnormals to zero and may replace a division by a reciprocal, so that only integer code gives the same bits on
every path. A magnitude is `mantissa * 2^(exponent - 23)`, mantissa uint32 below 2^31 and exponent int32;
normalised means 2^23 <= mantissa < 2^24. Where a mantissa is cut, its lowest bit stays 1 if any lost bit was
("sticky"), which is all that a later rounding has to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Array = Any  # np.ndarray or jax.Array: one definition serves both

MAGNITUDE = 0x7FFFFFFF  # of a float32's bits: all but the sign
INFINITY = 0x7F800000  # float32 infinity; NaNs are above it


@dataclass(frozen=True)
class Minifloat:
    """A small float type of sign, exponent and mantissa bits, without infinities.

    min_exponent: the smallest normal number is 2^min_exponent. max_code: the largest finite magnitude.
    """

    dtype: np.dtype
    mantissa_bits: int
    min_exponent: int
    max_code: int
    sign_bit: int


E4M3 = Minifloat(np.dtype(ml_dtypes.float8_e4m3fn), 3, -6, 0x7E, 0x80)  # largest 448; 0x7f is NaN
E2M1 = Minifloat(np.dtype(ml_dtypes.float4_e2m1fn), 1, 0, 0x7, 0x8)  # largest 6: OCP MX v1.0, 5.3.3


def namespace(array: Array) -> ModuleType:
    """jax.numpy for arrays of JAX, traced ones included; numpy for all others."""
    return jnp if isinstance(array, jax.Array) else np


def bitcast(array: Array, dtype: Any) -> Array:
    """The same bits as another type of the same width."""
    return jax.lax.bitcast_convert_type(array, dtype) if isinstance(array, jax.Array) else array.view(dtype)


def float32_bits(array: Array) -> Array:
    """Bits, uint32, of a float32, bfloat16 or float16 array as float32; exact. Raises TypeError for others."""
    xp = namespace(array)
    if array.dtype == np.float32:
        return bitcast(array, xp.uint32)
    if array.dtype == ml_dtypes.bfloat16:
        return bitcast(array, xp.uint16).astype(xp.uint32) << 16
    if array.dtype != np.float16:
        raise TypeError(f"cannot quantise {array.dtype}: cast it to float32, bfloat16 or float16 first")
    bits = bitcast(array, xp.uint16).astype(xp.uint32)
    field, fraction = (bits >> 10) & 0x1F, bits & 0x3FF
    mantissa = fraction | xp.where(field == 0, xp.uint32(0), xp.uint32(1 << 10))
    finite = pack_float32(mantissa, xp.maximum(field, 1).astype(xp.int32) - 15 + 23 - 10)
    magnitude = xp.where(field == 31, xp.uint32(INFINITY) | fraction << 13, finite)
    return magnitude | (bits & 0x8000) << 16


def split(bits: Array) -> tuple[Array, Array]:
    """Mantissa and exponent of the magnitude of float32 bits; subnormals keep exponent -126, not normalised."""
    xp = namespace(bits)
    field = (bits >> 23) & 0xFF
    mantissa = (bits & 0x7FFFFF) | xp.where(field == 0, xp.uint32(0), xp.uint32(1 << 23))
    return mantissa, xp.maximum(field, 1).astype(xp.int32) - 127


def decode(kind: Minifloat, codes: Array) -> tuple[Array, Array]:
    """Mantissa and exponent of the magnitude of codes (uint32) of `kind`, not normalised."""
    xp = namespace(codes)
    magnitude = codes & (kind.sign_bit - 1)
    field = magnitude >> kind.mantissa_bits
    implicit = xp.where(field == 0, xp.uint32(0), xp.uint32(1 << kind.mantissa_bits))
    mantissa = (magnitude & ((1 << kind.mantissa_bits) - 1)) | implicit
    exponent = xp.maximum(field, 1).astype(xp.int32) - 1 + kind.min_exponent
    return mantissa, exponent + 23 - kind.mantissa_bits


def normalise(mantissa: Array, exponent: Array, width: int = 24) -> tuple[Array, Array]:
    """The same number with a mantissa of exactly `width` (24 to 26) bits, sticky; zero stays zero."""
    xp = namespace(mantissa)
    for step in (4, 2, 1):  # down from at most 31 bits
        high = mantissa >> (width + step - 1) != 0
        lost = (mantissa & ((1 << step) - 1) != 0).astype(xp.uint32)
        mantissa = xp.where(high, (mantissa >> step) | lost, mantissa)
        exponent = xp.where(high, exponent + step, exponent)
    for step in (16, 8, 4, 2, 1):
        low = mantissa >> (width - step) == 0
        mantissa = xp.where(low, mantissa << step, mantissa)
        exponent = xp.where(low, exponent - step, exponent)
    return mantissa, exponent


def round_to(kind: Minifloat, mantissa: Array, exponent: Array, random: Array | None = None) -> Array:
    """Codes of `kind`, uint32 without sign, for magnitudes whose mantissa is below 2^24.

    The mantissa must be normalised wherever exponent >= kind.min_exponent. Rounds to nearest, ties to even; or,
    given `random` (uniform uint32), up with the probability of the part cut off. Saturates at kind.max_code.
    """
    xp = namespace(mantissa)
    shift = 23 - kind.mantissa_bits + xp.maximum(kind.min_exponent - exponent, 0)
    shift = xp.minimum(shift, 31).astype(xp.uint32)  # from 25 on, the nearest is zero
    unit = xp.uint32(1) << shift
    add = (unit >> 1) - 1 + ((mantissa >> shift) & 1) if random is None else random & (unit - 1)
    # A mantissa that rounds up to the next power of two carries into the exponent, as it should.
    base = xp.maximum(exponent - kind.min_exponent, 0).astype(xp.uint32) << kind.mantissa_bits
    return xp.minimum(base + ((mantissa + add) >> shift), xp.uint32(kind.max_code))


def pack_float32(mantissa: Array, exponent: Array) -> Array:
    """Bits of the float32 nearest (ties to even) to a magnitude; subnormals kept, exponents up to 127."""
    xp = namespace(mantissa)
    wide, exponent = normalise(mantissa, exponent, width=26)  # two bits more than float32: round and sticky
    exponent = exponent + 2
    shift = xp.minimum(2 + xp.maximum(-126 - exponent, 0), 31).astype(xp.uint32)
    rounded = (wide + (xp.uint32(1) << (shift - 1)) - 1 + ((wide >> shift) & 1)) >> shift
    base = xp.maximum(exponent + 126, 0).astype(xp.uint32) << 23
    return xp.where(mantissa == 0, xp.uint32(0), base + rounded)


def divide(numerator: tuple[Array, Array], denominator: tuple[Array, Array]) -> tuple[Array, Array]:
    """Quotient of two normalised magnitudes: 21 bits, sticky, normalised. Zero over anything is zero."""
    xp = namespace(numerator[0])
    (top, top_exponent), (bottom, bottom_exponent) = numerator, denominator
    small = top < bottom
    top = xp.where(small, top << 1, top)
    quotient, rest = top * 0, top
    for step in (6, 7, 7):  # long division: the rest is below 2^25, then 2^24, and 31 bits are at hand
        shifted = rest << step
        digit = shifted // bottom
        rest = shifted - digit * bottom
        quotient = (quotient << step) | digit
    quotient = quotient << 3 | (rest != 0).astype(xp.uint32)
    return quotient, top_exponent - bottom_exponent - small.astype(xp.int32)


def divide_exactly(mantissa: Array, exponent: Array, divisor: int) -> Array:
    """Float32 bits of a normalised magnitude over a small odd divisor (3 to 63) times a power of two."""
    xp = namespace(mantissa)
    power = (divisor & -divisor).bit_length() - 1
    odd = divisor >> power
    shifted = mantissa << 7
    quotient = shifted // odd
    sticky = (shifted != quotient * odd).astype(xp.uint32)
    return pack_float32(quotient | sticky, exponent - 7 - power)
