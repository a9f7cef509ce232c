"""Epochs, signals and waits between the ranks of a heap, and what happens when a peer does not come.

All counters are 64 bits wide and only grow. A signal is a release at system scope after the whole block's stores, a
wait an acquire; see `all_reduce_protocol` for the values. Every wait is bounded: a rank that waits for longer than
its limit, or finds that it and a peer run different calls, writes a failure record in host memory, tells all ranks to
give up, and (where the kernel was made so) stops its context with a trap, which the host sees as a launch failure.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from qwenjax_kernels.all_reduce_protocol import STEPS, arrival_share, epoch_of, inbox
from qwenjax_kernels.heap_layout import ABORTED, DISAGREES, MAX_RANKS, TIMED_OUT, HeapLayout

POLLS_BETWEEN_CHECKS = 1024  # about a millisecond; the clock and the abort word are read only then


def load_acquire(address: Int64) -> Int64:
    """A counter that other ranks write; what they wrote before is visible after it."""
    return cute.arch.inline_ptx(
        "ld.acquire.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address]
    )


def store_release(address: Int64, value: Int64) -> None:
    """A counter that other ranks read, after everything that this thread's block stored before its last barrier."""
    cute.arch.inline_ptx("st.release.sys.global.b64 [{$r0}], {$r1};", read_only_args=[address, value])


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
    """The limits of a kernel's waits. timeout_ns: of each wait; trap: whether a failure stops the context."""

    def __init__(self, bases: Any, ranks: int, timeout_ns: int, trap: bool) -> None:
        self.bases, self.ranks, self.timeout_ns, self.trap = bases, ranks, timeout_ns, trap

    @cute.jit
    def fail(self, own: Int64, record: Int64, code: Int32, peer: Int32, epoch: Int64) -> None:
        """Writes the failure record, once a rank, and tells every rank to give up."""
        before = cute.arch.inline_ptx(
            "atom.relaxed.gpu.global.exch.b32 {$w0}, [{$r0}], 1;",
            write_only_types=[Uint32],
            read_only_args=[own + HeapLayout.recorded],
        )
        if before == Uint32(0):
            store_word(record + 4, Uint32(peer))
            store_word(record + 8, Uint32(epoch))
            cute.arch.fence_acq_rel_sys()
            store_word(record, Uint32(code))
            for rank in range(self.ranks):
                store_word(self.bases.base(rank) + HeapLayout.abort, Uint32(1))
        cute.arch.fence_acq_rel_sys()
        if cutlass.const_expr(self.trap):
            cute.arch.inline_ptx("trap;")

    @cute.jit
    def gives_up(self, own: Int64, record: Int64, peer: Int32, epoch: Int64, started: Int64) -> cutlass.Boolean:
        """Whether to stop waiting for `peer`, now that a wait that began at `started` (ns) goes on."""
        code = Int32(0)
        if load_word(own + HeapLayout.abort) != Uint32(0):
            code = Int32(ABORTED)
        elif cute.arch.globaltimer() - started > Int64(self.timeout_ns):
            code = Int32(TIMED_OUT)
        if code != 0:
            self.fail(own, record, code, peer, epoch)
        return code != 0

    @cute.jit
    def wait(self, own: Int64, record: Int64, offset: Int64, target: Int64, peer: Int32, epoch: Int64) -> Int64:
        """Waits until the counter at `offset` of the own memory is at least target; returns it, or target if not."""
        value = load_acquire(own + offset)
        if value < target:
            started = cute.arch.globaltimer()
            polls = Int32(0)
            while value < target:
                value = load_acquire(own + offset)
                polls += 1
                if polls % POLLS_BETWEEN_CHECKS == 0 and value < target:
                    given_up = self.gives_up(own, record, peer, epoch, started)
                    if given_up:
                        value = target
        return value

    @cute.jit
    def agree(self, own: Int64, record: Int64, rank: Int32, tag: cutlass.Constexpr, epoch: Int64) -> None:
        """Threads below `ranks` of one block tell each rank what this call is, and compare it with the peers' calls.

        tag: 1 to STEPS - 1, another one where the call is another; see `all_reduce.tag`.
        """
        thread, _, _ = cute.arch.thread_idx()
        if thread < self.ranks:
            row = Int64(HeapLayout.headers) + inbox(epoch) * (8 * MAX_RANKS)
            mine = epoch * STEPS + tag
            store_release(self.bases.base(thread) + row + Int64(rank) * 8, mine)
            # A wait that gave up returns its target, which no tag makes.
            theirs = self.wait(own, record, row + Int64(thread) * 8, epoch * STEPS, thread, epoch)
            if theirs != mine and theirs != epoch * STEPS:
                self.fail(own, record, Int32(DISAGREES), thread, epoch)

    @cute.jit
    def grid_barrier(self, own: Int64, record: Int64, blocks: cutlass.Constexpr, rank: Int32, epoch: Int64) -> None:
        """A barrier of the first `blocks` blocks of a grid, or any others, as long as all of them are resident.

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
                read_only_args=[own + HeapLayout.grid_barrier],
            )
            everyone = (before // blocks + 1) * blocks
            self.wait(own, record, Int64(HeapLayout.grid_barrier), everyone, rank, epoch)
        cute.arch.sync_threads()
