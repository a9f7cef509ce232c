"""What training a head takes in memory, by arithmetic: to know before a 30B model is loaded."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from qwenjax.config import DTYPES, ModelConfig
from qwenjax.model import abstract_model
from qwenjax.sharded_model import by_name, partition_specs
from qwenjax.train.losses import HEAD, chunk_tokens
from qwenjax_ffi.experts_training import EVERY_EXPERT_UP_TO

# Float32 masters, their gradients and AdamW's two moments.
_HEAD_BYTES_PER_PARAMETER = 16
# Of float32 [chunk, vocabulary] at once: the head's logits, the base's, and what the gradient makes of either.
_LOGITS_AT_ONCE = 4


def head_training_bytes(config: ModelConfig, mesh: Mesh, batch: int, length: int, depths: int) -> dict[str, int]:
    """Bytes on each rank, by what they are for; "total" last.

    batch: windows of `length` tokens, over all data ranks. "base" is exact (no gradient, no masters: its own dtype), as
    are the head's 16 bytes a parameter. "activations" counts what a depth keeps for its gradient: of each token 12 rows
    of the hidden size, the attention's q, k, v and output, float32 scores where the window attention keeps them (from
    the second depth on), and the experts': their weights as the matmuls take them, and every expert's gate, up and
    input where every expert runs on every token. XLA's own scratch comes on top: at Qwen3-30B's shape the peak on an
    H200 was 1.16 of the total (bench/results/train-head-30b.txt).
    """
    _, abstract = abstract_model(config, mesh)
    shapes, specs = by_name(abstract), by_name(partition_specs(abstract))
    sizes = {name: _local(shape.shape, specs[name], mesh) for name, shape in shapes.items()}
    base = sum(size * shapes[name].dtype.itemsize for name, size in sizes.items() if not name.startswith(HEAD))
    head = sum(size for name, size in sizes.items() if name.startswith(HEAD)) * _HEAD_BYTES_PER_PARAMETER
    tokens = batch * length // mesh.shape["data"]
    width = jnp.dtype(DTYPES[config.dtype]).itemsize
    heads = config.num_attention_heads // mesh.shape["model"]
    attention = (
        2 * heads * config.head_dim + 2 * max(1, config.num_key_value_heads // mesh.shape["model"]) * config.head_dim
    )
    local = config.num_experts // mesh.size
    experts = 3 * local * config.hidden_size * config.moe_intermediate_size
    every_expert = local <= EVERY_EXPERT_UP_TO * config.num_experts_per_tok
    rows = local * 3 * config.moe_intermediate_size * every_expert
    per_depth = width * (tokens * (12 * config.hidden_size + attention + rows) + experts)
    scores = tokens * length * heads * 4 * max(0, depths - 1)
    logits = min(chunk_tokens(config.vocab_size), tokens) * config.vocab_size * 4 * _LOGITS_AT_ONCE
    parts = {"base": base, "head": head, "activations": depths * per_depth + scores, "logits": logits}
    return {**parts, "total": sum(parts.values())}


def _local(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> int:
    """Elements of one rank's shard."""
    split = 1
    for axes in spec:
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            split *= mesh.shape[axis]
    return math.prod(shape) // split
