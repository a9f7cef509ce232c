"""bench/random_weights.py: parameters lie on a mesh as a checkpoint's do, and every rank makes its own share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.checkpoint.load import load_model, with_mxfp8
from qwenjax.checkpoint.packed import with_packed
from qwenjax.config import ModelConfig
from qwenjax.mesh import MeshError, make_mesh
from qwenjax.model import abstract_model
from qwenjax.sharded_model import ShardedModel, by_name, shardings
from tests.helpers import random_tensors, tiny, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# A dense layer, an embedding that does not divide over the ranks, and shares that are no whole units of the packing.
RAW = tiny(
    num_hidden_layers=3,
    mlp_only_layers=[1],
    vocab_size=63,
    hidden_size=64,
    head_dim=32,
    moe_intermediate_size=32,
    intermediate_size=128,
    num_experts_per_tok=2,
    torch_dtype="bfloat16",
)
MESHES = [(1, 1), (1, 4), (4, 1), (2, 2)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import random_weights

    return random_weights


@pytest.fixture
def make(bench: Any) -> Callable[..., ShardedModel]:
    return lambda data, model, raw=RAW, **options: bench.random_weights(
        ModelConfig.from_dict(raw), mesh=make_mesh(data, model), **options
    )


def kinds(leaves: dict[str, Any]) -> dict[str, Any]:
    """Of each parameter its kind, with what is static in it, and shape and dtype of its arrays."""
    return {
        name: (jax.tree.structure(weight), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(weight)])
        for name, weight in leaves.items()
    }


@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)], ids=str)
def test_shapes_are_those_that_the_loader_fills(make: Any, mesh: tuple[int, int]) -> None:
    _, abstract = abstract_model(ModelConfig.from_dict(RAW), make_mesh(*mesh), jnp.bfloat16)
    placed = by_name(shardings(abstract, make_mesh(*mesh)))
    quantised = {name for name in placed if name.endswith(("_proj", "w13", "w2"))}
    expected = with_packed(by_name(with_mxfp8(abstract, quantised)), placed)
    made = jax.eval_shape(lambda: make(*mesh, quantization="mxfp8", packed=True).state)
    assert kinds(by_name(made)) == kinds(expected)


def shares(weight: Any) -> list[dict[jax.Device, Any]]:
    return [leaf.sharding.devices_indices_map(leaf.shape) for leaf in jax.tree.leaves(weight)]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parameters_lie_as_a_checkpoint_is_loaded(
    make: Any, tmp_path: Path, mesh: tuple[int, int], packed: bool
) -> None:
    folder = write_checkpoint(tmp_path, RAW, random_tensors(RAW))
    loaded = load_model(folder, make_mesh(*mesh), quantization="mxfp8", progress=False, pack=packed)
    made = make(*mesh, quantization="mxfp8", packed=packed)
    ours, theirs = by_name(made.state), by_name(loaded.state)
    assert kinds(ours) == kinds(theirs)
    assert jax.tree.structure(made.state) == jax.tree.structure(loaded.state)
    assert {name: shares(weight) for name, weight in ours.items()} == {n: shares(w) for n, w in theirs.items()}


# Two heads of keys, which four ranks do not split.
@pytest.mark.parametrize("name", ["attention.k_proj", "attention.o_proj", "experts.w13"])
def test_numbers_are_the_same_on_every_mesh_and_others_everywhere(bench: Any, name: str) -> None:
    found = []
    for data, model in [(1, 1), (1, 4)]:
        mesh = make_mesh(data, model)
        _, abstract = abstract_model(ModelConfig.from_dict(RAW), mesh, jnp.bfloat16)
        placed = by_name(shardings(abstract, mesh))[name]
        made = bench.random_parameter(0, 7, name, by_name(abstract)[name], placed)
        assert made.sharding.is_equivalent_to(placed, made.ndim)
        found.append(np.asarray(made, np.float32))
    np.testing.assert_array_equal(*found)
    rows = found[0].reshape(-1, found[0].shape[-1])
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert 0.015 < rows.std() < 0.025


def test_a_mesh_that_would_cut_a_block_of_scales_is_refused(make: Any) -> None:
    with pytest.raises(MeshError, match="blocks of 32"):
        make(1, 4, tiny(**{**RAW, "intermediate_size": 64}), quantization="mxfp8")
