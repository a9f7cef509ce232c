"""Rotary position embeddings, plain and YaRN."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2]: theta^(-2i / head_dim), interpolated by YaRN where configured.

    YaRN (arXiv:2309.00071, section 3.2) divides the frequencies of wavelengths longer than the original context by
    `factor`, keeps the short ones, and blends linearly in between; the blend's corners are beta_fast and beta_slow
    rotations over the original context.
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "default":
        return plain.astype(np.float32)

    def dimension_of(rotations: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference implementation: a step instead of a division by zero
    interpolated = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return (plain / rope.factor * interpolated + plain * (1 - interpolated)).astype(np.float32)


def cos_sin(positions: jax.Array, frequencies: np.ndarray, attention_factor: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, times attention_factor.

    positions: int32 [batch, tokens]; frequencies: float32 [head_dim / 2]. Returns two float32
    [batch, tokens, head_dim / 2].
    """
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor
