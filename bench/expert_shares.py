"""The experts of one MoE layer of Qwen3-235B at decode, by the share that a rank holds and the format of the weights.

    python bench/expert_shares.py [--formats MXFP8 ...] [--record expert-shares.txt]    (a GPU, torch and Triton)
    python bench/expert_shares.py --plot bench/results/expert-shares.txt                (matplotlib)

Every expert of a rank is active with one token; EP = 4 to 64 ranks share the 128 experts. A line a share and format:
microseconds of the gate/up matmul, of the down matmul and of both, and the roof, weights over the measured copy
bandwidth. Formats: bf16 (ours, and torch's `_grouped_mm`), FP8 with a scale per 128 x 128 (`fp8_block`, in Triton, its
best of six tilings) and MXFP8 (ours). Ours includes gather, SwiGLU and routing weight; the peers are the matmul alone.
`--plot` draws what such runs printed, as PNG beside the text.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from grouped_gemm import SHAPES, SHARES, Shape, graph_seconds, our_seconds
from measure import copy_bandwidth, header, recorded

EXPERT_PARALLEL = (64, 32, 16, 8, 4)
BYTES = {"bf16": 2.0, "bf16-torch": 2.0, "FP8-128x128-Triton": 1 + 4 / 128**2, "MXFP8": 33 / 32}
TILINGS = [(block_n, stages) for block_n in (64, 128) for stages in (3, 4, 6)]


def torch_bf16_seconds(shape: Shape) -> float:
    import torch

    x = torch.randn(shape.groups, shape.k, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(1, shape.groups + 1, device="cuda", dtype=torch.int32)
    size = (shape.groups, shape.outputs, shape.k)
    weights = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(shape.layers)]
    return graph_seconds(lambda layer: torch._grouped_mm(x, weights[layer].transpose(-2, -1), offs=ends), shape)


def fp8_block_seconds(shape: Shape) -> float:
    import torch
    from fp8_block import BLOCK, grouped_matmul, reference

    n, k = shape.outputs, shape.k
    x = torch.randn(shape.groups, k, device="cuda").to(torch.float8_e4m3fn)
    x_scales = torch.rand(shape.groups, k // BLOCK, device="cuda") + 0.5
    weights = [torch.randn(shape.groups, n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(shape.layers)]
    scales = torch.rand(shape.groups, n // BLOCK, k // BLOCK, device="cuda") + 0.5
    out = torch.full((shape.groups, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    grouped_matmul(x, x_scales, weights[0], scales, out)
    expected = reference(x, x_scales, weights[0], scales)
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < 0.01:
        raise RuntimeError(f"the FP8 peer is wrong: normwise error {error}")

    def seconds(block_n: int, stages: int) -> float:
        call: Callable[[int], None] = lambda layer: grouped_matmul(  # noqa: E731
            x, x_scales, weights[layer], scales, out, block_n, stages
        )
        return graph_seconds(call, shape)

    return min(time for tiling in TILINGS if not math.isnan(time := seconds(*tiling)))


FORMATS: dict[str, Callable[[Shape], float]] = {
    "bf16": lambda shape: our_seconds(shape, 1, "bf16"),
    "bf16-torch": torch_bf16_seconds,
    "FP8-128x128-Triton": fp8_block_seconds,
    "MXFP8": lambda shape: our_seconds(shape, 1),
}


def plot(text: Path) -> None:
    """Microseconds of both matmuls over EP, the roofs of ours dashed, from the lines that runs printed."""
    from matplotlib.figure import Figure

    found = re.findall(r"^EP=(\d+) +(\S+) +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+)$", text.read_text(), re.M)
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for name in FORMATS:
        points = sorted((int(ranks), float(both), float(roof)) for ranks, line, both, roof in found if line == name)
        if not points:
            continue
        ranks, both, roofs = zip(*points, strict=True)
        (line,) = axes.plot(ranks, both, marker="o", label=name)
        if name in ("bf16", "MXFP8"):
            axes.plot(ranks, roofs, linestyle="--", linewidth=1, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(EXPERT_PARALLEL, [f"EP={ranks}" for ranks in EXPERT_PARALLEL])
    ticks = [2**i for i in range(3, 10)]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylabel("microseconds a layer, gate/up and down")
    axes.set_title("Experts of a Qwen3-235B layer, one token each, one H200 (dashed: copy bandwidth)", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(text.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a rank's experts at decode, by share and weight format.")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what is in FILE, beside it; measure nothing")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.plot)
        return
    shapes = {shape.name: shape for shape in (*SHAPES, *SHARES)}
    with recorded(arguments.record):
        print(header("jax", "nvidia-cutlass-dsl", "torch", "triton"))
        bandwidth = copy_bandwidth()
        print(f"copy bandwidth: {bandwidth / 1e12:.2f} TB/s\n")
        print(
            f"{'share':<6} {'weights':<20} {'gate/up us':>10} {'down us':>8} {'both us':>8} {'roof us':>8}", flush=True
        )
        for name in arguments.formats:
            for ranks in EXPERT_PARALLEL:
                up, down = shapes[f"235b_up_ep{ranks}"], shapes[f"235b_down_ep{ranks}"]
                of_up, of_down = (FORMATS[name](shape) * 1e6 for shape in (up, down))
                elements = sum(shape.groups * shape.outputs * shape.k for shape in (up, down))
                roof = elements * BYTES[name] / bandwidth * 1e6
                print(f"EP={ranks:<3} {name:<20} {of_up:>10.1f} {of_down:>8.1f} {of_up + of_down:>8.1f} {roof:>8.1f}")
                print(end="", flush=True)


if __name__ == "__main__":
    main()
