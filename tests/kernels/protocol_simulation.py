"""The all-reduce protocols on simulated ranks, every access in a random order and checked for what it may rely on.

Steps, slots and the values of signals come from qwenjax_kernels.all_reduce_protocol, as the kernels' do. A block of a
rank is a thread with a vector clock. A signal that is a release carries its thread's clock, a wait that is an acquire
takes it over; a plain access is a race, and an error, where the access that it must follow did not happen before it
by those clocks (as in FastTrack: Flanagan and Freund 2009). A word with its epoch beside it is stored without a
release: it carries the clock of the kernel's beginning, and who reads it takes that over at its kernel's end, since
the ends and beginnings of kernels are the only fences there. So a missing fence is found in any order of execution,
and no delay of memory needs to be played.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from qwenjax_kernels import all_reduce_protocol

Key = tuple[Any, ...]
Clock = list[int]
Ready = Callable[[], bool]


class ProtocolError(AssertionError):
    """A race, a word overwritten before it was read, a wrong sum, a tile collected twice or never, or a deadlock."""


@dataclass(frozen=True)
class Call:
    """One all-reduce: its algorithm ("one_shot", "two_shot", "multicast"), tiles of the message, and blocks of its
    grid, which for the latter two are the teams of all blocks."""

    algorithm: str
    tiles: int
    grid: int


@dataclass
class Thread:
    """A block of a rank. start: its clock at the kernel's beginning; later: what it takes over at the kernel's end."""

    index: int
    clock: Clock
    start: Clock
    later: Clock

    def join(self, clock: Clock) -> None:
        self.clock = [max(a, b) for a, b in zip(self.clock, clock, strict=True)]

    def join_at_end(self, clock: Clock) -> None:
        self.later = [max(a, b) for a, b in zip(self.later, clock, strict=True)]


@dataclass
class Cell:
    """A place of memory: its value and epoch flag, who wrote it and when, and when each thread read it last."""

    value: int = 0
    flag: int = 0
    carried: Clock = field(default_factory=list)
    writer: int = -1
    written: int = 0
    reads: dict[int, int] = field(default_factory=dict)


class Simulation:
    """Ranks that run `calls` in order, each as fast as chance lets it.

    protocol: where steps, slots and values are taken from; another one seeds a bug, as does release=False (signals
    without their fence) or acquire=False.
    """

    def __init__(
        self,
        ranks: int,
        calls: list[Call],
        seed: int,
        protocol: Any = all_reduce_protocol,
        release: bool = True,
        acquire: bool = True,
    ) -> None:
        self.ranks, self.calls, self.protocol = ranks, calls, protocol
        self.release, self.acquire = release, acquire
        self.random = random.Random(seed)
        self.blocks = max(call.grid for call in calls)
        self.size = ranks * self.blocks
        self.cells: dict[Key, Cell] = {}
        self.signals: dict[Key, tuple[int, Clock]] = {}
        self.arrivals = [0] * ranks
        self.rank_clock = [[0] * self.size for _ in range(ranks)]
        self.tiles: list[tuple[int, int, int]] = []  # collected: call, by whom, which

    def run(self) -> None:
        """Runs all calls to their end. Raises ProtocolError."""
        self.run_calls()
        due = [
            (number, rank, tile)
            for number, call in enumerate(self.calls)
            if isinstance(call, Call)
            for rank in range(self.ranks)
            for tile in range(call.tiles)
        ]
        if sorted(self.tiles) != due:
            raise ProtocolError("a tile was collected twice, or never")

    def run_calls(self) -> None:
        next_call = [0] * self.ranks
        live: dict[int, list[tuple[Iterator[Ready | None], Thread]]] = {rank: [] for rank in range(self.ranks)}
        waiting: dict[int, Ready] = {}
        while True:
            for rank, blocks in live.items():
                if not blocks and next_call[rank] < len(self.calls):
                    live[rank] = self.launch(rank, next_call[rank])
                    next_call[rank] += 1
            running = [(rank, block) for rank, blocks in live.items() for block in blocks]
            if not running:
                return
            able = [item for item in running if item[1][1].index not in waiting or waiting[item[1][1].index]()]
            if not able:
                raise ProtocolError("deadlock: every block waits")
            rank, (program, thread) = self.random.choice(able)
            waiting.pop(thread.index, None)
            for _ in range(self.random.choice((1, 1, 2, 5, 30))):
                try:
                    ready = next(program)
                except StopIteration:
                    live[rank].remove((program, thread))
                    self.finish(rank, thread)
                    break
                thread.clock[thread.index] += 1
                if ready is not None and not ready():
                    waiting[thread.index] = ready
                    break

    def launch(self, rank: int, number: int) -> list[tuple[Iterator[Ready | None], Thread]]:
        """The blocks of a rank's next kernel, which begins where its last one ended."""
        begun = self.rank_clock[rank]
        blocks = []
        for block in range(self.calls[number].grid):
            thread = Thread(rank * self.blocks + block, begun.copy(), begun.copy(), begun.copy())
            thread.clock[thread.index] += 1
            blocks.append((self.block(rank, block, number, thread), thread))
        return blocks

    def finish(self, rank: int, thread: Thread) -> None:
        thread.join(thread.later)
        self.rank_clock[rank] = [max(a, b) for a, b in zip(self.rank_clock[rank], thread.clock, strict=True)]

    def block(self, rank: int, block: int, number: int, thread: Thread) -> Iterator[Ready | None]:
        """What a block does in one call, a yield after every access."""
        epoch = self.protocol.epoch_of(self.arrivals[rank])
        self.arrivals[rank] += self.protocol.arrival_share(block == 0, self.calls[number].grid)
        yield None
        yield from self.collective(rank, block, number, epoch, thread)

    def collective(self, rank: int, block: int, number: int, epoch: int, thread: Thread) -> Iterator[Ready | None]:
        """What a block does in its epoch."""
        call, protocol = self.calls[number], self.protocol
        tiles = range(block, call.tiles, call.grid)
        if call.algorithm == "one_shot":
            for action in protocol.ONE_SHOT:
                if action == "push":
                    for tile in tiles:
                        yield from self.push(rank, number, tile, epoch, thread)
                elif action == "collect":
                    for tile in tiles:
                        yield from self.collect_words(rank, number, tile, epoch, thread)
            return
        for turn in range(len(tiles) + protocol.LAST_LAG):
            for step in protocol.TWO_SHOT:
                i = turn - step.lag
                if step.action == "wait" and i >= 0:
                    yield from self.wait(rank, block, protocol.signal_value(epoch, i), thread)
                elif step.action != "wait" and 0 <= i < len(tiles):
                    # Calls cut the rings differently: this one's are those of another block in the call before.
                    place = ((block + number) % self.blocks, protocol.slot(i))
                    yield from getattr(self, step.action)(rank, number, tiles[i], place, thread)
            if turn <= len(tiles):
                yield from self.signal(rank, block, protocol.signal_value(epoch, turn), thread)

    def term(self, rank: int, number: int, tile: int, part: int) -> int:
        """What a rank has to add: another number for every rank, call, tile and part of it."""
        return random.Random(f"{rank} {number} {tile} {part}").randrange(1 << 40)

    def total(self, number: int, tile: int, part: int) -> int:
        return sum(self.term(rank, number, tile, part) for rank in range(self.ranks))

    def stage(self, rank: int, number: int, tile: int, place: Key, thread: Thread) -> Iterator[None]:
        for part in range(self.ranks):
            key = (rank, *place, part) if self.calls[number].algorithm == "multicast" else (part, *place, rank)
            self.write(("staged", *key), self.term(rank, number, tile, part), thread)
            yield None

    def reduce(self, rank: int, number: int, tile: int, place: Key, thread: Thread) -> Iterator[None]:
        total = 0
        for peer in range(self.ranks):
            key = (peer, *place, rank) if self.calls[number].algorithm == "multicast" else (rank, *place, peer)
            total += self.read(("staged", *key), thread)
            yield None
        for step in range(1, self.ranks + 1):
            self.write(("results", (rank + step) % self.ranks, *place, rank), total, thread)
            yield None

    def collect(self, rank: int, number: int, tile: int, place: Key, thread: Thread) -> Iterator[None]:
        for part in range(self.ranks):
            self.check(self.read(("results", rank, *place, part), thread), rank, number, tile, part)
            yield None
        self.tiles.append((number, rank, tile))

    def push(self, rank: int, number: int, tile: int, epoch: int, thread: Thread) -> Iterator[None]:
        for step in range(1, self.ranks + 1):
            key = ("inbox", (rank + step) % self.ranks, self.protocol.inbox(epoch), rank, tile)
            cell = self.cells.setdefault(key, Cell())
            self.check_reads(key, cell, thread)
            cell.value, cell.flag, cell.carried = self.term(rank, number, tile, 0), epoch, thread.start
            yield None

    def collect_words(self, rank: int, number: int, tile: int, epoch: int, thread: Thread) -> Iterator[Ready | None]:
        total = 0
        for peer in range(self.ranks):
            key = ("inbox", rank, self.protocol.inbox(epoch), peer, tile)
            cell = self.cells.setdefault(key, Cell())
            yield lambda cell=cell: cell.flag == epoch
            total += cell.value
            cell.reads[thread.index] = thread.clock[thread.index]
            thread.join_at_end(cell.carried)
            yield None
        self.check(total, rank, number, tile, 0)
        self.tiles.append((number, rank, tile))

    def signal(self, rank: int, block: int, value: int, thread: Thread) -> Iterator[None]:
        for peer in range(self.ranks):
            carried = thread.clock.copy() if self.release else thread.start
            self.signals["signal", peer, block, rank] = value, carried
            yield None

    def wait(self, rank: int, block: int, value: int, thread: Thread) -> Iterator[Ready]:
        for peer in range(self.ranks):
            key = ("signal", rank, block, peer)
            self.signals.setdefault(key, (0, [0] * self.size))
            yield lambda key=key: self.signals[key][0] >= value
            (thread.join if self.acquire else thread.join_at_end)(self.signals[key][1])

    def write(self, key: Key, value: int, thread: Thread) -> None:
        cell = self.cells.setdefault(key, Cell())
        self.check_write(key, cell, thread)
        self.check_reads(key, cell, thread)
        cell.value, cell.writer, cell.written = value, thread.index, thread.clock[thread.index]
        cell.reads = {}

    def read(self, key: Key, thread: Thread) -> int:
        cell = self.cells.setdefault(key, Cell())
        if cell.writer < 0:
            raise ProtocolError(f"{key} is read before anything was written")
        self.check_write(key, cell, thread)
        cell.reads[thread.index] = thread.clock[thread.index]
        return cell.value

    def check_write(self, key: Key, cell: Cell, thread: Thread) -> None:
        if cell.writer >= 0 and cell.written > thread.clock[cell.writer]:
            raise ProtocolError(f"{key}: a write that did not happen before the access of thread {thread.index}")

    def check_reads(self, key: Key, cell: Cell, thread: Thread) -> None:
        for reader, when in cell.reads.items():
            if when > thread.clock[reader]:
                raise ProtocolError(f"{key} is overwritten by thread {thread.index}; thread {reader} may still read it")

    def check(self, total: int, rank: int, number: int, tile: int, part: int) -> None:
        expected = self.total(number, tile, part)
        if total != expected:
            raise ProtocolError(f"rank {rank}, call {number}, tile {tile}: {total} instead of {expected}")
