"""A picture of a load: the spread of the three times that a client waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qwenjax_serving.bench.drive import Run


def plot_run(run: Run, title: str, path: Path) -> None:
    """Writes the share of requests (or events) at or below each time. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: install qwenjax[plot]") from error
    good = [record for record in run.records if record.error is None]
    panels = {
        "time to first token": [record.time_to_first_token for record in good],
        "time per output token": [time for record in good if (time := record.time_per_output_token) is not None],
        "between events": [gap for record in good for gap in np.diff(record.arrivals).tolist()],
    }
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for axes, (name, seconds) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        values = np.sort(np.asarray(seconds)) * 1e3
        axes.step(values, np.arange(1, len(values) + 1) / max(len(values), 1), where="post")
        axes.set(xlabel=f"{name} (ms)", ylabel="share at or below", ylim=(0, 1), xlim=(0, None))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
