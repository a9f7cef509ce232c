"""Paged decode attention of Qwen3-30B-A3B's shapes on one GPU, beside the limit and cuDNN over copies of the pages.

    python bench/paged_attention.py [--no-cudnn] [--points 64x2048x1 ...] [--record NAME]

A point is BATCHxCONTEXTxTOKENS: sequences, cached tokens of each, query tokens of each. Every call reads another layer
of caches that together are several times as large as the L2, in a jitted loop, each on the result of the one before;
the loop's dispatch is taken out by running it at two lengths. The limit is the caches' bytes at the rate of a copy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from measure import copy_bandwidth, header, median_seconds, recorded

from qwenjax_ffi.attention import paged_attention

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 4, 128, 64
L2_BYTES = 60 << 20
TOKEN_BYTES = KV_HEADS * HEAD_DIM * 2 * 2
MIN_LAYERS = 16  # calls of a turn of the loop, which costs a few microseconds by itself, up to 2 GiB of caches
SHORT, LONG = 2, 8  # turns of the loop
POINTS = [
    *(f"{batch}x{context}x1" for batch, context in ((1, 2048), (1, 8192), (1, 32768), (16, 2048), (32, 2048))),
    *(f"64x2048x{tokens}" for tokens in (1, 2, 4, 8)),
    *(f"{batch}x{context}x1" for batch, context in ((64, 8192), (128, 4096), (256, 2048))),
]

Attend = Callable[..., jax.Array]


@dataclass(frozen=True)
class Point:
    batch: int
    context: int
    tokens: int

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

    def arrays(self) -> tuple[Any, ...]:
        """Random data: zeros run faster. Pages of a sequence lie anywhere."""
        pages = -(-self.context // PAGE)
        size = (self.layers, self.batch * pages, KV_HEADS, PAGE, HEAD_DIM)
        make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
        q = make(jax.random.key(0), (self.batch, self.tokens, Q_HEADS, HEAD_DIM))
        keys, values = (make(jax.random.key(seed), size) for seed in (1, 2))
        table = np.random.default_rng(0).permutation(self.batch * pages).reshape(self.batch, pages)
        positions = np.broadcast_to(np.arange(self.context - self.tokens, self.context), (self.batch, self.tokens))
        return q, keys, values, jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32)


def seconds_a_call(attend: Attend, point: Point, arrays: tuple[Any, ...]) -> float:
    """Seconds of one call inside a jitted loop over the layers."""
    layers = [jnp.asarray([layer], jnp.int32) for layer in range(point.layers)]

    def run(turns: int, q: jax.Array, *rest: Any) -> jax.Array:
        def turn(_: jax.Array, x: jax.Array) -> jax.Array:
            for layer in layers:
                x = attend(x, *rest, layer)
            return x

        return jax.lax.fori_loop(0, turns, turn, q)

    seconds = {}
    for turns in (SHORT, LONG):
        compiled = jax.jit(partial(run, turns)).lower(*arrays).compile()
        seconds[turns] = median_seconds(lambda compiled=compiled: jax.block_until_ready(compiled(*arrays)), 5)
    return (seconds[LONG] - seconds[SHORT]) / ((LONG - SHORT) * point.layers)


def measure(point: Point, bandwidth: float, cudnn: bool) -> str:
    arrays = point.arrays()
    ours = seconds_a_call(partial(paged_attention, implementation="kernel"), point, arrays)
    limit = point.bytes / bandwidth
    cells = [point.batch, point.context, point.tokens, f"{ours * 1e6:.1f}", f"{limit * 1e6:.1f}", f"{limit / ours:.0%}"]
    if cudnn:
        peer = seconds_a_call(partial(paged_attention, implementation="cudnn"), point, arrays)
        cells.append(f"{peer * 1e6:.0f} ({peer / ours:.2f}x)")
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="*", default=POINTS, help="BATCHxCONTEXTxTOKENS")
    parser.add_argument("--no-cudnn", action="store_true")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    with recorded(arguments.record):
        print(header("jax", "jaxlib", "nvidia-cutlass-dsl"))
        bandwidth = copy_bandwidth()
        print(f"copy {bandwidth / 1e12:.2f} TB/s\n")
        columns = ["batch", "context", "query tokens", "us", "limit us", "of limit"]
        columns += [] if arguments.no_cudnn else ["cuDNN over copies us"]
        print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
        for text in arguments.points:
            print(measure(Point.parse(text), bandwidth, not arguments.no_cudnn), flush=True)


if __name__ == "__main__":
    main()
