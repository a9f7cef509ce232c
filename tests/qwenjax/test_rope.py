"""Rotary embeddings against transformers' tables, and their defining property."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.config import ModelConfig
from qwenjax.rope import cos_sin, inverse_frequencies
from qwenjax_ffi.attention_inputs import rotate
from tests.helpers import tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    {**YARN, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e6), (16, 1e4)])
def test_cos_and_sin_equal_transformers(rope: dict[str, Any], head_dim: int, theta: float) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    raw = tiny(head_dim=head_dim, rope_theta=None, rope_parameters={**rope, "rope_theta": theta})
    ours = ModelConfig.from_dict(raw)
    theirs = modeling.Qwen3MoeRotaryEmbedding(modeling.Qwen3MoeConfig.from_dict(raw))
    # Small positions: at large ones float32 angles differ in the last bit of the frequencies times the position.
    positions = np.arange(64, dtype=np.int32)[None]
    frequencies = inverse_frequencies(ours.rope, head_dim)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=2e-6)
    cos, sin = cos_sin(jnp.asarray(positions), frequencies, ours.rope.attention_factor)
    their_cos, their_sin = theirs(torch.zeros(1, 64, head_dim), torch.from_numpy(positions).long())
    np.testing.assert_allclose(np.tile(cos, 2), their_cos.numpy(), atol=2e-5)
    np.testing.assert_allclose(np.tile(sin, 2), their_sin.numpy(), atol=2e-5)


def test_scores_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 2, 16)), jnp.float32) for _ in range(2))
    frequencies = inverse_frequencies(ModelConfig.from_dict(tiny()).rope, 16)

    def score(query_at: int, key_at: int) -> np.ndarray:
        at = [cos_sin(jnp.full((1, 1), position, jnp.int32), frequencies, 1.0) for position in (query_at, key_at)]
        return np.asarray((rotate(q, *at[0]) * rotate(k, *at[1])).sum(-1))

    np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-4)
    assert np.abs(score(9, 4) - score(9, 5)).max() > 1e-2


def test_bfloat16_heads_are_rotated_in_float32_and_rounded_once() -> None:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(1, 5, 2, 16)), jnp.bfloat16)
    angles = cos_sin(
        jnp.arange(5, dtype=jnp.int32)[None], inverse_frequencies(ModelConfig.from_dict(tiny()).rope, 16), 1.0
    )
    expected = rotate(x.astype(jnp.float32), *angles).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotate(x, *angles), expected)
