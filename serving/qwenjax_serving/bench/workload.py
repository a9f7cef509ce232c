"""What is sent, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwenjax.text_files import read_text

_FIRST_ID = 256  # below lie bytes and, in some vocabularies, special tokens

Prompt = str | list[int]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """num_prompts requests of up to max_tokens new tokens. Exactly one of concurrency, requests that run at any time,
    and rate, requests a second at random times (a Poisson process). extra: further fields of every request."""

    num_prompts: int
    max_tokens: int
    concurrency: int | None = None
    rate: float | None = None
    temperature: float = 0.0
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError, naming the option and its limit."""
        options = {"num_prompts": "--num-prompts", "max_tokens": "--output-len", "concurrency": "--concurrency"}
        for name, option in options.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}; it is at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"--rate is {self.rate}; it is above 0")
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("give one of --concurrency and --rate")

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start at which each request is sent, by `rate`."""
        assert self.rate is not None
        waits = random.Random(self.seed)
        return itertools.accumulate(waits.expovariate(self.rate) for _ in range(self.num_prompts))


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts of `length` random ids, so that a server finds none of them in its prefix cache."""
    if length < 1 or vocab_size <= _FIRST_ID:
        raise ValueError(
            f"--input-len is at least 1 and --vocab-size above {_FIRST_ID}; they are {length}, {vocab_size}"
        )
    ids = random.Random(seed)
    return [[ids.randrange(_FIRST_ID, vocab_size) for _ in range(length)] for _ in range(count)]


def file_prompts(count: int, path: Path) -> list[Prompt]:
    """The lines of a file, again from its first where it has too few. Raises ValueError for a file without text."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--file {path}: holds no prompt; it has one on every line")
    return list(itertools.islice(itertools.cycle(lines), count))


def request_body(prompt: Prompt, model: str, workload: Workload, chat: bool) -> dict[str, Any]:
    """The JSON of one request to /v1/completions or /v1/chat/completions."""
    what = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    limits = {"max_tokens": workload.max_tokens, "temperature": workload.temperature}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **what, **limits, **options, **workload.extra}
