"""What a conversion did: tensors, bytes and errors per kind, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwenjax.convert.encode import Error
from qwenjax.convert.plan import Plan
from qwenjax.convert.source import Source


def make_report(source: Source, plan: Plan, errors: Mapping[str, Error], options: dict[str, Any]) -> dict[str, Any]:
    """The report, of JSON types. Nothing in it depends on the run, so that a resumed one gives the same bytes.

    Errors are relative RMSE per tensor, sqrt(sum (x - q)^2 / sum q^2): their mean and the worst of each kind.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for part in plan.parts:
        entry = kinds.setdefault(
            part.kind,
            {"tensors": 0, "converted": 0, "bytes_before": 0, "bytes_after": 0, "mean_relative_error": None}
            | {"worst_relative_error": None, "worst_tensor": None, "scales_clamped": 0},
        )
        entry["tensors"] += 1
        entry["bytes_before"] += part.bytes_in
        entry["bytes_after"] += part.bytes_out
        if part.quantised:
            error = errors[part.name].relative
            total = (entry["mean_relative_error"] or 0.0) * entry["converted"] + error
            entry["converted"] += 1
            entry["mean_relative_error"] = total / entry["converted"]
            entry["scales_clamped"] += errors[part.name].clamped
            if entry["worst_tensor"] is None or error > entry["worst_relative_error"]:
                entry["worst_relative_error"], entry["worst_tensor"] = error, part.name
    for entry in kinds.values():
        for key in ("mean_relative_error", "worst_relative_error"):
            if entry[key] is not None:
                entry[key] = float(f"{entry[key]:.6g}")
    return {
        **options,
        "source": source.folder.resolve().name,
        "source_format": "fp8_block" if source.block else "float",
        "tensors": len(plan.parts),
        "converted": sum(part.quantised for part in plan.parts),
        "bytes_before": sum(info.nbytes for info in source.checkpoint.tensors.values()),
        "bytes_after": sum(shard.nbytes for shard in plan.shards),
        "scales_clamped": sum(entry["scales_clamped"] for entry in kinds.values()),
        "kinds": dict(sorted(kinds.items())),
    }


def format_table(report: Mapping[str, Any]) -> str:
    """The report as lines of text, one per kind and one for all."""
    head = "kind,tensors,converted,before,after,mean error,worst error,clamped,worst tensor"
    rows: list[tuple[str, ...]] = [tuple(head.split(","))]
    for kind, entry in report["kinds"].items():
        rows.append((kind, *_row(entry), entry["worst_tensor"] or ""))
    rows.append(("all", *_row(report), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, len(row) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    def error(key: str) -> str:
        return "" if entry.get(key) is None else f"{entry[key]:.5f}"

    return (
        f"{entry['tensors']:,}",
        f"{entry['converted']:,}",
        f"{entry['bytes_before'] / 1e9:.3f} GB",
        f"{entry['bytes_after'] / 1e9:.3f} GB",
        error("mean_relative_error"),
        error("worst_relative_error"),
        f"{entry['scales_clamped']:,}",
    )
