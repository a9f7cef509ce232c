"""Check that every extra resolves to wheels on each platform and Python that qwenjax supports.

Nothing is downloaded but metadata and nothing is built. Needs `uv` (the `dev` extra) and a package index.
Usage: python constraints/resolve.py
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
# uv reads each of these as glibc 2.28 or newer; GB200 hosts are aarch64.
PLATFORMS = {"x86-64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = (("disagg", "train", "cuda12"), ("disagg", "train", "cuda13"), ("disagg", "test"))
SHOWN = ("jax", "flax", "nvidia-cutlass-dsl", "cuda-python", "torch")


def resolve(platform: str, python: str, extras: tuple[str, ...]) -> tuple[bool, str]:
    """Whether the extras resolve, and a line that shows the versions found or uv's reason."""
    command = [str(UV), "pip", "compile", "pyproject.toml", "--only-binary", ":all:", "--no-header", "--no-annotate"]
    command += ["--python", sys.executable, "--no-python-downloads"]  # one interpreter asks for all the versions
    command += ["--python-platform", PLATFORMS[platform], "--python-version", python]
    command += itertools.chain.from_iterable(("--extra", extra) for extra in extras)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    name = f"{platform:8} Python {python}  {'+'.join(extras):12}"
    # An extra that a new release of a dependency dropped is a warning to uv and a missing CUDA plugin to a user.
    dropped = [line for line in run.stderr.splitlines() if "does not have an extra" in line]
    if run.returncode or dropped:
        return False, f"{name} FAILED\n{run.stderr}"
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", run.stdout, flags=re.MULTILINE))
    versions = ", ".join(f"{package} {found[package]}" for package in SHOWN if package in found)
    return True, f"{name} {len(found):3} packages: {versions}"


def main() -> int:
    cases = list(itertools.product(PLATFORMS, PYTHONS, EXTRAS))
    with ThreadPoolExecutor(max_workers=4) as pool:
        results = list(pool.map(lambda case: resolve(*case), cases))
    print("\n".join(line for _, line in results))
    failed = sum(not ok for ok, _ in results)
    print(f"{len(cases) - failed} of {len(cases)} resolve to wheels only")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
