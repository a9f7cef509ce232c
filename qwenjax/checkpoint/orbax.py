"""Saving and restoring a model's parameters with Orbax: every rank writes its own shards, and any mesh reads them.

A folder is self-contained: `parameters/` as Orbax lays it out, one array for each parameter under the parameter's
name, and config.json, which is written last, so that a folder with one is complete.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from qwenjax.checkpoint.mapping import listing
from qwenjax.checkpoint.safetensors import CheckpointError
from qwenjax.config import ModelConfig
from qwenjax.model import abstract_model
from qwenjax.sharded_model import ShardedModel, by_name, from_names, shardings

_PARAMETERS = "parameters"


def save_model(model: ShardedModel, folder: str | Path) -> None:
    """Writes the parameters and the config, whose dtype becomes that of the parameters, to a new or empty folder.

    Every process of a multi-host mesh calls it, with a folder that all of them see. Raises CheckpointError where the
    folder holds something already or cannot be written.
    """
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: is there already; save to a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / _PARAMETERS, by_name(model.state))
        if jax.process_index() == 0:
            config = replace(model.config, dtype=str(model.dtype)).to_dict()
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except Exception as error:  # Orbax and TensorStore raise errors of many types, few of which name the folder
        raise CheckpointError(f"{folder}: cannot save there: {error}") from error


def restore_model(folder: str | Path, mesh: Mesh, dtype: jnp.dtype | None = None) -> ShardedModel:
    """The model that save_model wrote, on `mesh`, which may have another shape than the one it was saved from.

    Every rank reads its own shards into place, as `dtype` (default: as saved). Raises ConfigError for a folder without
    a config, MeshError where the model does not divide over the mesh, and CheckpointError, before any parameter is
    read, for parameters that are missing, unknown or of another shape, or while reading for damaged files.
    """
    folder = Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = ModelConfig.from_folder(folder)
    graphdef, abstract = abstract_model(config, mesh, dtype)
    placed = by_name(shardings(abstract, mesh))
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed[name])
        for name, leaf in by_name(abstract).items()
    }
    if not (folder / _PARAMETERS).is_dir():
        raise CheckpointError(f"{folder}: holds no {_PARAMETERS}/; qwenjax.checkpoint.orbax.save_model writes one")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check_names_and_shapes(wanted, checkpointer.metadata(folder / _PARAMETERS).item_metadata)
            arrays = checkpointer.restore(folder / _PARAMETERS, wanted)
    except Exception as error:  # as in save_model
        raise CheckpointError(f"{folder}: cannot be restored: {error}") from error
    return ShardedModel(config, mesh, graphdef, from_names(abstract, arrays))


def _check_names_and_shapes(wanted: dict[str, jax.ShapeDtypeStruct], stored: Any) -> None:
    found = {name: tuple(array.shape) for name, array in dict(stored or {}).items()}
    complaints = {
        "lacks": [name for name in wanted if name not in found],
        "has no place for": [name for name in found if name not in wanted],
        "has in another shape": [
            f"{name} ({list(found[name])}, by config.json {list(leaf.shape)})"
            for name, leaf in wanted.items()
            if name in found and found[name] != leaf.shape
        ],
    }
    if any(complaints.values()):
        raise CheckpointError("; ".join(f"{what} {listing(names)}" for what, names in complaints.items() if names))
