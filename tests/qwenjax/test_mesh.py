"""A model on any mesh is the model on one device; meshes that do not fit are errors."""

from __future__ import annotations

import logging
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import qwenjax.mesh
from qwenjax.config import ModelConfig
from qwenjax.logits import sequence_logits
from qwenjax.mesh import MeshError, check_divides, check_processes, make_mesh
from qwenjax.model import abstract_model
from qwenjax.sharded_model import by_name
from tests.helpers import TINY, model_from_tensors, random_tensors, tiny

SHAPES = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)]
# Three sequences: on four data ranks one has nothing but padding.
IDS = [np.random.default_rng(n).integers(0, TINY["vocab_size"], n).tolist() for n in (33, 5, 12)]
FP32_TOLERANCE = 1e-5
# Sums over ranks are rounded to bfloat16's 8 bits once more than on one device, at every layer; logits here spread by
# 1.3, up to 5. Where a rounding gives one token in a hundred another last expert, its logits move by a unit.
BF16_TOLERANCE, BF16_TOLERANCE_OF_REROUTED = 0.1, 1.5

MODELS: dict[int, dict[str, Any]] = {
    # The vocabulary is split over the model ranks, and there are fewer kv heads than the four of (1, 4).
    2: tiny(num_hidden_layers=3, mlp_only_layers=[1], num_key_value_heads=2),
    # 66 rows do not divide by four: the vocabulary is kept whole there.
    4: tiny(num_key_value_heads=4, vocab_size=66, attention_bias=False, norm_topk_prob=False, tie_word_embeddings=True),
}


@cache
def logits(kv_heads: int, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """float32 [tokens of all sequences, vocab]."""
    raw = {**MODELS[kv_heads], "torch_dtype": dtype}
    model = model_from_tensors(raw, make_mesh(*shape), random_tensors(raw, seed=kv_heads))
    return np.concatenate(sequence_logits(model, IDS))


@pytest.mark.parametrize("kv_heads", MODELS)
@pytest.mark.parametrize("shape", [*SHAPES, pytest.param((8, 1), marks=pytest.mark.slow)], ids=str)
def test_float32_logits_and_greedy_ids_equal_one_device(shape: tuple[int, int], kv_heads: int) -> None:
    alone, spread = logits(kv_heads, (1, 1), "float32"), logits(kv_heads, shape, "float32")
    assert alone.std() > 1
    assert np.abs(spread - alone).max() < FP32_TOLERANCE
    np.testing.assert_array_equal(spread.argmax(-1), alone.argmax(-1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_logits_are_close_and_clear_greedy_ids_equal_one_device(shape: tuple[int, int]) -> None:
    alone, spread = logits(2, (1, 1), "bfloat16"), logits(2, shape, "bfloat16")
    error = np.abs(spread - alone).max(-1)  # of each token
    assert (error < BF16_TOLERANCE).mean() > 0.95
    assert error.max() < BF16_TOLERANCE_OF_REROUTED
    second, first = np.sort(alone, axis=-1)[:, -2:].T
    clear = first - second > 2 * error
    assert clear.mean() > 0.5, "most tokens must have a greedy id that the error cannot move"
    np.testing.assert_array_equal(spread[clear].argmax(-1), alone[clear].argmax(-1))


def test_bfloat16_is_close_to_float32() -> None:
    half, full = logits(2, (1, 1), "bfloat16"), logits(2, (1, 1), "float32")
    # The weights themselves were rounded; nearly all tokens keep their experts.
    assert np.median(np.abs(half - full)) < 0.1


@pytest.mark.parametrize(("model", "split"), [(2, True), (4, False)])
def test_kv_projections_are_split_by_head_or_whole_on_every_rank(model: int, split: bool) -> None:
    raw = MODELS[2]
    parameters = by_name(model_from_tensors(raw, make_mesh(1, model), random_tensors(raw)).state)
    rows = raw["num_key_value_heads"] * raw["head_dim"]
    for name in ("attention.k_proj", "attention.v_proj"):
        shards = {shard.data.shape[1] for shard in parameters[name].addressable_shards}
        assert shards == {rows // model if split else rows}
    assert {s.data.shape[1] for s in parameters["attention.q_proj"].addressable_shards} == {64 // model}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_are_spread_over_both_axes(shape: tuple[int, int]) -> None:
    raw = MODELS[2]
    experts = by_name(model_from_tensors(raw, make_mesh(*shape), random_tensors(raw)).state)["experts.w13"]
    ranks = shape[0] * shape[1]
    first = {shard.device: shard.index[1].indices(8)[:2] for shard in experts.addressable_shards}
    assert [first[d] for d in jax.devices()[:ranks]] == [(r * 8 // ranks, (r + 1) * 8 // ranks) for r in range(ranks)]


def test_a_mesh_with_both_axes_says_once_that_it_runs_on_references(caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig.from_dict(tiny())
    qwenjax.mesh._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "qwenjax.mesh"):
        for shape in ((1, 1), (1, 4), (4, 1)):
            abstract_model(config, make_mesh(*shape))
        assert not caplog.records
        for shape in ((2, 2), (2, 2), (2, 4)):
            abstract_model(config, make_mesh(*shape) if shape != (2, 4) else make_mesh(4, 2))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "reference collectives" in caplog.text


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((1, 3), {}, r"model=3 does not divide 4 query heads with 2 kv heads; sizes that do: \[1, 2, 4\]"),
        ((1, 8), {}, r"model=8 does not divide 4 query heads"),
        (
            (1, 4),
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            r"model=4 does not divide 12 query heads with 6 kv heads; sizes that do: \[1, 2, 3, 6, 12\]",
        ),
        ((3, 1), {}, r"data=3 x model=1 ranks do not divide 8 experts; .*: \[1, 2, 4, 8\]"),
        ((4, 2), {"num_experts": 12}, r"data=4 x model=2 ranks do not divide 12 experts; .*: \[1, 2, 3, 4, 6, 12\]"),
        (
            (1, 4),
            {"mlp_only_layers": [0], "intermediate_size": 50},
            r"model=4 does not divide intermediate_size 50 of the dense layers; sizes that do: \[1, 2\]",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_an_error_that_lists_those_that_do(
    shape: tuple[int, int], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        check_divides(ModelConfig.from_dict(tiny(**changes)), make_mesh(*shape))


@pytest.mark.parametrize("shape", [(3, 1), (8, 1)])
def test_a_model_without_experts_needs_no_experts_to_divide(shape: tuple[int, int]) -> None:
    check_divides(ModelConfig.from_dict(tiny(mlp_only_layers=[0, 1], num_experts=5)), make_mesh(*shape))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1), "data=0, model=1: both must be at least 1"),
        ((1, -2), "data=1, model=-2"),
        ((3, 3), r"needs 9 devices; 8 are here \(cpu\).*JAX_NUM_CPU_DEVICES=9"),
    ],
)
def test_a_mesh_that_the_machine_lacks_is_an_error(shape: tuple[int, int], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        make_mesh(*shape)


def test_a_mesh_takes_the_devices_that_it_is_given() -> None:
    chosen = jax.devices()[4:6]
    assert make_mesh(1, 2, chosen).devices.ravel().tolist() == chosen


def test_a_mesh_that_leaves_processes_with_fewer_devices_than_others_is_refused() -> None:
    def mesh_of(*processes: int) -> Any:
        devices = np.array([[SimpleNamespace(process_index=process) for process in processes]])
        return SimpleNamespace(devices=devices, size=len(processes), shape={"data": 1, "model": len(processes)})

    check_processes(mesh_of(0, 0, 1, 1), 2)
    with pytest.raises(MeshError, match=r"data=1, model=4 processes 0 to 1 have \[4, 0\] devices; each needs 2"):
        check_processes(mesh_of(0, 0, 0, 0), 2)
    with pytest.raises(MeshError, match=r"have \[3, 1\]"):
        check_processes(mesh_of(0, 0, 0, 1), 2)
