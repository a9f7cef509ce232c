"""A model whose parameters lie on a mesh, and the way to run per-rank code on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax.config import ModelConfig
from qwenjax.mesh import DATA, MODEL
from qwenjax.model import Qwen3Moe, abstract_model, partition_specs
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.collectives import fresh_epochs, unarmed
from qwenjax_ffi.packing import PackedMXFP8Weight
from qwenjax_ffi.token_exchange_kernel import ExchangeRows
from qwenjax_ffi.weights import MXFP8Weight

EPOCHS_SPEC = PartitionSpec((DATA, MODEL))  # a count a rank, or more words: qwenjax_ffi.collectives

_loaded: set[Hashable] = set()  # programs that `ShardedModel.run` has run


@dataclass(frozen=True)
class ShardedModel:
    """Structure (graphdef) and parameters (state, sharded over `mesh`) of a Qwen3Moe."""

    config: ModelConfig
    mesh: Mesh
    graphdef: nnx.GraphDef
    state: nnx.State

    def epochs(self) -> jax.Array:
        """A fresh epoch array, int32 [ranks * words], for any number of tokens: see mesh_epochs."""
        return mesh_epochs(self.config, self.mesh, self.dtype, tokens=1)

    def run(self, program: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        """`program(state, *arguments, epochs, graphdef=, mesh=, **static)` over fresh epochs.

        program: of `jax.jit`, whose static arguments are those with names, and which donates none; arguments: arrays.
        Where this process drives several GPUs, each program is run once before with collectives that return at once,
        which loads its kernels: loading may wait for what runs, and what runs for the kernel (docs/collectives.md).
        """
        epochs = self.epochs()

        def results(epochs: jax.Array) -> Any:
            return program(self.state, *arguments, epochs, graphdef=self.graphdef, mesh=self.mesh, **static)

        if len(self.mesh.local_devices) > 1 and (idle := unarmed(epochs, self.mesh.size)) is not epochs:
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((self.state, arguments)))
            compiled = (program, self.graphdef, self.mesh, shapes, tuple(sorted(static.items())))
            if compiled not in _loaded:
                jax.block_until_ready(results(idle))
                _loaded.add(compiled)
        return results(epochs)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and cache, that of the norms."""
        return jnp.dtype(jax.tree.leaves(self.state["norm"])[0].dtype)

    @property
    def quantised(self) -> list[str]:
        """Names of the parameters that are quantised, in order."""
        return sorted(name for name, leaf in by_name(self.state).items() if _is_quantised(leaf))

    @property
    def activation_format(self) -> ActivationFormat:
        """What the inputs of the quantised layers are rounded to, see Qwen3Moe."""
        model: Qwen3Moe = nnx.merge(self.graphdef, self.state)
        return model.attention.activation_format

    @property
    def num_parameters(self) -> int:
        """Elements in all parameters, as the checkpoint counts them."""
        return sum(math.prod(weight.shape) for weight in by_name(self.state).values())


def mesh_epochs(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype, tokens: int) -> jax.Array:
    """A fresh epoch array, int32 [ranks * words], for a model of this dtype; see qwenjax_ffi.collectives.fresh_epochs.

    tokens: how many a data rank runs at once where that has to be fast: on a mesh with model=1, more tokens than its
    heap holds are dispatched to their experts through XLA. The heap always holds 1 MiB of rows from a rank to another.
    """
    if mesh.shape[MODEL] == 1 and config.sparse_layers:
        return fresh_epochs(mesh, DATA, ExchangeRows(tokens, config.hidden_size, config.num_experts_per_tok, dtype))
    return fresh_epochs(mesh, MODEL)


def on_ranks(
    graphdef: nnx.GraphDef, mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function(model, *args)`, per-rank code, as a function of (state, *args) over the whole mesh.

    in_specs are those of args. The state is an argument of the program to jit, never closed over: its arrays would
    become constants.
    """

    def whole(state: nnx.State, *args: Any) -> Any:
        def per_rank(state: nnx.State, *args: Any) -> Any:
            return function(nnx.merge(graphdef, state), *args)

        specs = (partition_specs(state), *in_specs)
        # check_vma: the model's own collectives make replicated values that the checker cannot prove to be.
        ranks = jax.shard_map(per_rank, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return ranks(state, *args)

    return whole


def shardings(model_state: nnx.State, mesh: Mesh) -> Any:
    """The state's tree with a NamedSharding in place of every parameter."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        partition_specs(model_state),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def by_name(tree: Any) -> dict[str, Any]:
    """The parameters of a state, or of a tree shaped like one, by name: "attention.q_proj"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantised)
    return {_name(path): leaf for path, leaf in leaves}


def from_names(structure: nnx.State, leaves: Mapping[str, Any]) -> nnx.State:
    """`structure` with the leaves of these names. A state's structure holds the PartitionSpecs of the mesh that it
    was made for: parameters that move to another mesh take that mesh's structure, from abstract_model."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], structure, is_leaf=_is_quantised)


def _is_quantised(leaf: Any) -> bool:
    return isinstance(leaf, MXFP8Weight | PackedMXFP8Weight)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def random_model(config: ModelConfig, mesh: Mesh, seed: int = 0, dtype: jnp.dtype | None = None) -> ShardedModel:
    """A model of random weights, made on the mesh: for benchmarks, tests and training from scratch.

    Raises MeshError where the model does not divide over the mesh.
    """
    graphdef, abstract = abstract_model(config, mesh, dtype)
    named = random_parameters(config, mesh, seed, dtype)
    return ShardedModel(config, mesh, graphdef, from_names(abstract, named))


def random_parameters(
    config: ModelConfig, mesh: Mesh, seed: int = 0, dtype: jnp.dtype | None = None, only: str = ""
) -> dict[str, jax.Array]:
    """The parameters of random_model by name, those whose names begin with `only`; the others are not made."""
    _, abstract = abstract_model(config, mesh, dtype)
    placed = {name: sharding for name, sharding in by_name(shardings(abstract, mesh)).items() if name.startswith(only)}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        named = by_name(nnx.state(Qwen3Moe(config, mesh, rngs=nnx.Rngs(key), dtype=dtype)))
        return {name: named[name] for name in placed}

    return jax.jit(init, out_shardings=placed)(jax.random.key(seed))
