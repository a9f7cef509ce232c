"""An interrupted `qwenjax convert` goes on to the same bytes. A crash is an exception at the n-th step that leaves the
files as they are; a kill is a real one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from qwenjax.convert import ConvertError, convert
from tests.qwenjax.conversions import contents, run_python, save, tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("source") / "model", tensors())


class Crash(BaseException):
    pass


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write and every rename is a step."""
    left = [step]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(os, "pwrite", counted(os.pwrite))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))


def test_a_crash_at_any_step_resumes_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", shard_bytes=60_000)
    expected, step, finished = contents(tmp_path / "whole"), 0, False
    while not finished:
        destination = tmp_path / f"step{step}"
        with pytest.MonkeyPatch.context() as patch:
            crash_at(step, patch)
            try:
                convert(source, destination, shard_bytes=60_000, workers=1)
                finished = True
            except Crash:
                seen = list(destination.rglob("*.safetensors"))
                assert all(contents(destination)[path.name] == expected[path.name] for path in seen)
        report = convert(source, destination, shard_bytes=60_000)
        assert contents(destination) == expected
        assert report == convert(source, tmp_path / "whole", shard_bytes=60_000)
        shutil.rmtree(destination)
        step += 9 if 6 < step < 60 else 1
    assert step > 60


KILLED = """
import os, signal, sys
from qwenjax.convert import convert
left, real = int(sys.argv[3]), os.pwrite
def pwrite(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
os.pwrite = pwrite
convert(sys.argv[1], sys.argv[2], shard_bytes=60_000)
"""


def test_a_killed_process_resumes_without_redoing_finished_shards(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", shard_bytes=60_000)
    for writes in (3, 25, 12):  # each goes on from where the last was killed
        run = run_python(KILLED, str(source), str(tmp_path / "dst"), str(writes))
        assert run.returncode == -signal.SIGKILL, run.stderr
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dst").glob("*.safetensors")}
    assert finished
    convert(source, tmp_path / "dst", shard_bytes=60_000)
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")
    assert all((tmp_path / "dst" / name).stat().st_mtime_ns == time for name, time in finished.items())


def test_an_unfinished_conversion_is_not_continued_with_other_options(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        crash_at(30, patch)
        with pytest.raises(Crash):
            convert(source, tmp_path / "dst", shard_bytes=60_000, workers=1)
    with pytest.raises(ConvertError, match="unfinished conversion of another source, or with other options"):
        convert(source, tmp_path / "dst", shard_bytes=60_000, only="experts")
