"""The grouped matmuls' references against float64, row by row, and against jax.lax.ragged_dot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax_ffi.grouped_gemm import grouped_gemm, moe_down, moe_gate_up, sum_rows
from qwenjax_ffi.weights import MXFP8Weight

GROUPS, IN, OUT, TOKENS = 5, 64, 32, 23
# Rows and their split: empty groups at each end and in between, all rows in one group, none at all, padding after.
SPLITS = {
    40: [
        [8, 8, 8, 8, 8],
        [0, 13, 0, 27, 0],
        [40, 0, 0, 0, 0],
        [0, 0, 0, 0, 40],
        [0] * 5,
        [1, 2, 3, 4, 5],
        [0, 0, 7, 0, 0],
    ],
    3: [[1, 0, 1, 0, 1], [0, 0, 0, 3, 0], [0, 1, 0, 0, 0]],
    700: [[700, 0, 0, 0, 0], [129, 128, 127, 1, 300]],
}
CASES = [(rows, split) for rows, splits in SPLITS.items() for split in splits]
GEMM = jax.jit(grouped_gemm, static_argnames=("out_dtype", "activation_format"))
GATE_UP, DOWN = (jax.jit(op, static_argnames="activation_format") for op in (moe_gate_up, moe_down))


def test_no_rows_give_no_results() -> None:
    weight, sizes, none = jnp.ones((GROUPS, OUT, IN)), jnp.zeros(GROUPS, jnp.int32), jnp.zeros(0, jnp.int32)
    assert grouped_gemm(jnp.ones((0, IN)), sizes, weight).shape == (0, OUT)
    assert moe_gate_up(jnp.ones((TOKENS, IN)), none, sizes, weight).shape == (0, OUT // 2)
    assert moe_down(jnp.ones((0, IN)), sizes, weight, jnp.zeros(0)).shape == (0, OUT)


def normal(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def groups_of(split: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(split)), split)


def multiply(x: np.ndarray, weight: np.ndarray, split: list[int]) -> np.ndarray:
    """float64 [rows in groups, out], one row at a time."""
    rows = [weight[group].astype(np.float64) @ x[row].astype(np.float64) for row, group in enumerate(groups_of(split))]
    return np.array(rows).reshape(-1, weight.shape[1])


def to_mxfp8(x: np.ndarray) -> np.ndarray:
    """An oracle by search: the smallest power of two under which no element of a block of 32 exceeds 448."""
    out = np.zeros(x.shape, np.float64)
    for row, block in np.ndindex(x.shape[0], x.shape[1] // 32):
        part = x[row, 32 * block : 32 * block + 32].astype(np.float64)
        exponent = -117
        while np.abs(part).max() > 448 * 2.0**exponent:
            exponent += 1
        elements = (part / 2.0**exponent).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        out[row, 32 * block : 32 * block + 32] = elements.astype(np.float64) * 2.0**exponent
    return out.astype(x.dtype)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize(("rows", "split"), CASES, ids=str)
def test_grouped_gemm_equals_float64_and_does_not_read_padding(rows: int, split: list[int]) -> None:
    x, weight = normal((rows, IN), 0), normal((GROUPS, OUT, IN), 1)
    used = sum(split)
    x[used:] = np.nan
    out = np.asarray(GEMM(x, np.array(split, np.int32), weight))
    np.testing.assert_allclose(out[:used], multiply(x, weight, split), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(out[used:], 0)


def test_grouped_gemm_equals_ragged_dot() -> None:
    x, weight = normal((40, IN), 2), normal((GROUPS, OUT, IN), 3)
    for split in SPLITS[40]:
        sizes, used = np.array(split, np.int32), sum(split)
        expected = jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes)
        np.testing.assert_allclose(GEMM(x, sizes, weight)[:used], expected[:used], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_are_float32_and_rounded_once(dtype: Any) -> None:
    # 255 ones after a 256: a bfloat16 sum would stay at 256 forever.
    x = np.ones((3, 256), dtype)
    weight = np.ones((1, 2, 256), dtype)
    x[:, 0] = 256
    sizes = np.array([3], np.int32)
    assert GEMM(x, sizes, weight, out_dtype=jnp.float32).tolist() == [[511.0] * 2] * 3
    assert GEMM(x, sizes, weight).dtype == dtype


@pytest.mark.parametrize(("rows", "split"), CASES, ids=str)
def test_moe_gate_up_equals_float64_and_does_not_read_padding(rows: int, split: list[int]) -> None:
    rng = np.random.default_rng(4)
    x, w13 = normal((TOKENS, IN), 5), normal((GROUPS, 2 * OUT, IN), 6)
    x[-1] = np.nan  # the token of the padding rows
    row_token = rng.integers(0, TOKENS - 1, rows).astype(np.int32)
    used = sum(split)
    row_token[used:] = TOKENS - 1
    out = np.asarray(GATE_UP(x, row_token, np.array(split, np.int32), w13))
    gate, up = np.split(multiply(x[row_token], w13, split), 2, axis=-1)
    np.testing.assert_allclose(out[:used], silu(gate) * up, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(out[used:], 0)


@pytest.mark.parametrize(("rows", "split"), CASES, ids=str)
def test_moe_down_equals_float64_and_does_not_read_padding(rows: int, split: list[int]) -> None:
    h, w2, row_weight = normal((rows, IN), 7), normal((GROUPS, OUT, IN), 8), normal((rows,), 9)
    used = sum(split)
    h[used:] = row_weight[used:] = np.nan
    out = np.asarray(DOWN(h, np.array(split, np.int32), w2, row_weight))
    expected = multiply(h, w2, split) * row_weight[:used, None].astype(np.float64)
    np.testing.assert_allclose(out[:used], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(out[used:], 0)


def test_a_layer_of_a_stack_equals_the_layer_alone() -> None:
    stack, split = normal((3, GROUPS, 2 * OUT, IN), 10), np.array([0, 13, 0, 27, 0], np.int32)
    x, row_token, row_weight = normal((40, IN), 11), np.arange(40, dtype=np.int32)[::-1].copy(), normal((40,), 12)
    for layer in (0, 2):
        for index in (np.int32(layer), np.array([layer], np.int32)):
            alone = stack[layer]
            np.testing.assert_array_equal(GEMM(x, split, stack, index), GEMM(x, split, alone))
            np.testing.assert_array_equal(
                GATE_UP(x, row_token, split, stack, index), GATE_UP(x, row_token, split, alone)
            )
            np.testing.assert_array_equal(DOWN(x, split, stack, row_weight, index), DOWN(x, split, alone, row_weight))


def test_mxfp8_weights_equal_their_decoded_values() -> None:
    rng = np.random.default_rng(13)
    elements = normal((2, GROUPS, 2 * OUT, IN), 14).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(122, 131, (2, GROUPS, 2 * OUT, IN // 32)).astype(np.uint8)
    weight = MXFP8Weight(jnp.asarray(elements), jnp.asarray(scales))
    decoded = elements.astype(np.float32) * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)
    x, split = normal((40, IN), 15), np.array([0, 13, 2, 25, 0], np.int32)
    row_token, row_weight, layer = np.arange(40, dtype=np.int32), normal((40,), 16), np.int32(1)
    np.testing.assert_array_equal(GEMM(x, split, weight, layer), GEMM(x, split, decoded, layer))
    np.testing.assert_allclose(
        GEMM(x, split, weight, layer), multiply(x, decoded[1], split.tolist()), rtol=1e-4, atol=2e-3
    )
    np.testing.assert_array_equal(
        GATE_UP(x, row_token, split, weight, layer), GATE_UP(x, row_token, split, decoded, layer)
    )
    np.testing.assert_array_equal(DOWN(x, split, weight, row_weight, layer), DOWN(x, split, decoded, row_weight, layer))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_mxfp8_activations_equal_an_independent_oracle(dtype: Any) -> None:
    x = normal((40, IN), 17)
    x *= 2.0 ** np.random.default_rng(18).integers(-20, 20, (40, 1))
    x[0], x[1, :32], x[2, :32] = 0, 448.0, 449.0  # on the corner of a scale, and just past it
    x[3, 32:] = [1e-3, *[300.0] * 31]  # an element that the block's scale leaves as a subnormal
    x = x.astype(dtype)
    weight, split = normal((GROUPS, OUT, IN), 19).astype(dtype), [0, 13, 0, 27, 0]
    sizes = np.array(split, np.int32)
    quantised = to_mxfp8(x)
    assert (quantised != x).mean() > 0.5
    out = GEMM(x, sizes, weight, activation_format="mxfp8", out_dtype=jnp.float32)
    np.testing.assert_array_equal(out, GEMM(quantised, sizes, weight, out_dtype=jnp.float32))
    expected = multiply(quantised, weight, split)
    scale = np.abs(quantised).max(-1, keepdims=True).astype(np.float64)
    assert (np.abs(out - expected) <= 1e-4 * scale * np.sqrt(IN)).all()
    row_token, row_weight = np.arange(40, dtype=np.int32)[::-1].copy(), normal((40,), 20)
    np.testing.assert_array_equal(
        GATE_UP(x, row_token, sizes, weight, activation_format="mxfp8"), GATE_UP(quantised, row_token, sizes, weight)
    )
    np.testing.assert_array_equal(
        DOWN(x, sizes, weight, row_weight, activation_format="mxfp8"), DOWN(quantised, sizes, weight, row_weight)
    )


def test_sum_rows_equals_float64_and_skips_rows_that_nothing_names() -> None:
    rows = normal((12, IN), 21)
    rows[-1] = np.nan
    token_rows = np.array([[0, 3, -1], [-1, -1, -1], [7, -1, 2], [10, 9, 8], [-1, 4, -1]], np.int32)
    out = sum_rows(jnp.asarray(rows), jnp.asarray(token_rows))
    expected = [sum((rows[r].astype(np.float64) for r in row if r >= 0), np.zeros(IN)) for row in token_rows]
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    halves = sum_rows(jnp.asarray(rows, jnp.bfloat16), jnp.asarray(token_rows))
    assert halves.dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((GROUPS, OUT, IN + 1), np.float32)}, f"contracts {IN + 1} features"),
        ({"weight": np.zeros((2, GROUPS, OUT, IN), np.float32)}, "axes"),
        ({"layer": 0}, "axes"),
        ({"group_sizes": np.zeros(GROUPS + 1, np.int32)}, rf"int32\[{GROUPS}\]"),
        ({"group_sizes": np.zeros(GROUPS, np.float32)}, "group_sizes is float32"),
        ({"activation_format": "fp4"}, "'fp4'"),
        ({"x": np.zeros((4, 48), np.float32), "weight": np.zeros((GROUPS, OUT, 48), np.float32),
          "activation_format": "mxfp8"}, "multiple of 32 features, not 48"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_an_error(change: dict[str, Any], message: str) -> None:
    arguments = {
        "x": np.zeros((4, IN), np.float32),
        "group_sizes": np.zeros(GROUPS, np.int32),
        "weight": np.zeros((GROUPS, OUT, IN), np.float32),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**arguments)
