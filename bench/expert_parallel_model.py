"""Predicts dispatch and combine for 4, 8 and 16 ranks from what was measured on two. Nothing it prints was measured.

A decode kernel takes a latency, the launch and the hop to a peer's poll, and beside it the bytes that a rank sends over
NVLink at some rate:

    seconds(ranks, tokens) = latency + tokens * (ranks - 1) * P(a token goes to a given rank) * row bytes / rate

A token goes to a rank where one of its top-k experts is: with even routing P = 1 - C(E - E/ranks, k) / C(E, k). Latency
and rate of each kernel are the least squares through the recorded rows of hidden 4096, but that of 64 tokens, which the
fit is held against, as it is against rows of other widths. Every GPU is taken to have the same latency and rate with
more peers: their stores leave beside each other, and a switch gives each its full rate. Rows travel in bf16, on the way
out with eight ids and weights.

The prefill's combine is the local sum at the rate that was measured, and the all-reduce as
qwenjax_ffi.all_reduce_choice predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measure import RESULTS

from qwenjax_ffi.all_reduce_choice import choose_algorithm, predicted_seconds

EXPERTS, TOP_K, HIDDEN = 128, 8, 4096  # Qwen3-235B-A22B
RANKS = (4, 8, 16)
TOKENS = (1, 4, 16, 64, 128)
HELD_OUT = 64  # tokens a rank: the row of the bar
PREFILL_TOKENS = 16384
EXTRA_BYTES = {"dispatch": 8 * TOP_K, "combine": 0}  # of a row, beside its elements
MEASURED = (RESULTS / "expert_parallel_decode.txt", RESULTS / "expert_parallel.md")  # on two H200s
PUBLISHED = [
    "published, dispatch / combine us: TensorRT-LLM GB200 EP=8 22.3 / 34.1 (64 tokens a rank), "
    "pplx H100 EP=8 49.7 / 64.2 (128)",
    "published, prefill combine at EP=4, 16,384 tokens: 730 us on H200, 438 us on GB200",
]


class Measured(NamedTuple):
    """A recorded row: tokens a rank, elements of a row, and the seconds of each kernel, on two ranks."""

    tokens: int
    hidden: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Kernel:
    """A kernel's latency in seconds and its rate in bytes a second."""

    op: str
    latency: float
    rate: float

    def seconds(self, ranks: int, tokens: int, hidden: int = HIDDEN) -> float:
        return self.latency + sent_bytes(self.op, ranks, tokens, hidden) / self.rate


def sent_bytes(op: str, ranks: int, tokens: int, hidden: int) -> float:
    """Bytes that a rank sends to all others, on average."""
    goes = 1 - math.comb(EXPERTS - EXPERTS // ranks, TOP_K) / math.comb(EXPERTS, TOP_K)
    return tokens * (ranks - 1) * goes * (2 * hidden + EXTRA_BYTES[op])


def read(paths: Sequence[Path]) -> tuple[list[Measured], dict[int, float]]:
    """The decode rows of recorded runs, and the seconds of their first local sums by EP (a prefill's)."""
    decode: list[Measured] = []
    sums: dict[int, float] = {}
    columns: list[str] = []
    for line in (line for path in paths for line in path.read_text().splitlines()):
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if "dispatch us" in cells or "operation" in cells:
            columns = cells
        row = dict(zip(columns, cells, strict=False)) if len(cells) == len(columns) else {}
        if row.get("tokens", "").isdigit() and "dispatch us" in row:
            seconds = {op: float(row[f"{op} us"]) * 1e-6 for op in EXTRA_BYTES}
            decode.append(Measured(int(row["tokens"]), int(row["hidden"]), seconds))
        if row.get("operation") == "sum rows":
            sums.setdefault(int(row["EP"]), float(row["us"]) * 1e-6)
    return decode, sums


def fits(row: Measured) -> bool:
    """Whether a row is one that the model is fitted to."""
    return row.hidden == HIDDEN and row.tokens != HELD_OUT


def fitted_kernels(measured: Sequence[Measured]) -> list[Kernel]:
    """Dispatch and combine."""
    fitting = [row for row in measured if fits(row)]
    if len(fitting) < 2:
        raise SystemExit(f"{len(fitting)} rows of hidden {HIDDEN} to fit to; the model needs two")
    return [fitted(fitting, op) for op in EXTRA_BYTES]


def fitted(measured: Sequence[Measured], op: str) -> Kernel:
    """The least squares of latency and seconds a byte."""
    sent = [sent_bytes(op, 2, row.tokens, row.hidden) for row in measured]
    a_byte, latency = np.polyfit(sent, [row.seconds[op] for row in measured], 1)
    if a_byte <= 0:
        raise SystemExit(f"{op} did not take longer with more tokens: no rate can be fitted")
    return Kernel(op, float(latency), 1 / float(a_byte))


def predict(paths: Sequence[Path], out: str | None) -> None:
    """Prints the tables, and draws the decode's to results/`out`.png."""
    measured, sums = read(paths)
    print(f"PREDICTED for {RANKS} ranks from two that were measured ({', '.join(path.name for path in paths)})\n")
    kernels = fitted_kernels(measured)
    predict_decode([row for row in measured if not fits(row)], kernels)
    if out:
        plot([row for row in measured if row.hidden == HIDDEN], kernels, RESULTS / f"{out}.png")
    if sums:
        predict_prefill(sums)
    print("\n" + "\n".join(PUBLISHED))


def predict_decode(held_out: Sequence[Measured], kernels: Sequence[Kernel]) -> None:
    for kernel in kernels:
        print(f"{kernel.op}: latency {kernel.latency * 1e6:.1f} us, {kernel.rate / 1e9:.0f} GB/s")
    print("\nheld against rows that it was not fitted to, two ranks:")
    print("| tokens a rank | hidden | kernel | measured us | model us | model / measured |\n" + "|" + " --- |" * 6)
    for row in held_out:
        for kernel in kernels:
            took, model = row.seconds[kernel.op], kernel.seconds(2, row.tokens, row.hidden)
            print(
                f"| {row.tokens} | {row.hidden} | {kernel.op} | {took * 1e6:.1f} | {model * 1e6:.1f} "
                f"| {model / took:.2f} |"
            )
    print(f"\npredicted dispatch / combine us, hidden {HIDDEN}, top-{TOP_K} of {EXPERTS} experts, even routing:")
    print(f"| tokens a rank | {' | '.join(f'EP={ranks}' for ranks in RANKS)} |\n|" + " --- |" * (1 + len(RANKS)))
    for tokens in TOKENS:
        cells = [" / ".join(f"{kernel.seconds(ranks, tokens) * 1e6:.1f}" for kernel in kernels) for ranks in RANKS]
        print(f"| {tokens} | {' | '.join(cells)} |")


def predict_prefill(sums: dict[int, float]) -> None:
    """Local sums of more ranks at the rate of the largest EP that was measured; the all-reduce over peer memory."""
    ep = max(sums)
    rate = sum_bytes(ep) / sums[ep]
    message = 2 * HIDDEN * PREFILL_TOKENS
    print(f"\nprefill, {PREFILL_TOKENS} tokens: local sum at {rate / 1e12:.2f} TB/s (measured at EP={ep}), all-reduce")
    print("| EP | local sum us | all-reduce us | together us |\n|" + " --- |" * 4)
    for ranks in RANKS:
        local = sums.get(ranks, sum_bytes(ranks) / rate)
        reducing = predicted_seconds(choose_algorithm(message, ranks, multicast=False), message, ranks)
        note = " (measured)" if ranks in sums else ""
        print(f"| {ranks} | {local * 1e6:.0f}{note} | {reducing * 1e6:.0f} | {(local + reducing) * 1e6:.0f} |")


def sum_bytes(ranks: int) -> float:
    """What the local sum moves: a rank's rows, and every token's sum."""
    return 2 * HIDDEN * PREFILL_TOKENS * (TOP_K / ranks + 1)


def plot(measured: Sequence[Measured], kernels: Sequence[Kernel], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(kernels), figsize=(10, 4), sharey=True)
    for axes, kernel in zip(panels, kernels, strict=True):
        took = [row.seconds[kernel.op] * 1e6 for row in measured]
        axes.plot([row.tokens for row in measured], took, "o", color="black", label="EP=2, measured")
        for ranks in (2, *RANKS):
            model = [kernel.seconds(ranks, tokens) * 1e6 for tokens in TOKENS]
            axes.plot(TOKENS, model, "--", color="black" if ranks == 2 else None, label=f"EP={ranks}, predicted")
        axes.set(xscale="log", title=kernel.op, xlabel="tokens a rank", ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("us a call")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
