"""Which all-reduce runs for a message, by its bytes and the number of ranks.

For two ranks the table agrees with what was measured on two H200s (bench/results/all_reduce.txt): one-shot was the
fastest up to 512 KiB, two-shot from there to 8 MiB, and XLA's (NCCL) at 64 MiB. For more ranks it is predicted, by
`predicted_seconds`, from the bytes that each GPU must move over NVLink and the latency of the steps that wait for one
another. bench/all_reduce.py prints what the table would be from measurements.
"""

from __future__ import annotations

from typing import Literal

from qwenjax_kernels.heap_layout import ONE_SHOT_BYTES

Algorithm = Literal["one_shot", "two_shot", "multicast"]  # the last is two-shot through the switch (NVLink SHARP)

# What the prediction is made of. NVLink4 carries 450 GB/s each way, and NCCL gets 370 of it on two H200s; the latencies
# are orders of magnitude. On two H200s calls took longer: 7.4 us at 64 KiB (predicted 3.6) and 55 us at 8 MiB (30).
BYTES_A_SECOND = 370e9
LAUNCH_SECONDS = 2.0e-6
ONE_WAY_SECONDS = 1.2e-6  # a store until a peer's poll sees it
FENCE_SECONDS = 0.8e-6  # until a block's stores have arrived, before its signal
READ_SECONDS = 1.5e-6  # a peer's memory, there and back

# (largest message in bytes that runs one-shot) by ranks. Above it: two-shot, or through the switch.
ONE_SHOT_LIMITS = {3: 524288, 4: 262144, 7: 131072, 14: 65536, 16: 32768}
# With this many ranks and more the switch moves fewer bytes: (1 + 1/N) against 2 (N-1)/N of the message.
MULTICAST_RANKS = 4
# The largest message that our kernels were measured to be faster for than NCCL: 55 us against 66 on two H200s. At 64
# MiB they took 381 us against 325: the latencies of a tile's steps hold a block back. More ranks were not measured.
FASTER_THAN_XLA_BYTES = 8 << 20


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
    """Launch, latencies and bytes, without overlap."""
    moving = bytes_each_way(algorithm, num_bytes, ranks) / BYTES_A_SECOND
    if algorithm == "one_shot":
        return LAUNCH_SECONDS + ONE_WAY_SECONDS + moving
    return LAUNCH_SECONDS + 2 * (FENCE_SECONDS + ONE_WAY_SECONDS) + READ_SECONDS + moving


def predicted_limit(ranks: int) -> int:
    """The largest power of two of bytes that one-shot is predicted to be best for."""
    size = ONE_SHOT_BYTES
    while predicted_seconds("one_shot", size, ranks) > predicted_seconds("two_shot", size, ranks):
        size //= 2
    return size
