"""Compiles a kernel whose threads all wait for a peer that never comes: `python compile_failing_waits.py 64`.

The argument is the threads of its one block. The environment says for what, as for `compile_all_reduce.py`.
"""

from __future__ import annotations

import sys

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int64

from qwenjax_kernels import peers, signals
from qwenjax_kernels.heap_layout import HeapLayout

signals.POLLS_BETWEEN_CHECKS = 2  # so that an emulated wait ends soon


def compile_waits(threads: int) -> None:
    """The kernel of rank 0 of two; its argument is the rank's table."""

    @cute.kernel
    def kernel(table: Int64) -> None:
        @cute.struct
        class Storage:
            bases: cute.struct.MemRange[Int64, 2]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        bases = peers.Bases(storage.bases.data_ptr().toint(), 2)
        bases.load(table)
        cute.arch.sync_threads()
        rank = peers.this_rank(table)
        record = peers.failure_record(table)
        watch = signals.Watch(bases, bases.base(rank), record, rank, Int64(1), 1, 0, True)
        watch.wait(Int64(HeapLayout.signals), Int64(1), rank + 1)

    @cute.jit
    def launch(stream: cuda.CUstream, table: Int64) -> None:
        kernel(table).launch(grid=[1, 1, 1], block=[threads, 1, 1], stream=stream)

    cute.compile(launch, cuda.CUstream(0), Int64(0))


if __name__ == "__main__":
    compile_waits(int(sys.argv[1]))
    print("compiled", flush=True)
