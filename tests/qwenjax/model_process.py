"""The model over processes, a device each: `python model_process.py 1 PROCESS PROCESSES PORT DEVICE`.

Prints "ok" where the process's share of the logits is that of its own device alone, with heads and with requests split.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from qwenjax.cache import SelfContext
from qwenjax.logits import _forward
from qwenjax.mesh import BY_DATA, DATA, MODEL, make_mesh
from qwenjax_ffi.collectives import close_heap
from tests.ffi.gpu_processes import join
from tests.helpers import model_from_tensors, random_tensors
from tests.qwenjax.test_model_on_gpus import check_logits, raw

LENGTH = 64


def logits(mesh: Mesh, config: dict[str, object], ids: np.ndarray) -> jax.Array:
    """[rows, length, vocab] of ids [rows, length]."""

    def placed(values: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, BY_DATA), lambda index: values[index])

    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(ids), 1))
    model = model_from_tensors(config, mesh, random_tensors(config))
    found: jax.Array = model.run(_forward, placed(ids), SelfContext(placed(positions)))
    return found


def main() -> None:
    join(*map(int, sys.argv[2:]))
    ranks = jax.process_count()
    config = raw(ranks)
    ids = np.random.default_rng(0).integers(0, 63, (ranks, LENGTH)).astype(np.int32)
    alone = np.asarray(logits(make_mesh(devices=jax.local_devices()), config, ids))
    for data, model, axis in ((1, ranks, MODEL), (ranks, 1, DATA)):
        mesh = make_mesh(data, model)
        for shard in logits(mesh, config, ids).addressable_shards:
            both = (each.reshape(-1, each.shape[-1]) for each in (alone[shard.index], np.asarray(shard.data)))
            check_logits(*both, ranks)
        close_heap(mesh, axis)
    print("ok", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
