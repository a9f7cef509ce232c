"""Kernels compiled in a process of their own, for an architecture that this machine need not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def compile_cases(program: Path, cases: Sequence[Any], architecture: str) -> tuple[str, list[str]]:
    """The compiler's remarks on all cases, and the PTX of each; `program` compiles its arguments, JSON, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "CUTE_DSL_ARCH": architecture,
            "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
            "CUTE_DSL_KEEP": "ptx",
            "CUTE_DSL_DUMP_DIR": folder,
            "JAX_PLATFORMS": "cpu",
        }
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, str(program), *map(json.dumps, cases)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr[-4000:]
        paths = sorted(Path(folder).glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns)
        texts = [path.read_text() for path in paths]
    assert len(texts) == len(cases)
    return run.stdout + run.stderr, texts


def compile_case(program: Path, case: Any, architecture: str) -> tuple[str, str]:
    """The compiler's remarks and the PTX of one case."""
    remarks, (ptx,) = compile_cases(program, [case], architecture)
    return remarks, ptx
