"""Every format against an oracle in float64 and tables, and its numpy and jitted paths against each other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax.quant import FORMATS, MXFP4, MXFP8, NVFP4, Format, FP8Block, NonFiniteError

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
F32_MAX = float(np.finfo(np.float32).max)
SHAPE = (250, 4032)  # 1,008,000 elements; 128 divides neither side


def nearest(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the nearest table entry, ties to the even index; above the table, its end."""
    middles = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middles, values, side="left")
    tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == values)
    return below + (tie & (below % 2 == 1))


def with_sign(codes: np.ndarray, x: np.ndarray, bit: int) -> np.ndarray:
    return (codes | np.signbit(x) * bit).astype(np.uint8)


def spread(scale: np.ndarray, shape: tuple[int, ...], rows: int, columns: int) -> np.ndarray:
    return scale.repeat(rows, 0)[: shape[0]].repeat(columns, 1)[:, : shape[1]]


def block_max(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    padded = np.pad(np.abs(x), [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])
    return padded.reshape(padded.shape[0] // rows, rows, -1, columns).max((1, 3))


def mx_oracle(x: np.ndarray, table: np.ndarray, sign: int, lowest: int) -> list[np.ndarray]:
    fraction, exponent = np.frexp(block_max(x, 1, 32) / table[-1])
    power = np.maximum(np.where(fraction == 0.5, exponent - 1, exponent), lowest)
    each = spread(np.ldexp(1.0, power), x.shape, 1, 32)
    codes = nearest(table, np.abs(x) / each)
    codes -= table[codes] * each > F32_MAX
    decoded = np.copysign(table[codes] * each, x).astype(np.float32)
    return [with_sign(codes, x, sign), (power + 127).astype(np.uint8), decoded]


def lowbias32(count: int, seed: int) -> np.ndarray:
    value = np.arange(count, dtype=np.uint64)
    for key in (seed, 0):
        value ^= np.uint64(key)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            value = (value ^ value >> np.uint64(shift)) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return value


def fp8_oracle(x: np.ndarray, seed: int | None) -> list[np.ndarray]:
    scale = np.clip(
        (block_max(x, 128, 128) / 448).astype(np.float32), 2.0**-117, np.uint32(0x7B124924).view(np.float32)
    )
    each = spread(scale, x.shape, 128, 128).astype(np.float64)
    quotient = np.abs(x) / each
    if seed is None:
        codes = nearest(E4M3, quotient)
    else:
        _, exponent = np.frexp(quotient)
        exponent = np.where(quotient == 0, -99, exponent - 1)
        exact = np.ldexp(quotient, 20 - exponent)
        mantissa = np.floor(exact).astype(np.int64) * 8 + (exact != np.floor(exact))
        shift = np.minimum(20 + np.maximum(-6 - exponent, 0), 31)
        random = lowbias32(x.size, seed).reshape(x.shape).astype(np.int64) & ((1 << shift) - 1)
        codes = np.minimum(np.maximum(exponent + 6, 0) * 8 + ((mantissa + random) >> shift), 126)
    return [with_sign(codes, x, 0x80), scale, np.copysign(E4M3[codes] * each, x).astype(np.float32)]


def nvfp4_oracle(x: np.ndarray) -> list[np.ndarray]:
    whole = np.float32(np.abs(x).max() / 2688)
    whole = np.clip(whole, np.float32(2.0**-100), np.uint32(0x79C30C30).view(np.float32))
    six = float(np.float32(6 * float(whole)))
    scale = np.maximum(nearest(E4M3, block_max(x, 1, 16) / six), 1)
    each = spread((E4M3[scale] * float(whole)).astype(np.float32), x.shape, 1, 16).astype(np.float64)
    codes = nearest(E2M1, np.abs(x) / each)
    decoded = np.copysign(E2M1[codes] * each, x).astype(np.float32)
    return [with_sign(codes, x, 8), scale.astype(np.uint8), whole, decoded]


ORACLES = {
    "mxfp8": lambda x: mx_oracle(x, E4M3, 0x80, -117),
    "fp8_block": lambda x: fp8_oracle(x, None),
    "fp8_block_stochastic": lambda x: fp8_oracle(x, 0),
    "mxfp4": lambda x: mx_oracle(x, E2M1, 8, -117),
    "nvfp4": nvfp4_oracle,
}
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def finite_bits(seed: int) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2**32, SHAPE, dtype=np.uint32)
    return np.where(bits & 0x7F800000 == 0x7F800000, bits ^ 0x40000000, bits).view(np.float32)


def close_exponents(seed: int) -> np.ndarray:
    """Blocks whose elements are within 2^12 of each other, so that all codes occur; at any magnitude."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 243, (SHAPE[0], SHAPE[1] // 32)).repeat(32, 1)
    field = (base + rng.integers(0, 12, SHAPE)).astype(np.uint32)
    return (field << 23 | rng.integers(0, 2**32, SHAPE, dtype=np.uint32) & 0x807FFFFF).view(np.float32)


def small_integers(seed: int) -> np.ndarray:
    """Many ties: integers over powers of two."""
    return np.random.default_rng(seed).integers(-1000, 1000, SHAPE).astype(np.float32) / 64


def as_bytes(array: object) -> np.ndarray:
    host = np.asarray(array)
    return host.reshape(-1).view(np.uint8) if host.dtype.itemsize > 1 else host.view(np.uint8).reshape(-1)


@every_format
@pytest.mark.parametrize("patterns", [finite_bits, close_exponents, small_integers])
def test_numpy_jax_and_float64_agree_bit_for_bit(format: Format, patterns) -> None:
    x = patterns(7)
    assert x.size >= 10**6
    on_host = format.quantise(x)
    jitted = jax.jit(format.quantise)(jnp.asarray(x))
    *expected, decoded = ORACLES[format.name](x.astype(np.float64))
    for host, device, oracle in zip(on_host, jitted, expected, strict=True):
        assert host.dtype == device.dtype
        assert host.shape == device.shape == oracle.shape
        np.testing.assert_array_equal(as_bytes(host), as_bytes(oracle))
        np.testing.assert_array_equal(as_bytes(device), as_bytes(oracle))
    back = format.dequantise(*on_host)
    np.testing.assert_array_equal(back.view(np.uint32), decoded.view(np.uint32))
    np.testing.assert_array_equal(
        np.asarray(jax.jit(format.dequantise)(*jitted)).view(np.uint32), decoded.view(np.uint32)
    )
    assert np.isfinite(back).all()


@every_format
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_width_types_are_read_exactly(format: Format, dtype) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    x = np.where(np.isfinite(x.astype(np.float32)), x, dtype(1)).reshape(128, 512)
    for half, device, single in zip(
        format.quantise(x), jax.jit(format.quantise)(jnp.asarray(x)), format.quantise(x.astype(np.float32)), strict=True
    ):
        np.testing.assert_array_equal(as_bytes(half), as_bytes(single))
        np.testing.assert_array_equal(as_bytes(device), as_bytes(single))


@every_format
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-35, -1e-40, 1e-45, 3.4028235e38, -3.3e38])
def test_uniform_arrays_of_any_magnitude_stay_finite(format: Format, value: float) -> None:
    x = np.full((128, 256), value, np.float32)
    back = format.dequantise(*format.quantise(x))
    assert np.isfinite(back).all()
    if abs(value) > 1e-30:
        np.testing.assert_allclose(back, x, rtol=0.26 if "fp4" in format.name else 0.07)


@functools.partial(jax.jit, static_argnums=0)
def through(format: Format, x: jax.Array) -> jax.Array:
    return format.dequantise(*format.quantise(x))


@every_format
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numpy_refuses_what_is_not_finite_and_jax_decodes_it_to_nan(format: Format, value: float) -> None:
    x = np.ones((256, 256), np.float32)
    x[129, 40] = value
    with pytest.raises(NonFiniteError, match=r"\[129, 40\]") as caught:
        format.quantise(x)
    assert caught.value.index == (129, 40)
    assert np.isnan(np.asarray(through(format, x))[129, 40])


@every_format
def test_relative_error_and_size_are_the_formats(format: Format) -> None:
    x = np.random.default_rng(0).standard_normal((512, 4096), np.float32)
    arrays = format.quantise(x)
    error = format.dequantise(*arrays).astype(np.float64) - x
    rmse = np.sqrt((error**2).sum() / (x.astype(np.float64) ** 2).sum())
    expected = {"mxfp8": 0.0265, "fp8_block": 0.0265, "fp8_block_stochastic": 0.0374, "mxfp4": 0.1154, "nvfp4": 0.0952}
    assert rmse == pytest.approx(expected[format.name], rel=0.01)
    bits = sum(a.size * (4 if a.dtype == ml_dtypes.float4_e2m1fn else 8 * a.dtype.itemsize) for a in arrays)
    assert bits / 8 / x.size == pytest.approx(format.bytes_per_element, abs=1e-5)


@every_format
def test_types_that_cannot_be_read_exactly_are_refused(format: Format) -> None:
    with pytest.raises(TypeError, match="float64"):
        format.quantise(np.ones((128, 128)))


@pytest.mark.parametrize(("format", "width"), [(MXFP8(), 33), (MXFP4(), 48), (NVFP4(), 24)])
def test_an_axis_that_does_not_divide_into_blocks_is_refused(format: Format, width: int) -> None:
    with pytest.raises(ValueError, match=f"{width}"):
        format.quantise(np.ones((4, width), np.float32))


def test_stochastic_rounding_is_unbiased_and_follows_its_seed() -> None:
    x = np.full((1024, 1024), 1.0, np.float32)
    x[:, 1:] = 0.013  # between two e4m3 numbers once the 1.0 sets the scale
    mean = FP8Block(stochastic=True).dequantise(*FP8Block(stochastic=True).quantise(x))[:, 130:].mean(dtype=np.float64)
    nearest_mean = FP8Block().dequantise(*FP8Block().quantise(x))[:, 1:128].mean(dtype=np.float64)
    assert mean == pytest.approx(0.013, rel=2e-4)
    assert nearest_mean != pytest.approx(0.013, rel=2e-3)
    one, same, other = (as_bytes(FP8Block(True, seed).quantise(x)[0]) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
