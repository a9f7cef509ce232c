"""Files that a command writes when its work is done, checked before it begins."""

from __future__ import annotations

from pathlib import Path

from qwenjax.evaluate.plot import require_matplotlib


def check_output_file(option: str, path: Path | None) -> None:
    """Raises ValueError where `path`, if it was given, is a folder or in none."""
    if path is not None and path.is_dir():
        raise ValueError(f"{option} is {path}, a folder; it is a file to write")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option} is {path}, and there is no folder {path.parent}; make it first")


def check_plot_file(option: str, path: Path | None) -> None:
    """As check_output_file; and where matplotlib is missing, or does not draw files of that kind."""
    if path is None:
        return
    check_output_file(option, path)
    known = require_matplotlib()().canvas.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise ValueError(f"{option} is {path}; a picture's name ends in one of .{', .'.join(sorted(known))}")
