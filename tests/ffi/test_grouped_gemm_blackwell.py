"""Blackwell's form of the grouped matmuls where its kernels do not run: results, choice, what the binding refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.quant import quantise_weight
from qwenjax_ffi import grouped_gemm_blackwell as kernels
from qwenjax_ffi import grouped_gemm_kernel
from qwenjax_ffi.blackwell_packing import BlockScaledRows, pack_rows
from qwenjax_ffi.expert_parallel import ExpertWeights, local_experts
from qwenjax_ffi.grouped_gemm import grouped_gemm, moe_down, moe_gate_up
from qwenjax_ffi.implementation import KernelUnavailableError
from qwenjax_ffi.linear import linear
from qwenjax_ffi.packing import RowOrder, pack
from qwenjax_ffi.weights import MXFP8Weight

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 3, 64, 32
SIZES = jnp.array([2, 0, 3], jnp.int32)
TOKENS = jnp.array([0, 2, 1, 1, 3, 0], jnp.int32)  # the last row is padding
block_scaled = partial(pack, layout="block_scaled")


def weight(out: int, features: int) -> MXFP8Weight:
    return quantise_weight(jax.random.normal(jax.random.key(out), (LAYERS, EXPERTS, out, features)))


def rows(count: int, features: int) -> jax.Array:
    return jax.random.normal(jax.random.key(count), (count, features), jnp.bfloat16)


GATE_UP, DOWN = weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH)
X, H, ROW_WEIGHT = rows(4, HIDDEN), rows(6, WIDTH), jnp.linspace(0.1, 1.0, 6)
CALLS: dict[str, tuple[Callable[..., Any], MXFP8Weight, RowOrder]] = {
    "grouped_gemm": (lambda w, **how: grouped_gemm(H, SIZES, w, 1, **how), DOWN, "plain"),
    "moe_gate_up": (lambda w, **how: moe_gate_up(X, TOKENS, SIZES, w, 1, **how), GATE_UP, "gate_up"),
    "moe_down": (lambda w, **how: moe_down(H, SIZES, w, ROW_WEIGHT, 1, **how), DOWN, "plain"),
    "linear": (lambda w, **how: linear(H, w, 1, **how), DOWN[:, 0], "plain"),
}


def float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def assert_same_rows(first: BlockScaledRows, second: BlockScaledRows) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    np.testing.assert_array_equal(np.asarray(first.data), np.asarray(second.data))


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("kept_as", ["model", "mxfp8"])
def test_block_scaled_weights_give_the_plain_weights_result(op: str, kept_as: str) -> None:
    call, plain, order = CALLS[op]
    expected = call(plain, activation_format=kept_as)
    found = call(block_scaled(plain, order), activation_format=kept_as)
    if op == "moe_gate_up" and kept_as == "mxfp8":
        assert_same_rows(found, pack_rows(expected, SIZES, 16))
    else:
        np.testing.assert_array_equal(float32(found), float32(expected))


def test_experts_in_quantised_rows_equal_experts_that_quantise_in_between() -> None:
    x, ids = rows(5, HIDDEN), jnp.array([[0, 2], [1, 0], [-1, -1], [2, 1], [0, 1]], jnp.int32)
    weights = jax.random.uniform(jax.random.key(0), ids.shape)
    plain = ExpertWeights(GATE_UP, DOWN, 1)
    packed = ExpertWeights(block_scaled(GATE_UP, "gate_up"), block_scaled(DOWN), 1)
    run = jax.jit(lambda experts: local_experts(x, ids, weights, experts, 0, "mxfp8"))
    np.testing.assert_array_equal(np.asarray(run(packed)), np.asarray(run(plain)))


def test_quantised_rows_are_taken_as_they_are() -> None:
    packed = pack_rows(H, SIZES, 16)
    found = moe_down(packed, SIZES, DOWN, ROW_WEIGHT, 1, activation_format="mxfp8")
    expected = moe_down(H, SIZES, DOWN, ROW_WEIGHT, 1, activation_format="mxfp8")
    np.testing.assert_array_equal(float32(found), float32(expected))
    with pytest.raises(ValueError, match="the rows are quantised to MXFP8, and activation_format is 'model'"):
        moe_down(packed, SIZES, DOWN, ROW_WEIGHT, 1)


@pytest.mark.parametrize("op", CALLS)
def test_a_kernel_asked_for_in_vain_is_an_error_that_says_why(op: str) -> None:
    call, plain, order = CALLS[op]
    kernel = partial(call, implementation="kernel")
    with pytest.raises(KernelUnavailableError, match=f"{op}: no kernel here: .* needs activation_format='mxfp8'"):
        kernel(block_scaled(plain, order))
    with pytest.raises(KernelUnavailableError, match=r"the backend is cpu|is not installed"):
        kernel(block_scaled(plain, order), activation_format="mxfp8")
    other: RowOrder = "gate_up" if order == "plain" else "plain"
    with pytest.raises(KernelUnavailableError, match=f"packed for '{other}', this operation needs '{order}'"):
        kernel(block_scaled(plain, other), activation_format="mxfp8")


@pytest.mark.parametrize(("capability", "runs"), [("10.0", True), ("10.3", True), ("9.0", False), ("12.0", False)])
def test_kernels_run_on_blackwell_alone(capability: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        compute_capability = capability

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    packed = block_scaled(DOWN)
    kernels.machine_unavailable.cache_clear()
    try:
        reason = kernels.unavailable(H, packed)
    finally:
        kernels.machine_unavailable.cache_clear()
    assert reason is None if runs else f"capability {capability}, the kernel is for 10.0 and 10.3" in str(reason)
    assert "the rows are float32" in str(kernels.unavailable(H.astype(jnp.float32), packed))


REFUSED: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    (
        "plain weight",
        lambda: kernels.moe_down(pack_rows(H, SIZES, 16), SIZES, DOWN, ROW_WEIGHT, 1),  # type: ignore[arg-type]
        TypeError,
        "takes a PackedMXFP8Weight of row order 'plain' and layout 'block_scaled'",
    ),
    (
        "Hopper's layout",
        lambda: kernels.moe_down(pack_rows(H, SIZES, 16), SIZES, pack(DOWN), ROW_WEIGHT, 1),
        TypeError,
        "layout 'block_scaled'",
    ),
    (
        "Blackwell's layout on Hopper",
        lambda: grouped_gemm_kernel.moe_down(H, SIZES, block_scaled(DOWN), ROW_WEIGHT, 1),
        TypeError,
        "layout 'fragments'",
    ),
    (
        "float32 rows",
        lambda: kernels.grouped_gemm(H.astype(jnp.float32), SIZES, block_scaled(DOWN), 1),
        ValueError,
        r"x is float32\[6, 32\]; it must be bfloat16",
    ),
    (
        "rows of another width",
        lambda: kernels.grouped_gemm(pack_rows(X, SIZES, 16), SIZES, block_scaled(DOWN), 1),
        ValueError,
        "the rows have 64 features, the weight contracts 32",
    ),
    (
        "rows for other groups",
        lambda: kernels.grouped_gemm(pack_rows(H, SIZES[:1], 16), SIZES, block_scaled(DOWN), 1),
        ValueError,
        r"tiles are uint8\[1, 1, 2560\]; for 3 groups they must be uint8\[3, 1, 2560\]",
    ),
    (
        "no layer",
        lambda: kernels.grouped_gemm(H, SIZES, block_scaled(DOWN)),
        ValueError,
        "with layer=None it has 3 axes",
    ),
    (
        "row_token of int64",
        lambda: kernels.quantise_rows(X, SIZES, TOKENS.astype(jnp.int16)),
        ValueError,
        r"row_token is int16\[6\]; it must be int32\[6\]",
    ),
    (
        "ragged features",
        lambda: kernels.quantise_rows(X[:, :40], SIZES),
        ValueError,
        "40 features; MXFP8 needs a multiple of 32",
    ),
    (
        "float16 result",
        lambda: kernels.grouped_gemm(pack_rows(H, SIZES, 16), SIZES, block_scaled(DOWN), 1, out_dtype=jnp.float16),
        ValueError,
        "writes bfloat16 or float32, not float16",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_wrong_arguments_are_python_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
