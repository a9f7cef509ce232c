"""Saving and restoring through Orbax: any mesh to any mesh, to the bit, and errors that name the folder."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.orbax import restore_model, save_model
from qwenjax.checkpoint.safetensors import CheckpointError
from qwenjax.config import ConfigError, ModelConfig
from qwenjax.logits import sequence_logits
from qwenjax.mesh import MeshError, make_mesh
from qwenjax.sharded_model import ShardedModel, by_name
from tests.helpers import assert_same_parameters, model_from_tensors, random_tensors, tiny, write_checkpoint

RAW = tiny(num_hidden_layers=3, mlp_only_layers=[1], rope_scaling={"type": "yarn", "factor": 2.0})
TENSORS = random_tensors(RAW)


def build(shape: tuple[int, int], **changes: Any) -> ShardedModel:
    return model_from_tensors({**RAW, **changes}, make_mesh(*shape), TENSORS)


@pytest.fixture(scope="module", params=[(1, 2), (1, 4)], ids=["kv heads split", "kv heads replicated"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "deep" / "folder"
    save_model(build(request.param), folder)
    return folder


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 4), (4, 1)], ids=str)
def test_a_model_is_restored_to_the_bit_in_the_shards_of_another_mesh(saved: Path, shape: tuple[int, int]) -> None:
    restored, expected = restore_model(saved, make_mesh(*shape)), build(shape)
    assert restored.config == expected.config
    assert_same_parameters(restored, expected)
    here, there = by_name(restored.state), by_name(expected.state)
    for name in here:
        assert here[name].sharding.is_equivalent_to(there[name].sharding, here[name].ndim), name
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected.state)


def test_a_restored_model_gives_the_same_logits(saved: Path) -> None:
    ids = [[1, 2, 3, 5, 8]]
    for shape in ((1, 1), (2, 2)):
        expected, logits = (sequence_logits(m, ids)[0] for m in (build(shape), restore_model(saved, make_mesh(*shape))))
        np.testing.assert_array_equal(logits, expected)


def test_the_folder_says_what_the_parameters_are(tmp_path: Path) -> None:
    model = build((1, 2), torch_dtype="bfloat16")
    config = ModelConfig.from_dict({**RAW, "torch_dtype": "float32"})
    save_model(ShardedModel(config, model.mesh, model.graphdef, model.state), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same_parameters(restore_model(tmp_path, make_mesh()), model)


def test_parameters_are_restored_as_another_dtype(saved: Path) -> None:
    restored = restore_model(saved, make_mesh(), jnp.bfloat16)
    assert_same_parameters(restored, build((1, 1), torch_dtype="bfloat16"))


def test_mxfp8_parameters_are_restored_to_the_bit(tmp_path: Path) -> None:
    raw = tiny(hidden_size=64, moe_intermediate_size=128)
    folder = write_checkpoint(tmp_path / "hf", raw, random_tensors(raw))
    model = load_model(folder, make_mesh(1, 2), quantization="mxfp8", progress=False)
    save_model(model, tmp_path / "orbax")
    restored = restore_model(tmp_path / "orbax", make_mesh(2, 2))
    expected = load_model(folder, make_mesh(2, 2), quantization="mxfp8", progress=False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(restored.state)} == {"float8_e4m3fn", "uint8", "float32"}
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected.state)
    for here, there in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected.state), strict=True):
        assert here.sharding.is_equivalent_to(there.sharding, here.ndim)
        np.testing.assert_array_equal(np.asarray(here).view(np.uint8), np.asarray(there).view(np.uint8))


def test_a_folder_that_holds_something_is_not_written_over(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (saved, tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="is there already") as error:
            save_model(build((1, 1)), folder)
        assert str(folder) in str(error.value)


def test_a_save_that_fails_names_the_folder_and_leaves_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", save)
    with pytest.raises(CheckpointError, match="disk full") as error:
        save_model(build((1, 1)), tmp_path / "new")
    assert str(tmp_path / "new") in str(error.value)
    with pytest.raises(ConfigError, match="no such file"):
        restore_model(tmp_path / "new", make_mesh())


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "has no place for lm_head"),
        ({"attention_bias": True}, r"lacks attention\.k_bias, attention\.o_bias, attention\.q_bias"),
        ({"head_dim": 8}, r"has in another shape .*attention\.q_proj \(\[3, 64, 40\], by config\.json \[3, 32, 40\]\)"),
        ({"num_experts": 4}, r"has in another shape experts\.router"),
        ({"mlp_only_layers": []}, r"has no place for mlp\.down_proj.*has in another shape experts\.router"),
    ],
)
def test_parameters_that_do_not_fit_the_config_are_an_error(
    saved: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        restore_model(folder, make_mesh())
    assert str(folder) in str(error.value)


def test_a_folder_without_a_model_is_an_error_that_names_it(saved: Path, tmp_path: Path) -> None:
    for folder, kind in ((tmp_path / "nothing", CheckpointError), (tmp_path, ConfigError)):
        with pytest.raises(kind, match="no such") as error:
            restore_model(folder, make_mesh())
        assert str(folder) in str(error.value)
    shutil.copy(saved / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="holds no parameters/"):
        restore_model(tmp_path, make_mesh())
    (tmp_path / "parameters").mkdir()
    with pytest.raises(CheckpointError, match="cannot be restored") as error:
        restore_model(tmp_path, make_mesh())
    assert str(tmp_path) in str(error.value)


def test_a_mesh_that_does_not_fit_is_an_error(saved: Path) -> None:
    with pytest.raises(MeshError, match="do not divide 8 experts"):
        restore_model(saved, make_mesh(3, 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_damaged_files_are_an_error_and_never_other_values(
    saved: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    expected, failed = build((1, 1)), 0
    names = sorted(path.relative_to(saved) for path in saved.rglob("d/*") if path.is_file())
    assert names
    for number, name in enumerate(names):
        folder = shutil.copytree(saved, tmp_path / str(number))
        if damage == "cut":
            (folder / name).write_bytes((folder / name).read_bytes()[: (folder / name).stat().st_size // 2])
        else:
            (folder / name).unlink()
        try:
            restored = restore_model(folder, make_mesh())
        except CheckpointError as error:
            assert str(folder) in str(error)  # noqa: PT017 - files that a restore does not need may be damaged unseen
            failed += 1
        else:
            assert_same_parameters(restored, expected)
    gc.collect()  # Orbax leaves coroutines behind, which complain when they go
    assert failed
