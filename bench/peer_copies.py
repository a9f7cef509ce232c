"""How fast two GPUs of one host copy to each other by loads and stores alone: what an all-reduce cannot beat.

    python bench/peer_copies.py [--record NAME]

128 MiB a call, ten calls, the median of three; "both ways": each GPU copies at the same time. push: a GPU stores to the
other's memory; pull: it loads from there. Threads keep eight vectors of 16 bytes in flight. Beside it a copy at home.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from measure import header, recorded

from qwenjax_ffi.symmetric_memory_exchange import Rendezvous
from qwenjax_ffi.symmetric_memory_mapping import MappedMemory
from qwenjax_kernels import vectors
from tests.kernels.gpu_ranks import NoStore, Ranks, call

BYTES, CHUNK, THREADS, UNROLL, CALLS = 128 << 20, 64 << 10, 512, 8, 10
PLAIN, PEER = (vectors.load_operand, vectors.store_result), (vectors.load_shared_memory, vectors.store_shared_memory)


def compiled(grid: int, load: Any, store: Any) -> Any:
    """A function of (stream, source, target)."""

    @cute.kernel
    def kernel(source: Int64, target: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        chunk = Int32(block)
        while chunk < BYTES // CHUNK:
            vector = Int32(thread)
            while vector < CHUNK // 16:
                offsets = [Int64(chunk) * CHUNK + Int64(vector + u * THREADS) * 16 for u in range(UNROLL)]
                loaded = [load(source + offset) for offset in offsets]
                for u in cutlass.range_constexpr(UNROLL):
                    store(target + offsets[u], loaded[u])
                vector += UNROLL * THREADS
            chunk += grid

    @cute.jit
    def launch(stream: cuda.CUstream, source: Int64, target: Int64) -> None:
        kernel(source, target).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream)

    return cute.compile(launch, cuda.CUstream(0), Int64(0), Int64(0))


def measure(ranks: Ranks, kernel: Any, addresses: dict[int, tuple[int, int]], senders: tuple[int, ...]) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(4):
        ranks.synchronise()
        start = time.perf_counter()
        for _ in range(CALLS):
            for rank in senders:
                ranks.driver._enter(rank)
                kernel(ranks.streams[rank], *addresses[rank])
        ranks.synchronise()
        times.append((time.perf_counter() - start) / CALLS)
    return sorted(times[1:])[1]  # the first call loads the kernel


def main() -> None:
    parser = argparse.ArgumentParser(description="Times copies between two GPUs.")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME")
    arguments = parser.parse_args()
    call("cuInit", 0)
    ranks = Ranks({0: 0, 1: 1}, 2)
    mapped = MappedMemory(ranks.driver, {0: 0, 1: 1}, 2, BYTES, Rendezvous(NoStore(), "copies", 0, 1, 10.0))
    own = {rank: ranks.empty(rank, BYTES) for rank in (0, 1)}
    cases: dict[str, tuple[Any, Any, dict[int, tuple[int, int]]]] = {
        "push": (PLAIN[0], PEER[1], {rank: (own[rank], mapped.bases[1 - rank]) for rank in own}),
        "pull": (PEER[0], PLAIN[1], {rank: (mapped.bases[1 - rank], own[rank]) for rank in own}),
        "at home": (*PLAIN, {rank: (own[rank], mapped.bases[rank]) for rank in own}),
    }
    with recorded(arguments.record):
        print(header("nvidia-cutlass-dsl", "cuda-bindings"))
        print("| copy | blocks | one way us | GB/s | both ways us | GB/s each |")
        print("|" + " --- |" * 6)
        for name, (load, store, addresses) in cases.items():
            for grid in (32, 64, 132):
                kernel = compiled(grid, load, store)
                one, both = (measure(ranks, kernel, addresses, senders) for senders in ((0,), (0, 1)))
                rates = [BYTES / seconds / 1e9 for seconds in (one, both)]
                print(f"| {name} | {grid} | {one * 1e6:.1f} | {rates[0]:.0f} | {both * 1e6:.1f} | {rates[1]:.0f} |")
    mapped.close()
    ranks.close()


if __name__ == "__main__":
    main()
