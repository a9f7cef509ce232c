"""Saving and restoring a model's parameters with Orbax: every rank writes its own shards, and any mesh reads them.

A folder is self-contained: `parameters/` as Orbax lays it out, one array for each parameter under the parameter's
name, and config.json, which is written last, so that a folder with one is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from qwenjax.checkpoint.load import ORBAX_PARAMETERS, check_blocks_divide, with_mxfp8
from qwenjax.checkpoint.mapping import listing
from qwenjax.checkpoint.packed import default_activation_format, layout_for, pack_model, packs_here, unpack_model
from qwenjax.checkpoint.safetensors import CheckpointError
from qwenjax.config import ModelConfig
from qwenjax.mesh import MeshError
from qwenjax.model import abstract_model
from qwenjax.sharded_model import ShardedModel, by_name, from_names, shardings
from qwenjax_ffi.activations import ActivationFormat


def save_model(model: ShardedModel, folder: str | Path) -> None:
    """Writes the parameters and the config, whose dtype becomes that of the parameters, to a new or empty folder.

    Parameters that are packed for a GPU's kernels are written unpacked, which takes their memory once more.
    Every process of a multi-host mesh calls it, with a folder that all of them see. Raises CheckpointError where the
    folder holds something already or cannot be written.
    """
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: is there already; save to a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / ORBAX_PARAMETERS, by_name(unpack_model(model).state))
        if jax.process_index() == 0:
            # How the files were quantised that the model came from says nothing about these.
            config = replace(model.config, dtype=str(model.dtype), quantization=None).to_dict()
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except Exception as error:  # Orbax and TensorStore raise errors of many types, few of which name the folder
        raise CheckpointError(f"{folder}: cannot save there: {error}") from error


def restore_model(
    folder: str | Path,
    mesh: Mesh,
    dtype: jnp.dtype | None = None,
    pack: bool | None = None,
    activation_format: ActivationFormat | None = None,
) -> ShardedModel:
    """The model that save_model wrote, on `mesh`, which may have another shape than the one it was saved from.

    Every rank reads its own shards into place, as `dtype` (default: as saved); MXFP8 parameters stay so, and are packed
    as load_model says, here one parameter after the other when all are read; activation_format as there. Raises
    ConfigError for a folder without a config, MeshError where the model does not divide over the mesh, and
    CheckpointError, before any parameter is read, for parameters that are missing, unknown or of another shape, or
    while reading for damaged files.
    """
    folder = Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = ModelConfig.from_folder(folder)
    graphdef, abstract = abstract_model(config, mesh, dtype)
    if not (folder / ORBAX_PARAMETERS).is_dir():
        raise CheckpointError(f"{folder}: holds no {ORBAX_PARAMETERS}/; qwenjax.checkpoint.orbax.save_model writes one")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = dict(checkpointer.metadata(folder / ORBAX_PARAMETERS).item_metadata or {})
            names = _quantised(stored) & by_name(abstract).keys()
            kept_as = activation_format or default_activation_format(by_name(abstract)["norm"].dtype, names, pack)
            if kept_as != "model":
                graphdef, abstract = abstract_model(config, mesh, dtype, kept_as)
            abstract = with_mxfp8(abstract, names)
            wanted, placed = by_name(abstract), by_name(shardings(abstract, mesh))
            _check_names_and_shapes(wanted, stored)
            check_blocks_divide(placed, wanted)
            arrays = checkpointer.restore(folder / ORBAX_PARAMETERS, {n: _placed(wanted[n], placed[n]) for n in wanted})
    except MeshError:
        raise
    except Exception as error:  # as in save_model
        raise CheckpointError(f"{folder}: cannot be restored: {error}") from error
    model = ShardedModel(config, mesh, graphdef, from_names(abstract, arrays))
    if packs_here(model.dtype, kept_as) if pack is None else pack:
        return pack_model(model, layout_for(kept_as))
    return model


def _quantised(stored: Mapping[str, Any]) -> set[str]:
    """The parameters that Orbax holds as a folder of elements and scales rather than as one array."""
    return {name for name, entry in stored.items() if isinstance(entry, Mapping)}


def _placed(parameter: Any, sharding: NamedSharding) -> Any:
    # The scales of a quantised parameter have its axes, so that one sharding serves both arrays.
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), parameter)


def _check_names_and_shapes(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    def shape(entry: Any) -> list[int]:
        return list(entry["elements"].shape if isinstance(entry, Mapping) else entry.shape)

    complaints = {
        "lacks": [name for name in wanted if name not in stored],
        "has no place for": [name for name in stored if name not in wanted],
        "has in another shape": [
            f"{name} ({shape(stored[name])}, by config.json {list(parameter.shape)})"
            for name, parameter in wanted.items()
            if name in stored and shape(stored[name]) != list(parameter.shape)
        ],
    }
    if any(complaints.values()):
        raise CheckpointError("; ".join(f"{what} {listing(names)}" for what, names in complaints.items() if names))
