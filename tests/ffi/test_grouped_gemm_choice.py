"""Which form of the grouped matmuls runs: the kernel where it can, else the reference, or an error that says why."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.quant import quantise_weight
from qwenjax_ffi import grouped_gemm_kernel as kernel
from qwenjax_ffi.grouped_gemm import grouped_gemm, moe_down, moe_gate_up
from qwenjax_ffi.implementation import KernelUnavailableError
from qwenjax_ffi.linear import linear
from qwenjax_ffi.packing import pack
from qwenjax_ffi.weights import MXFP8Weight

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 3, 64, 32
SIZES = jnp.array([2, 0, 3], jnp.int32)
TOKENS = jnp.array([0, 2, 1, 1, 3, 0], jnp.int32)  # the last row is padding


def weight(out: int, features: int) -> MXFP8Weight:
    return quantise_weight(jax.random.normal(jax.random.key(out), (LAYERS, EXPERTS, out, features)))


def rows(count: int, features: int) -> jax.Array:
    return jax.random.normal(jax.random.key(count), (count, features), jnp.bfloat16)


GATE_UP, DOWN = weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH)
X, H, ROW_WEIGHT = rows(4, HIDDEN), rows(6, WIDTH), jnp.linspace(0.1, 1.0, 6)
CALLS: dict[str, tuple[Callable[..., jax.Array], MXFP8Weight, str]] = {
    "grouped_gemm": (lambda w, **how: grouped_gemm(H, SIZES, w, 1, **how), DOWN, "plain"),
    "moe_gate_up": (lambda w, **how: moe_gate_up(X, TOKENS, SIZES, w, 1, **how), GATE_UP, "gate_up"),
    "moe_down": (lambda w, **how: moe_down(H, SIZES, w, ROW_WEIGHT, 1, **how), DOWN, "plain"),
}


@pytest.mark.parametrize("op", CALLS)
def test_packed_weights_give_the_reference_where_no_kernel_runs(op: str) -> None:
    call, plain, order = CALLS[op]
    packed = pack(plain, order)  # type: ignore[arg-type]
    expected = np.asarray(call(plain, implementation="reference"), np.float32)
    for how in ("auto", "reference"):
        np.testing.assert_array_equal(np.asarray(call(packed, implementation=how), np.float32), expected)


@pytest.mark.parametrize("op", CALLS)
def test_a_kernel_asked_for_in_vain_is_an_error_that_says_why(op: str) -> None:
    call, plain, order = CALLS[op]
    other = "gate_up" if order == "plain" else "plain"
    with pytest.raises(KernelUnavailableError, match=f"{op}: no kernel here: the weight is MXFP8Weight"):
        call(plain, implementation="kernel")
    with pytest.raises(KernelUnavailableError, match=f"packed for '{other}', this operation needs '{order}'"):
        call(pack(plain, other), implementation="kernel")  # type: ignore[arg-type]
    with pytest.raises(KernelUnavailableError, match=r"the backend is cpu|is not installed"):
        call(pack(plain, order), implementation="kernel")  # type: ignore[arg-type]
    with pytest.raises(KernelUnavailableError, match="activations in their own format, not 'mxfp8'"):
        call(pack(plain, order), implementation="kernel", activation_format="mxfp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="implementation is 'fast'"):
        call(plain, implementation="fast")


def test_a_reference_that_nobody_asked_for_is_said_once_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for _ in range(2):
        grouped_gemm(H.astype(jnp.float16), SIZES, pack(DOWN), 1)
    grouped_gemm(H.astype(jnp.float16), SIZES, DOWN, 1, implementation="reference")
    assert [record.message for record in caplog.records] == [
        "grouped_gemm runs its reference, which is slow on a GPU: the rows are float16, the kernel takes bfloat16"
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
def test_any_result_dtype_is_rounded_to_from_one_that_the_kernel_writes(
    monkeypatch: pytest.MonkeyPatch, dtype: jnp.dtype
) -> None:
    def written(x: jax.Array, sizes: jax.Array, weight: object, layer: object, out_dtype: jnp.dtype) -> jax.Array:
        assert out_dtype in (jnp.bfloat16, jnp.float32)
        return jnp.full((x.shape[0], HIDDEN), 1.01, out_dtype)

    monkeypatch.setattr(kernel, "unavailable", lambda *arguments, **named: None)
    monkeypatch.setattr(kernel, "grouped_gemm", written)
    packed = pack(DOWN)
    for result in (grouped_gemm(H, SIZES, packed, 1, out_dtype=dtype), linear(H, packed[0, 0], out_dtype=dtype)):
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, jnp.asarray(1.01, dtype))
