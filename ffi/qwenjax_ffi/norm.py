"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    x: [..., features]; weight: [features]. Statistics in float32; the result has x's dtype, and the weight is
    applied after that rounding, as transformers' Qwen3MoeRMSNorm does.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (weight.astype(x.dtype) * normed.astype(x.dtype)).astype(x.dtype)


def add_rms_norm(residual: jax.Array, x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """residual + x, rounded to their dtype, and the RMSNorm of that.

    The rounding is spelt out: XLA leaves it away where a float32 computation follows in the same fusion, and the kernel
    of `collectives.all_reduce_rms_norm` does not.
    """
    total = residual + x
    info = jnp.finfo(total.dtype)
    total = jax.lax.reduce_precision(total, info.nexp, info.nmant)
    return total, rms_norm(total, weight, eps)
