"""A picture of an evaluation: what each format costs, with weights alone and with activations."""

from __future__ import annotations

from pathlib import Path

from qwenjax.evaluate.report import LABELS
from qwenjax.evaluate.run import BASE, Evaluation

_SERIES = {False: ("weights alone", "tab:blue"), True: ("weights and activations", "tab:orange")}


def plot(evaluation: Evaluation, path: str | Path) -> None:
    """Draws KL from the base model (dots, logarithmic) and the rise of perplexity (bars) to the file `path`.

    Raises ValueError where matplotlib is missing, or for a file type that it does not draw.
    """
    figure_type = require_matplotlib()
    base, *results = evaluation.results
    formats = list(dict.fromkeys(result.format for result in results))
    figure = figure_type(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for activations, (name, colour) in _SERIES.items():
        chosen = [result for result in results if result.activations == activations and result.format != BASE]
        offset = 0.2 if activations else -0.2
        places = [formats.index(result.format) + offset for result in chosen]
        rise = [100 * (result.perplexity / base.perplexity - 1) for result in chosen]
        left.plot([result.kl for result in chosen], places, "o", label=name, color=colour)
        right.barh(places, rise, 0.38, color=colour)
    left.set_xscale("log")
    left.set_xlabel("KL(base || quantised), nats a token")
    right.set_xlabel(f"rise of perplexity over {base.perplexity:.2f}, %")
    left.set_yticks(range(len(formats)), [LABELS[name] for name in formats])
    right.set_yticks(range(len(formats)), [])
    left.set_ylim(right.get_ylim())
    for panel in (left, right):
        panel.invert_yaxis()
        panel.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=120)


def require_matplotlib():  # type: ignore[no-untyped-def]
    """matplotlib's Figure, which draws to files without a display. Raises ValueError with the way to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'qwenjax[plot]', or leave the plot out") from None
    return Figure
