"""Reading safetensors files and Hugging Face checkpoint folders with numpy and ml_dtypes only.

Format: https://github.com/huggingface/safetensors#format - eight bytes of little-endian header length, a JSON
header of `{name: {dtype, shape, data_offsets}}`, then the tensors' bytes, row major, without holes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
# A pread costs about 2 us in Python, the time it takes to copy 16 KiB: shorter runs are cut from whole rows.
MIN_RUN_BYTES = 16 << 10
ROWS_BYTES = 4 << 20  # scratch for those rows, per call

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used as it is; the message names the file, the tensor and the way out."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of a tensor before its bytes are read."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One .safetensors file, opened once. Reads are positional, so any number of threads may share it.

    Raises CheckpointError where the file is missing, truncated or malformed; nothing is read before the whole
    header is valid.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - kept open for the object's life
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from error
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{self.path}: truncated: {size} bytes hold no header; fetch the file again")
        length = int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"{self.path}: a header of {length:,} bytes does not fit a file of {size:,}; "
                "it is truncated or not safetensors; fetch it again"
            )
        self._data_start = 8 + length
        header = _parse_header(self.path, os.pread(self._file.fileno(), length, 8))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        spans = []
        for name, entry in header.items():
            info, begin, end = _parse_entry(self.path, name, entry)
            self.tensors[name] = info
            self._offsets[name] = begin
            spans.append((begin, end, name))
        _check_spans(self.path, spans, size - self._data_start)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """The tensor `name`, or the part of it that `index` (slices of step 1, one per leading axis) selects.

        Returns a fresh contiguous array. Only the selected bytes are read, save where they come in runs of
        under 16 KiB (a few columns of a matrix): then whole rows pass through 4 MiB of scratch.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        starts, counts = _bounds(name, info.shape, index)
        out = np.empty(counts, info.dtype)
        flat = out.reshape(-1).view(np.uint8)
        if flat.size == 0:
            return out
        # Axes after `axis` are whole, so that they and it form one contiguous run.
        axis = max((i for i, count in enumerate(counts) if count != info.shape[i]), default=0)
        strides = [math.prod(info.shape[i + 1 :]) * info.dtype.itemsize for i in range(len(counts))]
        by_rows = axis > 0 and counts[axis - 1] > 1 and counts[axis] * strides[axis] < MIN_RUN_BYTES
        outer = axis - 1 if by_rows else axis
        parts = math.prod(counts[:outer])
        targets = flat.reshape(parts, flat.size // parts)
        for target, position in zip(targets, itertools.product(*map(range, counts[:outer])), strict=True):
            first = [*position, *[0] * (len(counts) - outer)]
            offset = sum((start + i) * step for start, i, step in zip(starts, first, strides, strict=True))
            if by_rows:
                column = starts[axis] * strides[axis]
                rows = target.reshape(counts[outer], -1)
                self._read_rows(name, rows, self._offsets[name] + offset - column, strides[outer], column)
            else:
                self._read_run(name, target, self._offsets[name] + offset)
        return out

    def _read_rows(self, name: str, out: np.ndarray, offset: int, row_bytes: int, column: int) -> None:
        step = max(1, ROWS_BYTES // row_bytes)
        scratch = np.empty((min(step, len(out)), row_bytes), np.uint8)
        for row in range(0, len(out), step):
            part = out[row : row + step]
            whole = scratch[: len(part)]
            self._read_run(name, whole.reshape(-1), offset + row * row_bytes)
            part[:] = whole[:, column : column + out.shape[1]]

    def _read_run(self, name: str, out: np.ndarray, offset: int) -> None:
        view = memoryview(out)  # type: ignore[arg-type]
        position = self._data_start + offset
        while view:  # Linux hands over at most 2 GiB a call
            count = os.preadv(self._file.fileno(), [view], position)
            if count == 0:
                raise CheckpointError(f"{self.path}: now ends inside tensor {name!r}: it changed while open")
            view = view[count:]
            position += count


class Checkpoint:
    """A folder with one model.safetensors, or with shards listed by model.safetensors.index.json.

    Only the files that the index lists are opened: a stray one beside it is not read. Raises CheckpointError,
    before any tensor is read, for a folder without either, a shard that is missing, truncated or malformed, a
    tensor that the index names and its shard lacks, or the reverse.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        index_path = self.folder / INDEX_NAME
        single_path = self.folder / SINGLE_NAME
        if index_path.is_file():
            shards = _parse_index(index_path)
        elif single_path.is_file():
            shards = {SINGLE_NAME: None}
        elif not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder")
        else:
            raise CheckpointError(f"{self.folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        self.files: dict[str, SafetensorsFile] = {}
        self._files: dict[str, SafetensorsFile] = {}
        for file_name, listed in sorted(shards.items()):
            file = SafetensorsFile(self.folder / file_name)
            self.files[file_name] = file
            if listed is not None:
                _check_listed(file, listed, index_path)
            self._files.update(dict.fromkeys(file.tensors, file))
        self.tensors: dict[str, TensorInfo] = {name: file.tensors[name] for name, file in self._files.items()}

    def file_of(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self._find(name).path

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """As SafetensorsFile.read, from the file that holds `name`."""
        return self._find(name).read(name, index)

    def _find(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder}: no file of the checkpoint holds a tensor {name!r}")
        return file


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: the header names {twice!r} twice")
        return dict(pairs)

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); fetch the file again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(header).__name__}, not an object")
    return header


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{path}: tensor {name!r} lacks dtype, shape or data_offsets: {entry!r}")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        known = ", ".join(DTYPES)
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry['dtype']!r}; known are {known}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape):
        raise CheckpointError(f"{path}: tensor {name!r} has shape {shape!r}, not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: tensor {name!r} has data_offsets {offsets!r}, not [begin, end]")
    info = TensorInfo(dtype, tuple(shape))
    if offsets[1] - offsets[0] != info.nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r}, {entry['dtype']} {list(shape)}, needs {info.nbytes:,} bytes and its "
            f"data_offsets {offsets} give {offsets[1] - offsets[0]:,}"
        )
    return info, offsets[0], offsets[1]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    position, previous = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps" if begin < position else f"leaves {begin - position:,} unused bytes after"
            raise CheckpointError(f"{path}: tensor {name!r} at bytes {begin:,} to {end:,} {what} {previous}")
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {end:,} of {data_bytes:,}; fetch it again"
            )
        position, previous = end, repr(name)
    if position != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - position:,} bytes after the last tensor belong to none")


def _bounds(name: str, shape: tuple[int, ...], index: Sequence[slice] | None) -> tuple[list[int], list[int]]:
    """Start and count per axis."""
    index = tuple(index or ())
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} slices for tensor {name!r} of shape {list(shape)}")
    starts, counts = [0] * len(shape), list(shape)
    for axis, part in enumerate(index):
        start, stop, step = part.indices(shape[axis])
        if step != 1:
            raise ValueError(f"slices of tensor {name!r} must have step 1, axis {axis} has {step}")
        starts[axis], counts[axis] = start, max(0, stop - start)
    return starts, counts


def _parse_index(path: Path) -> dict[str, list[str] | None]:
    """File name -> the tensors that the index puts there."""
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        items = list(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no readable weight_map ({error!r}); fetch the file again") from error
    shards: dict[str, list[str] | None] = {}
    for name, file_name in items:
        # A shard lies beside its index: a path that climbs out of the folder is refused.
        if not isinstance(file_name, str) or file_name != Path(file_name).name:
            raise CheckpointError(f"{path}: tensor {name!r} is in {file_name!r}, not a file of this folder")
        listed = shards.setdefault(file_name, [])
        assert listed is not None
        listed.append(name)
    if not shards:
        raise CheckpointError(f"{path}: lists no tensor")
    missing = [file_name for file_name in sorted(shards) if not (path.parent / file_name).is_file()]
    if missing:
        listing = ", ".join(missing)
        raise CheckpointError(f"{path.parent}: {len(missing)} of {len(shards)} shards are missing: {listing}")
    return shards


def _check_listed(file: SafetensorsFile, listed: list[str], index_path: Path) -> None:
    absent = sorted(set(listed) - set(file.tensors))
    if absent:
        raise CheckpointError(f"{file.path}: lacks {', '.join(absent)}, which {index_path.name} places there")
    extra = sorted(set(file.tensors) - set(listed))
    if extra:
        raise CheckpointError(f"{file.path}: holds {', '.join(extra)}, which {index_path.name} lists elsewhere")
