"""Formats that a matmul may quantise its activations to; the default leaves them as they are.

Every scale belongs to a run of one row's features, so that a token's values depend on no other token of its batch.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes

from qwenjax_ffi.weights import MX_BLOCK, MXFP8Weight

# "model": the model's own dtype. "mxfp8": e4m3 with a UE8M0 scale per 32, what Blackwell's block-scaled MMA takes.
# "mxfp4": e2m1 with the same. "nvfp4": e2m1 with an e4m3 scale per 16 and a float32 scale per row. "fp8_block": e4m3
# with a float32 scale per 128, DeepSeek-V3's 1 x 128 tiles (arXiv:2412.19437, section 3.3.2).
ActivationFormat = Literal["model", "mxfp8", "fp8_block", "mxfp4", "nvfp4"]

_NVFP4_BLOCK, _FP8_BLOCK = 16, 128
_MX_MULTIPLES = {"mxfp8": MX_BLOCK, "mxfp4": MX_BLOCK, "nvfp4": _NVFP4_BLOCK}
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E4M3_MIN = 2.0**-9  # the smallest number of e4m3: blocks of zeros get it for a scale
# Scales that are products of floats: from here on, scale and element have a normal product. Below, elements are zero.
_MIN_SCALE = 2.0**-100


def quantise_activations(x: jax.Array, activation_format: ActivationFormat) -> jax.Array:
    """x as the format keeps it, decoded back to x's dtype: what a kernel multiplies, for its reference.

    x: [..., features], features a multiple of 32 ("mxfp8", "mxfp4") or 16 ("nvfp4"); a last run of fewer than 128
    features is a block of its own for "fp8_block". Power-of-two scales are the smallest with amax / scale <= 448 (e4m3)
    or 6 (e2m1), so that nothing clips, and NaN for a block that holds NaN or an infinity; the others are amax / 448 or
    amax / 6, NVFP4's rounded to e4m3. Elements are rounded to nearest, ties to even. Raises ValueError for another
    format or a ragged block.
    """
    if activation_format == "model":
        return x
    if activation_format not in get_args(ActivationFormat):
        known = ", ".join(map(repr, get_args(ActivationFormat)))
        raise ValueError(f"activation_format is {activation_format!r}; it is one of {known}")
    features, multiple = x.shape[-1], _MX_MULTIPLES.get(activation_format, 1)
    if features % multiple:
        raise ValueError(
            f"{activation_format.upper()} activations need a multiple of {multiple} features, not {features}"
        )
    block = min(_FP8_BLOCK, features) if activation_format == "fp8_block" else multiple
    values = x.astype(jnp.float32)
    padded = jnp.pad(values, [(0, 0)] * (x.ndim - 1) + [(0, -features % block)])
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    decoded = _scaled(blocks, amax, activation_format)
    return decoded.reshape(padded.shape)[..., :features].astype(x.dtype)


def quantise_mxfp8(x: jax.Array) -> MXFP8Weight:
    """The elements and the scales that `quantise_activations` decodes for "mxfp8", as a kernel multiplies them.

    x: [..., features], features a multiple of 32. A block that holds NaN or an infinity gets the NaN scale: one such
    value makes NaN of every sum that the block enters anyhow.
    """
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, MX_BLOCK)
    scale, inverse = _power_of_two(blocks, max_exponent=8, max_mantissa=0x600000)
    elements = (blocks * inverse).astype(jnp.float8_e4m3fn).reshape(x.shape)
    scale_bytes = (jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
    return MXFP8Weight(elements, scale_bytes[..., 0])


def _scaled(blocks: jax.Array, amax: jax.Array, activation_format: ActivationFormat) -> jax.Array:
    """Blocks [..., blocks, block] rounded under their scales. A power of two divides exactly, through its inverse."""
    if activation_format == "mxfp8":
        scale, inverse = _power_of_two(blocks, max_exponent=8, max_mantissa=0x600000)  # 448 is 1.75 * 2^8
        return _round(blocks * inverse, jnp.float8_e4m3fn) * scale
    if activation_format == "mxfp4":
        scale, inverse = _power_of_two(blocks, max_exponent=2, max_mantissa=0x400000)  # 6 is 1.5 * 2^2
        return _round(blocks * inverse, jnp.float4_e2m1fn) * scale
    if activation_format == "fp8_block":
        scale = jnp.maximum(amax / _E4M3_MAX, _MIN_SCALE)
        return _round(blocks / scale, jnp.float8_e4m3fn) * scale
    row = jnp.maximum(jnp.max(amax, axis=-2, keepdims=True) / (_E4M3_MAX * _E2M1_MAX), _MIN_SCALE)
    scale = jnp.maximum(_round(amax / (_E2M1_MAX * row), jnp.float8_e4m3fn), _E4M3_MIN) * row
    return _round(blocks / scale, jnp.float4_e2m1fn) * scale


def _power_of_two(blocks: jax.Array, max_exponent: int, max_mantissa: int) -> tuple[jax.Array, jax.Array]:
    """For blocks [..., block] the smallest power of two with amax / scale <= the format's largest number, and its
    inverse, [..., 1]; the scale is NaN where a block holds NaN or an infinity."""
    # The maximum of bits: of floats, XLA's may leave out a NaN (seen on a CPU).
    bits = jnp.max(jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32), axis=-1, keepdims=True)
    exponent = (bits >> 23).astype(jnp.int32) - 127 + ((bits & 0x7FFFFF) > max_mantissa).astype(jnp.int32)
    # 2^-117 is the smallest scale that decodes exactly to bf16, 2^125 the largest that a float32 amax can need.
    scale_exponent = jnp.clip(exponent - max_exponent, -117, 125)
    scale = jax.lax.bitcast_convert_type((scale_exponent + 127) << 23, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((127 - scale_exponent) << 23, jnp.float32)
    return jnp.where(bits < 0x7F800000, scale, jnp.nan), inverse


def _round(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 values rounded to nearest, ties to even, as the dtype keeps them, in whose range they are; NaN for what
    is not finite.

    Not by converting there and back: XLA leaves that out on a GPU (xla_allow_excess_precision), seen on an H200.
    """
    info = ml_dtypes.finfo(dtype)
    step = float(info.smallest_subnormal)
    normal = jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=info.nmant)
    rounded = jnp.where(jnp.abs(values) < float(info.smallest_normal), jnp.round(values / step) * step, normal)
    return jnp.where(jnp.isfinite(values), rounded, jnp.nan)
