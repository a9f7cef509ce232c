"""The workers that a router knows, and which of them gets the next request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qwenjax_serving.protocol.messages import Hello, Status, Work

_PREFIX_TOKENS = 64  # of a block of a prompt that a worker is remembered to have seen
_PREFIXES = 16_384  # blocks remembered of a worker


def prefix_keys(work: Work) -> list[int]:
    """One hash for each whole block of a prompt, of it and all before it; equal for equal beginnings."""
    keys, key = [], hash(work.cache_salt)
    for end in range(_PREFIX_TOKENS, len(work.prompt_token_ids) + 1, _PREFIX_TOKENS):
        key = hash((key, work.prompt_token_ids[end - _PREFIX_TOKENS : end]))
        keys.append(key)
    return keys


@dataclass(eq=False)
class Worker:
    """A worker as the router sees it.

    heard: when it last said anything. load: prompt tokens that it has to run (prefill) or outputs that it holds
    (decode). full: it said so, and nothing has ended there since. leaving: it takes no more work.
    """

    identity: bytes
    hello: Hello
    heard: float
    status: Status | None = None
    load: int = 0
    full: bool = False
    leaving: bool = False
    _seen: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def num_slots(self) -> int:
        """Sequences that it holds at most, as it last said."""
        return self.hello.num_slots if self.status is None else self.status.num_slots

    def saw(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _PREFIXES:
            self._seen.popitem(last=False)

    def known(self, keys: Sequence[int]) -> int:
        """Blocks of a prompt that it has seen before."""
        return next((place for place, key in enumerate(keys) if key not in self._seen), len(keys))


def choose(workers: Iterable[Worker], keys: Sequence[int], slack: int) -> Worker | None:
    """Of the workers whose load is within `slack` of the least, the one that knows most of the prompt, and of those
    that know as much the least loaded. None without workers."""
    candidates = list(workers)
    least = min((worker.load for worker in candidates), default=0)
    near = [worker for worker in candidates if worker.load <= least + slack]
    return max(near, key=lambda worker: (worker.known(keys), -worker.load), default=None)
