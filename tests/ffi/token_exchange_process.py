"""Dispatch and combine called from JAX on several GPUs; as a program, one process on all GPUs, or a rank.

    python token_exchange_process.py ITERATIONS [PROCESS PROCESSES PORT DEVICE]

Prints "wrong: 0" where every sum of every iteration was exact.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from qwenjax_ffi import collectives
from qwenjax_ffi.token_exchange import combine, dispatch
from qwenjax_ffi.token_exchange_kernel import ExchangeRows
from tests.ffi.gpu_processes import join, most_ranks

BY_RANK = PartitionSpec(("data", "model"))
ROWS = ExchangeRows(tokens=64, hidden=4096, top_k=8, dtype=jnp.bfloat16)
EXPERTS = 128


def gpu_mesh(ranks: int | None = None) -> Mesh:
    devices = jax.devices()[:ranks]
    return Mesh(np.array(devices).reshape(-1, 1), ("data", "model"))


def on_ranks(mesh: Mesh, function: Any, *arguments: Any) -> Any:
    """Runs per-rank code (epochs, *arguments), first without waiting for peers, so that its kernels are loaded.

    Arguments and results are spread over the ranks along their first axis.
    """
    heap = collectives.mesh_heap(mesh, "data", ROWS)
    assert heap is not None
    call = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=BY_RANK, out_specs=BY_RANK, check_vma=False))
    jax.block_until_ready(call(heap.epochs(armed=False), *arguments))
    return call(collectives.fresh_epochs(mesh, "data", ROWS), *arguments)


def tokens_of(call: Any, rank: Any, tokens: int, hidden: int, ranks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Integers, others for every call and rank; routes that change from call to call: over all experts, all to one
    expert, every other token nowhere, or the tokens of one rank nowhere."""
    token, column = jnp.arange(tokens, dtype=jnp.int32)[:, None], jnp.arange(hidden, dtype=jnp.int32)
    x = ((token * 5 + column * 3 + call * 7 + rank * 13) % 17 - 8).astype(jnp.bfloat16)
    choice = jnp.arange(ROWS.top_k, dtype=jnp.int32)
    spread = (token * 11 + choice * 17 + call * 29 + rank * 3) % EXPERTS
    kind = call % 4
    ids = jnp.where(kind == 1, jnp.where(choice == 0, call * 37 % EXPERTS, -1), spread)
    nowhere = ((kind == 2) & (token % 2 == 0)) | ((kind == 3) & (call // 4 % ranks == rank))
    weights = ((token + choice + call) % 3).astype(jnp.float32)
    return x, jnp.where(nowhere, -1, ids), weights


def experts(x: jax.Array, ids: jax.Array, weights: jax.Array, rank: Any, per_rank: int) -> jax.Array:
    """What stands for a rank's experts: x plus the rank for tokens that are there, plus their experts' weights."""
    here = (ids >= 0) & (ids // per_rank == rank)
    added = jnp.sum(jnp.where(here, weights, 0), axis=-1, keepdims=True)
    return jnp.where(here.any(-1, keepdims=True), x.astype(jnp.float32) + rank + added, 0)


def many_layers(mesh: Mesh, iterations: int, late: bool, tokens: int = 64, hidden: int = 512) -> int:
    """How many elements were wrong in `iterations` of two layers in flight; late: whether a rank, by chance, comes
    later."""
    ranks = mesh.size
    per_rank = EXPERTS // ranks

    def program(epochs: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank = jax.lax.axis_index("data")

        def turn(call: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            epochs, wrong = carry
            delay = jnp.float32(0)
            if late:
                chance = (call * 40503 + 12345) % 65536
                steps = jnp.where((chance % (8 * ranks)) == rank, chance // 2048, 0)
                delay = jax.lax.fori_loop(0, steps, lambda _, x: x * 0.5, delay)
            operands = [tokens_of(2 * call + i, rank, tokens, hidden, ranks) for i in range(2)]
            sent = []
            for x, ids, weights in operands:
                # The delay is 0, which only the device knows.
                there, epochs = dispatch(
                    x + delay.astype(x.dtype), ids, weights, per_rank, "data", epochs, implementation="kernel"
                )
                sent.append(there)
            for (x, ids, weights), there in zip(operands, sent, strict=True):
                partial = experts(there.x, there.ids, there.weights, rank, per_rank).astype(x.dtype)
                total, epochs = combine(partial, there.counts, there.slots, "data", epochs, implementation="kernel")
                expected = sum(experts(x, ids, weights, peer, per_rank) for peer in range(ranks))
                wrong += jnp.sum(total.astype(jnp.float32) != expected, dtype=jnp.int32)
            return epochs, wrong

        epochs, wrong = jax.lax.fori_loop(0, iterations, turn, (epochs, jnp.zeros(1, jnp.int32)))
        return wrong, epochs

    wrong, epochs = on_ranks(mesh, program)
    counts = [int(np.asarray(shard.data)[0]) for shard in epochs.addressable_shards]
    assert counts == [4 * iterations] * len(counts), counts
    return sum(int(np.asarray(shard.data)[0]) for shard in wrong.addressable_shards)


def main() -> None:
    iterations, *job = sys.argv[1:]
    if job:
        join(*map(int, job))
    mesh = gpu_mesh(most_ranks(len(jax.devices())))
    wrong = many_layers(mesh, int(iterations), late=True) + many_layers(mesh, int(iterations), late=False)
    print(f"wrong: {wrong}", flush=True)
    collectives.close_heap(mesh, "data")
    if job:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
