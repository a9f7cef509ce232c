"""The choice between an operation's jnp reference and its GPU kernel, the same for every operation."""

from __future__ import annotations

from typing import Literal

Implementation = Literal["auto", "reference", "kernel"]


class KernelUnavailableError(RuntimeError):
    """A kernel was asked for by name where it cannot run."""


def choose(op: str, implementation: Implementation, unavailable: str | None) -> Literal["reference", "kernel"]:
    """Which form of `op` runs.

    `unavailable` says why the kernel cannot run with these arguments on this backend, or is None where it can.
    "auto" takes the kernel where it can run; "kernel" insists on it.

    Raises KernelUnavailableError where the kernel is asked for and cannot run, ValueError for another word.
    """
    if implementation == "reference":
        return "reference"
    if implementation == "auto":
        return "reference" if unavailable else "kernel"
    if implementation != "kernel":
        raise ValueError(f"{op}: implementation is {implementation!r}; it is 'auto', 'reference' or 'kernel'")
    if unavailable:
        raise KernelUnavailableError(f"{op}: no kernel here: {unavailable}; use implementation='auto' or 'reference'")
    return "kernel"
