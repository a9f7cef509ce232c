"""What a tensor's name says about it: which are linear layers to quantise, and which of them belong together."""

from __future__ import annotations

import re

KINDS = ("experts", "attention", "mlp")  # kinds that are quantised; the others stay as they are

_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_FUSED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
_ATTENTION = re.compile(r"\.self_attn\.[qkvo]_proj\.weight$")
_MLP = re.compile(r"\.mlp\.(gate|up|down)_proj\.weight$")
_ROUTER = re.compile(r"\.mlp\.gate\.weight$")
_HEAD_INPUT = re.compile(r"^mtp\.fc\.weight$")


def kind_of(name: str) -> str:
    """One of "experts", "attention", "mlp" (dense layers), "router", "head_input" (mtp.fc), "norm", "embedding",
    "lm_head" or "other"."""
    if _EXPERT.search(name) or _FUSED.search(name):
        return "experts"
    if _ATTENTION.search(name):
        return "attention"
    if _MLP.search(name):
        return "mlp"
    if _ROUTER.search(name):
        return "router"
    if _HEAD_INPUT.search(name):
        return "head_input"
    if name.endswith("norm.weight"):
        return "norm"
    if name.endswith("embed_tokens.weight"):
        return "embedding"
    return "lm_head" if name.endswith("lm_head.weight") else "other"


def is_fused(name: str) -> bool:
    """Whether a tensor holds all experts of a layer, [experts, out, in], under a name without ".weight"."""
    return _FUSED.search(name) is not None


def module_of(name: str) -> str:
    """The module that owns a parameter: its name without the last part."""
    return name.rpartition(".")[0]


def fused_group(module: str) -> str:
    """Modules that engines hold as one matrix, and so in one precision, share this name (else it is the module's).

    vLLM and SGLang refuse a checkpoint that quantises some of q, k and v, of gate and up, or of a layer's experts.
    """
    module = re.sub(r"\.mlp\.experts\..*$", ".mlp.experts", module)
    module = re.sub(r"\.self_attn\.[qkv]_proj$", ".self_attn.qkv_proj", module)
    return re.sub(r"\.mlp\.(gate|up)_proj$", ".mlp.gate_up_proj", module)


def natural(name: str) -> list[str | int]:
    """Sort key under which layer 10 follows layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
