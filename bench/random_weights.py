"""A large model of random weights on a mesh, for benchmarks of shapes without a checkpoint."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax.checkpoint.load import check_blocks_divide, with_mxfp8
from qwenjax.checkpoint.mapping import all_pieces
from qwenjax.checkpoint.packed import default_activation_format, layout_for, packs_here, row_order
from qwenjax.config import ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.model import abstract_model
from qwenjax.quant.mxfp8 import quantise_weight
from qwenjax.quant.names import KINDS, kind_of
from qwenjax.sharded_model import ShardedModel, by_name, from_names, shardings
from qwenjax_ffi.packing import AnyWeight, PackedLayout, pack
from qwenjax_ffi.weights import MXFP8Weight

_STDDEV = 0.02  # transformers' initializer_range for Qwen3-MoE


def random_weights(
    config: ModelConfig,
    dtype: jnp.dtype = jnp.bfloat16,
    quantization: str | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    packed: bool | None = None,
) -> ShardedModel:
    """A model of `config` on a mesh, by default of the first device; quantization "mxfp8" quantises, and where the
    kernels run, or where `packed` says so, packs: parameters lie as load_model lays them. Every device makes its own
    share, and holds what one layer of one parameter takes beside it; the numbers are the same on every mesh. Raises
    MeshError as load_model does."""
    mesh = mesh or make_mesh()
    names = {piece.parameter for piece in all_pieces(config) if quantization and kind_of(piece.source) in KINDS}
    kept_as = default_activation_format(dtype, names, packed)
    graphdef, abstract = abstract_model(config, mesh, dtype, kept_as)
    abstract = with_mxfp8(abstract, names)
    shapes, placed = by_name(abstract), by_name(shardings(abstract, mesh))
    check_blocks_divide(placed, shapes)
    layout = layout_for(kept_as) if (packs_here(dtype, kept_as) if packed is None else packed) else None
    leaves = {
        name: random_parameter(seed, index, name, leaf, placed[name], layout)
        for index, (name, leaf) in enumerate(shapes.items())
    }
    return ShardedModel(config, mesh, graphdef, from_names(abstract, leaves))


def random_parameter(
    seed: int, index: int, name: str, leaf: Any, placed: NamedSharding, layout: PackedLayout | None = None
) -> AnyWeight:
    """A parameter like the abstract `leaf`, which may be an MXFP8Weight; layout: such a one packed.

    seed and index draw its numbers; norms, by their names, are ones.
    """
    if name.endswith("norm"):
        return jax.device_put(np.ones(leaf.shape, leaf.dtype), placed)
    stacked = len(leaf.shape) > 2 or name.endswith("bias")
    local, quantised = placed.shard_shape(leaf.shape), isinstance(leaf, MXFP8Weight)
    dtype, shape = jnp.bfloat16 if quantised else leaf.dtype, local[stacked:]
    # The axis that is split over ranks. What no mesh splits, or this one does not, is split along its first on others.
    split = next((axis for axis, names in enumerate(placed.spec) if names), None)
    axis = 0 if split is None else split - stacked

    def drawn(key: jax.Array) -> jax.Array:
        # Each place along the axis by where it is in the whole: the same numbers on every mesh.
        first = 0 if split is None else jax.lax.axis_index(placed.spec[split]) * shape[axis]
        places = first + jnp.arange(shape[axis])
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, places)
        others = shape[:axis] + shape[axis + 1 :]
        return jax.vmap(lambda key: jax.random.normal(key, others, dtype), out_axes=axis)(keys)

    def layer(key: jax.Array) -> AnyWeight:
        values = drawn(key) * jnp.asarray(_STDDEV, dtype)
        if not quantised:
            return values
        weight = quantise_weight(values)
        return weight if layout is None else pack(weight, row_order(name), layout)

    def share(seed: jax.Array) -> AnyWeight:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.lax.map(layer, jax.random.split(key, local[0])) if stacked else layer(key)

    shares = jax.shard_map(share, mesh=placed.mesh, in_specs=PartitionSpec(), out_specs=placed.spec, check_vma=False)
    return jax.jit(shares)(np.uint32(seed))
