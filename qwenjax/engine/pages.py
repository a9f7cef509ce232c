"""The pages of one data rank's cache: who holds them, and the prefixes of prompts that they keep for later requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Block:
    """A node of the prefix tree: the pages of one block of tokens, after those of its ancestors.

    key: what `block_keys` says of its tokens. holders: sequences that use it; each holds the ancestors too.
    """

    parent: Block | None
    key: bytes
    pages: tuple[int, ...]
    holders: int = 0
    children: dict[bytes, Block] = field(default_factory=dict)


def block_keys(tokens: Sequence[int], block_size: int, lookahead: int, salt: str | None) -> list[bytes]:
    """A key for every block of `tokens` that can be kept: its ids, and the first block's the salt too.

    lookahead: ids after the block that its contents depend on besides, 1 where a multi-token-prediction head has a
    cache: its entry at a position is made of the next position's token.
    """
    ids = np.asarray(tokens, np.int32)
    ends = range(block_size, len(tokens) - lookahead + 1, block_size)
    keys = [ids[end - block_size : end + lookahead].tobytes() for end in ends]
    if keys and salt is not None:
        keys[0] += salt.encode()
    return keys


class PagePool:
    """Page numbers 0 to num_pages - 1. Each is free, held by one sequence, or in a block of the prefix tree.

    A block without holders stays until its pages are wanted: the least recently used goes first, and never before those
    that come after it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0  # pages, since the start
        # Taken from the end: a page just freed is used again first, while it is still in caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._root = Block(None, b"", ())
        # Blocks without holders, in the order of eviction. A block is let go of after those below it, so that these
        # always come first.
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._num_idle = 0  # pages

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that hold a prefix which no sequence uses: free for the asking."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        return len(self._free) + self._num_idle

    def take(self, count: int) -> list[int]:
        """`count` pages, evicting what is idle. Raises ValueError where fewer are available: ask first."""
        if count > self.num_available:
            raise ValueError(f"{count} pages asked for, {self.num_available} of {self.num_pages} are available")
        while count > len(self._free):
            self._evict()
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages that `take` gave and no block has."""
        self._free.extend(reversed(pages))

    def match(self, keys: Iterable[bytes]) -> list[Block]:
        """The blocks of the longest known prefix, first to last."""
        found, block = list[Block](), self._root
        for key in keys:
            if key not in block.children:
                break
            block = block.children[key]
            found.append(block)
        return found

    def num_available_beside(self, blocks: Iterable[Block]) -> int:
        """Pages available to a sequence that holds `blocks`."""
        return self.num_available - sum(len(block.pages) for block in blocks if not block.holders)

    def hold(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not block.holders:
                del self._idle[block]
                self._num_idle -= len(block.pages)
            block.holders += 1

    def let_go(self, blocks: Sequence[Block]) -> None:
        """Undoes `hold`; blocks as a path from the root."""
        for block in reversed(blocks):
            block.holders -= 1
            if not block.holders:
                self._idle[block] = None
                self._num_idle += len(block.pages)

    def knows(self, path: Sequence[Block], key: bytes) -> bool:
        """Whether there is a block of `key` after `path`."""
        return key in (path[-1] if path else self._root).children

    def keep(self, path: Sequence[Block], key: bytes, pages: Sequence[int]) -> Block:
        """The block of `key` after `path`, held: one made of `pages`, or one that was there, and `pages` are freed."""
        parent = path[-1] if path else self._root
        block = parent.children.get(key)
        if block is None:
            block = parent.children[key] = Block(parent, key, tuple(pages), holders=1)
            return block
        self.hold([block])
        self.give_back(pages)
        return block

    def evict_all(self) -> None:
        """Frees all that is idle."""
        while self._idle:
            self._evict()

    def blocks(self) -> list[Block]:
        """Every block of the tree."""
        found, waiting = list[Block](), [self._root]
        while waiting:
            children = list(waiting.pop().children.values())
            found += children
            waiting += children
        return found

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        assert block.parent is not None
        assert not block.children
        del block.parent.children[block.key]
        self._num_idle -= len(block.pages)
        self.num_evicted += len(block.pages)
        self._free.extend(reversed(block.pages))
