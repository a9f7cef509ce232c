"""`qwenjax convert SRC DST`: a checkpoint to MXFP8."""

from __future__ import annotations

import argparse

import jax

from qwenjax.convert import convert, format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", metavar="SRC", help="a folder or Hugging Face repo id: bf16, fp16, fp32, or FP8 in blocks")
    add("dst", metavar="DST", help="folder to write; after an interruption the same command goes on there")
    add("--format", default="mxfp8", choices=["mxfp8"], help="of the weights (default %(default)s)")
    add("--only", choices=["experts", "attention", "mlp"], help="quantise these layers and no others")
    add(
        "--exclude", action="append", default=[], metavar="GLOB", help="leave these modules; may be given several times"
    )
    add(
        "--output",
        default="safetensors",
        choices=["safetensors", "orbax"],
        help="safetensors streams within 4 GB of memory; orbax, for qwenjax alone, needs memory for the whole "
        "quantised model and, until it is done, disk for it twice (default %(default)s)",
    )
    add("--workers", type=int, metavar="N", help="threads (default: one a core)")


def run(arguments: argparse.Namespace) -> int:
    """Converts with a progress bar on standard error, then prints the report on standard output.

    Raises ValueError for what cannot be converted, naming it.
    """
    jax.config.update("jax_platforms", "cpu")  # or JAX would reserve three quarters of every GPU's memory
    report = convert(
        arguments.src,
        arguments.dst,
        format=arguments.format,
        only=arguments.only,
        exclude=arguments.exclude,
        output=arguments.output,
        workers=arguments.workers,
        progress=True,
    )
    print(format_table(report))
    return 0
