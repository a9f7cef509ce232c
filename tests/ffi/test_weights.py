"""Decoding MXFP8 weights, for every element and every scale there is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax_ffi.weights import MIN_EXACT_SCALE, MX_BLOCK, MXFP8Weight, decode, decode_scales, select_layer

BYTES = np.arange(256, dtype=np.uint8)


@pytest.fixture(scope="module")
def every_pair() -> MXFP8Weight:
    """[256 scales, 256 elements]: row s has the scale s in each of its eight blocks."""
    elements = np.broadcast_to(BYTES, (256, 256)).view(ml_dtypes.float8_e4m3fn)
    scales = np.broadcast_to(BYTES[:, None], (256, 256 // MX_BLOCK))
    return MXFP8Weight(jnp.asarray(elements), jnp.asarray(scales))


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """float64 [256, 256], exact."""
    elements = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[:, None] * elements


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decode_equals_ml_dtypes_for_all_pairs_that_the_quantiser_writes(
    every_pair: MXFP8Weight, expected: np.ndarray, dtype: Any
) -> None:
    decoded = np.asarray(jax.jit(decode, static_argnums=1)(every_pair, dtype)).astype(np.float64)
    exact = slice(MIN_EXACT_SCALE, 247)  # from 2^-117 to 2^119: above, 448 times the scale overflows
    np.testing.assert_array_equal(decoded[exact], expected[exact])
    # 448 * 2^119 is the largest that fits; the NaN of e4m3 and of ue8m0 stay NaN everywhere.
    assert np.isfinite(expected[246][~np.isnan(expected[246])].astype(np.float32)).all()
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(expected))
    with np.errstate(over="ignore"):
        above = expected.astype(np.float32).astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(decoded[247:], above[247:])


def test_smaller_scales_decode_to_float32s_value_or_are_flushed_to_zero(
    every_pair: MXFP8Weight, expected: np.ndarray
) -> None:
    decoded = np.asarray(decode(every_pair, jnp.float32)).astype(np.float64)[:MIN_EXACT_SCALE]
    exact = expected[:MIN_EXACT_SCALE].astype(np.float32).astype(np.float64)
    normal = np.abs(exact) >= float(np.finfo(np.float32).smallest_normal)
    normal[0] = False  # this scale is a subnormal itself
    np.testing.assert_array_equal(decoded[normal], exact[normal])
    rest = ~normal & ~np.isnan(exact)
    assert ((decoded[rest] == exact[rest]) | (decoded[rest] == 0)).all()
    assert normal[1:].mean() > 0.7


def test_every_scale_decodes_as_ml_dtypes() -> None:
    decoded = np.asarray(decode_scales(jnp.asarray(BYTES), jnp.float32))
    expected = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decoded[1:], expected[1:])
    assert decoded[0] in (expected[0], 0)  # a subnormal, which a CPU that flushes them reads as 0


def test_plain_weights_are_cast() -> None:
    weight = jnp.asarray([[1.0, 2.0000001]], jnp.float32)
    assert decode(weight, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(decode(weight, jnp.float32), weight)


def test_select_layer_takes_elements_and_scales_of_one_layer() -> None:
    elements = jnp.asarray(np.arange(3 * 2 * 64).reshape(3, 2, 64) % 100, jnp.float8_e4m3fn)
    scales = jnp.asarray(np.arange(3 * 2 * 2).reshape(3, 2, 2), jnp.uint8)
    weight = MXFP8Weight(elements, scales)
    for layer in (2, np.int32(2), jnp.array([2], jnp.int32)):
        chosen = select_layer(weight, layer)
        assert isinstance(chosen, MXFP8Weight)
        assert chosen.shape == (2, 64)
        np.testing.assert_array_equal(chosen.elements, elements[2])
        np.testing.assert_array_equal(chosen.scales, scales[2])
    assert select_layer(weight, None) is weight
