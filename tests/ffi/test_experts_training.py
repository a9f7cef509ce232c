"""The differentiable form of the local experts, and that inference's own results stay what they were."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi import experts_training
from qwenjax_ffi.expert_parallel import ExpertWeights, local_experts
from qwenjax_ffi.weights import MXFP8Weight

TOKENS, HIDDEN, WIDTH, LOCAL, TOP_K, LAYERS, FIRST, LAYER = 21, 32, 16, 6, 2, 2, 3, 1
FORMS = (experts_training._every_expert, experts_training._by_expert)


def inputs() -> tuple[jax.Array, ...]:
    """x, weights, w13, w2, ids; some ids are of other ranks and some -1."""
    rng = np.random.default_rng(0)
    floats = [(TOKENS, HIDDEN), (TOKENS, TOP_K), (LAYERS, LOCAL, 2 * WIDTH, HIDDEN), (LAYERS, LOCAL, HIDDEN, WIDTH)]
    ids = np.stack([rng.permutation(12)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    ids[4] = -1
    ids[5, 1] = -1
    return (*(jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32) for shape in floats), jnp.asarray(ids))


def brute_force(x: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array, ids: jax.Array) -> jax.Array:
    out = jnp.zeros_like(x)
    for expert in range(LOCAL):
        gate, up = jnp.split(x @ w13[LAYER, expert].T, 2, axis=-1)
        made = (jax.nn.silu(gate) * up) @ w2[LAYER, expert].T
        out += made * jnp.sum(jnp.where(ids == expert + FIRST, weights, 0), axis=1)[:, None]
    return out


@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradients_equal_those_of_brute_force(
    form: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_training, "EVERY_EXPERT_UP_TO", 8 if form is experts_training._every_expert else 0)
    *floats, ids = inputs()
    direction = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)), jnp.float32)

    def ours(x: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        return jnp.vdot(direction, local_experts(x, ids, weights, ExpertWeights(w13, w2, LAYER), FIRST))

    def theirs(x: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        return jnp.vdot(direction, brute_force(x, weights, w13, w2, ids))

    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1, 2, 3)))(*floats)
    wanted, wanted_gradients = jax.value_and_grad(theirs, (0, 1, 2, 3))(*floats)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for found, want in zip(gradients, wanted_gradients, strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_both_forms_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    *floats, ids = inputs()
    x, weights, w13, w2 = floats
    called = []
    for form in FORMS:
        monkeypatch.setattr(experts_training, form.__name__, lambda *_, f=form: called.append(f))
    for limit in (8, 2):
        monkeypatch.setattr(experts_training, "EVERY_EXPERT_UP_TO", limit)
        experts_training.local_experts_training(x, ids, weights, w13, w2, LAYER, FIRST)
    assert called == list(FORMS)


def test_without_a_gradient_the_inference_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    *floats, ids = inputs()
    x, weights, w13, w2 = floats
    monkeypatch.setattr("qwenjax_ffi.expert_parallel.local_experts_training", None)
    out = local_experts(x, ids, weights, ExpertWeights(w13, w2, LAYER), FIRST)
    np.testing.assert_allclose(out, brute_force(x, weights, w13, w2, ids), rtol=1e-4, atol=1e-4)


def test_quantised_experts_have_no_gradient() -> None:
    *floats, ids = inputs()
    x, weights, w13, w2 = floats
    quantised = MXFP8Weight(w13.astype(jnp.float8_e4m3fn), jnp.full((LAYERS, LOCAL, 2 * WIDTH, 1), 127, jnp.uint8))
    with pytest.raises(ValueError, match="quantised experts"):
        jax.grad(lambda x: jnp.sum(local_experts(x, ids, weights, ExpertWeights(quantised, w2, LAYER), FIRST)))(x)


def test_quantised_activations_have_no_gradient() -> None:
    *floats, ids = inputs()
    x, weights, w13, w2 = floats
    with pytest.raises(ValueError, match="activation_format"):
        jax.grad(lambda x: jnp.sum(local_experts(x, ids, weights, ExpertWeights(w13, w2, LAYER), FIRST, "mxfp8")))(x)
