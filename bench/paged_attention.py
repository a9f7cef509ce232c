"""Paged decode attention of Qwen3's shapes on one GPU, beside the limit and cuDNN over copies of the pages.

    python bench/paged_attention.py [--no-cudnn] [--points 64x2048x1 ...] [--record NAME]

A point is BATCHxCONTEXTxTOKENS[xHEADS]: sequences, cached tokens of each, query tokens of each, and query heads of the
four kv heads: 32 of Qwen3-30B-A3B, or 64 of Qwen3-235B-A22B. Every call reads another layer
of caches that together are several times as large as the L2, in a jitted loop, each on the result of the one before;
the loop's dispatch is taken out by running it at two lengths. The limit is the caches' bytes at the rate of a copy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from attention_points import Programs, loops, print_table, seconds_a_turn
from measure import copy_bandwidth

from qwenjax_ffi.attention import paged_attention

KV_HEADS, HEAD_DIM, PAGE = 4, 128, 64
L2_BYTES = 60 << 20
TOKEN_BYTES = KV_HEADS * HEAD_DIM * 2 * 2
MIN_LAYERS = 16  # calls of a turn of the loop, which costs a few microseconds by itself, up to 2 GiB of caches
SHORT, LONG = 2, 8  # turns of the loop
POINTS = [
    *(f"{batch}x{context}x1" for batch, context in ((1, 2048), (1, 8192), (1, 32768), (16, 2048), (32, 2048))),
    *(f"64x2048x{tokens}" for tokens in (1, 2, 4, 8)),
    *(f"{batch}x{context}x1" for batch, context in ((64, 8192), (128, 4096), (256, 2048))),
    *(f"64x2048x{tokens}x64" for tokens in (1, 4, 8)),
]

bandwidth = cache(copy_bandwidth)


@dataclass(frozen=True)
class Point:
    batch: int
    context: int
    tokens: int
    q_heads: int = 32

    @classmethod
    def parse(cls, text: str) -> Point:
        return cls(*map(int, text.split("x")))

    @property
    def bytes(self) -> int:
        """Of keys and values that a call reads; the queries and results are under 1% of them."""
        return self.batch * self.context * TOKEN_BYTES

    @property
    def layers(self) -> int:
        return max(2, min(MIN_LAYERS, (2 << 30) // self.bytes), -(-4 * L2_BYTES // self.bytes))

    def arrays(self) -> tuple[jax.Array, ...]:
        """Random data: zeros run faster. Pages of a sequence lie anywhere."""
        pages = -(-self.context // PAGE)
        cache = (self.layers, self.batch * pages, KV_HEADS, PAGE, HEAD_DIM)
        shapes = [(self.batch, self.tokens, self.q_heads, HEAD_DIM), cache, cache]
        draws = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed, shape in enumerate(shapes)]
        table = jax.random.permutation(jax.random.key(3), self.batch * pages).reshape(self.batch, pages)
        positions = jnp.arange(self.context - self.tokens, self.context, dtype=jnp.int32)
        return (*draws, table.astype(jnp.int32), jnp.tile(positions, (self.batch, 1)))

    def compiled(self, implementation: Any) -> Programs:
        """Loops over the layers, each call on the result of the one before."""
        layers = [jnp.asarray([layer], jnp.int32) for layer in range(self.layers)]

        def turn(x: jax.Array, *rest: jax.Array) -> jax.Array:
            for layer in layers:
                x = paged_attention(x, *rest, layer, implementation=implementation)
            return x

        return loops(turn, jax.eval_shape(self.arrays), (SHORT, LONG))

    def row(self, ours: Programs, cudnn: Programs | None) -> str:
        arrays = jax.jit(self.arrays)()
        seconds, limit = seconds_a_turn(ours, arrays, 7) / self.layers, self.bytes / bandwidth()
        cells = [f"{self.batch} | {self.context} | {self.tokens} | {self.q_heads} | {seconds * 1e6:.1f}"]
        cells += [f"{limit * 1e6:.1f}", f"{limit / seconds:.0%}"]
        if cudnn:
            peer = seconds_a_turn(cudnn, arrays, 7) / self.layers
            cells.append(f"{peer * 1e6:.0f} ({peer / seconds:.1f}x)")
        return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print_table(
        __doc__,
        "BATCHxCONTEXTxTOKENS[xHEADS]",
        Point.parse,
        POINTS,
        "kernel",
        ["batch", "context", "query tokens", "query heads", "us", "limit us", "of limit"],
        "cuDNN over copies us",
        preface=lambda: print(f"copy {bandwidth() / 1e12:.2f} TB/s"),
    )
