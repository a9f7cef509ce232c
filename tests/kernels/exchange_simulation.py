"""Dispatch and combine on simulated ranks, mixed with all-reduces on the same heap; see `protocol_simulation`.

Actions, flags' values and the order of rows come from qwenjax_kernels.token_exchange_protocol, as the kernels' do;
where a token's row must lie is worked out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qwenjax_kernels import token_exchange_protocol
from tests.kernels.protocol_simulation import Call, Clock, Key, ProtocolError, Ready, Simulation, Thread


@dataclass(frozen=True)
class Exchange:
    """One call of `kind` "dispatch" or "combine". goes[rank][token]: the ranks that a token of a rank is sent to."""

    kind: str
    goes: tuple[tuple[frozenset[int], ...], ...]
    grid: int

    def slots(self, source: int, to: int) -> list[int]:
        """The tokens of a rank that are sent to another, in the order of their slots."""
        return [token for token, ranks in enumerate(self.goes[source]) if to in ranks]


class ExchangeSimulation(Simulation):
    """exchange: where the protocol is taken from; another one seeds a bug."""

    def __init__(
        self,
        ranks: int,
        calls: list[Call | Exchange],
        seed: int,
        exchange: Any = token_exchange_protocol,
        **others: Any,
    ) -> None:
        super().__init__(ranks, calls, seed, **others)  # type: ignore[arg-type]
        self.exchange = exchange
        self.words: dict[Key, tuple[int, Clock]] = {}
        self.collected: list[tuple[int, int, int, int]] = []  # call, by whom, from whom, which of their tokens

    def run(self) -> None:
        super().run()
        due = []
        for number, call in enumerate(self.calls):
            if isinstance(call, Exchange):
                pairs = [(a, b) for a in range(self.ranks) for b in range(self.ranks) if a != b]
                rows = [(source, to, token) for source, to in pairs for token in call.slots(source, to)]
                combine = call.kind == "combine"
                due += [(number, *((source, to) if combine else (to, source)), token) for source, to, token in rows]
        if sorted(self.collected) != sorted(due):
            raise ProtocolError("a row was collected twice, or never")

    def collective(self, rank: int, block: int, number: int, epoch: int, thread: Thread) -> Iterator[Ready | None]:
        call = self.calls[number]
        if not isinstance(call, Exchange):
            yield from super().collective(rank, block, number, epoch, thread)
            return
        steps = ExchangeBlock(self, call, number, rank, block, epoch, thread)
        for action in self.exchange.DISPATCH if call.kind == "dispatch" else self.exchange.COMBINE:
            yield from getattr(steps, action)()


class ExchangeBlock:
    """A block's actions in one call."""

    def __init__(
        self, ranks: ExchangeSimulation, call: Exchange, number: int, rank: int, block: int, epoch: int, thread: Thread
    ) -> None:
        self.ranks, self.call, self.number = ranks, call, number
        self.rank, self.block, self.epoch, self.thread = rank, block, epoch, thread
        self.protocol = ranks.exchange
        self.inbox = self.protocol.inbox(epoch)
        self.received = [len(call.slots(peer, rank)) for peer in range(ranks.ranks)]
        if call.kind == "dispatch":
            self.received = []  # until the counts have come
        self.tokens = range(block, len(call.goes[rank]), call.grid)
        items = range(block, len(call.goes[rank]) * (ranks.ranks - 1), call.grid)
        size = ranks.ranks
        self.items = [(self.protocol.peer_of(i, rank, size), self.protocol.slot_of(i, size)) for i in items]

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(self.ranks.ranks) if peer != self.rank]

    def tell(self) -> Iterator[Ready | None]:
        if self.block == 0:
            for peer in self.peers:
                self.put(("told", peer, self.inbox, self.rank), self.protocol.row_flag(self.epoch), self.thread.start)
                yield None

    def agree(self) -> Iterator[Ready | None]:
        if self.block == 0:
            for peer in self.peers:
                yield from self.get(("told", self.rank, self.inbox, peer), self.thread.join_at_end)

    def count(self) -> Iterator[Ready | None]:
        if self.block == 0:
            for peer in self.peers:
                word = self.protocol.count_word(self.epoch, len(self.call.slots(self.rank, peer)))
                self.put(("count", peer, self.inbox, self.rank), word, self.thread.start)
                yield None

    def expect(self) -> Iterator[Ready | None]:
        self.received = [0] * self.ranks.ranks
        for peer in self.peers:
            word = yield from self.get(("count", self.rank, self.inbox, peer), self.thread.join_at_end)
            self.received[peer] = self.protocol.count_of(word, self.epoch)
            if self.received[peer] != len(self.call.slots(peer, self.rank)):
                raise ProtocolError(f"rank {self.rank}, call {self.number}: a count of {self.received[peer]} of {peer}")

    def sent(self) -> list[tuple[int, int, int]]:
        """The rows that the block pushes: to whom, to which slot, of which token of whom."""
        if self.call.kind == "dispatch":
            rows = [(peer, self.call.slots(self.rank, peer)) for peer in self.peers]
            return [(peer, tokens.index(t), t) for t in self.tokens for peer, tokens in rows if t in tokens]
        return [
            (peer, slot, self.call.slots(peer, self.rank)[slot])
            for peer, slot in self.items
            if slot < self.received[peer]
        ]

    def due(self) -> list[tuple[int, int, int]]:
        """The rows that the block collects: from whom, in which slot, of which token."""
        if self.call.kind == "combine":
            rows = [(peer, self.call.slots(self.rank, peer)) for peer in self.peers]
            return [(peer, tokens.index(t), t) for t in self.tokens for peer, tokens in rows if t in tokens]
        return [
            (peer, slot, self.call.slots(peer, self.rank)[slot])
            for peer, slot in self.items
            if slot < self.received[peer]
        ]

    def value(self, by: int, to: int, token: int) -> int:
        """The row of a token: of the rank `by` for the rank `to`."""
        return self.ranks.term(by, self.number, token, to if self.call.kind == "combine" else 0)

    def push(self) -> Iterator[Ready | None]:
        for peer, slot, token in self.sent():
            self.ranks.write(
                ("row", peer, self.inbox, self.rank, slot), self.value(self.rank, peer, token), self.thread
            )
            yield None

    def signal(self) -> Iterator[Ready | None]:
        for peer, slot, _ in self.sent():
            carried = self.thread.clock.copy() if self.ranks.release else self.thread.start
            self.put(("flag", peer, self.inbox, self.rank, slot), self.protocol.row_flag(self.epoch), carried)
            yield None

    def wait(self) -> Iterator[Ready | None]:
        take = self.thread.join if self.ranks.acquire else self.thread.join_at_end
        for peer, slot, _ in self.due():
            yield from self.get(("flag", self.rank, self.inbox, peer, slot), take)

    def collect(self) -> Iterator[Ready | None]:
        for peer, slot, token in self.due():
            got = self.ranks.read(("row", self.rank, self.inbox, peer, slot), self.thread)
            if got != self.value(peer, self.rank, token):
                raise ProtocolError(f"rank {self.rank}, call {self.number}: another row of token {token} from {peer}")
            self.ranks.collected.append((self.number, self.rank, peer, token))
            yield None

    def put(self, key: Key, word: int, carried: Clock) -> None:
        self.ranks.words[key] = word, carried

    def get(self, key: Key, take: Callable[[Clock], None]) -> Any:
        """Waits for a word of this epoch; a generator that returns it."""
        self.ranks.words.setdefault(key, (0, [0] * self.ranks.size))
        yield lambda: self.ranks.words[key][0] >= self.protocol.row_flag(self.epoch)
        word, carried = self.ranks.words[key]
        take(carried)
        return word
