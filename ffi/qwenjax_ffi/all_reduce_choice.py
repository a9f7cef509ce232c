"""Which all-reduce runs for a message, by its bytes and the number of ranks.

The table is what `predicted_seconds` gives: fitted to two ranks, where it agrees with what was measured, and for more
from the bytes that each GPU must move over NVLink.
bench/all_reduce.py prints what the table would be from measurements.
"""

from __future__ import annotations

from typing import Literal

from qwenjax_kernels.heap_layout import HeapLayout

Algorithm = Literal["one_shot", "two_shot", "multicast"]  # the last is two-shot through the switch (NVLink SHARP)

# Seconds of a call, and bytes each way a second beyond that: fitted to two H200s (bench/results/all_reduce.txt),
# one-shot from 8 KiB to 2 MiB to 8%, two-shot from 2 to 256 MiB to 7%. NVLink4 is 450 GB/s each way by datasheet.
ONE_SHOT_SECONDS, ONE_SHOT_RATE = 4.1e-6, 315e9
TWO_SHOT_SECONDS, TWO_SHOT_RATE = 11e-6, 355e9

# (largest message in bytes that runs one-shot) by ranks. Above it: two-shot, or through the switch.
ONE_SHOT_LIMITS = {2: 1048576, 3: 524288, 5: 262144, 10: 131072, 16: 65536}
# With this many ranks and more the switch moves fewer bytes: (1 + 1/N) against 2 (N-1)/N of the message.
MULTICAST_RANKS = 4


def choose_algorithm(num_bytes: int, ranks: int, multicast: bool) -> Algorithm:
    """The algorithm for a message of num_bytes on each of `ranks` ranks; multicast: whether the heap has it.

    A number of ranks that is not in the table is treated as the next one that is.
    """
    if num_bytes <= one_shot_limit(ranks):
        return "one_shot"
    return "multicast" if multicast and ranks >= MULTICAST_RANKS else "two_shot"


def one_shot_limit(ranks: int) -> int:
    """The largest message in bytes that runs one-shot."""
    return next(limit for known, limit in ONE_SHOT_LIMITS.items() if ranks <= known)


def bytes_each_way(algorithm: Algorithm, num_bytes: int, ranks: int) -> float:
    """What a GPU sends, and as much receives, over NVLink."""
    if algorithm == "one_shot":
        return 2.0 * (ranks - 1) * num_bytes  # every word beside its epoch
    if algorithm == "two_shot":
        return 2.0 * (ranks - 1) / ranks * num_bytes
    return (1.0 + 1.0 / ranks) * num_bytes


def predicted_seconds(algorithm: Algorithm, num_bytes: int, ranks: int) -> float:
    """A call's, on NVLink4; more ranks and the switch are taken to have the latency and the rate of two."""
    moved = bytes_each_way(algorithm, num_bytes, ranks)
    if algorithm == "one_shot":
        return ONE_SHOT_SECONDS + moved / ONE_SHOT_RATE
    return TWO_SHOT_SECONDS + moved / TWO_SHOT_RATE


def predicted_limit(ranks: int) -> int:
    """The largest power of two of bytes that one-shot is predicted to be best for."""
    size = 1 << (HeapLayout(ranks).one_shot_bytes.bit_length() - 1)
    while predicted_seconds("one_shot", size, ranks) > predicted_seconds("two_shot", size, ranks):
        size //= 2
    return size
