"""The arguments of every command that loads a model."""

from __future__ import annotations

import argparse
from typing import get_args

from qwenjax_ffi.activations import ActivationFormat


def add_model_arguments(
    parser: argparse.ArgumentParser, quantization: bool = True, dtype: str = "auto", mesh: str = "default 1"
) -> None:
    """MODEL, its mesh and its dtype, `dtype` by default; `quantization`: whether the command can quantise it while
    loading; `mesh`: what help says of the sizes that it has by default."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder, or a Hugging Face repo id")
    for axis, what in (("data", "the requests"), ("model", "each layer")):
        text = f"ranks that share {what} ({mesh})"
        parser.add_argument(f"--{axis}-parallel", type=int, default=1, metavar="N", help=text)
    parser.add_argument(
        "--dtype",
        default=dtype,
        choices=("auto", "bfloat16", "float16", "float32"),
        help=f"auto is config.json's (default {dtype})",
    )
    if quantization:
        parser.add_argument("--quantization", choices=("mxfp8",), help="quantise the linear layers while loading")
        parser.add_argument(
            "--activation-format",
            choices=get_args(ActivationFormat),
            help="what the linear layers' inputs are rounded to (default: model; on Blackwell GPUs, for MXFP8, mxfp8)",
        )
    parser.add_argument("--revision", help="of a Hugging Face repository")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bars")
