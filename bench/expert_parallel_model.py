"""Predicts dispatch and combine for 4, 8 and 16 ranks from what was measured on two. Nothing it prints was measured.

A decode kernel takes a latency, the launch and the hop to a peer and back to its poll, and beside it the bytes that a
rank sends over NVLink at some rate:

    seconds(ranks, tokens) = latency + tokens * (ranks - 1) * P(a token goes to a given rank) * row bytes / rate

A token goes to a rank where one of its top-k experts is: with even routing P = 1 - C(E - E/ranks, k) / C(E, k).
Latency and rate of each kernel are fitted to two rows of the recorded run, the fewest tokens and the most; the rows
between are what the fit is held against. Every GPU is taken to have the same latency and rate with more peers: their
stores leave beside each other, and a switch gives each its full rate. Rows travel in bf16, with eight ids and weights
on the way out.

The prefill's combine is the local sum at the rate that was measured, and the all-reduce as
qwenjax_ffi.all_reduce_choice predicts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from measure import RESULTS

from qwenjax_ffi.all_reduce_choice import choose_algorithm, predicted_seconds

EXPERTS, TOP_K, HIDDEN = 128, 8, 4096  # Qwen3-235B-A22B
RANKS = (4, 8, 16)
TOKENS = (1, 4, 16, 64, 128)
PREFILL_TOKENS = 16384
ROW_BYTES = {"dispatch": 2 * HIDDEN + 8 * TOP_K, "combine": 2 * HIDDEN}
PUBLISHED = [
    "published, dispatch / combine us: TensorRT-LLM GB200 EP=8 22.3 / 34.1 (64 tokens a rank), "
    "pplx H100 EP=8 49.7 / 64.2 (128)",
    "published, prefill combine at EP=4, 16,384 tokens: 730 us on H200, 438 us on GB200",
]

Measured = dict[int, dict[str, float]]  # seconds of "dispatch" and "combine" by tokens a rank, on two ranks


@dataclass(frozen=True)
class Kernel:
    """A kernel's latency in seconds and its rate in bytes a second."""

    latency: float
    rate: float
    row_bytes: int

    def seconds(self, ranks: int, tokens: int) -> float:
        return self.latency + sent_rows(ranks, tokens) * self.row_bytes / self.rate


def sent_rows(ranks: int, tokens: int) -> float:
    """Rows that a rank sends to all others, on average."""
    goes = 1 - math.comb(EXPERTS - EXPERTS // ranks, TOP_K) / math.comb(EXPERTS, TOP_K)
    return tokens * (ranks - 1) * goes


def read(path: Path) -> tuple[Measured, dict[int, float]]:
    """The decode rows of hidden 4096 of a recorded run, and the seconds of its local sums by EP (prefill)."""
    decode: Measured = {}
    sums: dict[int, float] = {}
    columns: list[str] = []
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if "dispatch us" in cells or "operation" in cells:
            columns = cells
        row = dict(zip(columns, cells, strict=False))
        if row.get("hidden") == str(HIDDEN) and row.get("tokens", "").isdigit():
            decode[int(row["tokens"])] = {op: float(row[f"{op} us"]) * 1e-6 for op in ROW_BYTES}
        if row.get("operation") == "sum rows" and len(cells) == len(columns):
            sums.setdefault(int(row["EP"]), float(row["us"]) * 1e-6)
    return decode, sums


def fitted(measured: Measured, op: str) -> Kernel:
    """The kernel through the rows of the fewest tokens and the most."""
    fewest, most = min(measured), max(measured)
    sent = (sent_rows(2, most) - sent_rows(2, fewest)) * ROW_BYTES[op]
    slope = max(measured[most][op] - measured[fewest][op], 1e-9) / sent
    latency = measured[fewest][op] - sent_rows(2, fewest) * ROW_BYTES[op] * slope
    return Kernel(latency, 1 / slope, ROW_BYTES[op])


def predict(path: Path, out: str | None) -> None:
    """Prints the tables, and draws the decode's to results/`out`.png."""
    measured, sums = read(path)
    print(f"PREDICTED for {RANKS} ranks from two that were measured ({path.name})\n")
    if len(measured) >= 3:
        kernels = {op: fitted(measured, op) for op in ROW_BYTES}
        predict_decode(measured, kernels)
        if out:
            plot(measured, kernels, RESULTS / f"{out}.png")
    else:
        print(f"decode: {len(measured)} rows of hidden {HIDDEN} were measured; the model needs three")
    if sums:
        predict_prefill(sums)
    print("\n" + "\n".join(PUBLISHED))


def predict_decode(measured: Measured, kernels: dict[str, Kernel]) -> None:
    for op, kernel in kernels.items():
        print(f"{op}: latency {kernel.latency * 1e6:.1f} us, {kernel.rate / 1e9:.0f} GB/s")
    print("\nheld against rows that were not fitted, two ranks:")
    print("| tokens a rank | kernel | measured us | model us | model / measured |\n" + "|" + " --- |" * 5)
    for tokens in sorted(measured)[1:-1]:
        for op, kernel in kernels.items():
            took, model = measured[tokens][op], kernel.seconds(2, tokens)
            print(f"| {tokens} | {op} | {took * 1e6:.1f} | {model * 1e6:.1f} | {model / took:.2f} |")
    print("\npredicted dispatch / combine us, hidden 4096, top-8 of 128 experts, even routing:")
    print(
        "| tokens a rank | " + " | ".join(f"EP={ranks}" for ranks in RANKS) + " |\n" + "|" + " --- |" * (1 + len(RANKS))
    )
    for tokens in TOKENS:
        cells = [
            " / ".join(f"{kernel.seconds(ranks, tokens) * 1e6:.1f}" for kernel in kernels.values()) for ranks in RANKS
        ]
        print(f"| {tokens} | {' | '.join(cells)} |")


def predict_prefill(sums: dict[int, float]) -> None:
    """Local sums of more ranks at the rate of the largest EP that was measured; the all-reduce over peer memory."""
    ep = max(sums)
    rate = sum_bytes(ep) / sums[ep]
    message = 2 * HIDDEN * PREFILL_TOKENS
    print(f"\nprefill, {PREFILL_TOKENS} tokens: local sum at {rate / 1e12:.2f} TB/s (measured at EP={ep}), all-reduce")
    print("| EP | local sum us | all-reduce us | together us |\n" + "|" + " --- |" * 4)
    for ranks in RANKS:
        local = sum_bytes(ranks) / rate
        reducing = predicted_seconds(choose_algorithm(message, ranks, multicast=False), message, ranks)
        note = " (measured)" if ranks in sums else ""
        print(f"| {ranks} | {local * 1e6:.0f}{note} | {reducing * 1e6:.0f} | {(local + reducing) * 1e6:.0f} |")


def sum_bytes(ranks: int) -> float:
    """What the local sum moves: a rank's rows, and every token's sum."""
    return 2 * HIDDEN * PREFILL_TOKENS * (TOP_K / ranks + 1)


def plot(measured: Measured, kernels: dict[str, Kernel], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, (op, kernel) in zip(panels, kernels.items(), strict=True):
        axes.plot(
            sorted(measured),
            [measured[t][op] * 1e6 for t in sorted(measured)],
            "o-",
            color="black",
            label="EP=2, measured",
        )
        for ranks in RANKS:
            axes.plot(
                TOKENS,
                [kernel.seconds(ranks, t) * 1e6 for t in TOKENS],
                "--",
                marker=".",
                label=f"EP={ranks}, predicted",
            )
        axes.set(xscale="log", title=op, xlabel="tokens a rank", ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("us a call")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
