"""Prefill attention of Qwen3's shapes on one GPU, beside the limit and cuDNN over copies of the pages.

    python bench/prefill_attention.py [--no-cudnn] [--points 8x6000 ...] [--record NAME]

A point is PROMPTSxTOKENS[xHEADS]: prompts that the engine cuts into rows of 2,048 tokens and runs four rows a call,
and query heads of the four kv heads: 32 of Qwen3-30B-A3B, or 64 of Qwen3-235B-A22B. What is timed is all calls of a
layer, in a jitted loop, each on the result of the one before and on another layer's cache; the loop's dispatch is taken
out by running it at two lengths. Work is 4 * head_dim operations for each pair of a query and a key that it sees. The
limit is that work at the H200's dense bf16 peak, of which the best kernels reach 60% to 65%.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from attention_points import Programs, loops, print_table, seconds_a_turn

from qwenjax_ffi.attention import paged_attention

PEAK = 989e12  # NVIDIA's data sheet of the H200: dense bf16 operations a second
KV_HEADS, HEAD_DIM, PAGE, ROW, ROWS, LAYERS = 4, 128, 64, 2048, 4, 4
SHORT, LONG = 1, 4  # turns of the loop
POINTS = ["8x6000", "8x2048", "16x1000", "1x32768", "8x6000x64"]


@dataclass(frozen=True)
class Point:
    prompts: int
    tokens: int
    q_heads: int = 32

    @classmethod
    def parse(cls, text: str) -> Point:
        return cls(*map(int, text.split("x")))

    @property
    def operations(self) -> float:
        return 4 * HEAD_DIM * self.q_heads * self.prompts * self.tokens * (self.tokens + 1) / 2

    def calls(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Page tables and positions, [ROWS, pages] and [ROWS, ROW], of each call; pages of a prompt lie anywhere."""
        pages = -(-self.tokens // PAGE)
        table = np.random.default_rng(0).permutation(self.prompts * pages).reshape(self.prompts, pages)
        rows = [(prompt, start) for prompt in range(self.prompts) for start in range(0, self.tokens, ROW)]
        calls = []
        for first in range(0, len(rows), ROWS):
            some = rows[first : first + ROWS]
            tables, positions = np.zeros((ROWS, pages), np.int32), np.full((ROWS, ROW), -1, np.int32)
            for row, (prompt, start) in enumerate(some):
                tables[row] = table[prompt]
                count = min(ROW, self.tokens - start)
                positions[row, :count] = np.arange(start, start + count)
            calls.append((tables, positions))
        return calls

    def arrays(self) -> tuple[jax.Array, ...]:
        """Queries and caches; random: zeros run faster."""
        cache = (LAYERS, self.prompts * -(-self.tokens // PAGE), KV_HEADS, PAGE, HEAD_DIM)
        shapes = [(ROWS, ROW, self.q_heads, HEAD_DIM), cache, cache]
        return tuple(jax.random.normal(jax.random.key(seed), s, jnp.bfloat16) for seed, s in enumerate(shapes))

    def compiled(self, implementation: Any) -> Programs:
        calls = self.calls()

        def turn(x: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            for index, call in enumerate(calls):
                layer = jnp.asarray([index % LAYERS], jnp.int32)
                x = paged_attention(x, keys, values, *map(jnp.asarray, call), layer, implementation=implementation)
            return x

        return loops(turn, jax.eval_shape(self.arrays), (SHORT, LONG))

    def row(self, ours: Programs, cudnn: Programs | None) -> str:
        arrays = jax.jit(self.arrays)()
        seconds, limit = seconds_a_turn(ours, arrays, 5), self.operations / PEAK
        cells = [f"{self.prompts} | {self.tokens} | {self.q_heads} | {seconds * 1e3:.3f} | {limit * 1e3:.3f}"]
        cells += [f"{self.operations / seconds / 1e12:.0f} | {limit / seconds:.0%}"]
        if cudnn:
            peer = seconds_a_turn(cudnn, arrays, 5)
            cells.append(f"{peer * 1e3:.3f} ({peer / seconds:.1f}x)")
        return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print_table(
        __doc__,
        "PROMPTSxTOKENS[xHEADS]",
        Point.parse,
        POINTS,
        "prefill_kernel",
        ["prompts", "tokens", "query heads", "ms a layer", "limit ms", "TFLOP/s", "of limit"],
        "cuDNN over copies ms",
    )
