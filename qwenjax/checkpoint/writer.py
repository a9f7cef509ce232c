"""Writing one safetensors file, tensor by tensor, in bounded memory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qwenjax.checkpoint.safetensors import DTYPES, TensorInfo

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PART_SUFFIX = ".part"


class SafetensorsWriter:
    """Writes `path` from tensors whose types and shapes are known beforehand; their bytes come later, in any
    order and from any thread.

    The bytes go to `path` + ".part", which takes the final name in `close`, once every tensor is whole and on
    disk: a file under its final name is complete, whenever the process is killed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.tensors = dict(tensors)
        self.nbytes = 0
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self._offsets: dict[str, int] = {}
        for name, info in tensors.items():
            if info.dtype not in _NAMES:
                raise ValueError(f"tensor {name!r}: safetensors has no type for {info.dtype}")
            end = self.nbytes + info.nbytes
            header[name] = {
                "dtype": _NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [self.nbytes, end],
            }
            self._offsets[name] = self.nbytes
            self.nbytes = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # tensors start on 8 bytes, as the reference implementation lays them
        self._data_start = 8 + len(raw)
        self._written = dict.fromkeys(tensors, 0)
        self._lock = threading.Lock()
        self._part = self.path.with_name(self.path.name + PART_SUFFIX)
        self._file = open(self._part, "wb", buffering=0)  # noqa: SIM115 - open until close()
        os.ftruncate(self._file.fileno(), self._data_start + self.nbytes)
        _write_all(self._file.fileno(), np.frombuffer(len(raw).to_bytes(8, "little") + raw, np.uint8), 0)

    def write(self, name: str, array: np.ndarray, row: int = 0) -> None:
        """Writes rows of tensor `name` from row `row` of its first axis on; the whole tensor by default."""
        info = self.tensors[name]
        if array.dtype != info.dtype or array.shape[1:] != info.shape[1:]:
            raise ValueError(
                f"tensor {name!r} is {info.dtype} {list(info.shape)}, not {array.dtype} {list(array.shape)}"
            )
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = row * (info.nbytes // info.shape[0]) if row else 0
        if start + raw.size > info.nbytes:
            raise ValueError(f"tensor {name!r} has {info.shape[0]} rows; row {row} + {len(array)} is past them")
        _write_all(self._file.fileno(), raw, self._data_start + self._offsets[name] + start)
        with self._lock:
            self._written[name] += raw.size

    def close(self) -> None:
        """Puts the file on disk under its final name. Raises ValueError where a tensor is not whole."""
        short = [name for name, info in self.tensors.items() if self._written[name] != info.nbytes]
        if short:
            raise ValueError(f"{self.path}: not every byte was written of {', '.join(short)}")
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self.path)

    def abandon(self) -> None:
        """Closes and removes the temporary file."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def _write_all(descriptor: int, raw: np.ndarray, position: int) -> None:
    view = memoryview(raw)  # type: ignore[arg-type]
    while view:  # Linux takes at most 2 GiB a call
        count = os.pwrite(descriptor, view, position)
        view = view[count:]
        position += count
