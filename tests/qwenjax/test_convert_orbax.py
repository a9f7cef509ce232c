"""`qwenjax convert --output orbax`: the values of the safetensors output, restored on any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import qwenjax.checkpoint.orbax
from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.safetensors import CheckpointError
from qwenjax.config import ConfigError
from qwenjax.convert import ConvertError, convert
from qwenjax.mesh import make_mesh
from qwenjax.tokenizer import Tokenizer
from tests.generation import EOS_IDS, VOCABULARY, add_tokenizer
from tests.helpers import random_tensors, tiny, write_checkpoint

RAW = tiny(hidden_size=64, moe_intermediate_size=64, vocab_size=VOCABULARY, mtp_num_hidden_layers=None, eos_token_id=7)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return add_tokenizer(write_checkpoint(folder, RAW, random_tensors(RAW)))


@pytest.fixture(scope="module")
def orbax(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "dst"
    convert(source, folder, output="orbax")
    return folder


def assert_restores_as(folder: Path, safetensors: Path, shape: tuple[int, int]) -> None:
    here, there = (load_model(f, make_mesh(*shape), progress=False) for f in (folder, safetensors))
    assert here.config == there.config
    assert jax.tree.structure(here.state) == jax.tree.structure(there.state)
    for ours, expected in zip(jax.tree.leaves(here.state), jax.tree.leaves(there.state), strict=True):
        assert ours.sharding.is_equivalent_to(expected.sharding, ours.ndim)
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(expected).view(np.uint8))


@pytest.mark.parametrize("options", [{}, {"only": "experts"}], ids=["all", "experts"])
def test_orbax_holds_the_values_of_the_safetensors_output(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    report = convert(source, tmp_path / "safetensors", **options)
    assert convert(source, tmp_path / "orbax", output="orbax", **options) == report
    for shape in ((1, 1), (2, 2)):
        assert_restores_as(tmp_path / "orbax", tmp_path / "safetensors", shape)


def test_the_folder_is_a_whole_checkpoint(source: Path, orbax: Path) -> None:
    names = {path.name for path in orbax.iterdir()}
    extras = {path.name for path in source.iterdir()} - {"model.safetensors"}
    assert names == extras | {"parameters", "conversion_report.json"}
    config = json.loads((orbax / "config.json").read_text())
    assert config["eos_token_id"] == 7
    assert "quantization_config" not in config
    assert Tokenizer.from_folder(orbax).eos_ids == EOS_IDS


def test_the_same_command_again_changes_nothing_and_another_is_refused(source: Path, orbax: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in orbax.rglob("*")}
    assert convert(source, orbax, output="orbax")["converted"] > 0
    assert before == {path: path.stat().st_mtime_ns for path in orbax.rglob("*")}
    with pytest.raises(ConvertError, match="holds a finished conversion of something else"):
        convert(source, orbax)


@pytest.mark.parametrize("moment", ["before Orbax", "after Orbax"])
def test_a_run_that_was_stopped_is_taken_up_again(
    source: Path, orbax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save = qwenjax.checkpoint.orbax.save_model

    def stopped(model: Any, folder: Path) -> None:
        if moment == "after Orbax":
            save(model, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(qwenjax.checkpoint.orbax, "save_model", stopped)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "dst", output="orbax")
    assert not (tmp_path / "dst" / "config.json").exists()
    convert(source, tmp_path / "dst", output="orbax")
    assert {path.name for path in (tmp_path / "dst").iterdir()} == {path.name for path in orbax.iterdir()}
    assert_restores_as(tmp_path / "dst", orbax, (1, 1))


def test_an_orbax_folder_is_not_quantised_while_loading(orbax: Path) -> None:
    with pytest.raises(CheckpointError, match="convert --output orbax") as error:
        load_model(orbax, make_mesh(), quantization="mxfp8")
    assert str(orbax) in str(error.value)


def test_a_source_that_is_no_whole_model_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    tensors = random_tensors(RAW)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    source = write_checkpoint(tmp_path / "src", RAW, tensors)
    with pytest.raises(CheckpointError, match=r"not in the files: model\.layers\.1\.self_attn\.o_proj\.weight"):
        convert(source, tmp_path / "dst", output="orbax")


@pytest.mark.parametrize("output", ["safetensors", "orbax"])
def test_a_source_that_could_not_be_loaded_is_refused_before_anything_is_written(tmp_path: Path, output: str) -> None:
    tensors = random_tensors(RAW)
    lost = next(name for name in tensors if name.endswith("up_proj.weight"))
    write_checkpoint(tmp_path / "less", RAW, {name: value for name, value in tensors.items() if name != lost})
    with pytest.raises(CheckpointError, match=f"less: 1 tensors of the model are not in the files: {lost}"):
        convert(tmp_path / "less", tmp_path / "dst", output=output)
    write_checkpoint(tmp_path / "other", {**RAW, "model_type": "llama"}, tensors)
    if output == "orbax":  # as safetensors it is a checkpoint for other engines
        with pytest.raises(ConfigError, match="model_type is 'llama'"):
            convert(tmp_path / "other", tmp_path / "dst", output=output)
    assert not (tmp_path / "dst").exists()
