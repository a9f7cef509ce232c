"""What speculative decoding gains: tokens a step and speed against drafts and batch, on the small model.

    python bench/speculative.py [--tokens 128] [--temperature 0] [--drafts 0 1 2 3 4] [--batches 1 4 8 16 32]
        [--independent-noise] [--record NAME]

For every number of drafts k and batch size, the same prompts are continued by the same number of tokens; the speed-up
is over k = 0 at the same batch, each the median of several runs. The limit is the tokens a step: what would be gained
if drafting and the wider verification cost nothing. --independent-noise gives drafts a noise of their own, to show what
it brings that they use the verification's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from measure import RESULTS, header, recorded

from qwenjax import LLM, SamplingParams
from qwenjax.engine import speculate
from qwenjax.sampling import SamplingArrays, TokenCounts

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


def measure(
    model: Path, drafts: int, batches: Sequence[int], tokens: int, temperature: float, repeats: int
) -> list[Row]:
    """A row for every batch size, all with one engine."""
    prompts = (ROOT / "bench" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    llm = LLM(
        model,
        dtype="float32" if jax.default_backend() == "cpu" else "auto",  # XLA's bf16 on a CPU is emulated
        num_speculative_tokens=drafts,
        speculation_max_batch=max(batches),
        max_num_seqs=max(batches),
    )
    rows = []
    for batch in batches:
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


def draft_with_noise_of_their_own() -> None:
    """Makes drafts draw by another seed than verification does; what is drawn in the end stays the same."""
    own = speculate.sample

    def sample(
        logits: jax.Array, arrays: SamplingArrays, position: jax.Array, counts: TokenCounts | None = None
    ) -> jax.Array:
        return own(logits, replace(arrays, seed=arrays.seed ^ jnp.uint32(0x9E3779B9)), position, counts)

    speculate.sample = sample


def table(rows: list[Row]) -> str:
    """Measured, limit and the share of it, a line for every row."""
    plain = {row.batch: row.tokens_per_second for row in rows if row.drafts == 0}
    lines = ["drafts  batch  tokens/s  speed-up  tokens a step (limit)  accepted by position"]
    for row in rows:
        gain = row.tokens_per_second / plain.get(row.batch, float("nan"))
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
    for drafts in sorted({row.drafts for row in rows} - {0}):
        mine = [row for row in rows if row.drafts == drafts]
        gains = [row.tokens_per_second / plain[row.batch] for row in mine]
        axes.plot([row.batch for row in mine], gains, marker="o", label=f"{drafts} drafts")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="sequences in the batch", ylabel="speed-up over no drafts", xscale="log")
    axes.set_xticks(list(plain), [str(batch) for batch in plain])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "tiny")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--independent-noise", action="store_true")
    parser.add_argument("--record", help="name of the files in bench/results, without ending")
    arguments = parser.parse_args()
    if arguments.independent_noise:
        draft_with_noise_of_their_own()
    with recorded(arguments.record and f"{arguments.record}.txt"):
        print(header("jax", "jaxlib", "flax", "numpy"))
        print(
            f"{arguments.tokens} tokens a sequence, temperature {arguments.temperature:g}, "
            f"median of {arguments.repeats} runs\n"
        )
        rows = []
        for drafts in arguments.drafts:
            rows += measure(
                arguments.model,
                drafts,
                arguments.batches,
                arguments.tokens,
                arguments.temperature,
                arguments.repeats,
            )
        print(table(rows))
    if arguments.record and 0 in arguments.drafts:
        plot(rows, RESULTS / f"{arguments.record}.png")


if __name__ == "__main__":
    main()
