"""Small checkpoints that `qwenjax convert` is tested on, and what it left in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, WIDTH, EXPERTS, LAYERS = 64, 96, 4, 2
# Not of a model that we serve: of those a conversion checks that all tensors are there.
CONFIG = {"model_type": "some_of_one", "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "torch_dtype": "bfloat16"}
EXTRAS = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"top_k": 20}'}


def tensors(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Layer 0 has experts, layer 1 a dense MLP."""
    make = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (50, HIDDEN), "lm_head.weight": (50, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qo"}
        shapes |= {f"{base}.self_attn.{x}_proj.weight": (HIDDEN // 2, HIDDEN) for x in "kv"}
        shapes |= {f"{base}.self_attn.q_norm.weight": (16,), f"{base}.input_layernorm.weight": (HIDDEN,)}
    for mlp in [f"model.layers.0.mlp.experts.{e}" for e in range(EXPERTS)] + ["model.layers.1.mlp"]:
        shapes |= {f"{mlp}.{x}_proj.weight": (WIDTH, HIDDEN) for x in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, WIDTH)
    shapes["model.layers.0.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    return {name: torch.randn(shape, generator=make).to(dtype) * 0.02 for name, shape in shapes.items()}


def fuse(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    base = "model.layers.0.mlp.experts"
    pick = [{x: state[f"{base}.{e}.{x}_proj.weight"] for x in ("gate", "up", "down")} for e in range(EXPERTS)]
    rest = {name: tensor for name, tensor in state.items() if not name.startswith(base)}
    rest[f"{base}.gate_up_proj"] = torch.stack([torch.cat([p["gate"], p["up"]]) for p in pick])
    rest[f"{base}.down_proj"] = torch.stack([p["down"] for p in pick])
    return rest


def save(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """In two shards with an index."""
    folder.mkdir(parents=True)
    names = sorted(state)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: state[name].contiguous() for name in chosen}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    for name, text in (EXTRAS | {"README.md": "model card", "pytorch_model.bin": "weights"}).items():
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
