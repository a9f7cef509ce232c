"""Where everything lies in the symmetric heap, and in the small array that tells a kernel where the heap is.

Pure Python, importable without CuTeDSL. Offsets are bytes from the beginning of a rank's memory, the same on every
rank. The memory is zero before the first call.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwenjax_kernels.all_reduce_protocol import INBOXES, SLOTS

MAX_RANKS = 16
VECTOR = 16  # bytes that one thread moves at once
THREADS = 512
TEAMS = 8  # of a block in two-shot, at most
TEAM_THREADS = THREADS // TEAMS
MAX_BLOCKS = 128  # of 132 multiprocessors; with 16 teams, 64 took 430 us for 128 MiB on two H200s, 128 took 419
TILE_BYTES = 64 * 1024  # of one step of all teams of a block
STAGED_BYTES = TILE_BYTES + TEAMS * MAX_RANKS * VECTOR  # their tiles as the slices of all ranks, each in whole vectors
INBOX_BYTES = 8 * 1024 * 1024  # of one-shot messages of all ranks, each beside its flags
LINE = 128

# The failure record, int32 words in host memory: code, peer, low word of the epoch.
RECORD_BYTES = 64
FAILURES = {
    1: "a peer did not arrive in time",
    2: "a peer runs another collective or another shape",
    3: "a peer gave up",
}
TIMED_OUT, DISAGREES, ABORTED = FAILURES


@dataclass(frozen=True)
class HeapLayout:
    """The part of a heap of `ranks` ranks that the all-reduce uses; what other kernels use comes behind it.

    arrivals: uint64, STEPS times the epochs begun, plus blocks of the last that have begun.
    abort: uint32, not 0 once a rank gave up; recorded: uint32, not 0 once this rank's failure record is written.
    grid_barrier: uint64, blocks that came to the barrier of a grid subset.
    headers: uint64 [inboxes, ranks], STEPS times the epoch, plus the tag of the call each rank is in.
    signals: uint64 [blocks, teams, ranks], written by the rank of that index.
    inboxes: [inboxes, ranks, halves, vectors, 16 bytes], a half being two words of a vector, each with its epoch behind
    it: apart, so that a warp's stores are of whole lines.
    staged: [blocks, teams, slots]: over peer memory, every other rank's vectors of this rank's slice of a tile,
    [ranks, slice]; with multicast this rank's own tile. results: [blocks, teams, slots], a tile. A call may have fewer
    teams than TEAMS, with larger tiles; a block's part of the rings is SLOTS * STAGED_BYTES and SLOTS * TILE_BYTES.
    """

    ranks: int

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"a heap of {self.ranks} ranks; 2 to {MAX_RANKS} are supported")

    arrivals = 0
    abort = LINE
    recorded = LINE + 4
    grid_barrier = 2 * LINE
    headers = 3 * LINE
    signals = headers + INBOXES * MAX_RANKS * 8
    inboxes = 256 * 1024

    @property
    def one_shot_bytes(self) -> int:
        """The largest one-shot message."""
        return INBOX_BYTES // (2 * self.ranks) // VECTOR * VECTOR

    @property
    def staged(self) -> int:
        return self.inboxes + INBOXES * INBOX_BYTES

    @property
    def results(self) -> int:
        return self.staged + MAX_BLOCKS * SLOTS * STAGED_BYTES

    @property
    def num_bytes(self) -> int:
        return self.results + MAX_BLOCKS * SLOTS * TILE_BYTES

    def header(self, inbox: int, rank: int) -> int:
        return self.headers + 8 * (inbox * MAX_RANKS + rank)

    def signal(self, block: int, team: int, rank: int) -> int:
        return self.signals + 8 * ((block * TEAMS + team) * MAX_RANKS + rank)


assert HeapLayout.signals + 8 * MAX_BLOCKS * TEAMS * MAX_RANKS <= HeapLayout.inboxes

# The words of an epoch array with a heap behind it, after word 0, which counts the collectives: this rank (negative:
# kernels return at once, which loads them without waiting for anyone), the address of the failure record, every rank's
# base, and the multicast base where there is one. An address is two words, the low one first. A program that is traced
# sees nothing of the array but its length, so that this also says how much room the heap has for dispatch and combine:
# UNIT_WORDS unused words follow for each unit of it (`token_exchange_layout`).
RANK_WORD = 1
RECORD_WORD = 2
BASES_WORD = 4
UNIT_WORDS = 64  # more than two for each of 16 ranks, so that these are not taken for bases


def num_words(ranks: int, multicast: bool, units: int = 0) -> int:
    """Words of the epoch array of one rank."""
    return BASES_WORD + 2 * ranks + 2 * multicast + UNIT_WORDS * units


def multicast_word(ranks: int) -> int:
    return BASES_WORD + 2 * ranks
