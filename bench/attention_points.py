"""What the benchmarks of both attention kernels share: the command line, and times of loops compiled beforehand."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

import jax
from measure import header, median_seconds, recorded

Programs = dict[int, jax.stages.Compiled]  # by turns of the loop


class Point(Protocol):
    """A size: its loops with an implementation of `paged_attention`, and its row of the table from timing them."""

    def compiled(self, implementation: Any) -> Programs: ...

    def row(self, ours: Programs, cudnn: Programs | None) -> str: ...


def loops(turn: Callable[..., jax.Array], arrays: Sequence[Any], counts: tuple[int, int]) -> Programs:
    """Programs of so many turns, each of which takes the result of the one before as the first of `arrays`."""

    def run(count: int, first: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: turn(x, *rest), first)

    return {count: jax.jit(partial(run, count)).lower(*arrays).compile() for count in counts}


def seconds_a_turn(programs: Programs, arrays: Sequence[jax.Array], repeats: int) -> float:
    """Medians of both lengths, and of these the difference: without the dispatch."""
    (fewer, short), (more, long) = (
        (count, median_seconds(lambda program=program: jax.block_until_ready(program(*arrays)), repeats))
        for count, program in sorted(programs.items())
    )
    return (long - short) / (more - fewer)


def print_table(
    doc: str | None,
    syntax: str,
    parse: Callable[[str], Point],
    points: Sequence[str],
    implementation: str,
    columns: Sequence[str],
    cudnn_column: str,
    preface: Callable[[], object] = lambda: None,
) -> None:
    """The benchmark of the command line: a header, what `preface` prints, and a row for each point."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="*", default=points, help=syntax)
    parser.add_argument("--no-cudnn", action="store_true")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    parsed = [parse(text) for text in arguments.points]
    with recorded(arguments.record), ThreadPoolExecutor() as pool:
        print(header("jax", "jaxlib", "nvidia-cutlass-dsl"))
        preface()
        shown = [*columns, *([] if arguments.no_cudnn else [cudnn_column])]
        print("\n| " + " | ".join(shown) + " |\n|" + " --- |" * len(shown))
        ours = [pool.submit(point.compiled, implementation) for point in parsed]
        cudnn: list[Future[Programs] | None] = [
            None if arguments.no_cudnn else pool.submit(point.compiled, "cudnn") for point in parsed
        ]
        wait([future for future in [*ours, *cudnn] if future])  # compiling would disturb the timing
        for point, mine, theirs in zip(parsed, ours, cudnn, strict=True):
            print(point.row(mine.result(), theirs and theirs.result()), flush=True)
