"""Conversion of checkpoints to MXFP8: `convert(src, dst)`."""

from qwenjax.convert.report import format_table
from qwenjax.convert.run import convert
from qwenjax.convert.source import ConvertError

__all__ = ["ConvertError", "convert", "format_table"]
