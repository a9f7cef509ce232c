"""The files beside the weights, in the layout of NVIDIA's ModelOpt for MXFP8, which vLLM and SGLang read.

Sources: ModelOpt's export (modelopt/torch/export/quant_utils.py and convert_hf_config.py), vLLM's reader
(vllm/model_executor/layers/quantization/modelopt.py, ModelOptMxFp8Config: wants kv_cache_quant_algo and
exclude_modules in hf_quant_config.json, `weight` float8_e4m3fn [out, in] and `weight_scale` uint8 [out, in / 32]
not swizzled), SGLang's pull request 32538 (reads the same through its mxfp8 path).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwenjax.convert.destination import to_json
from qwenjax.convert.plan import Plan
from qwenjax_ffi.weights import MX_BLOCK

# vLLM and SGLang read hf_quant_config.json only where the producer is called modelopt.
PRODUCER = {"name": "modelopt", "version": "qwenjax"}


def config_files(config: dict[str, Any], plan: Plan) -> dict[str, bytes]:
    """config.json, hf_quant_config.json and the index of the shards, by name."""
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "MXFP8",
        "group_size": MX_BLOCK,
        "kv_cache_scheme": None,
        "ignore": plan.ignore,
        "producer": PRODUCER,
    }
    return {
        "config.json": to_json({**config, "quantization_config": quantization}),
        "hf_quant_config.json": to_json({"producer": PRODUCER, "quantization": _legacy(plan.ignore)}),
        "model.safetensors.index.json": to_json(_index(plan)),
    }


def _legacy(ignore: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_algo": "MXFP8",
        "kv_cache_quant_algo": None,
        "group_size": MX_BLOCK,
        "exclude_modules": list(ignore),
    }


def _index(plan: Plan) -> dict[str, Any]:
    weight_map = {
        name: plan.file_name(number)
        for number, shard in enumerate(plan.shards)
        for part in shard.parts
        for name in part.outputs
    }
    total = sum(shard.nbytes for shard in plan.shards)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
