"""Text files that a user gives or a checkpoint holds."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises ValueError, with the file's name, where it is none; OSError where it cannot be
    read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error})") from None
