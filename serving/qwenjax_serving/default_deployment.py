"""The deployment that `qwenjax serve MODEL` has without a file: from the devices at hand and the options given.

Without GPUs: a prefill and a decode worker of one CPU device each. On one GPU: both in one process, which share it and
the weights. On more: half of them for each, prefill with as many model ranks (TP = EP), decode with as many data ranks
(DP = EP), as far as the model's sizes allow it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.mesh import MeshError, check_sizes

logger = logging.getLogger(__name__)

_ASK = "import jax; found = jax.devices(); print(found[0].platform, len(found))"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_START = 120.0  # seconds that a process may take to find the GPUs


def count_gpus() -> int:
    """GPUs that a worker would see; 0 where JAX runs on the CPU. Asked of a process of its own, since this one is to
    hold no GPU. Raises OSError where that fails."""
    plugins = [plugin for plugin in _PLUGINS if _installed(plugin)]
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not plugins:
        return 0
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, timeout=_START, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(
            f"JAX finds no devices within {_START:g} s; nvidia-smi says whether the driver answers, and "
            "JAX_PLATFORMS=cpu serves without GPUs"
        ) from None
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [
            f"its process ended with status {asked.returncode}, without a word"
        ]
        raise OSError(f"JAX finds no devices: {said[-1]}")
    platform, count = asked.stdout.split()[-2:]
    if platform == "cpu":
        logger.warning("%s is installed, and JAX finds no GPU: serving on the CPU", plugins[0])
        return 0
    return int(count)


def default_deployment(
    config: ModelConfig,
    num_gpus: int,
    options: Mapping[str, Any],
    model_parallel: int | None = None,
    data_parallel: int | None = None,
    max_waiting: int | None = None,
) -> str:
    """The text of a deployment file, see `read_deployment`.

    options: of both engines, those that were given. model_parallel: ranks of the prefill worker, data_parallel: of the
    decode worker; one that is not given takes what the other leaves, both half. max_waiting: of the
    router. Raises MeshError for meshes that the devices or the model do not allow.
    """
    parts = []
    if max_waiting is not None:
        parts.append(_table("[router]", {"max_waiting": max_waiting}))
    if options:
        parts.append(_table("[engine]", options))
    if num_gpus == 1:
        if any(ranks is not None and ranks > 1 for ranks in (model_parallel, data_parallel)):
            raise MeshError(
                "there is one GPU: --model-parallel and --data-parallel are 1 where prefill and decode share it"
            )
        parts.append(_table("[both]", {"share_device": True}))
        return "\n".join(parts)
    half, prefill, decode = num_gpus // 2, model_parallel, data_parallel
    if prefill is None:
        rest = half if decode is None else num_gpus - decode
        prefill = _largest(rest, lambda count: check_sizes(config, 1, count))
    if decode is None:
        rest = half if model_parallel is None else num_gpus - prefill
        decode = _largest(rest, lambda count: check_sizes(config, count, 1))
    check_sizes(config, 1, prefill)
    check_sizes(config, decode, 1)
    if num_gpus and prefill + decode > num_gpus:
        raise MeshError(
            f"--model-parallel {prefill} for prefill and --data-parallel {decode} for decode need {prefill + decode} "
            f"GPUs; {num_gpus} are here"
        )
    gpus = _named_gpus() or [str(place) for place in range(num_gpus)]
    for name, size, first, count in (("prefill", "model", 0, prefill), ("decode", "data", prefill, decode)):
        own: dict[str, Any] = {f"{size}_parallel": count}
        if num_gpus:
            own["env"] = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + count])}
        parts.append(_table(f"[[{name}]]", own))
    return "\n".join(parts)


def _named_gpus() -> list[str]:
    """The GPUs that the environment names for this process, if it does."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def _largest(most: int, check: Callable[[int], None]) -> int:
    """The largest number of ranks up to `most` that a check lets pass; 1 always does."""
    for count in range(most, 1, -1):
        try:
            check(count)
        except MeshError:
            continue
        return count
    return 1


def _table(header: str, values: Mapping[str, Any]) -> str:
    return "".join([f"{header}\n", *(f"{name} = {_value(value)}\n" for name, value in values.items())])


def _value(value: Any) -> str:
    """As TOML writes it, which is as JSON does but for tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
