"""What a load showed, as numbers, a table and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qwenjax_serving.bench.drive import Run


@dataclass(frozen=True)
class Spread:
    """Milliseconds; None where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls(None, None, None, None, None)
        ms = np.asarray(seconds) * 1e3
        p50, p90, p99 = (float(value) for value in np.percentile(ms, (50, 90, 99)))
        return cls(float(ms.mean()), p50, p90, p99, float(ms.max()))


@dataclass(frozen=True)
class Report:
    """seconds: of the whole load. ttft: from sending to the first text. tpot: of a request's tokens after its first, on
    average. itl: between two events with text; an event may hold several tokens. latency: from sending to the end."""

    seconds: float
    completed: int
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float
    prompt_tokens_per_second: float
    completion_tokens_per_second: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    latency: Spread

    @classmethod
    def of(cls, run: Run) -> Report:
        good = [record for record in run.records if record.error is None]
        bad = Counter(
            f"{r.status}: {r.error}" if r.status else str(r.error) for r in run.records if r.error is not None
        )
        read = sum(record.prompt_tokens for record in good)
        drawn = sum(record.completion_tokens for record in good)
        return cls(
            seconds=run.seconds,
            completed=len(good),
            failed=len(run.records) - len(good),
            errors=dict(bad.most_common()),
            prompt_tokens=read,
            completion_tokens=drawn,
            requests_per_second=len(good) / run.seconds,
            prompt_tokens_per_second=read / run.seconds,
            completion_tokens_per_second=drawn / run.seconds,
            ttft=Spread.of([record.time_to_first_token for record in good]),
            tpot=Spread.of([time for record in good if (time := record.time_per_output_token) is not None]),
            itl=Spread.of([gap for record in good for gap in np.diff(record.arrivals).tolist()]),
            latency=Spread.of([record.latency for record in good]),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, in plain types; times of spreads in milliseconds."""
        return asdict(self)

    def table(self) -> str:
        lines = [
            f"{self.completed} requests in {self.seconds:.1f} s, {self.failed} failed: "
            f"{self.requests_per_second:.2f} requests/s, {self.prompt_tokens_per_second:.0f} prompt tokens/s, "
            f"{self.completion_tokens_per_second:.0f} new tokens/s",
            *(f"failed {count} x {error}" for error, count in self.errors.items()),
            "",
            f"{'ms':<24} | " + " ".join(f"{name:>9}" for name in ("mean", "p50", "p90", "p99", "max")),
        ]
        rows = {
            "time to first token": self.ttft,
            "time per output token": self.tpot,
            "between events": self.itl,
            "whole request": self.latency,
        }
        for name, spread in rows.items():
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            cells = (f"{'none' if value is None else format(value, '.2f'):>9}" for value in values)
            lines.append(f"{name:<24} | " + " ".join(cells))
        return "\n".join(lines)
