"""Times decode's dispatch and combine beside XLA's all_to_all (NCCL), both in one run on the GPUs of one host.

    python bench/expert_parallel_decode.py [--ranks N] [--tokens 1 4 ...] [--hidden 4096 2048] [--out NAME]

A row a number of tokens a rank: microseconds a call of each kernel and of its reference, how many times as fast the
kernel is, and the limit: the bytes that the busiest rank sends, each row once to each other rank that has one of its
experts, over NVLink's rate by datasheet; and what expert_parallel_model.py predicts from two ranks. bf16 rows, top-8 of
128 experts, routes drawn at random. Calls run in a jitted loop, eight a turn, each with the epochs of the last and
results of its own; the median of five. What the kernels return is first compared with the references'. NAME.txt is
written to bench/results/.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax
import jax.numpy as jnp
import numpy as np
from expert_parallel_model import MEASURED, Kernel, fitted_kernels, read
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measure import header, median_seconds, recorded

from qwenjax_ffi import collectives
from qwenjax_ffi.implementation import Implementation
from qwenjax_ffi.token_exchange import Dispatched, combine, dispatch
from qwenjax_ffi.token_exchange_kernel import ExchangeRows

NVLINK = {"9.0": 450e9, "10.0": 900e9, "10.3": 900e9}  # bytes a second each way, by datasheet
EXPERTS, TOP_K = 128, 8
TOKENS = [1, 4, 16, 64, 128, 256]
HIDDEN = [4096, 2048]
BARS = (20.0, 25.0)  # us, dispatch and combine at 1 to 64 tokens, hidden 4096, two ranks
PUBLISHED = """published, of 64 tokens a rank, hidden 4096, top-8, unless said (dispatch / combine, us):
TensorRT-LLM GB200 EP=8 22.3 / 34.1; pplx H100 EP=8 128 tokens 49.7 / 64.2; DeepEP 42.6 / 72.0"""
CALLS_A_TURN = 8  # of the loop, whose own kernels take a few microseconds a turn
BY_RANK = PartitionSpec(("data", "model"))
ROWS = ExchangeRows(max(TOKENS), max(HIDDEN), TOP_K, jnp.bfloat16)

Implementations: tuple[Implementation, ...] = ("kernel", "reference")


def on_ranks(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Per-rank code as a jitted function whose kernels are loaded on the first call, before one waits for a peer."""
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=BY_RANK, out_specs=BY_RANK, check_vma=False))
    heap = collectives.mesh_heap(mesh, "data", ROWS)
    assert heap is not None
    loaded = []

    def call(*arguments: jax.Array) -> Any:
        if not loaded:
            jax.block_until_ready(run(heap.epochs(armed=False), *arguments))
            loaded.append(True)
        return run(heap.epochs(), *arguments)

    return call


def seconds_a_call(mesh: Mesh, step: Callable[..., Any], arguments: tuple[jax.Array, ...], turns: int) -> float:
    """step: (epochs, *arguments) -> (results, epochs), per rank; timed inside a loop of `turns`."""

    def loop(epochs: jax.Array, *arguments: jax.Array) -> Any:
        shapes = [jax.eval_shape(step, epochs, *arguments)[0]] * CALLS_A_TURN
        results = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        def turn(_: jax.Array, carry: Any) -> Any:
            results, epochs = [], carry[1]
            for _ in range(CALLS_A_TURN):
                # Through the barrier, or XLA would take what does not change out of the loop.
                arguments_now, epochs = jax.lax.optimization_barrier((arguments, epochs))
                result, epochs = step(epochs, *arguments_now)
                results.append(result)
            return results, epochs

        return jax.lax.fori_loop(0, turns, turn, (results, epochs))

    run = on_ranks(mesh, loop)
    return median_seconds(lambda: jax.block_until_ready(run(*arguments)), 5) / (turns * CALLS_A_TURN)


def sending(implementation: Implementation, per_rank: int, epochs: jax.Array, *operands: jax.Array) -> Any:
    return dispatch(*operands, per_rank, "data", epochs, implementation=implementation)  # type: ignore[misc]


def bringing(implementation: Implementation, epochs: jax.Array, *operands: jax.Array) -> Any:
    return combine(*operands, "data", epochs, implementation=implementation)  # type: ignore[misc]


def check(mesh: Mesh, there: dict[str, Dispatched], homes: dict[str, jax.Array], tokens: int) -> None:
    """Raises SystemExit where the kernels' results are not those of the references."""
    ours, theirs = (there[name] for name in Implementations)
    used = np.arange(tokens) < np.asarray(theirs.counts).reshape(mesh.size, mesh.size, 1)
    for name in Dispatched._fields:
        a, b = (np.asarray(getattr(value, name)) for value in (ours, theirs))
        if name == "x":
            a, b = (value.reshape(*used.shape, -1)[used] for value in (a, b))
        if not np.array_equal(a, b):
            raise SystemExit(f"{tokens} tokens: {name} of the kernel differs from the reference's")
    if not np.array_equal(*(np.asarray(homes[name]) for name in Implementations)):
        raise SystemExit(f"{tokens} tokens: the sums of the kernel differ from the reference's")


def row(mesh: Mesh, tokens: int, hidden: int, link: float, turns: int, kernels: dict[str, Kernel]) -> str:
    ranks = mesh.size
    draw = np.random.default_rng(tokens)
    ids = np.stack([draw.permutation(EXPERTS)[:TOP_K] for _ in range(ranks * tokens)]).astype(np.int32)
    values = draw.normal(size=(ranks * tokens, hidden)).astype(jnp.bfloat16), ids, draw.random(ids.shape, np.float32)
    operands = tuple(jax.device_put(value, NamedSharding(mesh, BY_RANK)) for value in values)
    per_rank = EXPERTS // ranks
    there, homes, seconds = {}, {}, {}
    for name in Implementations:
        send, bring = functools.partial(sending, name, per_rank), functools.partial(bringing, name)
        there[name], _ = on_ranks(mesh, send)(*operands)
        back = there["kernel"].x, there["kernel"].counts, there["kernel"].slots
        homes[name], _ = on_ranks(mesh, bring)(*back)
        seconds["dispatch", name] = seconds_a_call(mesh, send, operands, turns)
        seconds["combine", name] = seconds_a_call(mesh, bring, back, turns)
    check(mesh, there, homes, tokens)
    slots = np.asarray(there["reference"].slots).reshape(ranks, tokens, ranks)
    sent = [int((slots[rank] >= 0).sum() - (slots[rank, :, rank] >= 0).sum()) for rank in range(ranks)]
    cells = [str(tokens), str(hidden)]
    for op, extra in (("dispatch", 8 * TOP_K), ("combine", 0)):
        ours, theirs = (seconds[op, name] for name in Implementations)
        limit = max(sent) * (2 * hidden + extra) / link
        predicted = kernels[op].seconds(ranks, tokens, hidden)
        cells += [f"{ours * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{theirs / ours:.2f}", f"{limit * 1e6:.2f}"]
        cells.append(f"{predicted * 1e6:.1f}")
    return "| " + " | ".join(cells) + " |"


def table(mesh: Mesh, tokens: list[int], hidden: list[int], turns: int = 50) -> None:
    """Prints the table for a decode mesh (data=N, model=1) of GPUs, with the bars and the published figures."""
    if collectives.mesh_heap(mesh, "data", ROWS) is None:
        raise SystemExit("no symmetric memory between these devices; the warning above says why")
    link = NVLINK[str(mesh.devices.flat[0].compute_capability)]
    print(f"decode, {mesh.size} ranks, one process, NVLink {link / 1e9:.0f} GB/s each way by datasheet")
    print(f"bars: {BARS[0]:.0f} / {BARS[1]:.0f} us at 1 to 64 tokens, hidden 4096, two ranks\n{PUBLISHED}\n")
    names = ["tokens", "hidden"]
    for op in ("dispatch", "combine"):
        names += [f"{op} us", "XLA us", "XLA / ours", "limit us", "predicted us"]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    measured, _ = read(MEASURED)
    kernels = {kernel.op: kernel for kernel in fitted_kernels(measured)}
    for width in hidden:
        for count in tokens:
            print(row(mesh, count, width, link, turns, kernels), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times decode's dispatch and combine beside XLA's all_to_all.")
    parser.add_argument("--ranks", type=int, help="how many GPUs; all by default")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="tokens a rank")
    parser.add_argument("--hidden", type=int, nargs="*", default=HIDDEN, help="elements of a row")
    parser.add_argument("--turns", type=int, default=50, help=f"turns of a loop of {CALLS_A_TURN} calls")
    parser.add_argument("--out", help="write NAME.txt to bench/results/")
    arguments = parser.parse_args()
    with recorded(arguments.out and f"{arguments.out}.txt"):
        print(header("jax", "jaxlib", "nvidia-cutlass-dsl", "cuda-bindings"))
        mesh = Mesh(np.array(jax.devices("gpu")[: arguments.ranks]).reshape(-1, 1), ("data", "model"))
        table(mesh, arguments.tokens, arguments.hidden, arguments.turns)


if __name__ == "__main__":
    main()
