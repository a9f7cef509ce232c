"""What benchmarks share: the header that says where they ran, medians of times, and the recorded output."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def header(*packages: str) -> str:
    """Commit, machine, versions of Python and of `packages`, and the load that other processes make, a line each."""
    found = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    return (
        f"commit: {_commit()}\n"
        f"machine: {device_name()}, {cores} CPU cores, {platform.system()} {platform.machine()}\n"
        f"versions: {', '.join(found)}\n"
        f"load average at the start: {load:.1f}"
    )


def device_name() -> str:
    """The accelerator that JAX runs on, or the CPU's name."""
    import jax  # here, since a benchmark without JAX has no need of it

    device = jax.devices()[0]
    return cpu_name() if device.platform == "cpu" else f"{len(jax.devices())} x {device.device_kind}"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Median wall time of `action`, which blocks until its work is done, after one run that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second of the driver's device-to-device copy of 2 GiB, read and write counted."""
    import jax  # here, as in device_name
    import jax.numpy as jnp
    from cuda.bindings import driver

    source, target = (jax.random.bits(jax.random.key(i), (1 << 29,), jnp.uint32) for i in range(2))
    jax.block_until_ready((source, target))
    driver.cuInit(0)
    _, context = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(context)

    def run() -> None:
        for _ in range(8):
            driver.cuMemcpyDtoDAsync(
                target.unsafe_buffer_pointer(), source.unsafe_buffer_pointer(), source.nbytes, driver.CUstream(0)
            )
        driver.cuCtxSynchronize()

    return 8 * 2 * source.nbytes / median_seconds(run, 5)


@contextlib.contextmanager
def recorded(name: str | None) -> Iterator[None]:
    """Copies what is printed meanwhile to results/NAME, with the command line first; nothing where name is None."""
    if name is None:
        yield
        return
    copy = io.StringIO()
    copy.write(f"$ python {' '.join(sys.argv)}\n")
    with contextlib.redirect_stdout(_Both(sys.stdout, copy)):
        yield
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(copy.getvalue(), encoding="utf-8")


class _Both(io.TextIOBase):
    def __init__(self, *streams: io.TextIOBase | io.StringIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)


def _commit() -> str:
    """The checkout's commit, "-dirty" where files differ from it; "unknown" outside a checkout."""
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
