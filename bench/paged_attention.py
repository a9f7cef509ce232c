"""Paged decode attention of Qwen3's shapes on one GPU, beside the limit and cuDNN over copies of the pages.

    python bench/paged_attention.py [--no-cudnn] [--points 64x2048x1 ...] [--record NAME]

A point is BATCHxCONTEXTxTOKENS[xHEADS]: sequences, cached tokens of each, query tokens of each, and query heads of the
four kv heads: 32 of Qwen3-30B-A3B, or 64 of Qwen3-235B-A22B. Every call reads another layer
of caches that together are several times as large as the L2, in a jitted loop, each on the result of the one before;
the loop's dispatch is taken out by running it at two lengths. The limit is the caches' bytes at the rate of a copy.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from measure import copy_bandwidth, header, median_seconds, recorded

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

Programs = dict[int, jax.stages.Compiled]  # by turns of the loop


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

        def run(turns: int, q: jax.Array, *rest: jax.Array) -> jax.Array:
            def turn(_: jax.Array, x: jax.Array) -> jax.Array:
                for layer in layers:
                    x = paged_attention(x, *rest, layer, implementation=implementation)
                return x

            return jax.lax.fori_loop(0, turns, turn, q)

        arrays = jax.eval_shape(self.arrays)
        return {turns: jax.jit(partial(run, turns)).lower(*arrays).compile() for turns in (SHORT, LONG)}

    def seconds_a_call(self, programs: Programs, arrays: tuple[jax.Array, ...]) -> float:
        seconds = {
            turns: median_seconds(lambda program=program: jax.block_until_ready(program(*arrays)), 7)
            for turns, program in programs.items()
        }
        return (seconds[LONG] - seconds[SHORT]) / ((LONG - SHORT) * self.layers)

    def row(self, bandwidth: float, ours: Programs, cudnn: Programs | None) -> str:
        arrays = jax.jit(self.arrays)()
        seconds, limit = self.seconds_a_call(ours, arrays), self.bytes / bandwidth
        cells = [f"{self.batch} | {self.context} | {self.tokens} | {self.q_heads} | {seconds * 1e6:.1f}"]
        cells += [f"{limit * 1e6:.1f}", f"{limit / seconds:.0%}"]
        if cudnn:
            peer = self.seconds_a_call(cudnn, arrays)
            cells.append(f"{peer * 1e6:.0f} ({peer / seconds:.1f}x)")
        return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="*", default=POINTS, help="BATCHxCONTEXTxTOKENS[xHEADS]")
    parser.add_argument("--no-cudnn", action="store_true")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    points = [Point.parse(text) for text in arguments.points]
    with recorded(arguments.record), ThreadPoolExecutor() as pool:
        print(header("jax", "jaxlib", "nvidia-cutlass-dsl"))
        bandwidth = copy_bandwidth()
        print(f"copy {bandwidth / 1e12:.2f} TB/s\n")
        columns = ["batch", "context", "query tokens", "query heads", "us", "limit us", "of limit"]
        columns += [] if arguments.no_cudnn else ["cuDNN over copies us"]
        print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
        ours = [pool.submit(point.compiled, "kernel") for point in points]
        cudnn: list[Future[Programs] | None] = [
            None if arguments.no_cudnn else pool.submit(point.compiled, "cudnn") for point in points
        ]
        wait([future for future in [*ours, *cudnn] if future])  # compiling would disturb the timing
        for point, mine, theirs in zip(points, ours, cudnn, strict=True):
            print(point.row(bandwidth, mine.result(), theirs and theirs.result()), flush=True)


if __name__ == "__main__":
    main()
