"""Formats that a matmul may quantise its activations to; the default leaves them as they are."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from qwenjax_ffi.weights import MX_BLOCK

# "model": the model's own dtype. "mxfp8": e4m3 with a UE8M0 scale per 32, what Blackwell's block-scaled MMA takes.
ActivationFormat = Literal["model", "mxfp8"]

_E4M3_MAX_MANTISSA = 0x600000  # 448 = 1.75 * 2^8: a float32 mantissa above 1.75 needs the next power of two
_E4M3_MAX_EXPONENT = 8


def quantise_activations(x: jax.Array, activation_format: ActivationFormat) -> jax.Array:
    """x as the format keeps it, decoded back to x's dtype: what a kernel multiplies, for its reference.

    x: [..., features], features a multiple of 32 for "mxfp8". The scale of a block is the smallest power of two
    with amax / scale <= 448, so that nothing clips. Raises ValueError for another format or a ragged block.
    """
    if activation_format == "model":
        return x
    if activation_format != "mxfp8":
        raise ValueError(f"activation_format is {activation_format!r}; it is 'model' or 'mxfp8'")
    if x.shape[-1] % MX_BLOCK:
        raise ValueError(f"MXFP8 activations need a multiple of {MX_BLOCK} features, not {x.shape[-1]}")
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, MX_BLOCK)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), jnp.uint32)
    exponent = (bits >> 23).astype(jnp.int32) - 127 + ((bits & 0x7FFFFF) > _E4M3_MAX_MANTISSA).astype(jnp.int32)
    # 2^-117 is the smallest scale that decodes exactly to bf16, 2^119 the largest that a float32 amax can need.
    scale_exponent = jnp.clip(exponent - _E4M3_MAX_EXPONENT, -117, 119)
    scale = jax.lax.bitcast_convert_type((scale_exponent + 127) << 23, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((127 - scale_exponent) << 23, jnp.float32)
    decoded = (blocks * inverse).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale
    return decoded.reshape(x.shape).astype(x.dtype)
