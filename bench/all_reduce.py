"""Times our all-reduce beside `psum` (NCCL), both in one run on the GPUs of one host, from 1 KiB to 256 MiB.

    python bench/all_reduce.py [--ranks N] [--kib 1 64 512 ...] [--out NAME]
    python bench/all_reduce.py --predict [--out NAME]

A row a size: bytes of the message on each rank, microseconds a call of each algorithm that may run it and of psum, the
best of ours over psum, GB/s each way (the bytes that a two-shot all-reduce sends, 2 (N-1)/N of the message, whatever
the algorithm), and that over NVLink's rate, the algorithm that is chosen, and its microseconds as predicted from byte
counts and what two H200s took. Calls run in a jitted loop, dispatched once, eight a turn, each over an operand of its
own, a few elements of each result leaving the loop, 50 turns and more: a run copies the operands once to where the loop
has them; the median of five. The sums, of integers, are compared with psum's. NAME.txt and NAME.png are
written to bench/results/. With --predict, no GPU: the rows that the choice of algorithm rests on, and the published
prefill case (four ranks, 16,384 tokens of 4,096 in bf16), all from byte counts and latencies and none of it measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
# XLA would make one all-reduce of a turn's calls of psum.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_all_reduce_combine_threshold_bytes=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from measure import RESULTS, header, median_seconds, recorded

from qwenjax_ffi import all_reduce_kernel, collectives
from qwenjax_ffi.all_reduce_choice import Algorithm, bytes_each_way, choose_algorithm, one_shot_limit, predicted_seconds
from qwenjax_kernels.heap_layout import HeapLayout

NVLINK = {"9.0": 450e9, "10.0": 900e9, "10.3": 900e9}  # bytes a second each way, by datasheet
KIB = 1024
SIZES = [1 << power for power in range(0, 19, 1)]  # in KiB
CALLS_A_TURN = 8  # of the loop, whose own kernels take a few microseconds a turn
PREFILL = 16384 * 4096 * 2  # bytes: the article's prefill, and this project's bar
PUBLISHED = "586 us on H200, 313 us on GB200 (the faster of both transports)"
BY_RANK = PartitionSpec(("data", "model"))

Call = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def sums_and_seconds(mesh: Mesh, call: Call, operands: list[jax.Array]) -> tuple[list[jax.Array], float]:
    """The sums of each operand, on all ranks, and seconds of one call inside a jitted loop."""
    turns = max(50, min(250, (1 << 31) // sum(x.nbytes for x in operands)))

    def once(epochs: jax.Array, operands: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        results = []
        for x in operands:
            sums, epochs = call(x, epochs)
            results.append(sums)
        return results, epochs

    def looped(epochs: jax.Array, operands: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        def turn(_: jax.Array, carry: tuple[list[jax.Array], jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            results, epochs = once(carry[1], operands)
            # A few elements leave the loop: whole results would be copied to where the loop carries them.
            return [sums.reshape(-1)[:8] for sums in jax.lax.optimization_barrier(results)], epochs

        return jax.lax.fori_loop(0, turns, turn, ([x.reshape(-1)[:8] for x in operands], epochs))

    check, run = (
        jax.jit(jax.shard_map(per_rank, mesh=mesh, in_specs=BY_RANK, out_specs=BY_RANK, check_vma=False))
        for per_rank in (once, looped)
    )
    heap = collectives.mesh_heap(mesh, "model")
    assert heap is not None
    for program in (check, run):
        jax.block_until_ready(program(heap.epochs(armed=False), operands))  # loads kernels, waits for no peer
    epochs = heap.epochs()
    sums, _ = check(epochs, operands)
    seconds = median_seconds(lambda: jax.block_until_ready(run(epochs, operands)), 5)
    return sums, seconds / (turns * len(operands))


def calls_of(num_bytes: int, ranks: int, multicast: bool) -> dict[str, Call]:
    """The algorithms that may run a message, and psum."""
    found: dict[str, Call] = {}
    algorithms: list[Algorithm] = ["two_shot", *(["multicast"] if multicast else [])]  # type: ignore[list-item]
    if num_bytes <= HeapLayout(ranks).one_shot_bytes:
        algorithms.insert(0, "one_shot")
    for algorithm in algorithms:
        found[algorithm] = lambda x, e, algorithm=algorithm: all_reduce_kernel.all_reduce(x, e, ranks, algorithm)
    found["psum"] = lambda x, e: collectives.all_reduce(x, "model", e, implementation="reference")
    return found


def integers(mesh: Mesh, elements: int, seed: int) -> list[jax.Array]:
    """Operands of a turn: small integers, whose sums are exact."""

    def make(seed: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), CALLS_A_TURN)
        return [jax.random.randint(key, (elements,), -8, 8, jnp.int8).astype(jnp.bfloat16) for key in keys]

    return jax.jit(make, out_shardings=jax.sharding.NamedSharding(mesh, BY_RANK))(seed)


def measure(mesh: Mesh, sizes: list[int], link: float) -> list[dict[str, Any]]:
    rows = []
    heap = collectives.mesh_heap(mesh, "model")
    if heap is None:
        raise SystemExit("no symmetric memory between these devices; the warning above says why")
    ranks, names = mesh.size, ["one_shot", "two_shot", *(["multicast"] if heap.has_multicast else []), "psum"]
    print(
        "| KiB | "
        + " | ".join(f"{name} us" for name in names)
        + " | psum / ours | GB/s | of NVLink | chosen | predicted us |"
    )
    print("|" + " --- |" * (len(names) + 6))
    for kib in sizes:
        calls = calls_of(kib * KIB, ranks, heap.has_multicast)
        operands = integers(mesh, ranks * kib * KIB // 2, kib)
        measured = {name: sums_and_seconds(mesh, call, operands) for name, call in calls.items()}
        for name, (sums, _) in measured.items():
            if not all(map(jnp.array_equal, sums, measured["psum"][0])):
                raise SystemExit(f"{name}: sums of {kib} KiB differ from psum's")
        seconds = {name: each for name, (_, each) in measured.items()}
        best = min(value for name, value in seconds.items() if name != "psum")
        rate = bytes_each_way("two_shot", kib * KIB, ranks) / best
        cells = [f"{seconds[name] * 1e6:.1f}" if name in seconds else "" for name in names]
        chosen = choose_algorithm(kib * KIB, ranks, heap.has_multicast)
        print(
            f"| {kib} | {' | '.join(cells)} | {seconds['psum'] / best:.2f} | {rate / 1e9:.0f} | {rate / link:.0%} "
            f"| {chosen} | {predicted_seconds(chosen, kib * KIB, ranks) * 1e6:.1f} |",
            flush=True,
        )
        rows.append({"kib": kib, **seconds})
    best_one_shot = [row["kib"] for row in rows if "one_shot" in row and row["one_shot"] <= row["two_shot"]]
    limit = max(best_one_shot, default=0) * KIB
    print(f"\none-shot is the fastest up to {limit} bytes of those measured; the table says {one_shot_limit(ranks)}")
    return rows


def predict() -> None:
    print("PREDICTED from byte counts and latencies (qwenjax_ffi.all_reduce_choice), nothing here was measured.")
    print("| ranks | bytes | one_shot us | two_shot us | multicast us | chosen without / with multicast |")
    print("|" + " --- |" * 6)
    sizes = [1 << 10, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 23, 1 << 26, PREFILL, 1 << 28]
    for ranks in (2, 4, 8, 16):
        for size in sizes:
            one = (
                f"{predicted_seconds('one_shot', size, ranks) * 1e6:.1f}"
                if size <= HeapLayout(ranks).one_shot_bytes
                else ""
            )
            two, switch = (f"{predicted_seconds(name, size, ranks) * 1e6:.1f}" for name in ("two_shot", "multicast"))
            chosen = " / ".join(choose_algorithm(size, ranks, multicast) for multicast in (False, True))
            print(f"| {ranks} | {size} | {one} | {two} | {switch} | {chosen} |")
    print(f"The published prefill case is four ranks and {PREFILL} bytes: {PUBLISHED}.")


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in ("one_shot", "two_shot", "multicast", "psum"):
        points = sorted((row["kib"], row[name] * 1e6) for row in rows if name in row)
        if points:
            label = "psum (NCCL)" if name == "psum" else name
            axes.plot(*zip(*points, strict=True), marker="o", label=label, linestyle="--" if name == "psum" else "-")
    axes.set(xscale="log", yscale="log", xlabel="KiB on each rank (bf16)", ylabel="us a call", title=title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times our all-reduce beside psum (NCCL).")
    parser.add_argument("--ranks", type=int, help="how many GPUs; all by default")
    parser.add_argument("--kib", type=int, nargs="*", default=SIZES, help="message sizes")
    parser.add_argument("--predict", action="store_true", help="print what is predicted, without a GPU")
    parser.add_argument("--out", help="write NAME.txt and NAME.png to bench/results/")
    arguments = parser.parse_args()
    with recorded(arguments.out and f"{arguments.out}.txt"):
        print(header("jax", "jaxlib", "nvidia-cutlass-dsl", "cuda-bindings"))
        if arguments.predict:
            predict()
            return
        devices = jax.devices("gpu")[: arguments.ranks]
        mesh = Mesh(np.array(devices).reshape(1, -1), ("data", "model"))
        link = NVLINK[str(devices[0].compute_capability)]
        print(f"{len(devices)} ranks, one process, NVLink {link / 1e9:.0f} GB/s each way by datasheet\n")
        rows = measure(mesh, arguments.kib, link)
    if arguments.out:
        plot(rows, RESULTS / f"{arguments.out}.png", f"all-reduce, {len(devices)} x {devices[0].device_kind}")


if __name__ == "__main__":
    main()
