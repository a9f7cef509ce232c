"""What speculative decoding gains: tokens a step and speed against drafts and batch, on the small model.

    python bench/speculative.py [--model configs/tiny] [--tokens 128] [--temperature 0 | 0.7] [--record NAME]

For every number of drafts k and batch size, the same prompts are continued by the same number of tokens; the speed-up
is over k = 0 at the same batch, each the median of several runs. The limit is the tokens a step: what would be gained
if drafting and the wider verification cost nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import jax
from measure import RESULTS, header, recorded

from qwenjax import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
DRAFTS = (0, 1, 2, 3, 4)
BATCHES = (1, 4, 8, 16, 32)


@dataclass(frozen=True)
class Row:
    """One measurement. acceptance: per draft position."""

    drafts: int
    batch: int
    tokens_per_second: float
    tokens_per_step: float
    acceptance: tuple[float, ...]


def measure(model: Path, drafts: int, tokens: int, temperature: float, repeats: int) -> list[Row]:
    """A row for every batch size, all with one engine."""
    prompts = (ROOT / "bench" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    llm = LLM(
        model,
        dtype="float32" if jax.default_backend() == "cpu" else "auto",  # XLA's bf16 on a CPU is emulated
        num_speculative_tokens=drafts,
        speculation_max_batch=max(BATCHES),
        max_num_seqs=max(BATCHES),
    )
    rows = []
    for batch in BATCHES:
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
            for seed in range(batch)
        ]
        speeds = []
        for _ in range(repeats):
            start = time.perf_counter()
            outputs = llm.generate(prompts[:batch], params)
            speeds.append(batch * tokens / (time.perf_counter() - start))
        stats = [output.speculation for output in outputs if output.speculation is not None]
        steps, drawn = sum(s.steps for s in stats), sum(s.tokens for s in stats)
        tried = [sum(s.drafted[place] for s in stats) for place in range(drafts)]
        accepted = [sum(s.accepted[place] for s in stats) for place in range(drafts)]
        acceptance = tuple(a / d for a, d in zip(accepted, tried, strict=True))
        per_step = drawn / steps if steps else 1.0
        rows.append(Row(drafts, batch, statistics.median(speeds), per_step, acceptance))
    return rows


def table(rows: list[Row]) -> str:
    """Measured, limit and the share of it, a line for every row."""
    plain = {row.batch: row.tokens_per_second for row in rows if row.drafts == 0}
    lines = ["drafts  batch  tokens/s  speed-up  tokens a step (limit)  accepted by position"]
    for row in rows:
        gain = row.tokens_per_second / plain[row.batch]
        shares = " ".join(f"{share:.0%}" for share in row.acceptance) or "-"
        speeds = f"{row.tokens_per_second:8.0f}  {gain:7.2f}x  {row.tokens_per_step:21.2f}"
        lines.append(f"{row.drafts:6}  {row.batch:5}  {speeds}  {shares}")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Speed-up against batch, a line for every number of drafts."""
    from matplotlib.figure import Figure

    plain = {row.batch: row.tokens_per_second for row in rows if row.drafts == 0}
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for drafts in DRAFTS[1:]:
        mine = [row for row in rows if row.drafts == drafts]
        gains = [row.tokens_per_second / plain[row.batch] for row in mine]
        axes.plot([row.batch for row in mine], gains, marker="o", label=f"{drafts} drafts")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="sequences in the batch", ylabel="speed-up over no drafts", xscale="log")
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "tiny")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", help="name of the files in bench/results, without ending")
    arguments = parser.parse_args()
    with recorded(arguments.record and f"{arguments.record}.txt"):
        print(header("jax", "jaxlib", "flax", "numpy"))
        print(
            f"{arguments.tokens} tokens a sequence, temperature {arguments.temperature:g}, "
            f"median of {arguments.repeats} runs\n"
        )
        rows = []
        for drafts in DRAFTS:
            rows += measure(arguments.model, drafts, arguments.tokens, arguments.temperature, arguments.repeats)
        print(table(rows))
    if arguments.record:
        plot(rows, RESULTS / f"{arguments.record}.png")


if __name__ == "__main__":
    main()
