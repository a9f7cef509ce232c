"""MXFP8 parameters in the order that the GPU kernels read: which are packed, when, and a whole model there and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from qwenjax.model import partition_specs
from qwenjax.sharded_model import ShardedModel, by_name, from_names
from qwenjax_ffi.grouped_gemm_kernel import machine_unavailable
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder, empty_packed, pack, unpack
from qwenjax_ffi.weights import MXFP8Weight


def packs_here(dtype: jnp.dtype) -> bool:
    """Whether a model whose activations are `dtype` runs faster packed: where the kernels run, which take bfloat16."""
    return dtype == jnp.bfloat16 and machine_unavailable() is None


def row_order(parameter: str) -> RowOrder:
    """The order in which the operation that reads a parameter wants its rows: SwiGLU wants gate beside up."""
    return "gate_up" if parameter.endswith("experts.w13") else "plain"


def with_packed(abstract: dict[str, Any], placed: dict[str, NamedSharding]) -> dict[str, Any]:
    """Abstract parameters by name, those in MXFP8 packed: every rank its own share."""
    return {
        name: _abstract_packed(weight, row_order(name), placed[name]) if isinstance(weight, MXFP8Weight) else weight
        for name, weight in abstract.items()
    }


def _abstract_packed(weight: MXFP8Weight, order: RowOrder, sharding: NamedSharding) -> PackedMXFP8Weight:
    part = jax.eval_shape(lambda: empty_packed(sharding.shard_shape(weight.shape), order))
    ranks = [whole // local for whole, local in zip(weight.shape, sharding.shard_shape(weight.shape), strict=True)]
    whole = (*(size * count for size, count in zip(part.data.shape, ranks, strict=False)), part.data.shape[-1])
    return replace(part, data=jax.ShapeDtypeStruct(whole, part.data.dtype))


def pack_model(model: ShardedModel) -> ShardedModel:
    """`model` with its MXFP8 parameters packed, each rank its own share.

    Each parameter's old arrays are deleted when it is packed, so that one is held twice at a time.
    """
    leaves = by_name(model.state)
    for name, weight in leaves.items():
        if isinstance(weight, MXFP8Weight):
            leaves[name] = _on_ranks(model, name, weight, partial(pack, row_order=row_order(name)))
            jax.tree.map(lambda old: old.delete(), weight)
    return replace(model, state=from_names(model.state, leaves))


def unpack_model(model: ShardedModel) -> ShardedModel:
    """`model` with its packed parameters as plain MXFP8 ones, as checkpoints hold them; the others are shared."""
    leaves = by_name(model.state)
    for name, weight in leaves.items():
        if isinstance(weight, PackedMXFP8Weight):
            leaves[name] = _on_ranks(model, name, weight, unpack)
    return replace(model, state=from_names(model.state, leaves))


def _on_ranks(model: ShardedModel, name: str, weight: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of each rank's share, a layer at a time: it takes several times a layer's memory."""
    spec = by_name(partition_specs(model.state))[name]
    whole = function if weight.ndim == 2 else partial(jax.lax.map, function)
    return jax.jit(jax.shard_map(whole, mesh=model.mesh, in_specs=spec, out_specs=spec, check_vma=False))(weight)
