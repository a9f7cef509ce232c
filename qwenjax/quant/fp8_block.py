"""FP8 with one float32 scale per 128x128 block, as DeepSeek-V3 and Qwen's FP8 checkpoints have it.

Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2. value = e4m3 element * scale, with
scale = amax / 448; in a checkpoint the scales are `X.weight_scale_inv`, [ceil(out / 128), ceil(in / 128)].
"""

from __future__ import annotations

import numpy as np

from qwenjax.quant.bits import (
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
from qwenjax.quant.format import Format, checked_bits

BLOCK = 128
MIN_SCALE_BITS = (127 - 117) << 23  # 2^-117, as for MXFP8: below it an element's value would be subnormal
MAX_SCALE_BITS = 0x7B124924  # the largest float32 whose product with 448 is finite


class FP8Block(Format):
    """e4m3fn elements [..., out, in] and float32 scales [..., ceil(out / 128), ceil(in / 128)].

    Elements are the exact quotient by the scale, rounded to nearest even; or, with `stochastic`, rounded up with
    the probability of the part cut off (to 2^-17), from a hash of `seed` and the element's position.
    """

    bytes_per_element = 1 + 4 / BLOCK**2

    def __init__(self, stochastic: bool = False, seed: int = 0) -> None:
        self.name = "fp8_block_stochastic" if stochastic else "fp8_block"
        self.stochastic = stochastic
        self.seed = seed

    def quantise(self, array: Array) -> tuple[Array, Array]:
        if array.ndim < 2:
            raise ValueError(f"{self.name} needs [..., out, in]; shape {list(array.shape)} has no rows")
        xp = namespace(array)
        bits = checked_bits(array)
        rows, columns = array.shape[-2:]
        padded = xp.pad(bits, [(0, 0)] * (array.ndim - 2) + [(0, -rows % BLOCK), (0, -columns % BLOCK)])
        *lead, high, wide = padded.shape
        blocks = (padded & MAGNITUDE).reshape(*lead, high // BLOCK, BLOCK, wide // BLOCK, BLOCK)
        amax = blocks.max((-3, -1))
        scale = divide_exactly(*normalise(*split(amax)), 448)
        scale = xp.clip(scale, xp.uint32(MIN_SCALE_BITS), xp.uint32(MAX_SCALE_BITS))
        # Sizes that 128 does not divide: the last block of a row or column is simply smaller.
        each = expand(scale, array.shape)
        quotient = divide(normalise(*split(bits)), split(each))
        random = _hash(xp, bits.shape, self.seed) if self.stochastic else None
        codes = round_to(E4M3, *quotient, random) | (bits >> 24) & E4M3.sign_bit
        scale = xp.where(amax >= INFINITY, xp.uint32(0x7FC00000), scale)
        return bitcast(codes.astype(xp.uint8), E4M3.dtype), bitcast(scale, xp.float32)

    def dequantise(self, elements: Array, *scales: Array) -> Array:
        xp = namespace(elements)
        each = expand(bitcast(scales[0].astype(xp.float32), xp.uint32), elements.shape)
        codes = bitcast(elements, xp.uint8).astype(xp.uint32)
        return bitcast(scaled_bits(codes, each), xp.float32)


def scaled_bits(codes: Array, scale_bits: Array) -> Array:
    """Float32 bits of e4m3 codes (uint32) times float32 scales (bits, broadcast): one rounding, no flush."""
    xp = namespace(codes)
    mantissa, exponent = decode(E4M3, codes)
    scale_mantissa, scale_exponent = split(scale_bits)
    # 4 bits times 24; decode counts in 2^-23, so that e4m3's mantissa is `mantissa` * 2^-3.
    magnitude = pack_float32(mantissa * scale_mantissa, exponent - 23 + scale_exponent)
    sign = (codes & E4M3.sign_bit) << 24 ^ (scale_bits & xp.uint32(0x80000000))
    nan = (codes & 0x7F == 0x7F) | (scale_bits & MAGNITUDE >= INFINITY)
    return xp.where(nan, xp.uint32(0x7FC00000), magnitude | sign)


def expand(scale: Array, shape: tuple[int, ...], block: tuple[int, int] = (BLOCK, BLOCK)) -> Array:
    """Per-block values [..., ceil(out / block), ceil(in / block)] as one per element, `shape`."""
    return scale.repeat(block[0], -2)[..., : shape[-2], :].repeat(block[1], -1)[..., : shape[-1]]


def _hash(xp: object, shape: tuple[int, ...], seed: int) -> Array:
    """Uniform uint32 from position and seed, by integer steps that numpy and XLA do alike.

    The mixing function is lowbias32 (Wellons, "Prospecting for Hash Functions", 2018).
    """
    value = xp.arange(np.prod(shape, dtype=int), dtype=xp.uint32)  # type: ignore[attr-defined]
    for key in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF):
        value = value ^ xp.uint32(key)  # type: ignore[attr-defined]
        value = (value ^ value >> 16) * xp.uint32(0x7FEB352D)  # type: ignore[attr-defined]
        value = (value ^ value >> 15) * xp.uint32(0x846CA68B)  # type: ignore[attr-defined]
        value = value ^ value >> 16
    return value.reshape(shape)
