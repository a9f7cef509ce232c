"""Drawing tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax.sampling.arrays import SamplingArrays
from qwenjax.sampling.counts import TokenCounts
from qwenjax.sampling.noise import gumbel_noise
from qwenjax.sampling.process import may_move_the_maximum, process_logits
from qwenjax.sampling.truncate import truncate


def sample(
    logits: jax.Array,
    arrays: SamplingArrays,
    position: jax.Array,
    counts: TokenCounts | None = None,
    count_rows: jax.Array | None = None,
) -> jax.Array:
    """One id a row, int32 [rows]; arguments as `process_logits`.

    Under `jax.vmap` its skipping of work that no row needs is lost.
    """
    # Where all rows take the largest logit as it is, no branch below is entered, and none copies the logits either: of
    # a batch of 64 five times 39 MB.
    processes = (arrays.temperature > 0) | may_move_the_maximum(arrays, position, logits.shape[1])
    return jax.lax.cond(
        processes.any(),
        lambda logits: draw(process_logits(logits, arrays, position, counts, count_rows), arrays, position),
        likeliest,
        logits,
    )


def likeliest(logits: jax.Array, *_: object) -> jax.Array:
    """What `sample` gives, with the same arguments, where all rows are greedy and their requests only draw."""
    return jnp.argmax(logits.astype(jnp.float32), axis=1).astype(jnp.int32)


def truncated(logits: jax.Array, arrays: SamplingArrays, position: jax.Array, *_: object) -> jax.Array:
    """What `sample` gives, with the same arguments, where all rows' requests only draw; see SamplingParams.

    Without branches: all rows pay for the truncation.
    """
    temperature = jnp.where(arrays.temperature > 0, arrays.temperature, 1)[:, None]
    scaled = logits.astype(jnp.float32) / temperature
    kept = truncate(scaled, arrays.top_k, arrays.top_p, arrays.min_p, branches=False)
    return draw(kept, arrays, position, branches=False)


def draw(processed: jax.Array, arrays: SamplingArrays, position: jax.Array, branches: bool = True) -> jax.Array:
    """argmax(processed + Gumbel noise), int32 [rows]; without noise where greedy. Ties go to the lowest id.

    processed: float32 [rows, vocab] from `process_logits`. position: int32 [rows], that of the token to draw.
    """
    random = arrays.temperature > 0

    def add_noise(processed: jax.Array) -> jax.Array:
        noise = gumbel_noise(arrays.seed, arrays.sample_index, position, processed.shape[1])
        return processed + jnp.where(random[:, None], noise, 0)

    if branches:
        perturbed = jax.lax.cond(random.any(), add_noise, lambda processed: processed, processed)
    else:
        perturbed = add_noise(processed)
    return jnp.argmax(perturbed, axis=1).astype(jnp.int32)
