"""A model whose linear layers hold what a format keeps of them, at the model's own width.

Parameters are stacks of a checkpoint's tensors. A format sees one tensor at a time, as `qwenjax convert` hands it over:
gate and up are two, and every expert of every layer is its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
from jax.sharding import NamedSharding

from qwenjax.checkpoint.mapping import all_pieces
from qwenjax.checkpoint.packed import unpack_model
from qwenjax.config import ModelConfig
from qwenjax.model import abstract_model
from qwenjax.quant import FORMATS
from qwenjax.quant.names import KINDS, kind_of
from qwenjax.sharded_model import ShardedModel, by_name, from_names, shardings
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.weights import MXFP8Weight, decode

# A format of weights: what its linear layers' inputs are kept in where activations are quantised as well.
ACTIVATIONS: dict[str, ActivationFormat] = {
    "mxfp8": "mxfp8",
    "fp8_block": "fp8_block",
    "fp8_block_stochastic": "fp8_block",  # rounding at random is for weights, whose error does not average out
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}


def linear_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters that `qwenjax convert` quantises, and how many matrices stand one on the other in each: 2 in w13."""
    names = {piece.parameter for piece in all_pieces(config) if kind_of(piece.source) in KINDS}
    return {name: 2 if name.endswith("w13") else 1 for name in sorted(names)}


def decoded(model: ShardedModel) -> ShardedModel:
    """The model with plain arrays for MXFP8 parameters, of the same values; the others are shared."""
    leaves = {
        name: decode(weight, model.dtype) if isinstance(weight, MXFP8Weight) else weight
        for name, weight in by_name(unpack_model(model).state).items()
    }
    return replace(model, state=from_names(abstract_model(model.config, model.mesh, model.dtype)[1], leaves))


def fake_quantised(model: ShardedModel, weights: str | None, activations: ActivationFormat = "model") -> ShardedModel:
    """`model` (of plain arrays) with the weights of its linear layers rounded to `weights`, a key of FORMATS, and their
    inputs to `activations`.

    Other parameters are shared with `model`; None leaves the weights too. Raises ValueError, naming the parameter,
    where a format's blocks do not divide a contraction axis.
    """
    leaves = by_name(model.state)
    placed = by_name(shardings(model.state, model.mesh))
    for name, stacked in linear_parameters(model.config).items():
        if weights is None:
            break
        try:
            leaves[name] = _round_trip(leaves[name], weights, stacked, placed[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    graphdef, _ = abstract_model(model.config, model.mesh, model.dtype, activations)
    return ShardedModel(model.config, model.mesh, graphdef, from_names(model.state, leaves))


# One program for all variants of a format: to compile the integer code takes longer than to run it on a small model.
@partial(jax.jit, static_argnames=("format", "stacked", "placed"))
def _round_trip(stack: jax.Array, format: str, stacked: int, placed: NamedSharding) -> jax.Array:
    """[..., out, in] quantised and dequantised, each [out / stacked, in] by itself; placed as it was."""
    kept = FORMATS[format]
    matrices = stack.reshape(-1, stack.shape[-2] // stacked, stack.shape[-1])

    def one(matrix: jax.Array) -> jax.Array:
        return kept.dequantise(*kept.quantise(matrix)).astype(stack.dtype)

    # One after the other: the integer code takes about ten times a matrix's memory.
    return jax.lax.with_sharding_constraint(jax.lax.map(one, matrices).reshape(stack.shape), placed)


def check_format(name: str) -> str:
    """`name`, if it is a format's. Raises ValueError that lists those there are."""
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is unknown; choose of {', '.join(FORMATS)}")
    return name
