"""A picture of a training run: the loss of every step, and what was measured on held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qwenjax.train.loop import read_log

_SMOOTHING = 0.98  # of the running mean that is drawn over the single steps


def plot_run(folder: str | Path, path: str | Path) -> None:
    """Draws `folder`'s log to the PNG `path`: loss in nats a token, and for a head the shares of agreeing drafts.

    Raises ImportError, naming the extra, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'qwenjax[train]'") from None
    rows = read_log(folder)
    steps = [row for row in rows if "loss" in row]
    measured = [row for row in rows if "held_out" in row]
    shares = sorted({name for row in steps for name in row if name.startswith("agree_")})
    figure = Figure(figsize=(7, 6 if shares else 3.5), layout="constrained")
    panels = figure.subplots(2 if shares else 1, 1, sharex=True, squeeze=False)[:, 0]
    _curve(panels[0], steps, "loss", "training")
    panels[0].plot(
        [row["step"] for row in measured], [row["held_out"]["loss"] for row in measured], "o", ms=4, label="held out"
    )
    panels[0].set_ylabel("loss, nats a token")
    # The first steps fall from ln(vocabulary); the axis shows what comes after.
    late = [row["loss"] for row in steps[len(steps) // 20 :]]
    panels[0].set_ylim(min(late) * 0.95, max(late) * 1.05)
    for name in shares:
        depth = name.removeprefix("agree_")
        _curve(panels[1], steps, name, f"drafts 1 to {depth}" if depth != "1" else "draft 1")
        panels[1].plot(
            [row["step"] for row in measured], [row["held_out"][name] for row in measured], "o", ms=4, color="black"
        )
    if shares:
        panels[1].set_ylabel("drafts that are the base's choice\n(dots: held-out text)")
        panels[1].set_ylim(0, 1)
    for panel in panels:
        panel.legend()
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=110)


def _curve(panel: Any, rows: list[dict[str, Any]], name: str, label: str) -> None:
    values = np.array([row[name] for row in rows])
    smooth = np.empty_like(values)
    mean = values[0]
    for index, value in enumerate(values):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
        smooth[index] = mean
    panel.plot([row["step"] for row in rows], smooth, label=label)
