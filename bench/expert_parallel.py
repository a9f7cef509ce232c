"""Times the kernels around the experts' matmuls beside the memory's limit and XLA, all in one run.

    python bench/expert_parallel.py [--tokens 16384] [--out NAME]
    python bench/expert_parallel.py --predict MEASURED.txt ... [--out NAME]

Prefill with tokens on every rank, for the share of Qwen3-235B's experts (128 experts, top-8, hidden 4096) that a rank
of EP = 1, 2 and 4 has, with random routing: sorting a rank's rows, copying them (from bf16 to MXFP8 tiles, as on
Blackwell), adding up a token's rows. A row each: microseconds a call, the bytes that have to move, the time that the
copy bandwidth measured in the same run gives them, the share of it reached, and XLA's time for the reference. With
two GPUs or more, also the sum with the all-reduce over the ranks that follows it, against XLA's sum and `psum`, and
what is predicted of the all-reduce alone. Results are compared with the references' before they are timed.

Calls run in a jitted loop of 20 ms or more, dispatched once; the median of five. A turn of such a loop took 9 to 10 us
with one token in it, ours and XLA's alike: nothing that is shorter, such as a decode batch, can be timed so.
Decode's dispatch and combine between GPUs follow (expert_parallel_decode.py). With --predict, no GPU: see
expert_parallel_model.py.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax
import jax.numpy as jnp
import numpy as np
from grouped_gemm import copy_bandwidth
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measure import header, median_seconds, recorded

from qwenjax_ffi import collectives
from qwenjax_ffi.all_reduce_choice import choose_algorithm, predicted_seconds
from qwenjax_ffi.blackwell_packing import pack_rows
from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.grouped_gemm_blackwell import quantise_rows
from qwenjax_ffi.implementation import Implementation
from qwenjax_ffi.routing import ExpertRows, sort_rows

EXPERTS, TOP_K, HIDDEN = 128, 8, 4096  # Qwen3-235B-A22B
BY_RANK = PartitionSpec(("data", "model"))
SHARES = (1, 2, 4)  # of the experts, on one of so many ranks
BAR = 0.75  # of the copy bandwidth
CALLS = 100  # of a loop over ranks, which copies its 0.5 GB of rows once
TILE_ROWS = 128  # of quantised rows, at prefill

Call = Callable[..., Any]


class Row(NamedTuple):
    """A line of the table: two forms of one operation, their operands, and the bytes that have to move."""

    name: str
    ep: int
    ours: Call
    xla: Call
    operands: tuple[Any, ...]
    moved: float


def routing(tokens: int) -> tuple[jax.Array, jax.Array]:
    """ids int32 and weights float32 [tokens, top_k]: distinct experts, evenly drawn."""
    scores = jax.random.uniform(jax.random.key(0), (tokens, EXPERTS))
    weights, ids = jax.lax.top_k(scores, TOP_K)
    return ids.astype(jnp.int32), weights


def loop(call: Call, calls: int) -> Call:
    """A jitted loop of calls, each of which waits for the one before."""

    @jax.jit
    def run(*operands: Any) -> Any:
        def turn(_: jax.Array, carry: Any) -> Any:
            return jax.lax.optimization_barrier((carry[0], call(*carry[0])))

        return jax.lax.fori_loop(1, calls, turn, (operands, call(*operands)))[1]

    return run


def compiled(row: Row, call: Call, bandwidth: float) -> tuple[Call, int]:
    """A loop of 20 ms or more, beside which a dispatch of 0.1 ms is nothing, and its calls."""
    calls = int(max(5, 20e-3 / max(row.moved / bandwidth, 10e-6)))
    return loop(call, calls).lower(*row.operands).compile(), calls


def seconds_a_call(run: Call, operands: tuple[Any, ...], calls: int) -> float:
    return median_seconds(lambda: jax.block_until_ready(run(*operands)), 5) / calls


def rows_of(tokens: int) -> Iterator[Row]:
    """The operations of the first of `ep` ranks that all have these tokens, for each share."""
    ids, weights = routing(tokens)
    x = jax.random.normal(jax.random.key(1), (tokens, HIDDEN), jnp.bfloat16)
    made = jax.random.normal(jax.random.key(2), (tokens * TOP_K, HIDDEN), jnp.bfloat16)
    for ep in SHARES:
        yield from rows_of_share(ids, weights, x, made, ep)


def rows_of_share(ids: jax.Array, weights: jax.Array, x: jax.Array, made: jax.Array, ep: int) -> Iterator[Row]:
    local, pairs, tokens = EXPERTS // ep, ids.size, ids.shape[0]

    def sort(implementation: Implementation, *a: Any) -> ExpertRows:
        return sort_rows(*a, 0, local, implementation=implementation)

    forms: tuple[Implementation, Implementation] = ("kernel", "reference")
    sorted_rows = jax.jit(functools.partial(sort, "kernel"))(ids, weights)
    rows = int(sorted_rows.group_sizes.sum())
    yield Row(
        "sort rows",
        ep,
        *(functools.partial(sort, form) for form in forms),  # type: ignore[arg-type]
        (ids, weights),
        2 * 4 * pairs + 3 * 4 * rows,
    )

    row_token = sorted_rows.row_token[:rows]
    yield Row(
        "copy rows",
        ep,
        lambda x, sizes, row_token: quantise_rows(x, sizes, row_token, tile_rows=TILE_ROWS).data,
        lambda x, sizes, row_token: pack_rows(x[row_token], sizes, TILE_ROWS).data,
        (x, sorted_rows.group_sizes, row_token),
        2 * HIDDEN * np.unique(row_token).size + HIDDEN * 33 / 32 * rows,
    )

    yield Row(
        "sum rows",
        ep,
        *(functools.partial(sum_rows, dtype=jnp.bfloat16, implementation=form) for form in forms),  # type: ignore[arg-type]
        (made, sorted_rows.token_rows),
        2 * HIDDEN * (rows + tokens) + 4 * pairs,
    )


def check(row: Row, ours: Any, expected: Any) -> None:
    """Both forms give the same, as far as there are rows."""
    if isinstance(expected, ExpertRows):
        rows = int(expected.group_sizes.sum())
        ours, expected = (
            r._replace(row_token=r.row_token[:rows], row_weight=r.row_weight[:rows]) for r in (ours, expected)
        )
    elif expected.dtype == jnp.uint8:
        used = int((-(-row.operands[1] // TILE_ROWS)).sum())
        ours, expected = ours[:used], expected[:used]
    if not jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), ours, expected)):
        raise SystemExit(f"{row.name}: the kernel's result differs from the reference's")


def measure(tokens: int, bandwidth: float) -> None:
    print(f"\n{tokens} tokens, all of them on each rank")
    print("| operation | EP | us | MB | limit us | of copy bandwidth | XLA us | XLA / ours |")
    print("|" + " --- |" * 8)
    rows = list(rows_of(tokens))
    with ThreadPoolExecutor(8) as pool:
        loops = list(pool.map(lambda row: [compiled(row, form, bandwidth) for form in (row.ours, row.xla)], rows))
    for row, forms in zip(rows, loops, strict=True):
        check(row, *(run(*row.operands) for run, _ in forms))
        ours, xla = (seconds_a_call(run, row.operands, calls) for run, calls in forms)
        limit = row.moved / bandwidth
        print(
            f"| {row.name} | {row.ep} | {ours * 1e6:.1f} | {row.moved / 1e6:.1f} | {limit * 1e6:.1f} "
            f"| {limit / ours:.0%} | {xla * 1e6:.1f} | {xla / ours:.1f} |",
            flush=True,
        )


def measure_over_ranks(tokens: int) -> None:
    """The sum of a rank's rows and the all-reduce that follows: ours, ours with psum, and XLA's with psum."""
    devices = jax.devices("gpu")
    mesh = Mesh(np.array(devices).reshape(1, -1), ("data", "model"))
    heap = collectives.mesh_heap(mesh, "model")
    if heap is None:
        raise SystemExit("no symmetric memory between these devices; the warning above says why")
    ranks = len(devices)
    ids, weights = routing(tokens)
    local = EXPERTS // ranks
    token_rows = jnp.concatenate([sort_rows(ids, weights, rank * local, local).token_rows for rank in range(ranks)])
    sharding = NamedSharding(mesh, BY_RANK)
    token_rows = jax.device_put(token_rows, sharding)
    made = jax.jit(
        lambda: jax.random.normal(jax.random.key(2), (ranks * tokens * TOP_K, HIDDEN), jnp.bfloat16),
        out_shardings=sharding,
    )()
    message = 2 * tokens * HIDDEN
    alone = predicted_seconds(choose_algorithm(message, ranks, heap.has_multicast), message, ranks)
    print(
        f"\n{tokens} tokens over {ranks} ranks: the sum of a rank's rows, then the all-reduce (alone, as predicted from"
    )
    print(f"byte counts and what two H200s took: {alone * 1e6:.0f} us)")
    print("| sum | all-reduce | us | XLA's / this |")
    print("|" + " --- |" * 4)
    seconds = {}
    forms: list[tuple[Implementation, Implementation]] = [
        ("reference", "reference"), ("kernel", "reference"), ("kernel", "kernel"), ("auto", "kernel"),
    ]  # fmt: skip
    for summing, reducing in forms:

        def per_rank(
            made: jax.Array, token_rows: jax.Array, epochs: jax.Array, forms: Any = (summing, reducing)
        ) -> tuple[jax.Array, jax.Array]:
            def turn(_: jax.Array, carry: Any) -> Any:
                token_rows, _, epochs = carry
                if forms[0] == "auto":
                    total, epochs = collectives.all_reduce(
                        made, "model", epochs, token_rows=token_rows, implementation=forms[1]
                    )
                else:
                    partial = sum_rows(made, token_rows, jnp.bfloat16, implementation=forms[0])
                    total, epochs = collectives.all_reduce(partial, "model", epochs, implementation=forms[1])
                token_rows, total, epochs = jax.lax.optimization_barrier((token_rows, total, epochs))
                return token_rows, total[0], epochs  # a whole result would be copied to where the loop carries it

            return jax.lax.fori_loop(0, CALLS, turn, (token_rows, jnp.zeros(HIDDEN, jnp.bfloat16), epochs))[1:]

        run = jax.jit(jax.shard_map(per_rank, mesh=mesh, in_specs=BY_RANK, out_specs=BY_RANK, check_vma=False))
        jax.block_until_ready(run(made, token_rows, heap.epochs(armed=False)))  # loads the kernels, waits for none
        epochs = heap.epochs()
        took = median_seconds(lambda: jax.block_until_ready(run(made, token_rows, epochs)), 5)  # noqa: B023
        seconds[summing, reducing] = took / CALLS
        names = {"reference": "XLA", "kernel": "ours", "auto": "as it is sent"}
        cells = f"{names[summing]} | {names[reducing]} | {seconds[summing, reducing] * 1e6:.1f}"
        print(f"| {cells} | {seconds['reference', 'reference'] / seconds[summing, reducing]:.2f} |", flush=True)


def measure_decode() -> None:
    """Decode's dispatch and combine over all GPUs."""
    from expert_parallel_decode import table

    print()
    table(Mesh(np.array(jax.devices("gpu")).reshape(-1, 1), ("data", "model")), [1, 16, 64, 128], [HIDDEN])


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the kernels around the experts' matmuls.")
    parser.add_argument("--tokens", type=int, default=16384, help="of a prefill, on every rank")
    parser.add_argument("--ranks-only", action="store_true", help="leave out what one GPU is enough for")
    parser.add_argument(
        "--predict", type=Path, nargs="+", metavar="MEASURED", help="predict EP 4, 8, 16 from recorded runs"
    )
    parser.add_argument("--out", help="write NAME.txt (with --predict also NAME.png) to bench/results/")
    arguments = parser.parse_args()
    with recorded(arguments.out and f"{arguments.out}.txt"):
        print(header("jax", "jaxlib", "nvidia-cutlass-dsl"))
        if arguments.predict:
            import expert_parallel_model

            expert_parallel_model.predict(arguments.predict, arguments.out)
            return
        if not arguments.ranks_only:
            bandwidth = copy_bandwidth()
            print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; the bar for a prefill is {BAR:.0%} of it")
            measure(arguments.tokens, bandwidth)
        if len(jax.devices()) > 1:
            measure_over_ranks(arguments.tokens)
            measure_decode()


if __name__ == "__main__":
    main()
