"""Programs of the GPU tests that print "wrong: 0", started as processes of their own: alone, or one a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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


def check(running: subprocess.Popen[str]) -> None:
    out, err = running.communicate(timeout=200)
    assert "wrong: 0\n" in out, (out + err)[-3000:]


def check_two(program: Path, calls: int, **environment: str) -> None:
    """Two processes that find each other on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for running in [start(program, calls, i, 2, port, **environment) for i in range(2)]:
        check(running)
