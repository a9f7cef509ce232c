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
    too_short = _too_short(arrays, position)

    def edit(logits: jax.Array) -> jax.Array:
        banned = jnp.where(too_short[:, None], -jnp.inf, jnp.float32(0))
        logits = logits.at[rows, arrays.end_ids].add(banned, mode="drop")
        return logits.at[rows, arrays.bias_ids].add(arrays.bias_values, mode="drop")

    # One branch for both scatters, since few requests need either.
    edits = too_short.any() | _has_bias(arrays, logits.shape[1]).any()
    logits = jax.lax.cond(edits, edit, lambda logits: logits, logits)
    if counts is not None:

        def penalise(logits: jax.Array, counts: TokenCounts) -> jax.Array:
            return _penalise(logits, arrays, counts.of(logits.shape[0], count_rows))

        logits = jax.lax.cond(_has_penalties(arrays).any(), penalise, lambda logits, _: logits, logits, counts)
    temperature = jnp.where(arrays.temperature > 0, arrays.temperature, 1)
    return truncate(logits / temperature[:, None], arrays.top_k, arrays.top_p, arrays.min_p)


def may_move_the_maximum(arrays: SamplingArrays, position: jax.Array, vocab_size: int) -> jax.Array:
    """Whether a row's largest logit may be another than before `process_logits`, bool [rows]."""
    # Truncation keeps the largest and its ties, and a temperature their order.
    return _too_short(arrays, position) | _has_bias(arrays, vocab_size).any(axis=1) | _has_penalties(arrays)


def _too_short(arrays: SamplingArrays, position: jax.Array) -> jax.Array:
    return position - arrays.prompt_len < arrays.min_tokens


def _has_bias(arrays: SamplingArrays, vocab_size: int) -> jax.Array:
    return arrays.bias_ids < vocab_size


def _has_penalties(arrays: SamplingArrays) -> jax.Array:
    penalties = arrays.presence_penalty, arrays.frequency_penalty
    return (arrays.repetition_penalty != 1) | (penalties[0] != 0) | (penalties[1] != 0)


def _penalise(logits: jax.Array, arrays: SamplingArrays, counts: TokenCounts) -> jax.Array:
    in_output = counts.in_output > 0
    penalty = jnp.where(counts.in_prompt | in_output, arrays.repetition_penalty[:, None], 1)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits -= arrays.frequency_penalty[:, None] * counts.in_output
    return logits - arrays.presence_penalty[:, None] * in_output
