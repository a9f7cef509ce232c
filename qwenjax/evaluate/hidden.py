"""The hidden states that a model ends with at every scored place of a text, and what the head makes of two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from qwenjax.cache import SelfContext
from qwenjax.evaluate.windows import Window
from qwenjax.mesh import DATA
from qwenjax.model import Qwen3Moe
from qwenjax.sharded_model import EPOCHS_SPEC, ShardedModel, on_ranks

_BATCH, _EVERYWHERE = PartitionSpec(DATA), PartitionSpec()
_LENGTH_STEP = 64  # windows are padded to a multiple, so that short texts share programs
CHUNK = 256  # places a call of the head: 0.3 GB of float32 logits for two models of Qwen3's vocabulary


class Scores(NamedTuple):
    """Per scored token, float32 [tokens] each. nats: -log q(token); kl: KL(p || q) in nats, p the base model's
    distribution and q the other's; agree: 1 where both have the same most likely token."""

    nats: np.ndarray
    kl: np.ndarray
    agree: np.ndarray


def hidden_states(
    model: ShardedModel,
    ids: Sequence[int],
    cuts: Sequence[Window],
    batch: int,
    advance: Callable[[int], object] = lambda count: None,
) -> np.ndarray:
    """[scored tokens, hidden] of the model's dtype: what predicts each scored token, in the text's order.

    batch: windows a call on each data rank. advance: called with the number of tokens scored since its last call.
    """
    rows = batch * model.mesh.shape[DATA]
    longest = max(cut.stop - cut.start for cut in cuts)
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    found = []
    for first in range(0, len(cuts), rows):
        some = cuts[first : first + rows]
        tokens, positions = np.zeros((rows, length), np.int32), np.full((rows, length), -1, np.int32)
        for row, cut in enumerate(some):
            tokens[row, : cut.stop - cut.start] = ids[cut.start : cut.stop]
            positions[row, : cut.stop - cut.start] = np.arange(cut.stop - cut.start)
        context = SelfContext(jnp.asarray(positions))
        out = np.asarray(model.run(_hidden, tokens, context))
        # The state at a place predicts the token after it.
        found += [out[row, cut.first - cut.start - 1 : cut.stop - cut.start - 1] for row, cut in enumerate(some)]
        advance(sum(cut.stop - cut.first for cut in some))
    return np.concatenate(found)


def compare(model: ShardedModel, base: np.ndarray, other: np.ndarray, targets: np.ndarray) -> Scores:
    """What `other` says of the targets, int [tokens], and how far that is from what `base` says; both are hidden
    states [tokens, hidden] before `model`'s head, which no format quantises."""
    parts = []
    for start in range(0, len(targets), CHUNK):
        chunk = [array[start : start + CHUNK] for array in (base, other, targets.astype(np.int32))]
        padded = [np.pad(array, [(0, CHUNK - len(array)), *[(0, 0)] * (array.ndim - 1)]) for array in chunk]
        scores = _compare(model.state, *padded, graphdef=model.graphdef, mesh=model.mesh)
        parts.append([np.asarray(score)[: len(chunk[2])] for score in scores])
    return Scores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@partial(jax.jit, static_argnames=("graphdef", "mesh"))
def _hidden(
    state: nnx.State, tokens: jax.Array, context: SelfContext, epochs: jax.Array, *, graphdef: nnx.GraphDef, mesh: Mesh
) -> jax.Array:
    def per_rank(qwen: Qwen3Moe, tokens: jax.Array, context: SelfContext, epochs: jax.Array) -> jax.Array:
        return qwen(tokens, context, epochs)[0]

    ranks = on_ranks(graphdef, mesh, per_rank, (_BATCH, _BATCH, EPOCHS_SPEC), _BATCH)
    return ranks(state, tokens, context, epochs)


@partial(jax.jit, static_argnames=("graphdef", "mesh"))
def _compare(
    state: nnx.State, base: jax.Array, other: jax.Array, targets: jax.Array, *, graphdef: nnx.GraphDef, mesh: Mesh
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def per_rank(
        qwen: Qwen3Moe, base: jax.Array, other: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        log_p, log_q = (jax.nn.log_softmax(qwen.logits(hidden), axis=-1) for hidden in (base, other))
        nats = -jnp.take_along_axis(log_q, targets[:, None], axis=-1)[:, 0]
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        agree = jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)
        return nats, kl, agree.astype(jnp.float32)

    return on_ranks(graphdef, mesh, per_rank, (_EVERYWHERE,) * 3, (_EVERYWHERE,) * 3)(state, base, other, targets)
