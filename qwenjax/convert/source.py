"""The checkpoint to convert: its config, and its tensors as (weight, scale) pairs with the errors named."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qwenjax.checkpoint.safetensors import Checkpoint, CheckpointError
from qwenjax_ffi.weights import MX_BLOCK

SCALE_SUFFIX = "_scale_inv"  # X.weight_scale_inv beside X.weight: DeepSeek's and Qwen's FP8 checkpoints
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class ConvertError(ValueError):
    """The conversion cannot be done as asked; the message names the thing, its value and the way out."""


@dataclass(frozen=True)
class Source:
    """An opened source checkpoint, which is only ever read.

    block: rows and columns that share a scale, where the weights are FP8; None for plain floats.
    """

    folder: Path
    config: dict[str, Any]
    checkpoint: Checkpoint
    block: tuple[int, int] | None

    def weights(self) -> list[str]:
        """All tensors save the scales of FP8 weights."""
        return [name for name in self.checkpoint.tensors if not name.endswith(SCALE_SUFFIX)]

    def is_fp8(self, name: str) -> bool:
        return self.checkpoint.tensors[name].dtype == FP8


def open_source(folder: str | os.PathLike[str]) -> Source:
    """Opens a folder with config.json and safetensors. Raises ConvertError, or CheckpointError for its files."""
    path = Path(folder)
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except OSError as error:
        raise ConvertError(f"{path / 'config.json'}: cannot be read ({error.strerror}); SRC must be a model") from error
    except ValueError as error:
        raise ConvertError(f"{path / 'config.json'}: not JSON: {error}") from error
    block = _block(path, config.get("quantization_config"))
    source = Source(path, config, Checkpoint(path), block)
    for name in source.checkpoint.tensors:
        _check_tensor(source, name)
    return source


def _block(path: Path, quantization: dict[str, Any] | None) -> tuple[int, int] | None:
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if method != "fp8" or not block:
        algorithm = quantization.get("quant_algo")
        what = f"{method} {algorithm}" if algorithm else f"{method}"
        raise ConvertError(
            f"{path}: is quantised already ({what}); convert reads float checkpoints and "
            "quant_method fp8 with weight_block_size"
        )
    if len(block) != 2 or block[1] % MX_BLOCK:
        raise ConvertError(f"{path}: weight_block_size {block} has columns that {MX_BLOCK} does not divide")
    return int(block[0]), int(block[1])


def _check_tensor(source: Source, name: str) -> None:
    tensors, info = source.checkpoint.tensors, source.checkpoint.tensors[name]
    if name.endswith(SCALE_SUFFIX):
        weight = tensors.get(name.removesuffix(SCALE_SUFFIX))
        if weight is None or weight.dtype != FP8:
            raise CheckpointError(f"{source.folder}: {name} scales no float8 tensor")
    elif info.dtype == FP8:
        scale = tensors.get(name + SCALE_SUFFIX)
        if source.block is None or scale is None:
            lacks = (
                "config.json has no weight_block_size" if source.block is None else f"{name}{SCALE_SUFFIX} is missing"
            )
            raise CheckpointError(f"{source.folder}: {name} is float8, but {lacks}")
        expected = tuple(-(-n // b) for n, b in zip(info.shape[-2:], source.block, strict=True))
        if scale.shape != (*info.shape[:-2], *expected):
            raise CheckpointError(
                f"{source.folder}: {name}{SCALE_SUFFIX} has shape {list(scale.shape)}; {list(info.shape)} in blocks "
                f"of {list(source.block)} needs {[*info.shape[:-2], *expected]}"
            )
    elif info.dtype not in FLOATS:
        raise CheckpointError(f"{source.folder}: {name} is {info.dtype}; a weight must be a float")
