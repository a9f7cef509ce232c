"""Log-probabilities of drawn and prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopLogprobs:
    """logprob: float32 [rows] and rank: int32 [rows] of the row's own id, rank 1 being the most likely.

    top_ids: int32 [rows, top_n] and top_logprobs: float32 [rows, top_n], falling, ties to the lowest id
    first.
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def token_logprobs(logits: jax.Array, ids: jax.Array, top_n: int) -> TopLogprobs:
    """Natural-log probabilities under the model's unprocessed logits, vLLM's `raw_logprobs`.

    logits: [rows, vocab], any float dtype. ids: int32 [rows], the drawn id, or the prompt's next one. top_n
    is static; 0 skips the search. A rank counts the ids that are strictly more likely.
    """
    logits = logits.astype(jnp.float32)
    norm = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)
    rank = 1 + (logits > chosen).sum(axis=1, dtype=jnp.int32)
    top_logits, top_ids = jax.lax.top_k(logits, top_n)
    return TopLogprobs((chosen - norm)[:, 0], rank, top_ids.astype(jnp.int32), top_logits - norm)
