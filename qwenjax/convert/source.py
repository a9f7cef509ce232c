"""The checkpoint to convert: its config, and its tensors with their types and scales checked."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenjax.checkpoint.load import ORBAX_PARAMETERS
from qwenjax.checkpoint.safetensors import Checkpoint
from qwenjax.checkpoint.stored import BLOCK_SCALE, StoredWeights, parse_quantization
from qwenjax_ffi.weights import MX_BLOCK

SCALE_SUFFIX = BLOCK_SCALE  # X.weight_scale_inv beside X.weight: DeepSeek's and Qwen's FP8 checkpoints


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
    weights: list[str]


def open_source(folder: str | os.PathLike[str]) -> Source:
    """Opens a folder with config.json and safetensors. Raises ConvertError, or CheckpointError for its files."""
    path = Path(folder)
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except OSError as error:
        raise ConvertError(f"{path / 'config.json'}: cannot be read ({error.strerror}); SRC must be a model") from error
    except ValueError as error:
        raise ConvertError(f"{path / 'config.json'}: not JSON: {error}") from error
    storage, block = parse_quantization(path, config.get("quantization_config"))
    if storage == "mxfp8":
        raise ConvertError(
            f"{path}: is quantised already (MXFP8); convert reads float checkpoints and quant_method fp8 with "
            "weight_block_size"
        )
    if storage == "fp8_block" and block[1] % MX_BLOCK:
        raise ConvertError(f"{path}: weight_block_size {list(block)} has columns that {MX_BLOCK} does not divide")
    if (path / ORBAX_PARAMETERS).is_dir():
        raise ConvertError(f"{path}: is an Orbax folder; convert reads safetensors, such as it was made from")
    checkpoint = Checkpoint(path)
    stored = StoredWeights(checkpoint, storage, block)
    return Source(path, config, checkpoint, block if storage == "fp8_block" else None, list(stored.tensors))
