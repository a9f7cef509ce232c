"""Small models for the tests: their configs, checkpoints in Hugging Face's layout, and the way to other meshes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from qwenjax.config import ModelConfig
from qwenjax.model import abstract_model
from qwenjax.sharded_model import ShardedModel, from_names, shardings
from qwenjax.sharded_model import by_name as parameters_by_name

# Every size differs from the others, so that no two axes can be mistaken for each other unseen.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}


def tiny(**changes: Any) -> dict[str, Any]:
    """config.json's content for a tiny model, with `changes`; None takes a field out."""
    return {name: value for name, value in {**TINY, **changes}.items() if value is not None}


def tensor_shapes(raw: Mapping[str, Any], fused: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor that transformers saves for a config, written out independently of the loader."""
    hidden, head_dim = raw["hidden_size"], raw["head_dim"]
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    yield "model.embed_tokens.weight", (raw["vocab_size"], hidden)
    for layer in range(raw["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", (hidden,)
        yield f"{block}.self_attn.q_proj.weight", (heads * head_dim, hidden)
        yield f"{block}.self_attn.k_proj.weight", (kv_heads * head_dim, hidden)
        yield f"{block}.self_attn.v_proj.weight", (kv_heads * head_dim, hidden)
        yield f"{block}.self_attn.o_proj.weight", (hidden, heads * head_dim)
        yield f"{block}.self_attn.q_norm.weight", (head_dim,)
        yield f"{block}.self_attn.k_norm.weight", (head_dim,)
        yield f"{block}.post_attention_layernorm.weight", (hidden,)
        if layer in raw.get("mlp_only_layers", []):
            yield f"{block}.mlp.gate_proj.weight", (raw["intermediate_size"], hidden)
            yield f"{block}.mlp.up_proj.weight", (raw["intermediate_size"], hidden)
            yield f"{block}.mlp.down_proj.weight", (hidden, raw["intermediate_size"])
            continue
        experts, width = raw["num_experts"], raw["moe_intermediate_size"]
        yield f"{block}.mlp.gate.weight", (experts, hidden)
        if fused:
            yield f"{block}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
            yield f"{block}.mlp.experts.down_proj", (experts, hidden, width)
            continue
        for expert in range(experts):
            yield f"{block}.mlp.experts.{expert}.gate_proj.weight", (width, hidden)
            yield f"{block}.mlp.experts.{expert}.up_proj.weight", (width, hidden)
            yield f"{block}.mlp.experts.{expert}.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    if not raw.get("tie_word_embeddings", False):
        yield "lm_head.weight", (raw["vocab_size"], hidden)


def random_tensors(raw: Mapping[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random tensors for a config, large enough that logits spread over several units; norms around 1, none at it."""
    rng = np.random.default_rng(seed)

    def tensor(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0, 0.2, shape)
        return values.astype(dtype)

    return {name: tensor(shape) for name, shape in tensor_shapes(raw)}


def fuse_experts(tensors: Mapping[str, np.ndarray], experts: int) -> dict[str, np.ndarray]:
    """The same checkpoint with each layer's experts in the two tensors of transformers 5."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for block in {name.split("experts.")[0] + "experts" for name in tensors if ".mlp.experts." in name}:
        gate, up, down = (
            np.stack([tensors[f"{block}.{expert}.{kind}_proj.weight"] for expert in range(experts)])
            for kind in ("gate", "up", "down")
        )
        fused[f"{block}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"{block}.down_proj"] = down
    return fused


def write_checkpoint(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: int = 1) -> Path:
    """A checkpoint folder: config.json and one model.safetensors, or `shards` files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(raw)))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def model_from_tensors(raw: Mapping[str, Any], mesh: Mesh, tensors: Mapping[str, np.ndarray]) -> ShardedModel:
    """A model of these tensors without a checkpoint and without the loader, placed leaf by leaf: quick."""
    config = ModelConfig.from_dict(raw)
    layers = range(config.num_hidden_layers)

    def stack(name: str, of: Any = layers) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{layer}.{name}.weight"] for layer in of])

    def experts(kind: str) -> np.ndarray:
        numbers = range(config.num_experts)
        return np.stack(
            [stack(f"mlp.experts.{expert}.{kind}_proj", config.sparse_layers) for expert in numbers], axis=1
        )

    leaves = {
        "embed_tokens": tensors["model.embed_tokens.weight"],
        "input_norm": stack("input_layernorm"),
        "post_attention_norm": stack("post_attention_layernorm"),
        "norm": tensors["model.norm.weight"],
        **{f"attention.{name}": stack(f"self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{f"attention.{name}": stack(f"self_attn.{name}") for name in ("q_norm", "k_norm")},
    }
    if config.sparse_layers:
        leaves["experts.router"] = stack("mlp.gate", config.sparse_layers)
        leaves["experts.w13"] = np.concatenate([experts("gate"), experts("up")], axis=2)
        leaves["experts.w2"] = experts("down")
    if config.dense_layers:
        leaves |= {f"mlp.{n}": stack(f"mlp.{n}", config.dense_layers) for n in ("gate_proj", "up_proj", "down_proj")}
    if not config.tie_word_embeddings:
        leaves["lm_head"] = tensors["lm_head.weight"]
    graphdef, abstract = abstract_model(config, mesh)
    placed = parameters_by_name(shardings(abstract, mesh))
    shapes = parameters_by_name(abstract)
    assert set(leaves) == set(shapes)
    for name, leaf in leaves.items():
        assert leaf.shape == shapes[name].shape, name
        leaves[name] = jax.device_put(leaf.astype(shapes[name].dtype), placed[name])
    return ShardedModel(config, mesh, graphdef, from_names(abstract, leaves))


def assert_same_parameters(first: ShardedModel, second: ShardedModel) -> None:
    """Equal names, shapes, dtypes and bits, whatever the meshes are."""
    left, right = parameters_by_name(first.state), parameters_by_name(second.state)
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        np.testing.assert_array_equal(np.asarray(left[name]), np.asarray(right[name]), err_msg=name)
