"""Epochs, signals and waits between the ranks of a heap, and what happens when a peer does not come.

All counters are 64 bits wide and only grow. A signal is a store behind a fence of the whole system, after the stores of
all threads that it speaks for; a wait is an acquire. See `all_reduce_protocol` for the values. Every wait is bounded: a
rank that waits for longer than its limit, or finds that it and a peer run different calls, writes a failure record in
host memory, tells all ranks to give up, and (where the kernel was made so) stops its context with a trap, which the
host sees as a launch failure.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from qwenjax_kernels.all_reduce_protocol import STEPS, arrival_share, epoch_of, inbox
from qwenjax_kernels.heap_layout import ABORTED, DISAGREES, MAX_RANKS, TIMED_OUT, HeapLayout

POLLS_BETWEEN_CHECKS = 1024  # about a millisecond; the clock and the abort word are read only then
RECORD_NS = 10**9  # at most, for another thread's failure record, which takes microseconds


def load_acquire(address: Int64) -> Int64:
    """A counter that other ranks write; what they wrote before is visible after it."""
    return cute.arch.inline_ptx(
        "ld.acquire.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address]
    )


def store_signal(address: Int64, value: Int64) -> None:
    """A counter that other ranks read, behind a fence of this thread: one fence can be for several counters."""
    cute.arch.inline_ptx("st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def load_word(address: Int64) -> Uint32:
    """A word that other ranks write."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def store_word(address: Int64, value: Uint32) -> None:
    """A word that other ranks or the host read."""
    cute.arch.inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def arrive(own: Int64, block: Int32, grid: cutlass.Constexpr) -> Int64:
    """One thread of each block announces it; returns the epoch of this launch, the same in all its blocks.

    The blocks of a launch add STEPS together, whatever their number is, so that the epoch is the old count over
    STEPS: no block needs to know when the others have read it.
    """
    before = cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int64],
        read_only_args=[own + HeapLayout.arrivals, arrival_share(Int64(block == 0), grid)],
    )
    return epoch_of(before)


class Watch:
    """A rank's waits for its peers, in one call.

    bases: `peers.Bases`; own, record: addresses of this rank's memory and failure record; tag: 1 to STEPS - 1, another
    one where the call is another; timeout_ns: of each wait; trap: whether a failure stops the context.
    """

    def __init__(
        self, bases: Any, own: Int64, record: Int64, rank: Int32, epoch: Int64, tag: int, timeout_ns: int, trap: bool
    ) -> None:
        self.bases, self.own, self.record, self.rank, self.epoch = bases, own, record, rank, epoch
        self.ranks, self.timeout_ns, self.trap = bases.ranks, timeout_ns, trap
        self.header = epoch * STEPS + tag
        self.headers = Int64(HeapLayout.headers) + inbox(epoch) * (8 * MAX_RANKS)

    @cute.jit
    def tell(self, thread: Int32) -> None:
        """Threads 0 to `ranks` - 1 of the caller's numbering tell each rank what this call is."""
        if thread >= 0 and thread < self.ranks:
            place = self.bases.base(thread) + self.headers + Int64(self.rank) * 8
            cute.arch.inline_ptx("st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[place, self.header])

    @cute.jit
    def agree(self, thread: Int32) -> None:
        """The same threads compare what every rank told."""
        if thread >= 0 and thread < self.ranks:
            # A wait that gave up returns its target, which no tag makes.
            theirs = self.wait(self.headers + Int64(thread) * 8, self.epoch * STEPS, thread)
            if theirs != self.header and theirs != self.epoch * STEPS:
                self.fail(Int32(DISAGREES), thread)

    @cute.jit
    def wait(self, offset: Int64, target: Int64, peer: Int32) -> Int64:
        """Waits until the counter at `offset` of the own memory is at least target; returns it, or target if not."""
        value = load_acquire(self.own + offset)
        if value < target:
            started = cute.arch.globaltimer()
            polls = Int32(0)
            while value < target:
                value = load_acquire(self.own + offset)
                polls += 1
                if polls % POLLS_BETWEEN_CHECKS == 0 and value < target:
                    given_up = self.gives_up(peer, started)
                    if given_up:
                        value = target
        return value

    @cute.jit
    def gives_up(self, peer: Int32, started: Int64) -> cutlass.Boolean:
        """Whether to stop waiting for `peer`, now that a wait that began at `started` (ns) goes on."""
        told = load_acquire(self.own + self.headers + Int64(peer) * 8)
        code = Int32(0)
        if load_word(self.own + HeapLayout.abort) != Uint32(0):
            code = Int32(ABORTED)
        elif told > self.epoch * STEPS and told != self.header:
            code = Int32(DISAGREES)
        elif cute.arch.globaltimer() - started > Int64(self.timeout_ns):
            code = Int32(TIMED_OUT)
        if code != 0:
            self.fail(code, peer)
        return code != 0

    @cute.jit
    def fail(self, code: Int32, peer: Int32) -> None:
        """Writes the failure record, once a rank, and tells every rank to give up.

        Returns, or traps, when the thread that writes it is done, whichever that is: a trap before would stop it.
        """
        before = cute.arch.inline_ptx(
            "atom.relaxed.gpu.global.exch.b32 {$w0}, [{$r0}], 1;",
            write_only_types=[Uint32],
            read_only_args=[self.own + HeapLayout.recorded],
        )
        if before == Uint32(0):
            store_word(self.record + 4, Uint32(peer))
            store_word(self.record + 8, Uint32(self.epoch))
            for rank in range(self.ranks):
                store_word(self.bases.base(rank) + HeapLayout.abort, Uint32(1))
            cute.arch.fence_acq_rel_sys()
            store_word(self.record, Uint32(code))  # last, so that who reads it knows that all is out
        started = cute.arch.globaltimer()
        recorded = load_word(self.record)
        while recorded == Uint32(0) and cute.arch.globaltimer() - started < Int64(RECORD_NS):
            recorded = load_word(self.record)
        cute.arch.fence_acq_rel_sys()
        if cutlass.const_expr(self.trap):
            cute.arch.inline_ptx("trap;")

    @cute.jit
    def grid_barrier(self, blocks: cutlass.Constexpr) -> None:
        """A barrier of `blocks` blocks of a grid, any of them, all resident; the others do not call it.

        Every use of a heap's barrier takes the same number. What the blocks' threads stored before is visible to all
        of them after it.
        """
        cute.arch.sync_threads()
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            cute.arch.fence_acq_rel_gpu()
            before = cute.arch.inline_ptx(
                "atom.acq_rel.gpu.global.add.u64 {$w0}, [{$r0}], 1;",
                write_only_types=[Int64],
                read_only_args=[self.own + HeapLayout.grid_barrier],
            )
            self.wait(Int64(HeapLayout.grid_barrier), (before // blocks + 1) * blocks, self.rank)
        cute.arch.sync_threads()
