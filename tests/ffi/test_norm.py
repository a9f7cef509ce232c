"""RMS normalisation against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi.norm import add_rms_norm, rms_norm

WEIGHT = np.random.default_rng(0).uniform(0.5, 1.5, 48).astype(np.float32)


def brute_force(x: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * WEIGHT


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_equals_float64(eps: float) -> None:
    x = np.random.default_rng(1).normal(size=(2, 3, 48)).astype(np.float32)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(WEIGHT), eps), brute_force(x, eps), rtol=1e-5)


def test_zeros_stay_zeros() -> None:
    assert (np.asarray(rms_norm(jnp.zeros((2, 48)), jnp.asarray(WEIGHT), 1e-6)) == 0).all()


def test_statistics_of_bfloat16_are_float32() -> None:
    # Of 4,096 equal squares a bfloat16 sum would stop growing after 256.
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(4096, jnp.bfloat16), 0.0)
    assert out.dtype == jnp.bfloat16
    assert (np.asarray(out, np.float32) == 1).all()


def test_bfloat16_is_rounded_before_and_after_the_weight_as_transformers_does() -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    x = jnp.asarray(np.random.default_rng(2).normal(size=(64, 48)), jnp.bfloat16)
    norm = modeling.Qwen3MoeRMSNorm(48, eps=1e-6).to(torch.bfloat16)
    norm.weight.data = torch.from_numpy(WEIGHT).to(torch.bfloat16)
    with torch.no_grad():
        theirs = norm(torch.from_numpy(np.asarray(x, np.float32)).to(torch.bfloat16)).float().numpy()
    ours = np.asarray(rms_norm(x, jnp.asarray(WEIGHT, jnp.bfloat16), 1e-6), np.float32)
    # Float32 statistics may differ in the last bit and fall on the other side of a tie: nearly all bits are equal.
    assert (ours == theirs).mean() > 0.99
    np.testing.assert_allclose(ours, theirs, rtol=2**-7)


def test_the_sum_is_rounded_before_its_norm_whatever_is_in_one_program() -> None:
    x, residual = (jax.random.normal(jax.random.key(seed), (7, 64), jnp.bfloat16) for seed in (0, 1))
    weight = jax.random.normal(jax.random.key(2), (64,), jnp.bfloat16)
    total, normed = jax.jit(add_rms_norm, static_argnums=3)(residual, x, weight, 1e-6)
    rounded = residual + x  # a program of its own
    np.testing.assert_array_equal(total, rounded)
    np.testing.assert_array_equal(normed, jax.jit(rms_norm, static_argnums=2)(rounded, weight, 1e-6))
