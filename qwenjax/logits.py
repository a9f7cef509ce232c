"""Logits of whole token sequences, without generating."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from qwenjax.cache import SelfContext
from qwenjax.config import ModelConfig
from qwenjax.mesh import DATA
from qwenjax.model import Qwen3Moe
from qwenjax.sharded_model import EPOCHS_SPEC, ShardedModel, on_ranks

_BATCH = PartitionSpec(DATA)
_LENGTH_STEP = 64  # lengths compile in these steps, so that texts of like length share a program


def sequence_logits(model: ShardedModel, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """float32 [tokens, vocab] for each sequence: row i holds the logits of the token after i.

    Sequences are padded to the longest, in steps of 64, and to a multiple of the data ranks. Raises ValueError
    for an empty sequence, an id outside the vocabulary or a sequence longer than max_position_embeddings.
    """
    check_sequences(model.config, sequences)
    data = model.mesh.shape[DATA]
    rows = -(-len(sequences) // data) * data
    length = -(-max(len(sequence) for sequence in sequences) // _LENGTH_STEP) * _LENGTH_STEP
    tokens = np.zeros((rows, length), np.int32)
    positions = np.full_like(tokens, -1)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        positions[row, : len(sequence)] = np.arange(len(sequence))
    logits = model.run(_forward, tokens, SelfContext(jnp.asarray(positions)))
    return [np.asarray(logits[row, : len(sequence)]) for row, sequence in enumerate(sequences)]


def check_sequences(config: ModelConfig, sequences: Sequence[Sequence[int]]) -> None:
    """Raises ValueError for what the model cannot read, naming the sequence and the limit."""
    vocabulary, longest = config.vocab_size, config.max_position_embeddings
    if not sequences:
        raise ValueError("no sequences")
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise ValueError(f"sequence {index} is empty")
        if len(sequence) > longest:
            raise ValueError(f"sequence {index} has {len(sequence)} tokens; max_position_embeddings is {longest}")
        for token in sequence:
            if isinstance(token, bool | np.bool_) or not isinstance(token, Integral):
                raise ValueError(f"sequence {index} holds {token!r}; token ids are integers")
            if not 0 <= token < vocabulary:
                raise ValueError(f"sequence {index} has token id {token}; the vocabulary is 0 to {vocabulary - 1}")


@partial(jax.jit, static_argnames=("graphdef", "mesh"))
def _forward(
    state: nnx.State,
    tokens: jax.Array,
    context: SelfContext,
    epochs: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    mesh: Mesh,
) -> jax.Array:
    def per_rank(qwen: Qwen3Moe, tokens: jax.Array, context: SelfContext, epochs: jax.Array) -> jax.Array:
        hidden, _, _ = qwen(tokens, context, epochs)
        return qwen.logits(hidden)

    ranks = on_ranks(graphdef, mesh, per_rank, (_BATCH, _BATCH, EPOCHS_SPEC), _BATCH)
    return ranks(state, tokens, context, epochs)
