"""From a model's logits to those that tokens are drawn from."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax.sampling.arrays import SamplingArrays
from qwenjax.sampling.counts import TokenCounts
from qwenjax.sampling.truncate import truncate


def process_logits(
    logits: jax.Array,
    arrays: SamplingArrays,
    position: jax.Array,
    counts: TokenCounts | None = None,
    count_rows: jax.Array | None = None,
) -> jax.Array:
    """The logits that a draw sees, float32 [rows, vocab], -inf at ids that cannot be drawn.

    logits: [rows, vocab], any float dtype. position: int32 [rows], that of the token to draw, counted from
    the prompt's first token, so that `position - prompt_len` tokens precede it in the output.
    counts: of the tokens before `position`; None only where no row has penalties. Row i is row count_rows[i] (int32
    [rows]) of the counts, by default row i; counts of more rows than these are read, if at all, without a copy.

    The steps and their order are vLLM's (class Sampler of its v1 engine): min_tokens, logit_bias, repetition,
    frequency and presence penalties, temperature (greedy rows: none), min-p, top-k, top-p.
    """
    logits = logits.astype(jnp.float32)
    rows = jnp.arange(logits.shape[0])[:, None]
    # One branch for both scatters, since few requests need either.
    too_short = position - arrays.prompt_len < arrays.min_tokens
    has_bias = arrays.bias_ids < logits.shape[1]

    def edit(logits: jax.Array) -> jax.Array:
        banned = jnp.where(too_short[:, None], -jnp.inf, jnp.float32(0))
        logits = logits.at[rows, arrays.end_ids].add(banned, mode="drop")
        return logits.at[rows, arrays.bias_ids].add(arrays.bias_values, mode="drop")

    logits = jax.lax.cond(too_short.any() | has_bias.any(), edit, lambda logits: logits, logits)
    if counts is not None:
        has_penalties = (arrays.repetition_penalty != 1) | (arrays.presence_penalty != 0)
        has_penalties |= arrays.frequency_penalty != 0

        def penalise(logits: jax.Array, counts: TokenCounts) -> jax.Array:
            return _penalise(logits, arrays, counts.of(logits.shape[0], count_rows))

        logits = jax.lax.cond(has_penalties.any(), penalise, lambda logits, _: logits, logits, counts)
    temperature = jnp.where(arrays.temperature > 0, arrays.temperature, 1)
    return truncate(logits / temperature[:, None], arrays.top_k, arrays.top_p, arrays.min_p)


def _penalise(logits: jax.Array, arrays: SamplingArrays, counts: TokenCounts) -> jax.Array:
    in_output = counts.in_output > 0
    penalty = jnp.where(counts.in_prompt | in_output, arrays.repetition_penalty[:, None], 1)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits -= arrays.frequency_penalty[:, None] * counts.in_output
    return logits - arrays.presence_penalty[:, None] * in_output
