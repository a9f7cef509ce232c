"""The training loop: batches in, checkpoints and a log out, resumed where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from qwenjax.mesh import DATA
from qwenjax.train.losses import Loss, Parameters
from qwenjax.train.step import OptimizerSettings, SpikeWatch, TrainState, init_state, make_steps
from qwenjax.train.tokens import TokenFiles

LOG_NAME = "log.jsonl"
_SETTINGS_NAME = "settings.json"
_CHECKPOINTS = "checkpoints"

Evaluate = Callable[[Parameters], dict[str, float]]


@dataclass(frozen=True)
class LoopSettings:
    """steps_per_call: steps in one program, between two looks at the loss. checkpoint_every, evaluate_every: steps, 0
    for only the end; both happen between calls. keep: checkpoints kept. max_seconds: stop after the first call past so
    long, with a checkpoint to go on from; 0 for never."""

    steps_per_call: int = 10
    checkpoint_every: int = 500
    evaluate_every: int = 0
    keep: int = 2
    max_seconds: float = 0.0
    progress: bool = True


class ResumeError(ValueError):
    """A folder of a training run that this one cannot go on from."""


def fit(
    loss: Loss,
    parameters: Parameters,
    frozen: Parameters,
    data: TokenFiles,
    optimizer: OptimizerSettings,
    loop: LoopSettings,
    mesh: Mesh,
    folder: str | Path,
    evaluate: Evaluate | None = None,
    settings: dict[str, Any] | None = None,
) -> Parameters:
    """Trains `parameters` (float32, by name) and returns them.

    `folder` receives checkpoints/ (Orbax), log.jsonl (one line a step) and settings.json. Where it holds a checkpoint,
    training goes on from it: killed at any moment and resumed, it computes what it would have computed, to the bit, on
    the same devices. Raises ResumeError where the folder's settings are others, DivergedError where the loss is not
    finite or spikes, ValueError where the batch does not divide over the mesh's data ranks.
    """
    if data.batch % mesh.shape[DATA]:
        raise ValueError(f"a batch of {data.batch} windows does not divide over {mesh.shape[DATA]} data ranks")
    folder = Path(folder).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    reader = {"batch": data.batch, "length": data.length, "seed": data.seed, "tokens": data.tokens}
    _check_settings(folder, {"optimizer": asdict(optimizer), "data": reader, **(settings or {})})
    placement = NamedSharding(mesh, PartitionSpec(None, DATA))
    options = ocp.CheckpointManagerOptions(max_to_keep=loop.keep, create=True)
    with ocp.CheckpointManager(folder / _CHECKPOINTS, options=options) as manager:
        state = _restore(manager, init_state(parameters, optimizer, mesh))
        steps = make_steps(loss, optimizer, state)
        done = int(state.step)
        log = _Log(folder / LOG_NAME, done)
        watch, begun = SpikeWatch(), time.perf_counter()
        with tqdm(total=optimizer.steps, initial=done, desc="Training", unit="step", disable=not loop.progress) as bar:
            while done < optimizer.steps:
                count = min(loop.steps_per_call, optimizer.steps - done, *_until(done, loop))
                batches = np.stack([data.windows(step) for step in range(done, done + count)])
                started = time.perf_counter()
                state, metrics = steps(state, frozen, jax.device_put(batches, placement))
                rows = {name: np.asarray(values).tolist() for name, values in metrics.items()}
                seconds = time.perf_counter() - started
                for index in range(count):
                    row = {name: values[index] for name, values in rows.items()}
                    log.write({"step": done + index, **row, "seconds": seconds / count})
                    watch.see(done + index, row["loss"], row["gradient_norm"])
                done += count
                bar.update(count)
                bar.set_postfix(loss=f"{rows['loss'][-1]:.4f}", tokens_s=f"{batches.size / seconds:,.0f}")
                stop = 0 < loop.max_seconds <= time.perf_counter() - begun
                last = stop or done == optimizer.steps
                if evaluate and (last or (loop.evaluate_every and done % loop.evaluate_every == 0)):
                    log.write({"step": done - 1, "held_out": evaluate(state.parameters)})
                if last or (loop.checkpoint_every and done % loop.checkpoint_every == 0):
                    manager.save(done, args=ocp.args.StandardSave(_saved(state)))
                if stop:
                    break
        manager.wait_until_finished()
    return state.parameters


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's log, oldest first."""
    return [json.loads(line) for line in (Path(folder) / LOG_NAME).read_text("utf-8").splitlines()]


class _Log:
    """log.jsonl, without the rows of steps that are about to be done again."""

    def __init__(self, path: Path, done: int) -> None:
        kept = []
        if path.is_file():
            # A run that was killed while writing leaves half a line at the end.
            lines = path.read_text("utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < done]
        path.write_text("".join(kept), "utf-8")
        self.path = path

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _until(done: int, loop: LoopSettings) -> list[int]:
    """Steps until the next checkpoint and the next evaluation: a call ends there, whatever was resumed when."""
    return [every - done % every for every in (loop.checkpoint_every, loop.evaluate_every) if every]


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / _SETTINGS_NAME
    wanted = json.loads(json.dumps(settings))
    if path.is_file():
        found = json.loads(path.read_text("utf-8"))
        different = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        if different:
            name = different[0]
            raise ResumeError(
                f"{folder}: was begun with {name} {found.get(name)}, not {wanted.get(name)}: go on with the same "
                "settings, or begin in a new folder"
            )
    path.write_text(json.dumps(wanted, indent=1) + "\n", "utf-8")


def _saved(state: TrainState) -> dict[str, Any]:
    return {"parameters": state.parameters, "moments": jax.tree.leaves(state.moments), "step": state.step}


def _restore(manager: ocp.CheckpointManager, fresh: TrainState) -> TrainState:
    newest = manager.latest_step()
    if newest is None:
        return fresh
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _saved(fresh))
    found = manager.restore(newest, args=ocp.args.StandardRestore(target))
    moments = jax.tree.unflatten(jax.tree.structure(fresh.moments), found["moments"])
    return TrainState(found["parameters"], moments, found["step"])
