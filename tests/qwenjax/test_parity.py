"""Logits equal transformers' Qwen3MoeForCausalLM in fp32, for small random models that it saved itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.safetensors import Checkpoint
from qwenjax.config import ModelConfig
from qwenjax.logits import _forward, sequence_logits
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel, by_name, from_names
from qwenjax_ffi.norm import rms_norm
from tests.helpers import TINY, tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
IDS = [np.random.default_rng(n).integers(0, TINY["vocab_size"], n).tolist() for n in (17, 40, 1)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k weights as they are, one kv head": {"norm_topk_prob": False, "num_key_value_heads": 1},
    "four kv heads, head_dim of hidden over heads": {"num_key_value_heads": 4, "head_dim": 10},
    "a dense layer by mlp_only_layers": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "dense layers by decoder_sparse_step": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "all dense": {"decoder_sparse_step": 3},
    "tied": {"tie_word_embeddings": True},
    "YaRN": {"rope_theta": None, "rope_parameters": YARN},
    "YaRN of one's own": {
        "rope_theta": None,
        "rope_parameters": {**YARN, "attention_factor": 0.9, "beta_fast": 8.0, "truncate": False},
    },
    "fused experts": {"num_experts": 6},
    "biases": {"attention_bias": True, "rms_norm_eps": 0.1},
    "all experts, in shards": {"num_experts": 4, "num_experts_per_tok": 4, "rope_theta": 1e6, "vocab_size": 67},
}


@dataclass(frozen=True)
class Case:
    folder: Path
    model: ShardedModel
    expected: list[np.ndarray]

    def error(self, model: ShardedModel) -> float:
        logits = sequence_logits(model, IDS)
        assert [ours.shape for ours in logits] == [theirs.shape for theirs in self.expected]
        return max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(logits, self.expected, strict=True))


def save_oracle(name: str, folder: Path) -> list[np.ndarray]:
    """Saves a random model under `folder` and returns its logits."""
    raw = tiny(**CASES[name])
    torch.manual_seed(len(name))
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig.from_dict(raw)).float().eval()
    with torch.no_grad():
        # As transformers makes them, norms are all one and biases zero, and nobody would miss them.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
        logits = [model(torch.tensor([ids])).logits[0].numpy() for ids in IDS]
    options: dict[str, Any] = {"save_original_format": False} if name == "fused experts" else {}
    if "shards" in name:
        options["max_shard_size"] = "30KB"
    model.save_pretrained(folder, **options)
    return logits


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("oracle")
    expected = save_oracle(request.param, folder)
    return Case(folder, load_model(folder, make_mesh(), progress=False), expected)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("plain")
    expected = save_oracle("plain", folder)
    return Case(folder, load_model(folder, make_mesh(), progress=False), expected)


def test_logits_equal_transformers_and_every_parameter_matters(case: Case) -> None:
    assert max(np.abs(logits).max() for logits in case.expected) > 1
    assert case.error(case.model) < TOLERANCE
    parameters = by_name(case.model.state)
    for name, value in parameters.items():
        zeroed = from_names(case.model.state, {**parameters, name: jnp.zeros_like(value)})
        assert case.error(replace(case.model, state=zeroed)) > 100 * TOLERANCE, f"{name} does not matter"


def test_the_cases_are_what_they_are_called(tmp_path: Path) -> None:
    configs = {name: ModelConfig.from_dict(tiny(**changes)) for name, changes in CASES.items()}
    assert all(c.head_dim != c.hidden_size / c.num_attention_heads for n, c in configs.items() if "hidden" not in n)
    assert {c.num_key_value_heads for c in configs.values()} == {1, 2, 4}
    assert configs["all dense"].sparse_layers == ()
    assert configs["dense layers by decoder_sparse_step"].dense_layers == (0, 2)
    save_oracle("fused experts", tmp_path / "fused")
    assert "model.layers.0.mlp.experts.gate_up_proj" in Checkpoint(tmp_path / "fused").tensors
    save_oracle("all experts, in shards", tmp_path / "shards")
    assert len(Checkpoint(tmp_path / "shards").files) > 2


@pytest.fixture
def recompiled() -> Iterator[None]:
    """Programs are compiled anew within a test that replaces one of their operations, and after it."""
    _forward.clear_cache()
    yield
    _forward.clear_cache()


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize(
    ("op", "broken"),
    [
        ("qwenjax_ffi.attention_inputs.rotate", lambda x, cos, sin: x),
        ("qwenjax_ffi.attention_inputs.rms_norm", lambda x, weight, eps: x * weight),
        ("qwenjax.model.rms_norm", lambda x, weight, eps: x * weight),
        ("qwenjax.model.moe_replicated_tokens_rms_norm", lambda *a: (a[5], rms_norm(a[5], a[6][a[10]], a[7]), a[8])),
    ],
)
def test_parity_fails_where_an_operation_is_left_out(
    plain: Case, monkeypatch: pytest.MonkeyPatch, op: str, broken: Any
) -> None:
    monkeypatch.setattr(op, broken)
    assert plain.error(plain.model) > 100 * TOLERANCE
