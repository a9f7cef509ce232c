"""The sizes of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from qwenjax.sampling_params import SamplingParams

# The largest batch whose steps were timed with a draft (Qwen3-30B-A3B's shapes on an H200, bench/results/
# engine-h200.md): 1.15 times the step without, before a layer was two calls, which an acceptance above 0.15 repays.
# Beyond, nothing is known.
MEASURED_SPECULATION_BATCH = 256
DecodeKind = Literal["decode", "greedy", "truncated"]
_SHORTEST_CHUNK = 16  # tokens; shorter prompts are padded to it


@dataclass(frozen=True)
class EngineConfig:
    """Sizes that the engine's programs are compiled for.

    max_model_len: tokens of prompt and output together. max_num_seqs: slots of a data rank. num_pages: pages of
    page_size tokens, of a data rank. max_num_batched_tokens: of one prefill call and data rank; longer prompts run in
    several calls. num_steps: of a decode call, each of which draws a token for each slot, or several with speculation.
    num_speculative_tokens: drafts of a step, 0 for none. speculation_max_batch: with more sequences than this on a data
    rank a call does without drafts. prefix_caching: whether pages of prompts are kept for those that begin alike.
    programs_by_kind: whether calls whose requests are of one kind (`decode_kind`) have decode programs of their own,
    without branches: for GPUs, where each branch waits for the host.
    """

    max_model_len: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    max_num_batched_tokens: int
    num_steps: int
    num_speculative_tokens: int = 0
    speculation_max_batch: int = MEASURED_SPECULATION_BATCH
    prefix_caching: bool = True
    programs_by_kind: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "num_pages", "page_size", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < _SHORTEST_CHUNK:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least {_SHORTEST_CHUNK}"
            )
        for name in ("num_speculative_tokens", "speculation_max_batch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return self.pages_for(self.max_model_len)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @cached_property
    def chunk_lengths(self) -> list[int]:
        """Row lengths that prefill is compiled for, ascending: a quarter of the budget, and its quarters.

        A prompt is cut into rows of the longest and one of what is left. Several rows of one prompt may share a call.
        """
        lengths = [max(_SHORTEST_CHUNK, self.max_num_batched_tokens // 4)]
        while lengths[-1] // 4 >= _SHORTEST_CHUNK:
            lengths.append(lengths[-1] // 4)
        return lengths[::-1]

    def chunk_length_for(self, tokens: int) -> int:
        """The length of the next row of a prompt of which `tokens` are left."""
        lengths = self.chunk_lengths
        return next((length for length in lengths if length >= tokens), lengths[-1])

    def rows_per_call(self, length: int) -> int:
        """Rows of `length` tokens in a prefill call, of a data rank."""
        return self.max_num_batched_tokens // length

    @cached_property
    def block_size(self) -> int:
        """Tokens of a block of the prefix cache: whole pages that end where a chunk does, so that what follows a hit
        runs in the same rows as without it."""
        return math.lcm(self.chunk_lengths[-1], self.page_size)

    @property
    def lookahead(self) -> int:
        """Tokens past its end that a block depends on, see `block_keys`."""
        return 1 if self.num_speculative_tokens else 0

    @property
    def tokens_per_call(self) -> int:
        """Most tokens that a decode call draws for a sequence."""
        return self.num_steps * (self.num_speculative_tokens + 1)

    @property
    def max_growth(self) -> int:
        """Most pages that a sequence is given for one decode call."""
        return self.pages_for(self.tokens_per_call)

    @cached_property
    def decode_batches(self) -> list[int]:
        """Numbers of slots that decode is compiled for: one sequence alone need not pay for a full batch."""
        return sorted({batch for batch in (1, 8, 64) if batch < self.max_num_seqs} | {self.max_num_seqs})

    @property
    def decode_kinds(self) -> tuple[DecodeKind, ...]:
        """What decode is compiled for: "decode", whatever requests ask for, and kinds of those."""
        return ("decode", "greedy", "truncated") if self.programs_by_kind else ("decode",)

    @property
    def decode_variants(self) -> list[tuple[int, int]]:
        """Batch and number of drafts of every decode program. Requests may go without drafts at any batch."""
        plain = [(batch, 0) for batch in self.decode_batches]
        if not self.num_speculative_tokens or not self.speculation_max_batch:
            return plain
        # At every batch: a few sequences may be left in high slots, and those are to keep their drafts.
        return plain + [(batch, self.num_speculative_tokens) for batch in self.decode_batches]


def decode_kind(requests: Iterable[SamplingParams]) -> DecodeKind:
    """Of the program that draws for these requests.

    "greedy": all draw the ids of the largest logits as they are. "truncated": some truncate by top_k and some by top_p,
    so that all pay for both as they would with branches; none asks for more. "decode": anything.
    """
    requests = list(requests)
    if not all(params.only_draws for params in requests):
        return "decode"
    random = [params for params in requests if not params.greedy]
    truncates = any(params.top_k > 0 for params in random) and any(params.top_p < 1 for params in random)
    return "truncated" if truncates else "decode" if random else "greedy"
