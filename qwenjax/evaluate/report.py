"""An evaluation as a table and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from qwenjax.evaluate.run import BASE, Evaluation, Result
from qwenjax.quant import FORMATS

LABELS = {
    "mxfp8": "MXFP8",
    "fp8_block": "FP8 block",
    "fp8_block_stochastic": "FP8 block, stochastic",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}


def label(result: Result, dtype: str) -> str:
    """What a row is called: the format's name, or the base model's dtype."""
    return dtype if result.format == BASE else LABELS[result.format]


def format_table(evaluation: Evaluation) -> str:
    """The results as a Markdown table, a row each."""
    head = ("weights", "activations", "bits/weight", "perplexity", "bits/byte", "KL from base, nats", "top-1 agreement")
    rows = [head, *(_row(result, evaluation.dtype) for result in evaluation.results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            rules = ["-" * width if column < 2 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
            lines.append(f"| {' | '.join(rules)} |")
    return "\n".join(lines)


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation, of JSON types."""
    return dataclasses.asdict(evaluation)


def _row(result: Result, dtype: str) -> tuple[str, ...]:
    name = label(result, dtype)
    kept_as = "FP8 1x128" if result.format.startswith("fp8_block") else name
    return (
        name,
        kept_as if result.activations else dtype,
        "" if result.format == BASE else f"{8 * FORMATS[result.format].bytes_per_element:.2f}",
        f"{result.perplexity:.4f}",
        "" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}",
        f"{result.kl:.6f}",
        f"{result.top1:.2%}",
    )
