"""ModelConfig: every field of config.json, in both layouts, and the configs that are refused."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenjax.config import ConfigError, ModelConfig, RopeConfig
from tests.helpers import tiny

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny(**changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 99),
        ("hidden_size", 56),
        ("num_hidden_layers", 5),
        ("num_attention_heads", 6),
        ("num_key_value_heads", 1),
        ("head_dim", 14),
        ("max_position_embeddings", 77),
        ("rms_norm_eps", 1e-3),
        ("intermediate_size", 11),
        ("moe_intermediate_size", 13),
        ("num_experts", 12),
        ("num_experts_per_tok", 4),
        ("norm_topk_prob", False),
        ("decoder_sparse_step", 2),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("dtype", "float16"),
    ],
)
def test_a_field_is_honoured(field: str, value: object) -> None:
    changes = {"torch_dtype": None, field: value}
    assert getattr(read(**changes), field) == value
    assert getattr(read(), field) != value


def test_head_dim_is_the_field_and_not_hidden_size_over_heads() -> None:
    assert read(hidden_size=40, num_attention_heads=4, head_dim=16).head_dim == 16
    assert read(hidden_size=40, num_attention_heads=4, head_dim=None).head_dim == 10


@pytest.mark.parametrize(
    ("step", "mlp_only", "experts", "sparse"),
    [
        (1, [], 8, (0, 1, 2, 3, 4)),
        (2, [], 8, (1, 3)),
        (3, [], 8, (2,)),
        (1, [0, 4], 8, (1, 2, 3)),
        (2, [1], 8, (3,)),
        (6, [], 8, ()),
        (1, [], 0, ()),
    ],
)
def test_sparse_and_dense_layers(step: int, mlp_only: list[int], experts: int, sparse: tuple[int, ...]) -> None:
    config = read(num_hidden_layers=5, decoder_sparse_step=step, mlp_only_layers=mlp_only, num_experts=experts)
    assert config.sparse_layers == sparse
    assert config.dense_layers == tuple(layer for layer in range(5) if layer not in sparse)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_dtype_in_either_spelling(name: str, value: str) -> None:
    assert read(**{"torch_dtype": None, name: value}).dtype == "bfloat16"


def test_experts_in_either_spelling() -> None:
    assert read(num_experts=None, num_local_experts=16).num_experts == 16


def test_old_and_new_layout_are_one_config() -> None:
    old = tiny(rope_theta=5e5, rope_scaling=YARN)
    new = tiny(rope_theta=None, torch_dtype=None, dtype="float32")
    new["rope_parameters"] = {
        "rope_theta": 5e5,
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 32,
    }
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new) == ModelConfig.from_dict({**old, **new})


def test_yarn_under_type_and_under_rope_type() -> None:
    named = [{**YARN}, {**YARN, "rope_type": "yarn"}, {"rope_type": "yarn", **{k: YARN[k] for k in list(YARN)[1:]}}]
    first, second, third = (read(rope_scaling=scaling).rope for scaling in named)
    assert first == second == third
    # The factor as configured, not max_position_embeddings over the original; equation 22 of the YaRN paper.
    assert first == RopeConfig(1e4, "yarn", 4.0, 0.1 * math.log(4.0) + 1, 32.0, 1.0, 32, True)


@pytest.mark.parametrize(
    ("setting", "value", "where"),
    [
        ("attention_factor", 0.7, "attention_factor"),
        ("beta_fast", 16.0, "beta_fast"),
        ("beta_slow", 2, "beta_slow"),
        ("truncate", False, "truncate"),
        ("factor", 2.5, "factor"),
        ("original_max_position_embeddings", 64, "original_max_position_embeddings"),
    ],
)
def test_a_yarn_setting_is_honoured(setting: str, value: object, where: str) -> None:
    assert getattr(read(rope_scaling={**YARN, setting: value}).rope, where) == value


def test_yarn_stretches_max_position_embeddings_where_no_original_length_is_given() -> None:
    assert read(rope_scaling={"type": "yarn", "factor": 4.0}).rope.original_max_position_embeddings == 128


def test_attention_factor_of_two_mscales() -> None:
    factor = read(rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}).rope.attention_factor
    assert factor == pytest.approx((0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope type is 'llama3'"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"torch_dtype": "float64"}, "dtype is 'float64'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "64"}, "vocab_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 40.5}, "hidden_size is 40.5"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is 0"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is 0"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers names layer 2"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers names layer -1"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers names layer '0'"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers names layer True"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"rope_scaling": {"factor": 2.0}}, "factor is not a setting of rope type 'default'"),
        ({"rope_scaling": {**YARN, "low_freq_factor": 1.0}}, "low_freq_factor is not a setting of rope type 'yarn'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {**YARN, "factor": True}}, "factor is True"),
        ({"rope_scaling": {**YARN, "attention_factor": 0.0}}, "attention_factor is 0.0"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16"}, ["dtype", "torch_dtype", "bfloat16", "float32"]),
        ({"num_local_experts": 16}, ["num_experts", "num_local_experts", "8", "16"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok 9", "num_experts 8"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": None, "hidden_size": 42}, ["head_dim", "hidden_size 42", "4 heads"]),
        ({"rope_parameters": {"rope_theta": 1e6}}, ["rope_theta", "10000.0", "1000000.0"]),
        ({"rope_scaling": {**YARN, "rope_type": "default"}}, ["rope_type", "type", "yarn", "default"]),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            ["factor", "4.0", "2.0", "rope_scaling", "rope_parameters"],
        ),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, ["rope_type", "yarn", "default"]),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            ["original_max_position_embeddings", "64", "32"],
        ),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, ["mscale", "mscale_all_dim"]),
        (
            {"rope_scaling": {**YARN, "attention_factor": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
            ["attention_factor is 1.0", "mscales"],
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}}, ["beta_fast 1.0", "beta_slow 2.0"]),
        (
            {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
            ["partial_rotary_factor", "1.0", "0.5"],
        ),
    ],
)
def test_two_values_that_contradict_each_other_are_an_error(changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    for word in named:
        assert word in str(error.value)


def test_an_unknown_field_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "qwenjax.config"):
        read(use_mystery_heads=True, quantum=3)
    assert "quantum, use_mystery_heads" in caplog.text
    caplog.clear()
    read()
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "not JSON"),
        ("[]", "a JSON list"),
        ("[" * 100_000, "not JSON"),
        ('{"model_type": "qwen3_moe"}', "hidden_size is missing"),
        ('{"head_dim": 16, "head_dim": 32}', "head_dim is given twice, as 16 and as 32"),
        ('{"rope_scaling": {"factor": 2.0, "factor": 4.0}}', "factor is given twice"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_an_unreadable_config_is_an_error_that_names_the_file(
    tmp_path: Path, content: str | bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_folder_in_place_of_the_config_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_folder(tmp_path)


@given(st.data())
def test_to_dict_and_from_dict_are_inverse(data: st.DataObject) -> None:
    draw = data.draw
    layers, kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    changes = {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": 2 * draw(st.integers(1, 64)),
        "rms_norm_eps": draw(st.floats(1e-12, 1.0)),
        "rope_theta": draw(st.floats(2.0, 1e8)),
        "norm_topk_prob": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "decoder_sparse_step": draw(st.integers(1, 7)),
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), unique=True)),
        "torch_dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        "quantization_config": draw(st.sampled_from([None, {"quant_method": "fp8"}])),
    }
    if draw(st.booleans()):
        changes["rope_scaling"] = {
            **YARN,
            "factor": draw(st.floats(1.0, 64.0)),
            "truncate": draw(st.booleans()),
            "attention_factor": draw(st.none() | st.floats(0.1, 2.0)),
        }
    config = read(**changes)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.quantization == config.quantization


def test_transformers_reads_to_dict_as_the_same_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = read(rope_scaling=YARN, mlp_only_layers=[1], attention_bias=True)
    theirs = transformers.Qwen3MoeConfig.from_dict(config.to_dict())
    assert ModelConfig.from_dict(theirs.to_dict()) == config
