"""Cutting a long text into windows that a model can read, so that every token but the first is scored once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of a text are read; those from `first` on are scored, each from what the window has
    before it."""

    start: int
    stop: int
    first: int


def windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of a text of `num_tokens`: at most `context` tokens each, `stride` apart.

    A scored token has at least context - stride tokens before it, or all there are. The first token of the text has
    none and is not scored. Raises ValueError for a text of fewer than two tokens or a stride that leaves gaps.
    """
    if num_tokens < 2:
        raise ValueError(f"the text has {num_tokens} tokens; at least 2 are needed to predict one from another")
    if not 1 <= stride < context:
        raise ValueError(f"stride is {stride}; it is at least 1 and below the context of {context} tokens")
    first = 1
    for start in range(0, num_tokens, stride):
        stop = min(start + context, num_tokens)
        yield Window(start, stop, first)
        if stop == num_tokens:
            return
        first = stop
