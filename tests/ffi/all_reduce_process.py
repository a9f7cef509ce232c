"""All-reduce called from JAX on several GPUs; as a program, one process on all GPUs, or a rank.

    python all_reduce_process.py CALLS [PROCESS PROCESSES PORT DEVICE]

Prints "wrong: 0" where every sum of every call was exact.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from qwenjax_ffi import collectives
from qwenjax_ffi.all_reduce_choice import choose_algorithm, one_shot_limit
from tests.ffi.gpu_processes import join, most_ranks

BY_RANK = PartitionSpec(("data", "model"))
SMALL = 1001  # bf16 elements: one-shot


def gpu_mesh(ranks: int | None = None) -> Mesh:
    devices = jax.devices()[:ranks]
    return Mesh(np.array(devices).reshape(1, -1), ("data", "model"))


def on_ranks(mesh: Mesh, function: Any, *arguments: Any) -> Any:
    """Runs per-rank code (epochs, *arguments), first without waiting for peers, so that its kernels are loaded.

    Arguments and results are spread over the ranks along their first axis.
    """
    heap = collectives.mesh_heap(mesh, "model")
    assert heap is not None
    call = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=BY_RANK, out_specs=BY_RANK, check_vma=False))
    jax.block_until_ready(call(heap.epochs(armed=False), *arguments))
    return call(collectives.fresh_epochs(mesh, "model"), *arguments)


def pattern(call: jax.Array, rank: Any, elements: int) -> jax.Array:
    """Integers from -8 to 8, others for every call and rank: their sums are exact in bf16."""
    place = jnp.arange(elements, dtype=jnp.int32)
    return ((place * 3 + call * 7 + rank * 13) % 17 - 8).astype(jnp.bfloat16)


def many_calls(mesh: Mesh, calls: int, late: bool) -> int:
    """How many elements were wrong in `calls` calls of each size; late: whether one rank, by chance, comes later."""
    ranks = mesh.size
    large = one_shot_limit(ranks) // 2 + 1001  # of two bytes: two-shot
    algorithms = [choose_algorithm(2 * elements, ranks, multicast=False) for elements in (SMALL, large)]
    assert algorithms == ["one_shot", "two_shot"], algorithms

    def program(epochs: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank = jax.lax.axis_index("model")

        def turn(call: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            epochs, wrong = carry
            delay = jnp.float32(0)
            if late:
                chance = (call * 40503 + 12345) % 65536
                steps = jnp.where((chance % (8 * ranks)) == rank, chance // 2048, 0)
                delay = jax.lax.fori_loop(0, steps, lambda _, x: x * 0.5, delay)
            for elements in (SMALL, large):
                # The delay is 0, which only the device knows. The input's memory is used again as soon as it is free.
                x = pattern(call, rank, elements) + delay.astype(jnp.bfloat16)
                total, epochs = collectives.all_reduce(x, "model", epochs, implementation="kernel")
                expected = sum(pattern(call, other, elements).astype(jnp.float32) for other in range(ranks))
                wrong += jnp.sum(total.astype(jnp.float32) != expected, dtype=jnp.int32)
            return epochs, wrong

        epochs, wrong = jax.lax.fori_loop(0, calls, turn, (epochs, jnp.zeros(1, jnp.int32)))
        return wrong, epochs

    wrong, epochs = on_ranks(mesh, program)
    counts = [int(np.asarray(shard.data)[0]) for shard in epochs.addressable_shards]
    assert counts == [2 * calls] * len(counts), counts
    return sum(int(np.asarray(shard.data)[0]) for shard in wrong.addressable_shards)


def main() -> None:
    calls, *job = sys.argv[1:]
    if job:
        join(*map(int, job))
    mesh = gpu_mesh(most_ranks(len(jax.devices())))
    print(f"wrong: {many_calls(mesh, int(calls), late=True) + many_calls(mesh, int(calls), late=False)}", flush=True)
    collectives.close_heap(mesh, "model")
    if job:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
