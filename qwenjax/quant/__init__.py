"""Number formats for weights, behind one interface (qwenjax.quant.format.Format)."""

from qwenjax.quant.format import Format, NonFiniteError
from qwenjax.quant.fp4 import MXFP4, NVFP4
from qwenjax.quant.fp8_block import FP8Block
from qwenjax.quant.mxfp8 import MXFP8, quantise_weight

FORMATS: dict[str, Format] = {
    format.name: format for format in (MXFP8(), FP8Block(), FP8Block(stochastic=True), MXFP4(), NVFP4())
}

__all__ = [
    "FORMATS",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "FP8Block",
    "Format",
    "NonFiniteError",
    "quantise_weight",
]
