"""Loading a Hugging Face checkpoint onto a mesh: every rank reads its own slices, in parallel, into place."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwenjax.checkpoint.fill import MAX_CHUNK_BYTES, Filler
from qwenjax.checkpoint.mapping import EMBEDDING, MTP_PREFIX, TIED_HEAD, Piece, plan
from qwenjax.checkpoint.packed import default_activation_format, layout_for, packs_here, with_packed
from qwenjax.checkpoint.resolve import resolve
from qwenjax.checkpoint.safetensors import Checkpoint, CheckpointError
from qwenjax.checkpoint.stored import Storage, StoredWeights, parse_quantization
from qwenjax.config import ModelConfig
from qwenjax.mesh import MeshError, divisors
from qwenjax.model import abstract_model
from qwenjax.quant.names import KINDS, kind_of
from qwenjax.sharded_model import ShardedModel, by_name, from_names, shardings
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.weights import MX_BLOCK, MXFP8Weight

logger = logging.getLogger(__name__)

ORBAX_PARAMETERS = "parameters"  # the folder that qwenjax.checkpoint.orbax writes beside config.json


def load_model(
    model: str | Path,
    mesh: Mesh,
    dtype: jnp.dtype | None = None,
    revision: str | None = None,
    quantization: str | None = None,
    progress: bool = True,
    pack: bool | None = None,
    activation_format: ActivationFormat | None = None,
) -> ShardedModel:
    """The checkpoint `model` (a folder or a Hugging Face repo id) on `mesh`, as `dtype` (default: config.json's).

    A folder may also be one that qwenjax.checkpoint.orbax saved.

    Weights that are stored in MXFP8 stay so. FP8 weights with a scale per block are decoded to `dtype`, and those of a
    parameter that is quantised in some layers alone too; a warning says so. quantization="mxfp8" quantises the linear
    layers that `qwenjax convert` does, chunk by chunk as they are read.

    pack: whether MXFP8 parameters get the order that the GPU kernels read (default: where those run). Each layer is
    packed as soon as it is read whole, so that no more than two lie unpacked beside the packed ones.

    activation_format: what the inputs of quantised layers are rounded to, see Qwen3Moe (default: "model", and on
    Blackwell GPUs, for MXFP8 parameters, "mxfp8", which a warning says: their kernels multiply no others).

    Host memory beyond the parameters stays under twice the largest tensor of the files: tensors are read in chunks and
    written into their place in the stacked parameters. Raises ConfigError, CheckpointError or MeshError, each before
    any weight is read, save for a file that changes meanwhile and NonFiniteError where NaN meets the quantiser.
    """
    if quantization not in (None, "mxfp8"):
        raise ValueError(f"quantization is {quantization!r}; qwenjax quantises to 'mxfp8' as it loads, or not (None)")
    folder = resolve(model, revision)
    if (folder / ORBAX_PARAMETERS).is_dir():
        return _restored(folder, mesh, dtype, quantization, pack, activation_format)
    config = ModelConfig.from_folder(folder)
    declared, block = parse_quantization(folder, config.quantization)
    checkpoint = Checkpoint(folder)
    if _names_head(checkpoint):
        config = replace(config, mtp_num_hidden_layers=1)
        config.check()
    stored = StoredWeights(checkpoint, declared, block)
    graphdef, abstract = abstract_model(config, mesh, dtype)
    try:
        pieces = plan(config, stored.tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if config.tie_word_embeddings and TIED_HEAD in checkpoint.tensors:
        _check_tied(checkpoint)
    names = _quantised_parameters(stored, pieces, all_linear=quantization == "mxfp8")
    own_dtype = by_name(abstract)["norm"].dtype
    kept_as = activation_format or default_activation_format(own_dtype, names, pack)
    if kept_as != "model":
        graphdef, abstract = abstract_model(config, mesh, dtype, kept_as)
    abstract = with_mxfp8(abstract, names)
    placed, shapes = by_name(shardings(abstract, mesh)), by_name(abstract)
    check_blocks_divide(placed, shapes)
    if packs_here(own_dtype, kept_as) if pack is None else pack:
        shapes = with_packed(shapes, placed, layout_for(kept_as))
    filler = Filler(stored, placed, shapes, progress)
    return ShardedModel(config, mesh, graphdef, from_names(abstract, filler.fill(pieces)))


def has_mtp_head(folder: Path, config: ModelConfig) -> bool:
    """Whether a checkpoint folder has a multi-token-prediction head, by its config or by its tensors' names.

    Raises CheckpointError as Checkpoint does.
    """
    if config.mtp_num_hidden_layers or (folder / ORBAX_PARAMETERS).is_dir():
        return config.mtp_num_hidden_layers > 0
    return _names_head(Checkpoint(folder))


def _names_head(checkpoint: Checkpoint) -> bool:
    # Checkpoints in the wild hold a head without a word in config.json.
    return any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors)


def _restored(
    folder: Path,
    mesh: Mesh,
    dtype: jnp.dtype | None,
    quantization: str | None,
    pack: bool | None,
    activation_format: ActivationFormat | None,
) -> ShardedModel:
    from qwenjax.checkpoint.orbax import restore_model  # here: it builds on this module

    if quantization:
        raise CheckpointError(
            f"{folder}: holds parameters as Orbax saved them, which are not quantised while loading; "
            "leave quantization out, and quantise with `qwenjax convert --output orbax`"
        )
    return restore_model(folder, mesh, dtype, pack, activation_format)


def _quantised_parameters(stored: StoredWeights, pieces: list[Piece], all_linear: bool) -> set[str]:
    """The parameters that are kept in MXFP8; warns of quantised tensors that are decoded."""
    storages: dict[str, set[Storage]] = defaultdict(set)
    linear = set()
    for piece in pieces:
        storages[piece.parameter].add(stored.storage(piece.source))
        if kind_of(piece.source) in KINDS:
            linear.add(piece.parameter)
    if all_linear:
        return linear | {name for name, found in storages.items() if found == {"mxfp8"}}
    for name, found in storages.items():
        if found == {"fp8_block"}:
            logger.warning("%s is stored in FP8 and decoded as it is loaded; quantization='mxfp8' keeps it small", name)
        elif len(found) > 1:
            logger.warning("%s is quantised in some layers and not in others; all are decoded", name)
    return {name for name, found in storages.items() if found == {"mxfp8"}}


def with_mxfp8(abstract: nnx.State, names: set[str]) -> nnx.State:
    """The abstract parameters with those of these names in MXFP8."""
    leaves = by_name(abstract)
    for name in names:
        shape = leaves[name].shape
        if shape[-1] % MX_BLOCK:
            raise CheckpointError(f"{name}: MXFP8 needs a multiple of {MX_BLOCK} input features, not {shape[-1]}")
        scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // MX_BLOCK), jnp.uint8)
        leaves[name] = MXFP8Weight(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scales)  # type: ignore[arg-type]
    return from_names(abstract, leaves)


def check_blocks_divide(placed: dict[str, NamedSharding], shapes: dict[str, Any]) -> None:
    """Raises MeshError where a rank's share of a quantised parameter would cut a block of 32 in two."""
    for name, weight in shapes.items():
        if not isinstance(weight, MXFP8Weight):
            continue
        local = placed[name].shard_shape(weight.shape)[-1]
        if local % MX_BLOCK:
            blocks = weight.shape[-1] // MX_BLOCK
            raise MeshError(
                f"{weight.shape[-1] // local} ranks split the {weight.shape[-1]} input features of {name} into "
                f"{local}, which blocks of {MX_BLOCK} do not divide; numbers of ranks that do: {divisors(blocks)}"
            )


def _check_tied(checkpoint: Checkpoint) -> None:
    head, embedding = checkpoint.tensors[TIED_HEAD], checkpoint.tensors[EMBEDDING]
    # Parts of both are on the host at once, and no more than the loader's two largest tensors may be.
    part = min(MAX_CHUNK_BYTES, embedding.nbytes // 8)
    rows = max(1, part * embedding.shape[0] // max(embedding.nbytes, 1))
    same = head == embedding and all(
        np.array_equal(
            checkpoint.read(TIED_HEAD, (slice(row, row + rows),)).view(np.uint8),
            checkpoint.read(EMBEDDING, (slice(row, row + rows),)).view(np.uint8),
        )
        for row in range(0, head.shape[0], rows)
    )
    if not same:
        raise CheckpointError(
            f"{checkpoint.file_of(TIED_HEAD)}: {TIED_HEAD} differs from {EMBEDDING}, and config.json says "
            "tie_word_embeddings true: set it to false to use both"
        )
