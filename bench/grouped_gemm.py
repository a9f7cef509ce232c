"""Times the grouped GEMM beside the hardware's limits and its peers, all in one run on one GPU.

    python bench/grouped_gemm.py [--shapes 30b_up ...] [--rows 1 8 64 375] [--no-peers] [--out FILE]

A row a shape and number of rows an expert (every expert has as many), with MXFP8 weights: microseconds a call, TB/s of
weights, TB/s of everything that must move (weights, rows read once, results), TFLOP/s, the share of the roof, our own
time with bf16 weights, and the peers' times over ours. The roof is the larger of bytes over the measured copy bandwidth
and operations over the measured matmul rate. Peers: torch's `_grouped_mm` (bf16) and `_scaled_grouped_mm` (FP8, a scale
a row), and `jax.lax.ragged_dot`.

Every call reads weights that no recent call has read: the layers of a stack larger than the L2 in turn, our calls in
a jitted loop, torch's in a CUDA graph. Times are the median of five runs, the loop's dispatch taken out by running it
at two lengths.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from measure import copy_bandwidth

from qwenjax_ffi import grouped_gemm_kernel as kernels
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder, packed_shape

L2_BYTES = 60 << 20
MIN_LAYERS = 16  # calls of a turn of the loop, which costs a few microseconds by itself
SHORT, LONG = 2, 8  # turns of the loop

Weights = Literal["mxfp8", "bf16"]


@dataclass(frozen=True)
class Shape:
    """An expert matmul: `groups` matrices of [outputs, k]; gate and up count as one matmul of both."""

    name: str
    groups: int
    k: int
    outputs: int
    gate_up: bool

    @property
    def width(self) -> int:
        return self.outputs // 2 if self.gate_up else self.outputs

    @property
    def layers(self) -> int:
        """Of a stack of one-byte weights that is four times as large as the L2.

        A turn calls each layer once: XLA makes one call of two that are alike.
        """
        return max(MIN_LAYERS, -(-4 * L2_BYTES // (self.groups * self.outputs * self.k)))


SHAPES = [
    Shape("30b_up", 128, 2048, 1536, True),
    Shape("30b_down", 128, 768, 2048, False),
    Shape("235b_up_ep8", 16, 4096, 3072, True),
    Shape("235b_down_ep8", 16, 1536, 4096, False),
]
# One token an expert at the shares of 235B's 128 experts that a rank holds: the article's decode benchmark.
SHARES = [
    shape
    for ep in (4, 16, 32, 64)
    for shape in (
        Shape(f"235b_up_ep{ep}", 128 // ep, 4096, 3072, True),
        Shape(f"235b_down_ep{ep}", 128 // ep, 1536, 4096, False),
    )
]


def median_seconds(run: Callable[[], Any], runs: int = 5) -> float:
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def seconds_a_call(call: Callable[..., jax.Array], shape: Shape, arguments: tuple[Any, ...]) -> float:
    """Seconds of one call inside a jitted loop over the layers."""
    layers = [jnp.asarray([layer], jnp.int32) for layer in range(shape.layers)]

    def program(turns: int) -> Callable[..., Any]:
        def run(*arguments: Any) -> list[jax.Array]:
            def turn(_: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
                return [call(layer, *arguments) for layer in layers]

            return jax.lax.fori_loop(0, turns, turn, turn(jnp.int32(0), []))

        return jax.jit(run)

    seconds = {}
    for turns in (SHORT, LONG):
        compiled = program(turns)
        seconds[turns] = median_seconds(lambda compiled=compiled: jax.block_until_ready(compiled(*arguments)))
    return (seconds[LONG] - seconds[SHORT]) / ((LONG - SHORT) * len(layers))


def matmul_rate() -> float:
    """Operations a second of an 8192 cubed bf16 product."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16) * jnp.bfloat16(2.0**-7)

    def seconds(times: int) -> float:
        run = jax.jit(lambda x, w: jax.lax.fori_loop(0, times, lambda i, x: x @ w, x))
        return median_seconds(lambda: jax.block_until_ready(run(x, w)))

    return 16 * 2 * 8192**3 / (seconds(20) - seconds(4))


def our_seconds(shape: Shape, rows_each: int, weights: Weights = "mxfp8") -> float:
    """Our kernel with balanced groups; gate/up gathers an eighth as many tokens as it has rows."""
    rows = shape.groups * rows_each
    logical = (shape.layers, shape.groups, shape.outputs, shape.k)
    order: RowOrder = "gate_up" if shape.gate_up else "plain"
    tokens = max(rows // 8, 1) if shape.gate_up else rows

    @jax.jit
    def made() -> tuple[Any, ...]:
        weight, x, tokens_or_factors = (jax.random.key(seed) for seed in range(3))
        return (
            random_weight(weight, logical, order, weights),
            jnp.full(shape.groups, rows_each, jnp.int32),
            jax.random.normal(x, (tokens, shape.k), jnp.bfloat16),
            jax.random.randint(tokens_or_factors, (rows,), 0, tokens),
            jax.random.uniform(tokens_or_factors, (rows,)),
        )

    def call(layer: jax.Array, w: Any, sizes: Any, x: Any, row_token: Any, factors: Any) -> jax.Array:
        if shape.gate_up:
            return kernels.moe_gate_up(x, row_token, sizes, w, layer)
        return kernels.moe_down(x, sizes, w, factors, layer)

    return seconds_a_call(call, shape, made())


def random_weight(key: jax.Array, logical: tuple[int, ...], order: RowOrder, weights: Weights) -> Any:
    """Random data: zeros run faster."""
    if weights == "bf16":
        bits = jax.random.bits(key, logical, jnp.uint16) & jnp.uint16(0xBFFF)  # below 2
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    # Bit 3 and 4 of each byte cleared, no element is NaN; scales of 2^-12.
    data = jax.random.bits(key, packed_shape(logical, order), jnp.uint8) & jnp.uint8(0xE7)
    return PackedMXFP8Weight(data.at[..., -256:].set(115), *logical[-2:], order)


def ragged_dot_seconds(shape: Shape, rows_each: int) -> float:
    """jax.lax.ragged_dot with bf16 weights, without gather, SwiGLU or routing weights."""
    rows = shape.groups * rows_each
    x = jax.random.normal(jax.random.key(3), (rows, shape.k), jnp.bfloat16)
    one = (shape.groups, shape.k, shape.outputs)
    stack = [jax.random.normal(jax.random.key(layer), one, jnp.bfloat16) for layer in range(2)]
    sizes = jnp.full(shape.groups, rows_each, jnp.int32)
    run = jax.jit(lambda x, s, *ws: [jax.lax.ragged_dot(x, w, s) for w in ws])
    return median_seconds(lambda: jax.block_until_ready(run(x, sizes, *stack))) / len(stack)


def torch_seconds(shape: Shape, rows_each: int) -> tuple[float, float]:
    """torch's bf16 and FP8 (a scale a row) grouped matmuls in a CUDA graph, over as many weights as our layers."""
    import torch

    rows = shape.groups * rows_each
    x = torch.randn(rows, shape.k, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(1, shape.groups + 1, device="cuda", dtype=torch.int32) * rows_each
    weights = [
        torch.randn(shape.groups, shape.outputs, shape.k, device="cuda", dtype=torch.bfloat16)
        for _ in range(shape.layers)
    ]
    x8, weights8 = x.to(torch.float8_e4m3fn), [w.to(torch.float8_e4m3fn) for w in weights]
    scale_x = torch.ones(rows, device="cuda")
    scale_w = torch.ones(shape.groups, shape.outputs, device="cuda")

    def bf16(layer: int) -> Any:
        return torch._grouped_mm(x, weights[layer].transpose(-2, -1), offs=ends)

    def fp8(layer: int) -> Any:
        w = weights8[layer].transpose(-2, -1)
        return torch._scaled_grouped_mm(
            x8, w, scale_x, scale_w, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return graph_seconds(bf16, shape), graph_seconds(fp8, shape)


def graph_seconds(call: Callable[[int], Any], shape: Shape) -> float:
    """Seconds of one torch call, of a layer, in a CUDA graph over the layers."""
    import torch

    try:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in [*range(shape.layers)] * 4:
                call(layer)
    except RuntimeError as error:
        print(f"# a torch peer does not run: {str(error).splitlines()[0]}", file=sys.stderr)
        return float("nan")

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return median_seconds(run) / (4 * shape.layers)


def measure(shape: Shape, rows_each: int, bandwidth: float, rate: float, peers: bool) -> str:
    rows = shape.groups * rows_each
    weight_bytes = shape.groups * shape.outputs * shape.k * 33 / 32
    tokens = max(rows // 8, 1) if shape.gate_up else rows
    moved = weight_bytes + 2 * tokens * shape.k + 2 * rows * shape.width
    operations = 2 * rows * shape.outputs * shape.k
    roof = max(moved / bandwidth, operations / rate)
    ours = our_seconds(shape, rows_each)
    cells = [
        f"{shape.name} | {rows_each} | {ours * 1e6:.1f}",
        f"{weight_bytes / ours / 1e12:.2f} | {moved / ours / 1e12:.2f} | {operations / ours / 1e12:.0f}",
        f"{roof * 1e6:.1f} | {roof / ours:.0%}",
        f"{our_seconds(shape, rows_each, 'bf16') * 1e6:.1f}",
    ]
    if peers:
        times = [*torch_seconds(shape, rows_each), ragged_dot_seconds(shape, rows_each)]
        cells += [f"{peer * 1e6:.0f} ({peer / ours:.2f}x)" for peer in times]
    return "| " + " | ".join(cells) + " |"


def environment() -> list[str]:
    """What the numbers were measured with."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "nvidia-cutlass-dsl")]
    proc = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?", proc.read_text()) if proc.exists() else None
    driver = found.group() if found else "unknown"
    return [f"one {jax.devices()[0].device_kind}, driver {driver}", *versions]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the grouped GEMM beside its limits and peers.")
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64, 375])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    known = {shape.name: shape for shape in [*SHAPES, *SHARES]}
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    lines = [
        f"`python bench/grouped_gemm.py {' '.join(sys.argv[1:])}`".rstrip(),
        ", ".join(environment()),
        f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s",
        "",
    ]
    header = "| shape | rows an expert | us | TB/s weights | TB/s all | TFLOP/s | roof us | of roof | ours bf16 us |"
    peers = not arguments.no_peers
    header += " torch bf16 us | torch FP8 us | ragged_dot us |" if peers else ""
    lines += [header, "|" + " --- |" * (header.count("|") - 1)]
    print("\n".join(lines), flush=True)
    for name in arguments.shapes:
        for rows_each in arguments.rows:
            lines.append(measure(known[name], rows_each, bandwidth, rate, peers))
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
