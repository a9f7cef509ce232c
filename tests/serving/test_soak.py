"""Minutes of load: what servers hold stays level."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_OF_EACH = ["--deployment", str(ROOT / "configs" / "deployments" / "cpu.toml")]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ONE_OF_EACH], ids=["one process", "router and two workers"])
def test_five_minutes_of_mixed_requests_leave_memory_files_pages_and_gauges_level(options: list[str]) -> None:
    if options:
        pytest.importorskip("nixl")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # as users start it
    command = [sys.executable, "bench/soak.py", "--minutes", "5", *options]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    soaked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    print(soaked.stdout)
    assert soaked.returncode == 0, soaked.stdout + soaked.stderr
    assert soaked.stdout.endswith("level: pages, gauges, files and memory\n")
