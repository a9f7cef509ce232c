"""Times decode's dispatch and combine alone, captured in CUDA graphs without JAX, on the GPUs of one host.

    python bench/expert_parallel_graph.py [--ranks N] [--tokens 1 4 ...] [--hidden 4096 2048] [--out NAME]

What bench/expert_parallel_decode.py times from JAX has XLA's copies of results and its launches in it; a decode step
that XLA captures is between the two. A graph of 100 calls a rank, launched on all ranks together; the median of seven,
of the slowest rank. bf16 rows, top-8 of 128 experts, routes drawn at random; results are first held against their
definition in numpy. One process drives all GPUs. NAME.txt is written to bench/results/.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
from measure import header, recorded

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the launcher of ranks without JAX, which the tests have

from tests.kernels import exchange_ranks as exchange  # noqa: E402
from tests.kernels.gpu_ranks import Ranks, call  # noqa: E402

EXPERTS, TOP_K = 128, 8
TOKENS = [1, 4, 16, 64, 128, 256]
HIDDEN = [4096, 2048]
CALLS, REPEATS = 100, 7
NVLINK = 450e9  # bytes a second each way, NVLink4 by datasheet


def microseconds(ranks: Ranks, launch: Callable[[int], None]) -> float:
    """Of one call in a graph of CALLS, by events on every rank's stream: the slowest rank's."""
    graphs = {}
    for rank, stream in ranks.streams.items():
        ranks.driver._enter(ranks.local[rank])
        call("cuStreamBeginCapture", stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for _ in range(CALLS):
            launch(rank)
        graphs[rank] = call("cuGraphInstantiate", call("cuStreamEndCapture", stream), 0)
        call("cuGraphUpload", graphs[rank], stream)
    ranks.synchronise()
    times = []
    for _ in range(REPEATS + 1):
        events = {}
        for rank, stream in ranks.streams.items():
            ranks.driver._enter(ranks.local[rank])
            events[rank] = [call("cuEventCreate", 0) for _ in range(2)]
            call("cuEventRecord", events[rank][0], stream)
            call("cuGraphLaunch", graphs[rank], stream)
            call("cuEventRecord", events[rank][1], stream)
        ranks.synchronise()
        times.append(max(call("cuEventElapsedTime", *pair) for pair in events.values()) * 1e3 / CALLS)
    ranks.memory.check()
    return statistics.median(times[1:])


def row(size: int, tokens: int, hidden: int) -> str:
    shape = exchange.Shape(size, "bfloat16", tokens, hidden, TOP_K, EXPERTS)
    case = exchange.make_case(shape, exchange.routings(shape, 0)["random"], 0, integers=False)
    ranks = exchange.make_ranks(shape)
    layer = exchange.Layer(ranks, shape, [case])
    kernels: dict[str, Any] = {
        "dispatch": exchange.compiled_dispatch(shape),
        "combine": exchange.compiled_combine(shape),
    }
    exchange.load(ranks, layer, kernels["dispatch"], kernels["combine"])
    for step, kernel in kernels.items():
        for rank in ranks.local:
            getattr(layer, step)(kernel, rank, 0)
    ranks.synchronise()
    for rank in ranks.local:
        case.check(shape, rank, layer.dispatched(rank), layer.combined(layer.out[rank]), f"rank {rank}")

    def dispatch(rank: int) -> None:
        x, *others = layer.operands[0][rank]
        ranks.launch(kernels["dispatch"], rank, x, *others, *layer.results[rank])

    def combine(rank: int) -> None:
        ranks.launch(kernels["combine"], rank, layer.partials[0][rank], *layer.results[rank][3:], layer.out[rank])

    times = [microseconds(ranks, launch) for launch in (dispatch, combine)]
    ranks.close()
    sent = max(int((case.slots[r] >= 0).sum() - (case.slots[r, :, r] >= 0).sum()) for r in range(size))
    limits = [sent * (2 * hidden + extra) / NVLINK * 1e6 for extra in (8 * TOP_K, 0)]
    cells = [f"{time:.1f} | {limit:.2f}" for time, limit in zip(times, limits, strict=True)]
    return f"| {tokens} | {hidden} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times decode's dispatch and combine in CUDA graphs without JAX.")
    parser.add_argument("--ranks", type=int, help="how many GPUs; all by default")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="tokens a rank")
    parser.add_argument("--hidden", type=int, nargs="*", default=HIDDEN, help="elements of a row")
    parser.add_argument("--out", help="write NAME.txt to bench/results/")
    arguments = parser.parse_args()
    call("cuInit", 0)
    size = arguments.ranks or call("cuDeviceGetCount")
    with recorded(arguments.out and f"{arguments.out}.txt"):
        print(header("nvidia-cutlass-dsl", "cuda-bindings"))
        print(f"{size} ranks, one process, graphs of {CALLS} calls; limit: bytes sent over {NVLINK / 1e9:.0f} GB/s\n")
        print("| tokens | hidden | dispatch us | limit us | combine us | limit us |\n|" + " --- |" * 6)
        for hidden in arguments.hidden:
            for tokens in arguments.tokens:
                print(row(size, tokens, hidden), flush=True)


if __name__ == "__main__":
    main()
