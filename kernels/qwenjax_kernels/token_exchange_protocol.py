"""The decode all-to-all, dispatch and combine: what each block of each rank does, in which order. Pure Python.

The kernels (`token_dispatch`, `token_combine`) and the simulation of the tests take the actions, the values of signals
and the order of rows from here. Epochs, inboxes and arrivals are the all-reduce's (`all_reduce_protocol`): all
collectives of a heap count the same epochs, whatever their kinds and order are.

Why inboxes may be reused without a barrier at the end of a call, and by dispatch and combine alike:
- Block 0 of every rank tells its peers which epoch it has begun, and does not end before all peers have told it so
  (agree). A rank that is in epoch e + 1 thus has only peers that have begun e, and so ended e - 1, whatever they ran.
- What arrives in epoch e lies in the inbox of e's parity and is read in e alone. It is written over in e + 2 at the
  earliest, by a rank that has ended e + 1, so that the reader has begun e + 1 and ended e.
- Flags and counts grow with the epoch, and each has its own place whatever the rows' sizes are, so that one of epoch
  e - 2 never stands for one of e.
"""

from __future__ import annotations

from typing import Any

from qwenjax_kernels.all_reduce_protocol import INBOXES, STEPS, arrival_share, epoch_of, inbox, signal_value

__all__ = ["COMBINE", "DISPATCH", "INBOXES", "STEPS", "arrival_share", "epoch_of", "inbox"]

# tell: block 0 tells every rank which call it is in. count: finds the slots of the own tokens; block 0 sends each peer
# the number of rows that it will get. push: stores the rows of the block's tokens to their slots in the inboxes.
# signal: a flag for each of them, after a fence. expect: waits for the count of every peer. wait: waits for the flags
# of the rows that the block collects. collect: copies them out of the own inbox, and marks the slots that stay empty.
# agree: block 0 waits until every rank has told, while others of its threads wait for rows.
DISPATCH = ("tell", "count", "push", "signal", "expect", "agree", "wait", "collect")
# Counts and slots are known from the dispatch. push: stores the sums of the peers' tokens to those peers' inboxes, in
# the slots in which they came. wait and collect: of the rows that the ranks sent for the block's own tokens.
COMBINE = ("tell", "push", "signal", "agree", "wait", "collect")


def row_flag(epoch: Any) -> Any:
    """What is signalled once a row has been pushed in an epoch, and waited for."""
    return signal_value(epoch, 0)


def count_word(epoch: Any, count: Any) -> Any:
    """A count that tells its epoch too, so that it needs no flag; at least row_flag(epoch)."""
    return signal_value(epoch, count)


def count_of(word: Any, epoch: Any) -> Any:
    """The count in a count_word of this epoch."""
    return word - signal_value(epoch, 0)


def peer_of(item: Any, rank: Any, ranks: int) -> Any:
    """The peer of an item. A block's items are block, block + grid, ...; one is a slot of a peer, slot after slot."""
    return (rank + 1 + item % (ranks - 1)) % ranks


def slot_of(item: Any, ranks: int) -> Any:
    """The slot of an item. Slots fill from 0 up, so that the used ones are spread over all blocks."""
    return item // (ranks - 1)
