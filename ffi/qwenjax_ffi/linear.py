"""A dense linear layer over plain or quantised weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax_ffi.activations import ActivationFormat, quantise_activations
from qwenjax_ffi.weights import Weight, decode, select_layer


def linear(
    x: jax.Array,
    weight: Weight,
    layer: jax.Array | int | None = None,
    bias: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    activation_format: ActivationFormat = "model",
) -> jax.Array:
    """x @ weight^T + bias, summed in float32.

    x: [..., in]; weight: [out, in], or a stack [layers, out, in] of which `layer` (int32 [1] or scalar) is taken;
    bias: [out] or [layers, out]. Returns [..., out] of `out_dtype` (default: x's dtype). Quantised weights are
    decoded exactly to x's dtype first, and x is quantised where activation_format says so.
    """
    x = quantise_activations(x, activation_format)
    matrix = decode(select_layer(weight, layer), x.dtype)
    y = jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if bias is not None:
        chosen = select_layer(bias, layer)
        assert isinstance(chosen, jax.Array)
        y = y + chosen.astype(jnp.float32)
    return y.astype(out_dtype or x.dtype)
