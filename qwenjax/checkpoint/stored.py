"""How a checkpoint stores its weights (floats, MXFP8, FP8 with a scale per block), and reading any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from qwenjax.checkpoint.safetensors import Checkpoint, CheckpointError, TensorInfo
from qwenjax_ffi.weights import MX_BLOCK

Storage = Literal["float", "mxfp8", "fp8_block"]

_FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_MX_SCALE, BLOCK_SCALE = "_scale", "_scale_inv"  # suffixes of the scales' names
_READS = (
    "qwenjax reads ModelOpt's MXFP8 (quant_method modelopt, quant_algo MXFP8), compressed-tensors' mxfp8-quantized, "
    "and fp8 with weight_block_size"
)


def parse_quantization(folder: Path, raw: Mapping[str, Any] | None) -> tuple[Storage, tuple[int, int]]:
    """The storage of quantised weights that a checkpoint declares, and rows and columns that share a scale.

    raw: config.json's quantization_config. ModelOpt's older exports declare theirs in hf_quant_config.json alone.
    Raises CheckpointError for a method that we do not read, by name.
    """
    legacy = folder / "hf_quant_config.json"
    if raw is None and legacy.is_file():
        try:
            found = json.loads(legacy.read_text("utf-8"))
            raw = {"quant_method": "modelopt", **found["quantization"]}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{legacy}: no readable 'quantization' ({error!r})") from error
    if raw is None:
        return "float", (1, 1)
    method, algorithm = raw.get("quant_method"), raw.get("quant_algo")
    if method == "modelopt" and algorithm == "MXFP8":
        return "mxfp8", (1, MX_BLOCK)
    if method == "compressed-tensors" and raw.get("format") == "mxfp8-quantized":
        return "mxfp8", (1, MX_BLOCK)
    block = raw.get("weight_block_size")
    if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return "fp8_block", (block[0], block[1])
    kind = algorithm or raw.get("format") or (f"weight_block_size {block}" if method == "fp8" else None)
    raise CheckpointError(f"{folder}: is quantised by {method!r}{f' ({kind})' if kind else ''}; {_READS}")


class StoredWeights:
    """A checkpoint's weights with their scales at their side.

    tensors: every tensor that is not a scale. Raises CheckpointError, before a weight is read, for a type that does not
    go with what the checkpoint declares, a weight without its scales, scales of another shape or of no weight.
    """

    def __init__(self, checkpoint: Checkpoint, declared: Storage, block: tuple[int, int]) -> None:
        self.checkpoint, self.declared, self.block = checkpoint, declared, block
        self._suffix = {"float": None, "mxfp8": _MX_SCALE, "fp8_block": BLOCK_SCALE}[declared]
        self.tensors = {name: info for name, info in checkpoint.tensors.items() if not self._is_scale(name)}
        for name, info in checkpoint.tensors.items():
            self._check(name, info)

    def storage(self, name: str) -> Storage:
        """How tensor `name` is stored: one that the quantiser left alone is a float."""
        return self.declared if self.tensors[name].dtype == FP8 else "float"

    def nbytes(self, name: str, shape: Sequence[int]) -> int:
        """Bytes in the files of a part of `name` of that shape, its scales aside."""
        return int(np.prod(shape)) * self.tensors[name].dtype.itemsize

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """The values of a part of `name` as floats: float32 where it is quantised, which holds them exactly (MXFP8) or
        rounded once (FP8 blocks), else as stored."""
        values = self.checkpoint.read(name, index)
        if self.storage(name) == "float":
            return values
        index = [*index, *[slice(None)] * (values.ndim - len(index))]
        rows, columns = (
            np.arange(*part.indices(size)) // block
            for part, size, block in zip(index[-2:], self.tensors[name].shape[-2:], self.block, strict=True)
        )
        scales = self._read_scales(name, [*index[:-2], _covering(rows), _covering(columns)])
        each = scales[..., rows - rows[0], :][..., columns - columns[0]]
        return values.astype(np.float32) * each

    def read_mxfp8(self, name: str, index: Sequence[slice]) -> tuple[np.ndarray, np.ndarray]:
        """Elements and scale bytes of a part of an MXFP8 tensor; the part begins and ends between blocks of 32."""
        elements = self.checkpoint.read(name, index)
        index = [*index, *[slice(None)] * (elements.ndim - len(index))]
        start, stop, _ = index[-1].indices(self.tensors[name].shape[-1])
        last = slice(start // MX_BLOCK, stop // MX_BLOCK)
        return elements, self.checkpoint.read(name + _MX_SCALE, [*index[:-1], last]).view(np.uint8)

    def _read_scales(self, name: str, index: Sequence[slice]) -> np.ndarray:
        scales = self.checkpoint.read(f"{name}{self._suffix}", index)
        if self.declared == "fp8_block":
            return scales.astype(np.float32)
        return np.ldexp(np.float32(1), scales.view(np.uint8).astype(np.int32) - 127)

    def _is_scale(self, name: str) -> bool:
        return self._suffix is not None and name.endswith(self._suffix)

    def _check(self, name: str, info: TensorInfo) -> None:
        where, tensors = self.checkpoint.file_of(name), self.checkpoint.tensors
        if self._is_scale(name):
            assert self._suffix is not None
            weight = tensors.get(name.removesuffix(self._suffix))
            if weight is None or weight.dtype != FP8:
                raise CheckpointError(f"{where}: {name} scales no float8 tensor")
        elif info.dtype == FP8 and self._suffix is not None:
            if len(info.shape) < 2:
                raise CheckpointError(f"{where}: {name} is float8 {list(info.shape)}; weights in blocks have two axes")
            scale = tensors.get(name + self._suffix)
            if scale is None:
                raise CheckpointError(f"{where}: {name} is float8, and {name}{self._suffix} is missing")
            blocks = (-(-size // block) for size, block in zip(info.shape[-2:], self.block, strict=True))
            expected = (*info.shape[:-2], *blocks)
            if scale.shape != expected or (self.declared == "mxfp8" and scale.dtype.itemsize != 1):
                raise CheckpointError(
                    f"{where}: {name}{self._suffix} is {scale.dtype} {list(scale.shape)}; {list(info.shape)} in blocks "
                    f"of {list(self.block)} needs {list(expected)}"
                )
            if self.declared == "mxfp8" and info.shape[-1] % MX_BLOCK:
                raise CheckpointError(f"{where}: {name} has {info.shape[-1]} columns, which {MX_BLOCK} does not divide")
        elif info.dtype not in _FLOATS:
            raise CheckpointError(
                f"{where}: tensor {name!r} is {info.dtype}; weights are bf16, fp16 or fp32"
                + ("" if self._suffix else ", as config.json declares no quantisation")
            )


def _covering(blocks: np.ndarray) -> slice:
    return slice(int(blocks[0]), int(blocks[-1]) + 1)
