"""Programs of the GPU tests, started as processes of their own: alone, or a process a rank.

The ranks of several processes may share a GPU. They take turns on it then, milliseconds each, and have it for
themselves in their turn, so that what waits for another rank waits for its turn: it shows that ranks which come late,
in any order, get the right results, and nothing of NVLink. No collective of XLA's may run in them: NCCL refuses ranks
of one GPU.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[2]


def most_ranks(gpus: int) -> int:
    """How many ranks a test has that takes all GPUs there are: a power of two, 16 at most."""
    return 1 << (min(gpus, 16).bit_length() - 1)


def start(program: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return subprocess.Popen(
        [sys.executable, str(program), *map(str, arguments)],
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(*running: subprocess.Popen[str]) -> None:
    """Each has to end by printing that all was right: "wrong: 0" or "ok". One that does not stops the others."""
    try:
        for process in running:
            out, err = process.communicate(timeout=200)
            assert out.endswith(("wrong: 0\n", "ok\n")), f"status {process.returncode}: {(out + err)[-3000:]}"
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def check_folder(program: Path, folder: Path, processes: int, calls: int) -> None:
    """Processes without JAX, a rank each; they find each other in a folder."""
    check(*(start(program, process, processes, folder, calls) for process in range(processes)))


def check_ranks(program: Path, devices: Sequence[int], calls: int = 1, **environment: str) -> None:
    """A process for each of the devices, of which several may be the same GPU; they find each other on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check(
        *(
            start(program, calls, process, len(devices), port, device, **environment)
            for process, device in enumerate(devices)
        )
    )


def join(process: int, processes: int, port: int, device: int) -> None:
    """In a process of `check_ranks`, before anything else of JAX: makes it the rank that it is."""
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, local_device_ids=[device])
