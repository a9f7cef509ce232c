"""A large model of random weights on one device, made layer by layer, for benchmarks of shapes without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax.checkpoint.load import with_mxfp8
from qwenjax.checkpoint.mapping import all_pieces
from qwenjax.checkpoint.packed import default_activation_format, layout_for, packs_here, row_order
from qwenjax.config import ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.model import abstract_model
from qwenjax.quant.mxfp8 import MXFP8
from qwenjax.quant.names import KINDS, kind_of
from qwenjax.sharded_model import ShardedModel, by_name, from_names
from qwenjax_ffi.packing import PackedLayout, empty_packed, pack_into
from qwenjax_ffi.weights import MXFP8Weight

_STDDEV = 0.02  # transformers' initializer_range for Qwen3-MoE


def random_weights(
    config: ModelConfig,
    dtype: jnp.dtype = jnp.bfloat16,
    quantization: str | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> ShardedModel:
    """A model of `config` on a mesh of one device, by default the first; quantization "mxfp8" quantises, and where the
    kernels run packs, what load_model does. One layer of one parameter at a time is held beside the model."""
    mesh = mesh or make_mesh()
    if mesh.size != 1:
        raise ValueError(f"random_weights is for one device; {mesh} has {mesh.size}")
    names = {piece.parameter for piece in all_pieces(config) if quantization and kind_of(piece.source) in KINDS}
    kept_as = default_activation_format(dtype, names)
    graphdef, abstract = abstract_model(config, mesh, dtype, kept_as)
    abstract = with_mxfp8(abstract, names)
    packed = layout_for(kept_as) if packs_here(dtype, kept_as) else None
    leaves = {}
    for index, (name, leaf) in enumerate(by_name(abstract).items()):
        key = jax.random.fold_in(jax.random.key(seed), index)
        if name.rsplit(".", 1)[-1].endswith("norm"):
            leaves[name] = jnp.ones(leaf.shape, leaf.dtype)
        elif isinstance(leaf, MXFP8Weight):
            leaves[name] = _quantised(leaf, name, key, packed)
        else:
            leaves[name] = _plain(leaf.shape, leaf.dtype, key)
    # Of the mesh, as load_model's are: programs would compile anew for results that are.
    leaves = {name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec())) for name, leaf in leaves.items()}
    return ShardedModel(config, mesh, graphdef, from_names(abstract, leaves))


def _plain(shape: tuple[int, ...], dtype: jnp.dtype, key: jax.Array) -> jax.Array:
    stack = jnp.zeros(shape, dtype)
    for layer in range(shape[0]) if len(shape) > 2 else ():
        stack = _put(stack, _normal(jax.random.fold_in(key, layer), shape[1:], dtype), jnp.int32(layer))
    return stack if len(shape) > 2 else _normal(key, shape, dtype)


def _quantised(leaf: MXFP8Weight, name: str, key: jax.Array, packed: PackedLayout | None) -> object:
    layers, *shape = leaf.shape
    stack = (
        empty_packed(leaf.shape, row_order(name), packed)
        if packed
        else MXFP8Weight(jnp.zeros(leaf.shape, leaf.elements.dtype), jnp.zeros(leaf.scales.shape, jnp.uint8))
    )
    for layer in range(layers):
        one = _random_mxfp8(jax.random.fold_in(key, layer), tuple(shape))
        if packed:
            stack = pack_into(stack, one, jnp.int32(layer))
        else:
            put = partial(_put, layer=jnp.int32(layer))
            stack = replace(stack, elements=put(stack.elements, one.elements), scales=put(stack.scales, one.scales))
    return stack


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(_STDDEV, dtype)


@partial(jax.jit, static_argnums=1)
def _random_mxfp8(key: jax.Array, shape: tuple[int, ...]) -> MXFP8Weight:
    return MXFP8Weight(*MXFP8().quantise(_normal(key, shape, jnp.bfloat16)))


@partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, one: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, one, layer, 0)
