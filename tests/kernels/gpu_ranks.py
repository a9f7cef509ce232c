"""Ranks of a heap on any GPUs, several of them on one too: kernels launched on a stream a rank, without JAX.

As a program, one process of several: `python gpu_ranks.py PROCESS PROCESSES FOLDER CALLS`, a rank each.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import ml_dtypes
import numpy as np
from cutlass import Int64

from qwenjax_ffi.symmetric_memory_driver import CudaDriver
from qwenjax_ffi.symmetric_memory_exchange import Rendezvous
from qwenjax_ffi.symmetric_memory_mapping import MappedMemory
from qwenjax_kernels import peers, signals
from qwenjax_kernels.all_reduce import AllReduce
from qwenjax_kernels.heap_layout import BASES_WORD, MAX_BLOCKS, RANK_WORD, RECORD_WORD, HeapLayout, num_words
from tests.ffi.heap_process import FolderStore
from tests.kernels import all_reduce_cases as cases

DTYPES = {
    "bfloat16": (cutlass.BFloat16, np.dtype(ml_dtypes.bfloat16)),
    "float16": (cutlass.Float16, np.dtype(np.float16)),
    "float32": (cutlass.Float32, np.dtype(np.float32)),
}

APART_NS = 60 * 10**9  # that ranks of several processes wait: each compiles its kernels when it may


def call(name: str, *arguments: Any) -> Any:
    """A driver call; raises where it fails."""
    result, *values = getattr(cuda, name)(*arguments)
    assert int(result) == 0, f"{name}: {result!r}"
    return values[0] if len(values) == 1 else values


class NoStore:
    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str, seconds: float) -> str | None:
        return None


class Ranks:
    """The ranks of this process (rank: CUDA device), of `ranks` in all; `rendezvous` with the other processes.

    num_bytes: of the heap; by default what the all-reduce uses.
    """

    def __init__(
        self, local: dict[int, int], ranks: int, rendezvous: Rendezvous | None = None, num_bytes: int = 0
    ) -> None:
        self.driver, self.local, self.ranks = CudaDriver(), local, ranks
        alone = Rendezvous(NoStore(), "ranks", 0, 1, 10.0)
        self.memory = MappedMemory(
            self.driver, local, ranks, num_bytes or HeapLayout(ranks).num_bytes, rendezvous or alone
        )
        self.streams: dict[int, Any] = {}
        self.tables: dict[int, int] = {}
        self.unarmed: dict[int, int] = {}
        self._buffers: list[int] = []
        for rank, device in local.items():
            self.driver._enter(device)
            self.streams[rank] = call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
            row = np.zeros(num_words(ranks, False), np.uint32)
            row[RANK_WORD] = rank
            addresses = {RECORD_WORD: self.memory.records[rank]}
            addresses |= {BASES_WORD + 2 * peer: self.memory.bases[peer] for peer in range(ranks)}
            for word, address in addresses.items():
                row[word], row[word + 1] = address & 0xFFFFFFFF, address >> 32
            self.tables[rank] = self.put(rank, row)
            row[RANK_WORD] = 1 << 31
            self.unarmed[rank] = self.put(rank, row)

    def close(self) -> None:
        self.synchronise()
        for buffer in self._buffers:
            call("cuMemFree", buffer)
        self.memory.close()

    def empty(self, rank: int, num_bytes: int) -> int:
        self.driver._enter(self.local[rank])
        self._buffers.append(int(call("cuMemAlloc", num_bytes)))
        return self._buffers[-1]

    def put(self, rank: int, value: np.ndarray) -> int:
        value = np.ascontiguousarray(value)
        address = self.empty(rank, value.nbytes)
        call("cuMemcpyHtoD", address, value.ctypes.data, value.nbytes)
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        value = np.empty(shape, dtype)
        call("cuMemcpyDtoH", value.ctypes.data, address, value.nbytes)
        return value

    def copy(self, rank: int, target: int, source: int, num_bytes: int) -> None:
        call("cuMemcpyDtoDAsync", target, source, num_bytes, self.streams[rank])

    def fill(self, rank: int, target: int, byte: int, num_bytes: int) -> None:
        call("cuMemsetD8Async", target, byte, num_bytes, self.streams[rank])

    def synchronise(self) -> None:
        for rank, stream in self.streams.items():
            self.driver._enter(self.local[rank])
            call("cuStreamSynchronize", stream)

    def launch(self, compiled: Any, rank: int, *addresses: int, armed: bool = True) -> None:
        """addresses: x, out; of the fused form x, residual, weight, out, normed. Not armed: only loads the kernel."""
        self.driver._enter(self.local[rank])
        x, *others = addresses
        compiled(self.streams[rank], x, (self.tables if armed else self.unarmed)[rank], *others)


def compiled(ranks: int, dtype: str, elements: int, algorithm: Any, row: int = 0, **settings: Any) -> Any:
    """The kernel, as a function of (stream, x, table, out) or (stream, x, table, residual, weight, out, normed); with
    the settings top_k and features, of token_rows behind these."""
    settings = {"timeout_ns": 5 * 10**9, "trap": False} | settings
    kernel = AllReduce(
        ranks=ranks, dtype=DTYPES[dtype][0], elements=elements, algorithm=algorithm, row=row, eps=1e-6, **settings
    )

    @cute.jit
    def plain(stream: cuda.CUstream, x: Int64, table: Int64, out: Int64) -> None:
        kernel.launch(stream, x, table, None, None, None, out, None)

    @cute.jit
    def plain_of_rows(stream: cuda.CUstream, x: Int64, table: Int64, out: Int64, token_rows: Int64) -> None:
        kernel.launch(stream, x, table, token_rows, None, None, out, None)

    @cute.jit
    def fused(
        stream: cuda.CUstream, x: Int64, table: Int64, residual: Int64, weight: Int64, out: Int64, normed: Int64
    ) -> None:
        kernel.launch(stream, x, table, None, residual, weight, out, normed)

    @cute.jit
    def fused_of_rows(
        stream: cuda.CUstream,
        x: Int64,
        table: Int64,
        residual: Int64,
        weight: Int64,
        out: Int64,
        normed: Int64,
        token_rows: Int64,
    ) -> None:
        kernel.launch(stream, x, table, token_rows, residual, weight, out, normed)

    form = (fused_of_rows if row else plain_of_rows) if kernel.top_k else (fused if row else plain)
    addresses = [Int64(0)] * ((6 if row else 3) + bool(kernel.top_k))
    return cute.compile(form, cuda.CUstream(0), *addresses)


class CountingBlock:
    """A block that adds 1 to out[round] before each of some barriers and looks at the sum after it."""

    def __init__(self, watch: signals.Watch, out: Int64, blocks: int, rounds: int) -> None:
        self.watch, self.out, self.blocks, self.rounds = watch, out, blocks, rounds

    @cute.jit
    def count(self, thread: cutlass.Int32) -> None:
        for i in cutlass.range_constexpr(self.rounds):
            if thread == 0:
                add_one(self.out + 4 * i)
            self.watch.grid_barrier(self.blocks)
            if thread == 63 and signals.load_word(self.out + 4 * i) != self.blocks:
                add_one(self.out + 4 * self.rounds)


def compiled_barrier(blocks: int, grid: int, rounds: int) -> Any:
    """A kernel whose first `blocks` blocks count rounds between barriers: a function of (stream, table, out).

    out: uint32 [rounds + 1], zeros before; out[round] is `blocks` then, and out[rounds] counts the blocks that passed
    a barrier before all had come.
    """

    @cute.kernel
    def kernel(table: Int64, out: Int64) -> None:
        @cute.struct
        class Storage:
            bases: cute.struct.MemRange[Int64, 2]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        bases = peers.Bases(storage.bases.data_ptr().toint(), 2)
        bases.load(table)
        rank = peers.this_rank(table)
        own, record = bases.base(rank), peers.failure_record(table)
        if block < blocks:
            watch = signals.Watch(bases, own, record, rank, Int64(1), 1, 5 * 10**9, False)
            CountingBlock(watch, out, blocks, rounds).count(thread)

    @cute.jit
    def launch(stream: cuda.CUstream, table: Int64, out: Int64) -> None:
        kernel(table, out).launch(grid=[grid, 1, 1], block=[64, 1, 1], stream=stream)

    return cute.compile(launch, cuda.CUstream(0), Int64(0), Int64(0))


def add_one(address: Int64) -> None:
    cute.arch.inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[address])


def many_calls(ranks: Ranks, calls: int, seed: int, every: int = 20, **settings: Any) -> None:
    """Small one-shot calls with a large two-shot one and one that adds up rows in every `every`, exact sums of inputs
    that change from call to call and are overwritten right after each, ranks late by chance. Each process draws its own
    delays. settings: of `compiled`, by default with few blocks, so that those of eight ranks on one GPU are all
    resident."""
    settings = {"max_blocks": 4} | settings
    tokens, features = 200, 264
    variants, sizes = 7, {"one_shot": 1001, "two_shot": 300_001, "rows": tokens * features}
    dtype = DTYPES["bfloat16"][1]
    draw = np.random.default_rng(0)
    inputs = {
        name: draw.integers(-8, 8, (variants, ranks.ranks, 3 * n if name == "rows" else n)).astype(dtype)
        for name, n in sizes.items()
    }
    expected = {name: np.stack([cases.summed(values) for values in inputs[name]]) for name in ("one_shot", "two_shot")}
    _, named = cases.rows_of_tokens(0, ranks.ranks, tokens, features, dtype)
    of_ranks = (ranks.ranks, 3 * tokens, features)
    added_up = [cases.added_up(values.reshape(of_ranks), named) for values in inputs["rows"]]
    expected["rows"] = np.stack([cases.summed(values).reshape(-1) for values in added_up])
    # Three forms in turn: their calls use the same heap.
    of_rows = {"top_k": cases.TOP_K, "features": features}
    kernels: dict[str, Any] = {
        "one_shot": compiled(ranks.ranks, "bfloat16", sizes["one_shot"], "one_shot", **settings),
        "two_shot": compiled(ranks.ranks, "bfloat16", sizes["two_shot"], "two_shot", **settings),
        "rows": compiled(ranks.ranks, "bfloat16", sizes["rows"], "two_shot", **of_rows, **settings),
    }
    token_rows = {rank: ranks.put(rank, named[rank]) for rank in ranks.local}
    large = {every - 1: "two_shot", every // 2 - 1: "rows"}
    names = [large.get(c % every, "one_shot") for c in range(calls)]
    count = {name: names.count(name) for name in sizes}
    devices = {
        rank: {name: [ranks.put(rank, inputs[name][k, rank]) for k in range(variants)] for name in sizes}
        for rank in ranks.local
    }
    x = {rank: ranks.empty(rank, max(value[0, 0].nbytes for value in inputs.values())) for rank in ranks.local}
    log = {rank: {name: ranks.empty(rank, 2 * sizes[name] * count[name]) for name in sizes} for rank in ranks.local}
    late = random.Random(seed)
    for rank in ranks.local:
        for name in sizes:
            ranks.fill(rank, log[rank][name], 0xFF, 2 * sizes[name] * count[name])
    done = dict.fromkeys(sizes, 0)
    for name in names:
        k = done[name] % variants
        num_bytes = inputs[name][k, 0].nbytes
        for rank in ranks.local:
            if late.random() < 0.01:
                time.sleep(late.random() * 2e-3)
            ranks.copy(rank, x[rank], devices[rank][name][k], num_bytes)
            others = [token_rows[rank]] if name == "rows" else []
            ranks.launch(kernels[name], rank, x[rank], log[rank][name] + done[name] * 2 * sizes[name], *others)
            ranks.fill(rank, x[rank], 0xFF, num_bytes)
        done[name] += 1
    ranks.synchronise()
    ranks.memory.check()
    for name, n in sizes.items():
        for rank in ranks.local:
            got = ranks.get(log[rank][name], (count[name], n), np.uint16)
            for c in range(count[name]):
                wanted = expected[name][c % variants].view(np.uint16)
                np.testing.assert_array_equal(got[c], wanted, err_msg=f"{name} call {c}, rank {rank}")


def main() -> None:
    process, processes, folder, calls = sys.argv[1:]
    rank, ranks = int(process), int(processes)
    call("cuInit", 0)
    rendezvous = Rendezvous(FolderStore(Path(folder)), "ranks", rank, ranks, 60.0)
    mine = Ranks({rank: rank % call("cuDeviceGetCount")}, ranks, rendezvous)
    many_calls(mine, int(calls), seed=rank, max_blocks=MAX_BLOCKS, timeout_ns=APART_NS)
    rendezvous.gather("done", True)
    mine.close()
    print("ok", flush=True)


if __name__ == "__main__":
    main()
