"""The pages of one data rank's cache, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """A free list of page numbers 0 to num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Taken from the end: a page just freed is used again first, while it is still in caches.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages. Raises ValueError where fewer are free: the caller asks `num_free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages that `take` gave."""
        self._free.extend(reversed(pages))
