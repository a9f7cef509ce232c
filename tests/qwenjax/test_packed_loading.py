"""Parameters packed for the GPU kernels as they are loaded: the same values, rank by rank, and the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.checkpoint.fill import _Shard
from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.orbax import restore_model, save_model
from qwenjax.checkpoint.packed import default_activation_format, pack_model, packs_here, unpack_model
from qwenjax.checkpoint.safetensors import CheckpointError
from qwenjax.checkpoint.save import save_pretrained
from qwenjax.logits import sequence_logits
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel, by_name
from qwenjax_ffi import grouped_gemm_blackwell
from qwenjax_ffi.packing import PackedMXFP8Weight
from tests.helpers import random_tensors, tiny, write_checkpoint

# Ranks' shares of rows and columns that are no multiples of a unit's 64 and 128; a dense layer.
RAW = tiny(
    num_hidden_layers=2,
    mlp_only_layers=[1],
    num_experts_per_tok=2,
    hidden_size=192,
    moe_intermediate_size=96,
    intermediate_size=128,
    head_dim=16,
)
IDS = [np.random.default_rng(0).integers(0, RAW["vocab_size"], 17).tolist()]
Pair = tuple[ShardedModel, ShardedModel]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), RAW, random_tensors(RAW))


@pytest.fixture(scope="module")
def pair(source: Path) -> Pair:
    """Loaded plain and packed, attention split over two ranks."""
    return load(source, (1, 2)), load(source, (1, 2), pack=True)


def load(folder: Path, shape: tuple[int, int], **options: Any) -> ShardedModel:
    return load_model(folder, make_mesh(*shape), quantization="mxfp8", progress=False, **options)


def assert_same_bits(first: ShardedModel, second: ShardedModel) -> None:
    assert jax.tree.structure(first.state) == jax.tree.structure(second.state)
    for here, there in zip(jax.tree.leaves(first.state), jax.tree.leaves(second.state), strict=True):
        assert here.sharding.is_equivalent_to(there.sharding, here.ndim)
        np.testing.assert_array_equal(np.asarray(here).view(np.uint8), np.asarray(there).view(np.uint8))


def assert_packing_keeps_every_bit(plain: ShardedModel, packed: ShardedModel) -> None:
    found = {name for name, weight in by_name(packed.state).items() if isinstance(weight, PackedMXFP8Weight)}
    assert found == {name for name, weight in by_name(plain.state).items() if not isinstance(weight, jax.Array)}
    assert packed.num_parameters == plain.num_parameters
    assert_same_bits(unpack_model(packed), plain)


def test_packing_while_loading_keeps_every_bit(pair: Pair) -> None:
    assert_packing_keeps_every_bit(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2), (4, 1)], ids=str)
def test_packing_while_loading_keeps_every_bit_on_other_meshes(source: Path, shape: tuple[int, int]) -> None:
    assert_packing_keeps_every_bit(load(source, shape), load(source, shape, pack=True))


def test_packed_parameters_give_the_same_logits(pair: Pair) -> None:
    (plain,), (packed,) = (sequence_logits(model, IDS) for model in pair)
    np.testing.assert_array_equal(packed, plain)


def layouts(model: ShardedModel) -> set[str]:
    return {weight.layout for weight in by_name(model.state).values() if isinstance(weight, PackedMXFP8Weight)}


@pytest.mark.slow
def test_packing_for_blackwell_keeps_every_bit_and_its_logits_are_of_quantised_activations(source: Path) -> None:
    plain, packed = (load(source, (1, 2), pack=pack, activation_format="mxfp8") for pack in (False, True))
    assert layouts(packed) == {"block_scaled"}
    assert_packing_keeps_every_bit(plain, packed)
    (expected,), (found,) = (sequence_logits(model, IDS) for model in (plain, packed))
    np.testing.assert_array_equal(found, expected)
    (unquantised,) = sequence_logits(load(source, (1, 2)), IDS)
    assert np.abs(found - unquantised).max() > 1e-3


def test_activations_are_quantised_by_default_on_blackwell_alone_and_a_warning_says_so(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_activation_format(jnp.bfloat16, {"w13"}) == "model"
    monkeypatch.setattr(grouped_gemm_blackwell, "machine_unavailable", lambda: None)
    assert default_activation_format(jnp.float32, {"w13"}) == "model"  # the kernels take bfloat16
    assert default_activation_format(jnp.bfloat16, set()) == "model"
    assert not packs_here(jnp.bfloat16, "model")
    assert not packs_here(jnp.bfloat16, "nvfp4")
    assert not caplog.records
    assert layouts(load(source, (1, 1), dtype=jnp.bfloat16)) == {"block_scaled"}
    assert "rounded to MXFP8" in caplog.text
    assert "activation_format='model'" in caplog.text


@pytest.mark.slow
def test_orbax_restores_for_blackwell_as_a_checkpoint_is_loaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(load(source, (1, 1), dtype=jnp.bfloat16), tmp_path / "orbax")
    monkeypatch.setattr(grouped_gemm_blackwell, "machine_unavailable", lambda: None)
    assert layouts(load_model(tmp_path / "orbax", make_mesh(1, 1), progress=False)) == {"block_scaled"}
    assert "rounded to MXFP8" in caplog.text
    kept = load_model(tmp_path / "orbax", make_mesh(1, 1), progress=False, activation_format="model")
    assert not layouts(kept)


def test_orbax_saves_packed_parameters_unpacked_and_packs_what_it_restores(pair: Pair, tmp_path: Path) -> None:
    plain, packed = pair
    save_model(packed, tmp_path / "orbax")
    restored = restore_model(tmp_path / "orbax", make_mesh(1, 2), pack=False)
    assert_same_bits(restored, plain)
    old = jax.tree.leaves(restored.state["experts"]["w13"])
    assert_same_bits(pack_model(restored), packed)
    assert all(leaf.is_deleted() for leaf in old)  # one parameter is held twice, not all


def test_packed_parameters_are_not_written_as_plain_files(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a plain array"):
        save_pretrained(pair[1], tmp_path / "hf")


def test_no_more_than_two_layers_lie_unpacked_at_a_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most: dict[int, int] = {}
    write = _Shard._write_packed

    def watched(self: _Shard, *arguments: Any) -> None:
        write(self, *arguments)
        most[id(self)] = max(most.get(id(self), 0), len(self.layers))

    monkeypatch.setattr(_Shard, "_write_packed", watched)
    load(source, (1, 2), pack=True)
    assert most
    assert max(most.values()) <= 2
