"""A dense linear layer over plain or quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import jax
import jax.numpy as jnp

from qwenjax_ffi import grouped_gemm_blackwell as blackwell
from qwenjax_ffi import grouped_gemm_kernel as kernel
from qwenjax_ffi.activations import ActivationFormat, quantise_activations
from qwenjax_ffi.implementation import Implementation, choose
from qwenjax_ffi.packing import AnyWeight, PackedMXFP8Weight, unpack
from qwenjax_ffi.weights import Weight, decode, select_layer


def linear(
    x: jax.Array,
    weight: AnyWeight,
    layer: jax.Array | int | None = None,
    bias: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    activation_format: ActivationFormat = "model",
    implementation: Implementation = "auto",
) -> jax.Array:
    """x @ weight^T + bias, summed in float32.

    x: [..., in]; weight: [out, in], or a stack [layers, out, in] of which `layer` (int32 [1] or scalar) is taken;
    bias: [out] or [layers, out]. Returns [..., out] of `out_dtype` (default: x's dtype). Quantised weights are
    decoded exactly to x's dtype first, and x is quantised where activation_format says so.

    implementation: "auto" runs the grouped GEMM kernel, with one group, where the weight is packed for it and the GPU
    is one that it is for, else the reference, which is XLA's own matmul; see qwenjax_ffi.implementation.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    kernels = blackwell if isinstance(weight, PackedMXFP8Weight) and weight.layout == "block_scaled" else kernel
    unavailable = kernels.unavailable(x, weight, activation_format=activation_format)
    if not isinstance(weight, PackedMXFP8Weight):
        unavailable = f"the weight is {type(weight).__name__}, the kernel is for PackedMXFP8Weight"
    if choose("linear", implementation, unavailable) == "kernel":
        assert isinstance(weight, PackedMXFP8Weight)
        y = _one_group(
            kernels, x, weight, layer, kernel.kernel_dtype(dtype) if bias is None else jnp.dtype(jnp.float32)
        )
    else:
        x = quantise_activations(x, activation_format)
        matrix = decode(_plain(select_layer(weight, layer)), x.dtype)
        y = jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if bias is not None:
        chosen = select_layer(bias, layer)
        assert isinstance(chosen, jax.Array)
        y = y + chosen.astype(jnp.float32)
    return y.astype(dtype)


def linear_side_by_side(
    x: jax.Array,
    weights: Sequence[AnyWeight],
    layer: jax.Array | int | None = None,
    out_dtype: jnp.dtype | None = None,
    activation_format: ActivationFormat = "model",
    implementation: Implementation = "auto",
) -> jax.Array:
    """Several linear layers of one input, without biases: [..., outputs of the first, then of the second, ...].

    Arguments and result as `linear`'s. "auto" runs the kernel in one launch where all weights are packed for Hopper and
    lie in whole units of 64 outputs, but for the last; where they do not, each layer by itself, as `linear` chooses.
    """
    why = next(
        (
            f"the weight is {type(weight).__name__}, the kernel is for PackedMXFP8Weight of layout 'fragments'"
            for weight in weights
            if not isinstance(weight, PackedMXFP8Weight) or weight.layout != "fragments"
        ),
        None,
    )
    packed = [weight for weight in weights if isinstance(weight, PackedMXFP8Weight)]
    reasons = (kernel.unavailable(x, weight, activation_format=activation_format) for weight in packed)
    why = why or kernel.apart(packed) or next(filter(None, reasons), None)
    if choose("linear_side_by_side", implementation, why) == "kernel":
        dtype = jnp.dtype(out_dtype or x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        y = kernel.side_by_side(rows, packed, layer, out_dtype=kernel.kernel_dtype(dtype))
        return y.reshape(*x.shape[:-1], -1).astype(dtype)
    apart = [linear(x, weight, layer, None, out_dtype, activation_format, implementation) for weight in weights]
    return jnp.concatenate(apart, axis=-1)


def _one_group(
    kernels: ModuleType, x: jax.Array, weight: PackedMXFP8Weight, layer: jax.Array | int | None, dtype: jnp.dtype
) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    sizes = jnp.full(1, rows.shape[0], jnp.int32)
    one = replace(weight, data=jnp.expand_dims(weight.data, -4))
    return kernels.grouped_gemm(rows, sizes, one, layer, out_dtype=dtype).reshape(*x.shape[:-1], -1)


def _plain(weight: AnyWeight) -> Weight:
    return unpack(weight) if isinstance(weight, PackedMXFP8Weight) else weight
