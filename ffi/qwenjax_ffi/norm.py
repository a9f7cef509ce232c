"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax_ffi import token_kernels as kernels
from qwenjax_ffi.implementation import Implementation, choose, with_gradient
from qwenjax_ffi.weights import select_layer


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    x: [..., features]; weight: [features]. Statistics in float32; the result has x's dtype, and the weight is
    applied after that rounding, as transformers' Qwen3MoeRMSNorm does.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (weight.astype(x.dtype) * normed.astype(x.dtype)).astype(x.dtype)


def add_rms_norm(
    residual: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    layer: jax.Array | int | None = None,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """residual + x, rounded to their dtype, and the RMSNorm of that.

    residual, x: [..., features]; weight: [features], or a stack [layers, features] of which `layer` (int32 [1] or
    scalar) is taken.
    """
    if residual.shape != x.shape or weight.shape[-1:] != x.shape[-1:] or weight.ndim != (1 if layer is None else 2):
        raise ValueError(f"residual {residual.shape} and weight {weight.shape} do not fit x {x.shape}")

    def reference(
        residual: jax.Array, x: jax.Array, weight: jax.Array, layer: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        total = residual + x
        # Spelt out: XLA leaves the rounding away where a float32 computation follows in the same fusion, and the
        # kernels, this one and that of collectives.all_reduce_rms_norm, do not.
        info = jnp.finfo(total.dtype)
        total = jax.lax.reduce_precision(total, info.nexp, info.nmant)
        return total, rms_norm(total, select_layer(weight, layer), eps)

    index = None if layer is None else jnp.asarray(layer, jnp.int32)
    unavailable = kernels.add_rms_norm_unavailable(residual, x, weight)
    if choose("add_rms_norm", implementation, unavailable) == "reference":
        return reference(residual, x, weight, index)

    def kernel(
        residual: jax.Array, x: jax.Array, weight: jax.Array, layer: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        if layer is None:
            return kernels.add_rms_norm(residual, x, weight[None], 0, eps)
        return kernels.add_rms_norm(residual, x, weight, layer, eps)

    both: tuple[jax.Array, jax.Array] = with_gradient(kernel, reference)(residual, x, weight, index)
    return both
