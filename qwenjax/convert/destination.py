"""The folder that is written: ours or refused, resumable, and never a file under its final name before it is whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

from qwenjax.convert.source import ConvertError, Source
from qwenjax.tokenizer import CHAT_TEMPLATES

STATE = ".qwenjax-convert"  # what is done so far; removed at the end
REPORT = "conversion_report.json"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_REPLACED = {"config.json", "hf_quant_config.json", "README.md", REPORT}
_SLACK_BYTES = 64 << 20  # headers, index and report: 20 MB for the 235B model


def fingerprint(source: Source, options: dict[str, Any]) -> str:
    """Changes whenever the same command could give other bytes: options, and name, size and time of every file."""
    files = [source.folder / "config.json", *(file.path for file in source.checkpoint.files.values()), *extras(source)]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([options, stats]).encode()).hexdigest()


def extras(source: Source) -> list[Path]:
    """Files that go along: tokenizer, chat template, generation config, licence; no weights, no model card."""
    return sorted(
        path
        for path in source.folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in _REPLACED
        and not path.name.endswith(_NOT_COPIED)
    )


def copy_extras(source: Source, folder: Path) -> None:
    """Copies the files that go along, and the named chat templates in their folder."""
    templates = sorted((source.folder / CHAT_TEMPLATES).glob("*.jinja"))
    if templates:
        (folder / CHAT_TEMPLATES).mkdir(exist_ok=True)
    for path in [*extras(source), *templates]:
        write_whole(folder / path.relative_to(source.folder), path.read_bytes())


def write_whole(path: Path, content: bytes) -> None:
    """Writes under a temporary name and renames, so that the file is whole or absent."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


class Destination:
    """DST of a conversion, locked against other processes until `close`. Raises ConvertError where it must not be
    written to.

    finished: whether an earlier run of the same command reached the end.
    """

    def __init__(self, folder: str | os.PathLike[str], source: Source, identity: str) -> None:
        self.folder = Path(folder)
        self.state = self.folder / STATE
        self.identity = identity
        self.finished = False
        self._lock: IO[str] | None = None
        if self.folder.exists() and not self.folder.is_dir():
            raise ConvertError(f"{self.folder}: is a file; DST must be a folder")
        here, there = source.folder.resolve(), self.folder.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise ConvertError(f"SRC {source.folder} and DST {self.folder} overlap; SRC is never written to")
        try:
            self._claim()
        except ConvertError:
            self.close()
            raise

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets other processes write there again."""
        if self._lock is not None:
            self._lock.close()

    def _claim(self) -> None:
        report = self.folder / REPORT
        if report.is_file():
            previous = _read_json(report)
            if previous.get("identity") != self.identity:
                raise ConvertError(f"{self.folder}: holds a finished conversion of something else; choose another DST")
            self.finished = True
            shutil.rmtree(self.state, ignore_errors=True)
            return
        if self.folder.exists() and any(self.folder.iterdir()) and not self.state.is_dir():
            raise ConvertError(f"{self.folder}: is not empty and not an unfinished conversion; choose another DST")
        self.state.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.state / "lock", "w")  # noqa: SIM115 - held until close()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConvertError(f"{self.folder}: another process is converting into it") from error
        plan = self.state / "plan.json"
        if plan.is_file() and _read_json(plan).get("identity") != self.identity:
            raise ConvertError(
                f"{self.folder}: holds an unfinished conversion of another source, or with other options; "
                "remove it or choose another DST"
            )
        write_whole(plan, to_json({"identity": self.identity}))

    def shard_state(self, shard: int) -> Path:
        return self.state / f"shard-{shard + 1:05d}.json"

    def done(self, shard: int, file_name: str) -> list[Any] | None:
        """What an earlier run noted of a shard that it finished. The note is written before the file's rename."""
        if (self.folder / file_name).is_file() and self.shard_state(shard).is_file():
            return json.loads(self.shard_state(shard).read_bytes())["errors"]
        return None

    def check_space(self, needed: int) -> None:
        """Raises ConvertError where `needed` bytes and some slack do not fit."""
        for stale in self.folder.glob("*.part"):
            stale.unlink()
        free = shutil.disk_usage(self.folder).free
        if free < needed + _SLACK_BYTES:
            raise ConvertError(
                f"{self.folder}: {free / 1e9:.1f} GB free, {(needed + _SLACK_BYTES) / 1e9:.1f} GB needed; "
                "free some or choose another DST"
            )

    def finish(self, report: dict[str, Any]) -> None:
        """The report is the last file written: with it the conversion is complete."""
        write_whole(self.folder / REPORT, to_json({"identity": self.identity, **report}))
        shutil.rmtree(self.state)

    def report(self) -> dict[str, Any]:
        """The report as it was written."""
        return {key: value for key, value in _read_json(self.folder / REPORT).items() if key != "identity"}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
