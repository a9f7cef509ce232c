"""A conversion to an Orbax folder: the parameters as the model holds them, which any mesh restores.

The safetensors are written first, inside the destination's state, so that what is quantised, how it is reported and how
it resumes are the same; then they are loaded whole on one device and saved through Orbax.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwenjax.checkpoint.save import TOKEN_IDS
from qwenjax.convert.destination import Destination, copy_extras, to_json, write_whole
from qwenjax.convert.plan import Plan
from qwenjax.convert.source import Source

_WEIGHTS, _SAVED = "safetensors", "orbax"  # folders of the state


def write_orbax(
    source: Source, plan: Plan, destination: Destination, convert_to: Callable[[Path], dict[str, Any]], progress: bool
) -> dict[str, Any]:
    """Fills the destination; `convert_to` writes the checkpoint as safetensors to a folder. Returns its report.

    Takes memory for the whole quantised model and, until it is done, disk for it twice. Raises CheckpointError for a
    source that is no model of ours, whole.
    """
    # Orbax takes 0.4 s to import, and brings half of JAX's checkpointing along.
    from qwenjax.checkpoint.load import ORBAX_PARAMETERS, load_model
    from qwenjax.checkpoint.orbax import save_model
    from qwenjax.mesh import make_mesh

    weights, saved = destination.state / _WEIGHTS, destination.state / _SAVED
    done = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    destination.check_space(2 * sum(shard.nbytes for shard in plan.shards) - done)
    report = convert_to(weights)
    for left in (saved, destination.folder / ORBAX_PARAMETERS):
        shutil.rmtree(left, ignore_errors=True)
    save_model(load_model(weights, make_mesh(), progress=progress, pack=False, activation_format="model"), saved)
    config = {key: source.config[key] for key in TOKEN_IDS if key in source.config} | json.loads(
        (saved / "config.json").read_text("utf-8")
    )
    os.replace(saved / ORBAX_PARAMETERS, destination.folder / ORBAX_PARAMETERS)
    copy_extras(source, destination.folder)
    write_whole(destination.folder / "config.json", to_json(config))
    return report
