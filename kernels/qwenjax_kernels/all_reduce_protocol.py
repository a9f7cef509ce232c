"""The all-reduce protocols: what each block of each rank does, in which order. Pure Python, importable without CuTeDSL.

The kernels (`all_reduce`) and the simulation of the tests take the steps, the slots and the signals' values from here.

Epochs. A heap counts its collectives: every call is one epoch, 1 the first. A signal carries epoch * STEPS + step,
which only grows, so that nothing is reset between calls and a signal of a later epoch satisfies an earlier wait.

Why buffers may be reused without a barrier at the end of a call:
- A rank that is in epoch e + 1 has finished the kernel of epoch e, in which each of its blocks waited for every peer;
  so every peer has begun epoch e, and has finished epoch e - 1.
- One-shot inboxes alternate between two, by epoch: what is written in e + 1 was read last in e - 1.
- Two-shot rings are each team's own, SLOTS tiles deep. A team stages tile t (at the ranks that reduce it, or at home
  for the switch) after it waited for the end of turn t - 2, in which its peers reduced tile t - 3. A peer writes the
  result of tile t in its turn t + 1, after it waited for the end of this team's turn t, in which that collected tile
  t - 2. A call that follows, however it cuts the rings, begins after all teams of this rank have waited for the last
  turn that their peers end, so that nobody still reads what this rank staged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

STEPS = 1 << 16  # signals of a team in one epoch, and what the blocks of a launch together add to the arrivals
INBOXES = 2


@dataclass(frozen=True)
class Step:
    """What a team of a block's warps does with tile turn - lag in each turn.

    stage: copies each slice of the message's tile to the ring of the rank that reduces it; with multicast, the tile to
    the own ring. wait: until the teams of its number of all ranks have ended turn - lag. reduce: sums the own
    slice of the tile over what all ranks staged and stores it to the results of all. collect: reads the tile from the
    own results.
    """

    action: Literal["stage", "wait", "reduce", "collect"]
    lag: int


# A turn ends with one fence and one signal to each rank. There are as many turns as tiles and LAST_LAG more, of which
# the first ends with a signal too, after the last tile is reduced. What a team waits for a peer signalled a turn ago,
# and what it stages before it waits hides the way there.
TWO_SHOT = (Step("stage", 0), Step("wait", 1), Step("reduce", 1), Step("collect", 2))
LAST_LAG = 2
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
    """What is signalled when step (from 0) of an epoch is done, and waited for: in two-shot, a turn."""
    return epoch * STEPS + step + 1


def inbox(epoch: Any) -> Any:
    """The one-shot inbox of an epoch."""
    return epoch % INBOXES


def slot(tile: Any) -> Any:
    """The ring slot of a team's tile."""
    return tile % SLOTS
