"""The choice between an operation's jnp reference and its GPU kernel, the same for every operation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax

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


def gpu_unavailable(capabilities: Collection[str], generation: str) -> str | None:
    """Why CuTeDSL kernels for GPUs of these compute capabilities ("9.0") cannot run on this machine, or None."""
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not an NVIDIA GPU"
    if importlib.util.find_spec("cutlass") is None:
        return "CuTeDSL (nvidia-cutlass-dsl) is not installed"
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability not in capabilities:
        wanted = f"{' and '.join(capabilities)} ({generation})"
        return f"the GPU has compute capability {capability}, the kernel is for {wanted}"
    return None


def with_gradient(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, differentiated as the reference is."""
    call = jax.custom_vjp(kernel)
    call.defvjp(
        lambda *arguments: (kernel(*arguments), arguments),
        lambda arguments, cotangents: jax.vjp(reference, *arguments)[1](cotangents),
    )
    return call
