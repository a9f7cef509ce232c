"""The arithmetic of what training takes, against arrays that are there."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from qwenjax.config import ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import by_name, random_model, random_parameters
from qwenjax.train.losses import HEAD
from qwenjax.train.memory import head_training_bytes
from qwenjax.train.runs import add_head
from qwenjax.train.step import OptimizerSettings, init_state
from tests.helpers import tiny

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "mtp_num_hidden_layers": 1,
}


def test_base_and_head_are_counted_as_they_lie_on_a_rank() -> None:
    config = ModelConfig.from_dict(tiny(mtp_num_hidden_layers=1))
    mesh = make_mesh(2, 2)
    model = random_model(config, mesh)
    named = by_name(model.state)
    head = {name: value for name, value in named.items() if name.startswith(HEAD)}
    state = init_state(head, OptimizerSettings(1), mesh)
    counted = head_training_bytes(config, mesh, batch=4, length=16, depths=2)

    def on_first_rank(tree: object) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    base = {name: value for name, value in named.items() if name not in head}
    assert counted["base"] == on_first_rank(base)
    # Masters and both moments lie there; the gradients are a fourth of the sort. The optimiser counts its steps twice.
    assert counted["head"] == on_first_rank(state.parameters) * 4
    assert on_first_rank(state.moments) == 2 * on_first_rank(state.parameters) + 8
    assert counted["total"] == sum(size for name, size in counted.items() if name != "total")


def test_a_new_head_is_made_without_a_second_base() -> None:
    config = ModelConfig.from_dict(tiny())
    model = random_model(config, make_mesh())
    base, grown = by_name(model.state), by_name(add_head(model, 5).state)
    assert all(grown[name] is leaf for name, leaf in base.items())
    head = {name: leaf for name, leaf in grown.items() if name not in base}
    whole = by_name(random_model(replace(config, mtp_num_hidden_layers=1), make_mesh(), 5).state)
    for name, leaf in head.items():
        np.testing.assert_array_equal(leaf, whole[name])
    made = random_parameters(replace(config, mtp_num_hidden_layers=1), make_mesh(), 5, only=HEAD)
    assert made.keys() == head.keys()


def test_a_head_for_30b_trains_on_one_gpu_of_141_gb() -> None:
    config = ModelConfig.from_dict(QWEN3_30B_A3B)
    counted = head_training_bytes(config, make_mesh(), batch=4, length=1024, depths=3)
    assert 60e9 < counted["base"] < 62e9  # 30.5 billion parameters in bf16
    assert 9e9 < counted["head"] < 11e9
    assert counted["total"] < 100e9
