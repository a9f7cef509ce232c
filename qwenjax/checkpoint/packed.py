"""MXFP8 parameters in the order that the GPU kernels read: which are packed, when, and a whole model there and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from qwenjax.model import partition_specs
from qwenjax.sharded_model import ShardedModel, by_name, from_names
from qwenjax_ffi import grouped_gemm_blackwell, grouped_gemm_kernel
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.packing import PackedLayout, PackedMXFP8Weight, RowOrder, empty_packed, pack, unpack
from qwenjax_ffi.weights import MXFP8Weight

logger = logging.getLogger(__name__)


def packs_here(dtype: jnp.dtype, activation_format: ActivationFormat) -> bool:
    """Whether a model whose activations are `dtype`, and multiplied in that format, runs faster packed.

    That is where the kernels of its layout run, which take bfloat16.
    """
    if activation_format not in ("model", "mxfp8"):
        return False
    kernels = grouped_gemm_blackwell if layout_for(activation_format) == "block_scaled" else grouped_gemm_kernel
    return dtype == jnp.bfloat16 and kernels.machine_unavailable() is None


def layout_for(activation_format: ActivationFormat) -> PackedLayout:
    """What MXFP8 parameters are packed as: the Blackwell kernels multiply MXFP8 activations, and no others."""
    return "block_scaled" if activation_format == "mxfp8" else "fragments"


def default_activation_format(
    dtype: jnp.dtype, quantised: Collection[str], pack: bool | None = None
) -> ActivationFormat:
    """The format of the activations that a model of these MXFP8 parameters multiplies, where nothing else is asked for.

    "mxfp8" on Blackwell GPUs, since the kernels there have no other, with a warning: it is not what the same
    checkpoint gives elsewhere. "model" everywhere else.
    """
    if not quantised or pack is False or not packs_here(dtype, "mxfp8"):
        return "model"
    logger.warning(
        "The GPU is a Blackwell: the inputs of all linear layers are rounded to MXFP8, as the kernels of the %d MXFP8 "
        "parameters multiply them; activation_format='model' keeps the inputs, without the kernels",
        len(quantised),
    )
    return "mxfp8"


def row_order(parameter: str) -> RowOrder:
    """The order in which the operation that reads a parameter wants its rows: SwiGLU wants gate beside up."""
    return "gate_up" if parameter.endswith("experts.w13") else "plain"


def with_packed(
    abstract: dict[str, Any], placed: dict[str, NamedSharding], layout: PackedLayout = "fragments"
) -> dict[str, Any]:
    """Abstract parameters by name, those in MXFP8 packed: every rank its own share."""
    return {
        name: _abstract_packed(weight, row_order(name), layout, placed[name])
        if isinstance(weight, MXFP8Weight)
        else weight
        for name, weight in abstract.items()
    }


def _abstract_packed(
    weight: MXFP8Weight, order: RowOrder, layout: PackedLayout, sharding: NamedSharding
) -> PackedMXFP8Weight:
    part = jax.eval_shape(lambda: empty_packed(sharding.shard_shape(weight.shape), order, layout))
    ranks = [whole // local for whole, local in zip(weight.shape, sharding.shard_shape(weight.shape), strict=True)]
    whole = (*(size * count for size, count in zip(part.data.shape, ranks, strict=False)), part.data.shape[-1])
    return replace(part, data=jax.ShapeDtypeStruct(whole, part.data.dtype))


def pack_model(model: ShardedModel, layout: PackedLayout = "fragments") -> ShardedModel:
    """`model` with its MXFP8 parameters packed, each rank its own share.

    Each parameter's old arrays are deleted when it is packed, so that one is held twice at a time.
    """
    leaves = by_name(model.state)
    for name, weight in leaves.items():
        if isinstance(weight, MXFP8Weight):
            leaves[name] = _on_ranks(model, name, weight, partial(pack, row_order=row_order(name), layout=layout))
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
