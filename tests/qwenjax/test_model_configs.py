"""The configs that ship with the project are the models they are named after."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from qwenjax.config import ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.model import abstract_model
from qwenjax.sharded_model import by_name, shardings

CONFIGS = Path(__file__).parents[2] / "configs"


# Parameters in all and active for a token, in billions, as Qwen publishes them: 30.5 and 3.3, 235 and 22.
@pytest.mark.parametrize(("name", "total", "active"), [("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235, 22)])
def test_a_config_has_the_published_number_of_parameters(name: str, total: float, active: float) -> None:
    config = ModelConfig.from_folder(CONFIGS / name)
    _, abstract = abstract_model(config, make_mesh())
    sizes = {parameter: math.prod(leaf.shape) for parameter, leaf in by_name(abstract).items()}
    experts = sizes["experts.w13"] + sizes["experts.w2"]
    idle = experts * (1 - config.num_experts_per_tok / config.num_experts)
    assert sum(sizes.values()) / 1e9 == pytest.approx(total, rel=0.005)
    assert (sum(sizes.values()) - idle) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("data", "model"), [(1, 4), (8, 1)])
def test_the_large_model_divides_over_the_articles_meshes(data: int, model: int) -> None:
    config, mesh = ModelConfig.from_folder(CONFIGS / "qwen3-235b-a22b"), make_mesh(data, model)
    _, abstract = abstract_model(config, mesh)
    placed = by_name(shardings(abstract, mesh))
    local = {name: placed[name].shard_shape(leaf.shape) for name, leaf in by_name(abstract).items()}
    ranks = data * model
    assert local["experts.w13"] == (94, 128 // ranks, 3072, 4096)
    assert local["attention.q_proj"] == (94, 64 * 128 // model, 4096)
    assert local["attention.k_proj"] == (94, 4 * 128 // model, 4096)
