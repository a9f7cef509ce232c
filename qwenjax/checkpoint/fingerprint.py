"""Telling two checkpoints of one config apart without reading them whole."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from qwenjax.checkpoint.load import ORBAX_PARAMETERS
from qwenjax.checkpoint.safetensors import Checkpoint

_ELEMENTS = 16  # of every tensor: training changes all that it touches
_BYTES = 64  # of every file of an Orbax folder, likewise


def checkpoint_fingerprint(folder: Path) -> str:
    """16 hexadecimal digits, equal for equal weights however their tensors are spread over files.

    Of every tensor the name, the dtype, the shape and a few elements of its middle count: fine-tunes of one model
    differ, while two files that differ in a few elements alone may not. Of a folder that Orbax wrote, the parameters'
    files count, of which only a copy is equal. Raises CheckpointError as Checkpoint does.
    """
    digest = hashlib.sha256()
    if (folder / ORBAX_PARAMETERS).is_dir():
        for path in sorted(path for path in (folder / ORBAX_PARAMETERS).rglob("*") if path.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(os.pread(file.fileno(), _BYTES, max(0, size - _BYTES) // 2))
        return digest.hexdigest()[:16]
    checkpoint = Checkpoint(folder)
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        *rows, last = info.shape or (1,)
        start = max(0, last - _ELEMENTS) // 2
        middle = [*(slice(size // 2, size // 2 + 1) for size in rows), slice(start, min(last, start + _ELEMENTS))]
        if info.nbytes:
            digest.update(checkpoint.read(name, middle if info.shape else None).tobytes())
    return digest.hexdigest()[:16]
