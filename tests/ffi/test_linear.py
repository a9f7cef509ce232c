"""Dense linear layers against float64."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax_ffi import grouped_gemm_kernel as kernel
from qwenjax_ffi.implementation import KernelUnavailableError
from qwenjax_ffi.linear import linear, linear_side_by_side
from qwenjax_ffi.packing import pack
from qwenjax_ffi.weights import MXFP8Weight


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, STACK, BIAS = normal((2, 3, 64), 0), normal((3, 24, 64), 1), normal((3, 24), 2)


def test_linear_equals_float64() -> None:
    expected = X.astype(np.float64) @ STACK[2].T.astype(np.float64)
    np.testing.assert_allclose(linear(jnp.asarray(X), STACK[2]), expected, rtol=1e-4, atol=1e-5)
    for layer in (2, jnp.array([2], jnp.int32)):
        np.testing.assert_allclose(linear(jnp.asarray(X), STACK, layer), expected, rtol=1e-4, atol=1e-5)
        with_bias = linear(jnp.asarray(X), STACK, layer, jnp.asarray(BIAS))
        np.testing.assert_allclose(with_bias, expected + BIAS[2], rtol=1e-4, atol=1e-5)
    alone = linear(jnp.asarray(X), STACK[2], bias=jnp.asarray(BIAS[2]))
    np.testing.assert_allclose(alone, expected + BIAS[2], rtol=1e-4, atol=1e-5)


def test_bfloat16_is_summed_in_float32_with_the_bias_and_rounded_once() -> None:
    # 255 ones after a 256: a bfloat16 sum would stay at 256. The bias then fits only before the rounding.
    x = jnp.ones((1, 256), jnp.bfloat16).at[0, 0].set(256)
    weight, bias = jnp.ones((1, 256), jnp.bfloat16), jnp.ones(1, jnp.bfloat16)
    assert linear(x, weight, out_dtype=jnp.float32).tolist() == [[511.0]]
    assert linear(x, weight, bias=bias, out_dtype=jnp.float32).tolist() == [[512.0]]
    out = linear(x, weight, bias=bias)
    assert (out.dtype, out.tolist()) == (jnp.bfloat16, [[512.0]])


def test_mxfp8_weights_equal_their_decoded_values() -> None:
    elements = STACK.astype(ml_dtypes.float8_e4m3fn)
    scales = np.random.default_rng(3).integers(120, 134, (3, 24, 2)).astype(np.uint8)
    decoded = elements.astype(np.float32) * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)
    weight = MXFP8Weight(jnp.asarray(elements), jnp.asarray(scales))
    for dtype in (jnp.float32, jnp.bfloat16):  # e4m3 times a power of two is exact in both
        x = jnp.asarray(X, dtype)
        expected = linear(x, jnp.asarray(decoded, dtype), 1)
        np.testing.assert_array_equal(linear(x, weight, 1), expected)
        np.testing.assert_array_equal(linear(x, pack(weight), 1), expected)  # no kernel runs here
        with pytest.raises(KernelUnavailableError, match="linear: no kernel here: the weight is MXFP8Weight"):
            linear(x, weight, 1, implementation="kernel")


@pytest.mark.parametrize("layer", [None, 1])
def test_layers_side_by_side_are_those_apart(layer: int | None) -> None:
    weights = [jnp.asarray(normal((3, width, 64), width)) for width in (24, 8, 40)]
    if layer is None:
        weights = [weight[0] for weight in weights]
    x = jnp.asarray(X)
    together = linear_side_by_side(x, weights, layer)
    np.testing.assert_array_equal(together, np.concatenate([linear(x, w, layer) for w in weights], axis=-1))
    with pytest.raises(KernelUnavailableError, match="linear_side_by_side: no kernel here: the weight is "):
        linear_side_by_side(x, weights, layer, implementation="kernel")


def test_layers_side_by_side_that_are_no_whole_units_run_apart() -> None:
    packed = [pack(MXFP8Weight(jnp.zeros((w, 64), jnp.float8_e4m3fn), jnp.zeros((w, 2), jnp.uint8))) for w in (96, 64)]
    assert kernel.apart(packed) == "a weight before the last has 96 outputs; it takes multiples of 64 there"
    assert kernel.apart(packed[::-1]) is None
    assert linear_side_by_side(jnp.ones((2, 64), jnp.bfloat16), packed).shape == (2, 160)
    with pytest.raises(ValueError, match="side_by_side: a weight before the last has 96 outputs"):
        kernel.side_by_side(jnp.ones((2, 64), jnp.bfloat16), packed)
