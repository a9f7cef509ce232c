"""Which version of qwenjax this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The installed distribution's; "unknown" in a checkout that is not installed."""
    try:
        return version("qwenjax")
    except PackageNotFoundError:
        return "unknown"
