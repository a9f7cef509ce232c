"""A head that begins as the base's own last layer, instead of at random."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from qwenjax.mesh import DATA
from qwenjax.model import Qwen3Moe
from qwenjax.sharded_model import EPOCHS_SPEC, ShardedModel, by_name, from_names, on_ranks
from qwenjax.train.contexts import WindowContext
from qwenjax.train.forward import first_layers
from qwenjax.train.losses import HEAD
from qwenjax.train.runs import add_head
from qwenjax_ffi.norm import rms_norm

_RIDGE = 1e-4  # of the mean squared input, against directions that the windows hardly show


def warm_head(model: ShardedModel, windows: np.ndarray) -> ShardedModel:
    """`model` with a new head: a copy of its last layer and final norm, behind the projection that best makes, from a
    token's embedding and the hidden state before it, what that layer receives (least squares over `windows`, int32
    [windows, tokens]; a few ten thousand tokens do).

    Raises ValueError where the last layer has no experts, which the head's has.
    """
    config = model.config
    last = config.num_hidden_layers - 1
    if last not in config.sparse_layers:
        raise ValueError(f"layer {last}, the last, has no experts; a head cannot begin as its copy")
    inner, outer = (np.asarray(part, np.float64) for part in model.run(_normal_equations, windows))
    ridge = _RIDGE * np.trace(inner) / len(inner)
    projection = np.linalg.solve(inner + ridge * np.eye(len(inner)), outer).T
    fresh, base = add_head(model), by_name(model.state)
    named = by_name(fresh.state)
    placed = named[f"{HEAD}fc"].sharding
    named[f"{HEAD}fc"] = jax.device_put(jnp.asarray(projection, model.dtype), placed)
    named[f"{HEAD}norm"] = jnp.copy(base["norm"])
    for name, value in base.items():
        if f"{HEAD}{name}" in named and name != "norm" and not name.startswith("mlp."):
            index = config.sparse_layers.index(last) if name.startswith("experts.") else last
            # A slice along the layer axis, which no mesh axis splits, keeps the sharding.
            named[f"{HEAD}{name}"] = jax.device_put(value[index : index + 1], value.sharding)
    return replace(fresh, state=from_names(fresh.state, named))


@partial(jax.jit, static_argnames=("graphdef", "mesh"))
def _normal_equations(
    state: nnx.State, tokens: jax.Array, epochs: jax.Array, graphdef: nnx.GraphDef, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """X^T X [2 hidden, 2 hidden] and X^T Y [2 hidden, hidden], float32."""

    def per_rank(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = qwen.config
        context = WindowContext(jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape))
        embedding = qwen.embed(tokens)
        hidden, _, epochs = qwen(tokens, context, epochs)
        received, _, _, _ = first_layers(qwen, embedding, context, epochs, config.num_hidden_layers - 1)
        ones = jnp.ones(config.hidden_size, embedding.dtype)
        normed = (rms_norm(part, ones, config.rms_norm_eps) for part in (embedding[:, 1:], hidden[:, :-1]))
        x = jnp.concatenate(list(normed), axis=-1).reshape(-1, 2 * config.hidden_size).astype(jnp.float32)
        y = received[:, 1:].reshape(-1, config.hidden_size).astype(jnp.float32)
        return jax.lax.psum((x.T @ x, x.T @ y), DATA)

    specs = (PartitionSpec(DATA), EPOCHS_SPEC)
    return on_ranks(graphdef, mesh, per_rank, specs, PartitionSpec())(state, tokens, epochs)
