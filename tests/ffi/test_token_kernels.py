"""The kernels that take a token each beside their references, on a GPU; and why they cannot run elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi import token_kernels
from qwenjax_ffi.attention_inputs import attention_inputs
from qwenjax_ffi.implementation import KernelUnavailableError
from qwenjax_ffi.norm import add_rms_norm
from qwenjax_ffi.routing import top_k_experts

EPS, LAYERS = 1e-6, 3
NORM = jax.jit(add_rms_norm, static_argnums=3, static_argnames="implementation")
ROUTE = jax.jit(top_k_experts, static_argnums=(1, 2), static_argnames="implementation")
HEADS = jax.jit(attention_inputs, static_argnums=(4, 7), static_argnames="implementation")


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(ours: jax.Array, expected: jax.Array) -> None:
    """Nearly all bits are equal; the others are a rounding apart."""
    a, b = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
    assert (a == b).mean() > 0.97
    np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "features"), [(1, 2048), (257, 264), (64, 4096), (3, 8)])
def test_sums_and_norms_are_the_references(tokens: int, features: int) -> None:
    residual, x, weight = (normal(s, *shape) for s, shape in enumerate([(tokens, features)] * 2 + [(LAYERS, features)]))
    for layer in (0, LAYERS - 1):
        index = jnp.asarray([layer], jnp.int32)
        ours = NORM(residual, x, weight, EPS, index, implementation="kernel")
        # The references in float32, rounded where they round: XLA leaves roundings away within a fusion.
        total = (residual.astype(jnp.float32) + x.astype(jnp.float32)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (ours[0], total)))
        close(ours[1], NORM(residual, x, weight, EPS, index, implementation="reference")[1])
    alone = NORM(residual, x, weight[1], EPS, implementation="kernel")
    stacked = NORM(residual, x, weight, EPS, jnp.int32(1), implementation="kernel")
    for one, other in zip(alone, stacked, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "head_dim"),
    [(1, 32, 4, 128), (256, 32, 4, 128), (3, 4, 2, 64), (2, 6, 1, 144), (5, 2, 2, 16)],
)
def test_heads_are_the_references(batch: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
    qkv = normal(0, batch, 2, (q_heads + 2 * kv_heads) * head_dim)
    norms = [normal(seed, LAYERS, head_dim) for seed in (1, 2)]
    angles = jax.random.uniform(jax.random.key(3), (batch, 2, head_dim // 2)) * 6
    arguments = (qkv, *norms, jnp.asarray([2], jnp.int32), EPS, jnp.cos(angles), jnp.sin(angles), kv_heads)
    ours, expected = (HEADS(*arguments, implementation=name) for name in ("kernel", "reference"))
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        close(one, other)
    np.testing.assert_array_equal(np.asarray(ours[2], np.float32), np.asarray(expected[2], np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "normalise"),
    [(1, 128, 8, True), (257, 128, 8, True), (64, 72, 5, False), (3, 8, 8, True), (64, 512, 32, True)],
)
def test_routing_is_the_references(tokens: int, experts: int, top_k: int, normalise: bool) -> None:
    logits = normal(tokens, tokens, experts, dtype=jnp.float32) * 3
    valid = jnp.arange(tokens) % 5 != 3
    weights, ids = ROUTE(logits, top_k, normalise, valid, implementation="kernel")
    expected, expected_ids = ROUTE(logits, top_k, normalise, valid, implementation="reference")
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.gpu
def test_ties_go_to_the_lowest_id_and_ids_are_distinct_whatever_the_logits() -> None:
    logits = np.zeros((4, 128), np.float32)
    logits[1, 64:] = 5
    logits[2, 100] = np.nan
    logits[3, [7, 90]] = np.inf, -np.inf
    ids = np.asarray(ROUTE(logits, 8, True, implementation="kernel")[1])
    assert ids.tolist() == [list(range(8)), list(range(64, 72)), list(range(8)), list(range(8))]


@pytest.mark.gpu
def test_gradients_are_the_references() -> None:
    residual, x, weight = normal(0, 4, 64), normal(1, 4, 64), normal(2, LAYERS, 64)

    def loss(implementation: Any, *arrays: jax.Array) -> jax.Array:
        total, normed = add_rms_norm(*arrays, EPS, 1, implementation=implementation)
        return jnp.sum(total.astype(jnp.float32)) + jnp.sum(jnp.square(normed.astype(jnp.float32)))

    ours, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2)))(residual, x, weight)
        for name in ("kernel", "reference")
    )
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.05, atol=0.05)


def test_unavailable_says_why() -> None:
    x, weight = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((3, 64), jnp.bfloat16)
    assert "x float32" in str(token_kernels.add_rms_norm_unavailable(x, x.astype(jnp.float32), weight))
    assert "rows of 60 features" in str(token_kernels.add_rms_norm_unavailable(x[:, :60], x[:, :60], weight))
    assert "is empty" in str(token_kernels.add_rms_norm_unavailable(x[:0], x[:0], weight))
    assert "heads are float32" in str(token_kernels.head_norms_unavailable(x.astype(jnp.float32), weight, weight))
    assert "head_dim is 18" in str(token_kernels.head_norms_unavailable(x, weight[:, :18], weight[:, :18]))
    assert "float32[tokens, experts]" in str(token_kernels.top_k_unavailable(x, 2))
    assert "65 of 64 experts" in str(token_kernels.top_k_unavailable(x.astype(jnp.float32), 65))
    if jax.default_backend() == "cpu":
        with pytest.raises(KernelUnavailableError, match="add_rms_norm: no kernel here: the backend is cpu"):
            add_rms_norm(x, x, weight, EPS, 1, implementation="kernel")
        with pytest.raises(KernelUnavailableError, match="top_k_experts: no kernel here: the backend is cpu"):
            top_k_experts(x.astype(jnp.float32), 2, True, implementation="kernel")


def test_shapes_that_do_not_fit_are_errors() -> None:
    x, weight = jnp.zeros((2, 64)), jnp.ones((3, 64))
    with pytest.raises(ValueError, match="do not fit x"):
        add_rms_norm(x, x, weight, EPS)
    with pytest.raises(ValueError, match="100 features are not query heads and 4 others of 16"):
        attention_inputs(jnp.zeros((1, 2, 100)), weight[:, :16], weight[:, :16], 0, EPS, x[None], x[None], 2)


def test_padding_goes_to_no_expert() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    weights, ids = top_k_experts(logits, 2, True, jnp.array([True, False, True, False]))
    expected = top_k_experts(logits, 2, True)
    np.testing.assert_array_equal(weights, expected[0])
    np.testing.assert_array_equal(ids, np.where([[True], [False], [True], [False]], expected[1], -1))
