"""One process of a heap under jax.distributed, memory as files: `python heap_distributed.py PROCESS PROCESSES PORT`."""

from __future__ import annotations

import ctypes
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from qwenjax_ffi.symmetric_memory import SymmetricHeap
from qwenjax_kernels.heap_layout import BASES_WORD, RANK_WORD
from tests.ffi.file_driver import FileDriver


def main() -> None:
    process, processes, port = map(int, sys.argv[1:])
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = Mesh(np.array(jax.devices()).reshape(1, -1), ("data", "model"))
    driver = FileDriver()
    for _ in range(2):  # a heap's name in the coordinator's store is used once
        heap = SymmetricHeap(mesh, "model", num_bytes=100, driver=driver)
        offset = heap.allocate(8)
        row = np.asarray(heap.epochs().addressable_shards[0].data).view(np.uint32)
        assert row[RANK_WORD] == process
        bases = [int(row[BASES_WORD + 2 * r]) | int(row[BASES_WORD + 2 * r + 1]) << 32 for r in range(processes)]
        # Each leaves its mark with the next rank, and finds the one of the rank before.
        ctypes.c_uint64.from_address(bases[(process + 1) % processes] + offset).value = 100 + process
        jax.experimental.multihost_utils.sync_global_devices("written")
        assert ctypes.c_uint64.from_address(bases[process] + offset).value == 100 + (process - 1) % processes
        heap.close()
        assert driver.live == []
    print("ok", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    import jax.experimental.multihost_utils

    main()
