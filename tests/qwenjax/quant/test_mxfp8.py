"""What the MXFP8 quantiser promises, one test a sentence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qwenjax.convert.encode import _count_clamped
from qwenjax.quant import MXFP8, quantise_weight
from qwenjax_ffi.grouped_gemm import grouped_gemm
from qwenjax_ffi.linear import linear
from qwenjax_ffi.weights import MIN_EXACT_SCALE, MXFP8Weight, decode

FORMAT = MXFP8()
blocks = hnp.arrays(
    np.uint32, (3, 64), elements=st.integers(0, 2**32 - 1).filter(lambda bits: bits & 0x7F800000 != 0x7F800000)
).map(lambda bits: bits.view(np.float32))
weights = hnp.arrays(np.float32, (2, 96), elements=st.floats(-1, 1, width=32))


@given(blocks | weights)
@settings(max_examples=300, deadline=None)
def test_the_scale_is_the_smallest_power_of_two_that_fits(x: np.ndarray) -> None:
    _, scales = FORMAT.quantise(x)
    amax = np.abs(x.astype(np.float64)).reshape(*scales.shape, 32).max(-1)
    power = np.ldexp(1.0, scales.astype(int) - 127)
    assert (amax / power <= 448).all()
    assert ((amax / (power / 2) > 448) | (scales == MIN_EXACT_SCALE)).all()
    assert (scales >= MIN_EXACT_SCALE).all()
    assert (scales != 255).all()


@given(blocks | weights)
@settings(max_examples=300, deadline=None)
def test_no_element_is_nan_and_each_is_the_nearest(x: np.ndarray) -> None:
    elements, scales = FORMAT.quantise(x)
    assert not np.isin(elements.view(np.uint8), (0x7F, 0xFF)).any()
    power = np.ldexp(1.0, scales.astype(int) - 127).repeat(32, -1)
    scaled = x.astype(np.float64) / power
    error = np.abs(elements.astype(np.float64) - scaled)
    # Half a unit in the last of three places, or half the smallest subnormal; near the end of float32 the
    # element 256 is not used, as it would decode to infinity.
    _, exponent = np.frexp(scaled)
    half_unit = np.ldexp(0.5, np.maximum(exponent - 1, -6) - 3)
    assert ((error <= half_unit) | ((scales == 247).repeat(32, -1) & (np.abs(scaled) > 248))).all()


@given(blocks | weights)
@settings(max_examples=200, deadline=None)
def test_quantising_the_decoded_values_again_changes_nothing(x: np.ndarray) -> None:
    once = FORMAT.dequantise(*FORMAT.quantise(x))
    np.testing.assert_array_equal(FORMAT.dequantise(*FORMAT.quantise(once)), once)


def test_decoding_to_bfloat16_is_exact_for_every_element_and_every_scale_written() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F] * 2 + [0] * 4, np.uint8)
    for scale in range(MIN_EXACT_SCALE, 247):
        weight = MXFP8Weight(
            jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)[None]), jnp.full((1, len(codes) // 32), scale, jnp.uint8)
        )
        exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(np.asarray(decode(weight, jnp.bfloat16)[0]).astype(np.float64), exact)


@pytest.mark.parametrize(("value", "clamped"), [(0.0, 0), (1e-35, 2), (1e-40, 2), (1e-45, 2), (3e-33, 0), (0.02, 0)])
def test_scales_under_2_to_the_minus_117_are_clamped_and_counted(value: float, clamped: int) -> None:
    x = np.full((2, 32), value, np.float32)
    elements, scales = FORMAT.quantise(x)
    assert _count_clamped(jnp.asarray(x)) == clamped
    assert (scales == MIN_EXACT_SCALE).all() == (value < 1e-33)
    assert np.isfinite(elements.astype(np.float32)).all()


def ocp_floor(x: np.ndarray) -> np.ndarray:
    """The OCP specification's rule: 2^(floor(log2 amax) - 8), what exceeds 448 clipped to it."""
    grouped = x.astype(np.float64).reshape(-1, 32)
    scale = 2.0 ** (np.floor(np.log2(np.abs(grouped).max(-1, keepdims=True))) - 8)
    clipped = np.clip(grouped / scale, -448, 448)
    return (clipped.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)


def test_the_ceil_rule_errs_less_than_the_ocp_floor() -> None:
    x = np.random.default_rng(0).standard_normal((1000, 4096), np.float32)

    def rmse(q: np.ndarray) -> float:
        return float(np.sqrt(((q - x.astype(np.float64)) ** 2).sum() / (x.astype(np.float64) ** 2).sum()))

    assert rmse(FORMAT.dequantise(*FORMAT.quantise(x))) == pytest.approx(0.0265, abs=1e-4)
    assert rmse(ocp_floor(x)) == pytest.approx(0.0294, abs=1e-4)


def test_agrees_with_the_decoder_that_the_operations_use() -> None:
    x = np.random.default_rng(1).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
    weight = quantise_weight(jnp.asarray(x))
    np.testing.assert_array_equal(decode(weight, jnp.float32), FORMAT.dequantise(weight.elements, weight.scales))


class QuantisedLayer(nnx.Module):
    def __init__(self, dense: jax.Array, experts: jax.Array) -> None:
        self.dense = nnx.Param(quantise_weight(dense))
        self.experts = nnx.Param(quantise_weight(experts))

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return grouped_gemm(linear(x, self.dense.get_value()), group_sizes, self.experts.get_value())


def test_a_flax_parameter_holds_a_quantised_weight_that_the_matmuls_accept() -> None:
    rng = np.random.default_rng(2)
    dense, experts = rng.standard_normal((64, 32), np.float32), rng.standard_normal((2, 96, 64), np.float32)
    layer = QuantisedLayer(jnp.asarray(dense), jnp.asarray(experts))
    x, sizes = rng.standard_normal((5, 32), np.float32), jnp.array([2, 3], jnp.int32)
    graph, state = nnx.split(layer)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8)}
    got = jax.jit(lambda state, x: nnx.merge(graph, state)(x, sizes))(state, jnp.asarray(x))
    plain = x @ FORMAT.dequantise(*FORMAT.quantise(dense)).T
    rounded = FORMAT.dequantise(*FORMAT.quantise(experts))
    expected = np.concatenate([plain[:2] @ rounded[0].T, plain[2:] @ rounded[1].T])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
