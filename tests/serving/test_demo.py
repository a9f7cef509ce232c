"""`make demo`, as a user runs it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from qwenjax_serving.demo import _PROMPT

pytest.importorskip("nixl")

ROOT = Path(__file__).resolve().parents[2]
FIGURES = re.compile(
    r"Time to first token (\d+) ms, then (\d+) tokens/s; (\d+) KiB of pages from prefill to decode; "
    r"(\d+)% of drafts accepted"
)


def processes_with(word: str) -> list[str]:
    """Command lines of processes that have a word in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if word.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has ended, or is another's
                continue
    return found


@pytest.mark.slow
def test_the_demo_streams_a_completion_prints_its_figures_and_leaves_no_process() -> None:
    recipe = re.search(r"^demo: .*\n\t@(.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    python, *arguments = shlex.split(recipe[1])
    assert python == ".venv/bin/python"
    word = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"DEMO_TEST": word}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(_PROMPT)
    assert len(ran.stdout) > len(_PROMPT) + 120  # characters: a token has one at least
    figures = FIGURES.search(ran.stderr)
    assert figures is not None, ran.stderr
    print(figures[0])
    assert all(int(figure) > 0 for figure in figures.groups())
    assert processes_with(word) == []
