"""The two-axis mesh that every deployment uses, and how a model's dimensions divide over it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from qwenjax.config import ModelConfig

logger = logging.getLogger(__name__)

DATA, MODEL = "data", "model"
BY_DATA = PartitionSpec(DATA)  # the leading axis, of requests, spread over the data ranks


class MeshError(ValueError):
    """A mesh that the machine or the model does not allow; the message lists sizes that do."""


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of data x model devices (the first ones of `devices`, or of jax.devices()).

    Attention shards its batch over `data` and its heads over `model`; experts are spread over both.
    Raises MeshError for sizes below 1 or above the devices at hand.
    """
    if data < 1 or model < 1:
        raise MeshError(f"mesh data={data}, model={model}: both must be at least 1")
    found = list(jax.devices() if devices is None else devices)
    if data * model > len(found):
        raise MeshError(
            f"mesh data={data} x model={model} needs {data * model} devices; {len(found)} are here "
            f"({found[0].platform}). On a CPU, JAX_NUM_CPU_DEVICES={data * model} makes as many"
        )
    # jax.make_mesh gives axes of explicit type, which shard_map refuses for plain arrays.
    return Mesh(np.array(found[: data * model]).reshape(data, model), (DATA, MODEL))


def check_processes(mesh: Mesh, processes: int) -> None:
    """Raises MeshError where one of the `processes` of jax.distributed has fewer devices of the mesh than another."""
    found = Counter(device.process_index for device in mesh.devices.flat)
    counts = [found[process] for process in range(processes)]
    if len(set(counts)) > 1:
        raise MeshError(
            f"of mesh data={mesh.shape[DATA]}, model={mesh.shape[MODEL]} processes 0 to {processes - 1} have {counts} "
            f"devices; each needs {mesh.size / processes:g}. CUDA_VISIBLE_DEVICES, or JAX_NUM_CPU_DEVICES on a CPU, "
            "says how many a process sees"
        )


def check_divides(config: ModelConfig, mesh: Mesh) -> None:
    """Raises MeshError where a dimension of the model does not divide over the mesh, with the sizes that would."""
    check_sizes(config, mesh.shape[DATA], mesh.shape[MODEL])


def check_sizes(config: ModelConfig, data: int, model: int) -> None:
    """As check_divides, for a mesh that need not be there."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % model or (kv_heads % model and model % kv_heads):
        fits = [m for m in divisors(heads) if kv_heads % m == 0 or m % kv_heads == 0]
        raise MeshError(
            f"model={model} does not divide {heads} query heads with {kv_heads} kv heads; sizes that do: {fits}"
        )
    if config.sparse_layers and config.num_experts % (data * model):
        raise MeshError(
            f"data={data} x model={model} ranks do not divide {config.num_experts} experts; "
            f"numbers of ranks that do: {divisors(config.num_experts)}"
        )
    if config.dense_layers and config.intermediate_size % model:
        raise MeshError(
            f"model={model} does not divide intermediate_size {config.intermediate_size} of the dense layers; "
            f"sizes that do: {[m for m in divisors(config.intermediate_size) if m <= heads]}"
        )


def say_where_collectives_are_references(mesh: Mesh) -> None:
    """Warns, once a process, of a mesh with both axes above 1: no kernel of ours serves its MoE layers."""
    if mesh.shape[DATA] > 1 and mesh.shape[MODEL] > 1:
        _warn_once()


@cache
def _warn_once() -> None:
    logger.warning(
        "a mesh with both axes above 1 runs its MoE layers on reference collectives: every rank gathers all tokens "
        "of the data axis. Meshes with data=1 or model=1 have kernels"
    )


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
