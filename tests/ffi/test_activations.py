"""Activation formats against the weight formats' exact integer code, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax.quant import FORMATS
from qwenjax_ffi.activations import _round, quantise_activations
from qwenjax_ffi.linear import linear

NAMES = ("mxfp8", "fp8_block", "mxfp4", "nvfp4")
RNG = np.random.default_rng(0)


def round_trip(row: np.ndarray, name: str) -> np.ndarray:
    """One row, [1, features]: FP8's blocks of 128 x 128 are then runs of 128, and NVFP4's global scale is the row's."""
    return FORMATS[name].dequantise(*FORMATS[name].quantise(row))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_kept_as_the_format_keeps_them(name: str) -> None:
    x = RNG.normal(size=(64, 320)).astype(np.float32) * 2.0 ** RNG.integers(-20, 20, (64, 10)).repeat(32, 1)
    x[3, :64] = 0
    x[5] = 0
    kept = np.asarray(quantise_activations(jnp.asarray(x, jnp.float32), name))  # type: ignore[arg-type]
    expected = np.concatenate([round_trip(row[None].astype(np.float32), name) for row in x])
    same = kept == expected
    if name.startswith("mx"):
        assert same.all()
        return
    # A quotient in float32 is rounded before it is rounded to the element: next to a tie that goes the other way, once
    # in 2^20 elements or so, and a scale or a product may differ in its last bit.
    close = np.isclose(kept, expected, rtol=1e-6, atol=0)
    assert (~close).mean() < 1e-3
    assert np.isfinite(kept).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn])
def test_elements_are_rounded_as_a_conversion_rounds_them(dtype: np.dtype) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    exact = np.unique(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    exact = exact[np.abs(exact) <= largest]
    ties = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate([exact, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    values = np.concatenate([values, RNG.uniform(-largest, largest, 10_000), 2.0 ** RNG.uniform(-14, 0, 10_000)])
    values = values.astype(np.float32)
    np.testing.assert_array_equal(_round(jnp.asarray(values), dtype), values.astype(dtype).astype(np.float32))
    assert np.isnan(_round(jnp.asarray([np.nan, np.inf, -np.inf]), dtype)).all()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_holds_what_is_not_finite_becomes_nan_and_no_other_does(name: str, value: float) -> None:
    x = RNG.normal(size=(2, 1056)).astype(np.float32)
    x[1, 40] = value
    kept = np.isnan(np.asarray(quantise_activations(jnp.asarray(x), name)))  # type: ignore[arg-type]
    expected = np.zeros_like(kept)
    expected[1, 32:64] = True
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_values_do_not_depend_on_the_other_rows(name: str) -> None:
    x = RNG.normal(size=(4, 256)).astype(np.float32)
    loud = x.copy()
    loud[1:] *= 1e4
    first, second = (quantise_activations(jnp.asarray(part), name)[0] for part in (x, loud))  # type: ignore[arg-type]
    np.testing.assert_array_equal(first, second)


def test_blocks_that_do_not_divide_are_an_error_and_fp8_takes_a_shorter_last_one() -> None:
    for name, multiple in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)):
        with pytest.raises(
            ValueError, match=f"{name.upper()} activations need a multiple of {multiple} features, not 200"
        ):
            quantise_activations(jnp.ones((1, 200)), name)  # type: ignore[arg-type]
    x = RNG.normal(size=(1, 200)).astype(np.float32)
    kept = np.asarray(quantise_activations(jnp.asarray(x), "fp8_block"))
    np.testing.assert_allclose(kept, round_trip(x, "fp8_block"), rtol=1e-6)


def test_linear_multiplies_the_kept_activations_and_pays_nothing_by_default() -> None:
    x, weight = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((3, 64), (5, 64)))
    for name in NAMES:
        expected = linear(quantise_activations(x, name), weight)  # type: ignore[arg-type]
        np.testing.assert_array_equal(linear(x, weight, activation_format=name), expected)  # type: ignore[arg-type]
        assert np.abs(np.asarray(expected - linear(x, weight))).max() > 1e-3
    # A conversion there and back would be left out on a GPU.
    assert "reduce_precision" in str(jax.make_jaxpr(lambda x: linear(x, weight, activation_format="mxfp8"))(x))
    assert "f8" not in str(jax.make_jaxpr(lambda x: linear(x, weight, activation_format="mxfp8"))(x))
    assert str(jax.make_jaxpr(lambda x: linear(x, weight))(x)).count("dot_general") == 1
    assert "abs" not in str(jax.make_jaxpr(lambda x: linear(x, weight))(x))
