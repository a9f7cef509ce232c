"""Training that is killed and resumed, and training that has to stop."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.config import ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel, by_name, random_model
from qwenjax.train import loop as loop_module
from qwenjax.train.loop import LoopSettings, ResumeError, read_log
from qwenjax.train.losses import LossSettings
from qwenjax.train.plot import plot_run
from qwenjax.train.runs import train_base, train_head
from qwenjax.train.step import DivergedError, OptimizerSettings, SpikeWatch
from qwenjax.train.tokens import TokenFiles
from qwenjax.train.warm_start import warm_head
from tests.helpers import assert_same_parameters, tiny

CONFIG = ModelConfig.from_dict(tiny())
LOSSES = LossSettings(dtype="float32", depths=2)
OPTIMIZER = OptimizerSettings(6, learning_rate=1e-2, warmup=2)
LOOP = LoopSettings(steps_per_call=2, checkpoint_every=3, progress=False)
LONG = OptimizerSettings(60, learning_rate=2e-2, warmup=5)
LONG_LOOP = replace(LOOP, steps_per_call=20, checkpoint_every=0)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with a period of 24 tokens."""
    path = tmp_path_factory.mktemp("tokens") / "text.npy"
    np.save(path, np.tile(np.random.default_rng(0).permutation(24), 60).astype(np.uint16))
    return path


def data(tokens: Path, length: int = 17) -> TokenFiles:
    return TokenFiles([tokens], length, 4, 0, CONFIG.vocab_size)


def run(tokens: Path, folder: Path, kind: str, loop: LoopSettings = LOOP) -> ShardedModel:
    if kind == "base":
        return train_base(CONFIG, make_mesh(2, 1), data(tokens), [tokens], folder, OPTIMIZER, LOSSES, loop)
    model = random_model(CONFIG, make_mesh(), 3)
    return train_head(model, data(tokens), [], folder, OPTIMIZER, replace(LOSSES, depths=1), loop)


class KilledError(Exception):
    """Stands for a kill in the middle of a run."""


@pytest.mark.parametrize("kind", [pytest.param("base", marks=pytest.mark.slow), "head"])
def test_killed_and_resumed_equals_uninterrupted(
    tokens: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tokens, tmp_path / "whole", kind)
    read = TokenFiles.windows

    def kill_at_five(self: TokenFiles, step: int) -> np.ndarray:
        if step == 5:
            raise KilledError
        return read(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(TokenFiles, "windows", kill_at_five)
        with pytest.raises(KilledError):
            run(tokens, tmp_path / "killed", kind)
    assert [row["step"] for row in read_log(tmp_path / "killed")] == [0, 1, 2, 3, 4]
    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(TokenFiles, "windows", lambda self, step: seen.append(step) or read(self, step))
        resumed = run(tokens, tmp_path / "killed", kind)
    assert seen == [3, 4, 5]  # from the checkpoint after step 2 on
    assert_same_parameters(resumed, whole)
    logs = [read_log(tmp_path / name) for name in ("whole", "killed")]
    plain = [[{name: row[name] for name in row if name != "seconds"} for row in rows] for rows in logs]
    assert plain[0] == plain[1]


def learn(tokens: Path, folder: Path, optimizer: OptimizerSettings = LONG) -> ShardedModel:
    return train_base(CONFIG, make_mesh(2, 1), data(tokens), [tokens], folder, optimizer, LOSSES, LONG_LOOP)


@pytest.fixture(scope="module")
def learned(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardedModel, Path]:
    """A base that knows the text, and the folder of its training."""
    folder = tmp_path_factory.mktemp("base")
    return learn(tokens, folder), folder


def test_training_learns_and_the_base_stays_as_it_was(
    tokens: Path, learned: tuple[ShardedModel, Path], tmp_path: Path
) -> None:
    base, folder = learned
    rows = read_log(folder)
    assert rows[0]["loss"] > 3.5
    assert rows[-1]["held_out"]["loss"] < 0.5
    model = train_head(base, data(tokens), [], tmp_path, LONG, LOSSES, LONG_LOOP)
    after, before = by_name(model.state), by_name(base.state)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    rows = read_log(tmp_path)
    assert rows[0]["agree_1"] < 0.2
    assert rows[-1]["agree_2"] > 0.8
    plot_run(tmp_path, tmp_path / "head.png")
    assert (tmp_path / "head.png").read_bytes().startswith(b"\x89PNG")


def test_warm_head_agrees_before_any_training(tokens: Path, learned: tuple[ShardedModel, Path], tmp_path: Path) -> None:
    base, _ = learned
    warm = warm_head(base, data(tokens).windows(0))
    train_head(warm, data(tokens), [], tmp_path, OptimizerSettings(1), LOSSES, LOOP)
    assert read_log(tmp_path)[0]["agree_1"] > 0.3


def test_run_of_other_settings_is_not_resumed(tokens: Path, learned: tuple[ShardedModel, Path]) -> None:
    _, folder = learned
    with pytest.raises(ResumeError, match="optimizer"):
        learn(tokens, folder, replace(LONG, steps=9))


def test_half_a_line_left_by_a_kill_does_not_hurt(
    tokens: Path, learned: tuple[ShardedModel, Path], tmp_path: Path
) -> None:
    _, folder = learned
    copy = shutil.copytree(folder, tmp_path / "copy")
    with (copy / loop_module.LOG_NAME).open("a") as file:
        file.write('{"step": 60, "lo')
    learn(tokens, copy)
    assert read_log(copy) == read_log(folder)


def test_batch_must_divide_over_the_data_ranks(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8 data ranks"):
        train_base(CONFIG, make_mesh(8, 1), data(tokens), [], tmp_path, OPTIMIZER, LOSSES, LOOP)


@pytest.mark.parametrize(("losses", "message"), [([2.0, 2.1, float("nan")], "loss nan"), ([2.0, 1.9, 3.5], "3.5000")])
def test_losses_that_stop_training(losses: list[float], message: str) -> None:
    watch = SpikeWatch()
    for step, loss in enumerate(losses[:-1]):
        watch.see(step, loss, 1.0)
    with pytest.raises(DivergedError, match=rf"step 2: .*{message}"):
        watch.see(2, losses[-1], 1.0)


def test_a_learning_rate_far_too_high_stops_training(tokens: Path, tmp_path: Path) -> None:
    optimizer = OptimizerSettings(40, learning_rate=1e3, warmup=1, clip=1e9)
    with pytest.raises(DivergedError, match="lower learning rate"):
        train_base(CONFIG, make_mesh(), data(tokens), [], tmp_path, optimizer, LOSSES, LOOP)
    assert json.loads((tmp_path / "settings.json").read_text())["optimizer"]["learning_rate"] == 1e3


@pytest.mark.slow
def test_time_limit_leaves_a_checkpoint_to_go_on_from(tokens: Path, tmp_path: Path) -> None:
    whole = run(tokens, tmp_path / "whole", "base")
    short = replace(LOOP, max_seconds=1e-9)
    run(tokens, tmp_path / "cut", "base", short)
    assert [row["step"] for row in read_log(tmp_path / "cut") if "loss" in row] == [0, 1]
    resumed = run(tokens, tmp_path / "cut", "base")
    assert_same_parameters(resumed, whole)
    assert by_name(resumed.state)["norm"].dtype == jnp.float32
