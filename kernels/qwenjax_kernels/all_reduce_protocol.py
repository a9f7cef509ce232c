"""The all-reduce protocols: what each block of each rank does, in which order. Pure Python, importable without CuTeDSL.

The kernels (`all_reduce`) and the simulation of the tests take the steps, the slots and the signals' values from here.

Epochs. A heap counts its collectives: every call is one epoch, 1 the first. A signal carries epoch * STEPS + step,
which only grows, so that nothing is reset between calls and a signal of a later epoch satisfies an earlier wait.

Why buffers may be reused without a barrier at the end of a call:
- A rank that is in epoch e + 1 has finished the kernel of epoch e, in which each of its blocks waited for every peer;
  so every peer has begun epoch e, and has finished epoch e - 1.
- One-shot inboxes alternate between two, by epoch: what is written in e + 1 was read last in e - 1.
- Two-shot rings are each block's own, SLOTS tiles deep. A block stages a tile (at the ranks that reduce it, or at home
  for the switch) after waiting for STAGED of the tile SLOTS - 1 before, which a peer signals only after reducing the
  tile SLOTS before; and a peer writes a result after STAGED of the same tile, which the block signals only after
  collecting the tile SLOTS before. A call that follows begins after all of this rank's blocks have waited for the last
  REDUCED of every peer, so that nobody still reads what this rank staged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

STEPS = 1 << 16  # signals of a block in one epoch, and what the blocks of a launch together add to the arrivals
INBOXES = 2
STAGED, REDUCED = 0, 1  # the phases that are signalled
PHASES = 2


@dataclass(frozen=True)
class Step:
    """What a block does with tile i - lag in turn i: it waits until the blocks of its number of all ranks have
    signalled a phase of that tile, acts, and signals a phase to all of them when the turn ends.

    stage: copies each slice of the message's tile to the ring of the rank that reduces it; with multicast, the tile to
    the own ring. reduce: sums the own slice of the tile over what all ranks staged and stores it to the results of all.
    collect: reads the tile from the own results.
    """

    action: Literal["stage", "reduce", "collect"]
    lag: int
    waits_for: int | None
    signals: int | None


# What goes over NVLink comes first in a turn, and one fence at its end waits for all of it, hidden by the collecting in
# between. A wait is for what a peer signalled at the end of its last turn, or of the one before.
TWO_SHOT = (
    Step("stage", 0, None, STAGED),
    Step("reduce", 1, STAGED, REDUCED),
    Step("collect", 3, REDUCED, None),
)
LAST_LAG = 3
SLOTS = 3  # with fewer, a tile is staged over one that a peer may still be reading

# In one-shot, a block pushes all its rounds before it collects the first. push: stores the words of a round to the
# inboxes of all ranks, each beside the epoch. collect: waits for the words of all ranks in the own inbox and adds them.
ONE_SHOT = ("push", "collect")


def arrival_share(is_first: Any, grid: Any) -> Any:
    """What a block of a grid adds to the arrivals, of which the epoch is the multiple of STEPS: STEPS over the grid."""
    return 1 + is_first * (STEPS - grid)


def epoch_of(arrivals: Any) -> Any:
    """The epoch of a block that found this count of arrivals."""
    return arrivals // STEPS + 1


def signal_value(epoch: Any, step: Any) -> Any:
    """What is signalled when step (from 0) of an epoch is done, and waited for."""
    return epoch * STEPS + step + 1


def inbox(epoch: Any) -> Any:
    """The one-shot inbox of an epoch."""
    return epoch % INBOXES


def slot(tile: Any) -> Any:
    """The ring slot of a block's tile."""
    return tile % SLOTS
