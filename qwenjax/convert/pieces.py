"""The unit of work: a run of rows of one weight, read, quantised and written by one thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qwenjax.checkpoint.stored import FP8
from qwenjax.checkpoint.writer import SafetensorsWriter
from qwenjax.convert.encode import Error, NonFinite, encode
from qwenjax.convert.plan import BF16, Part
from qwenjax.convert.source import SCALE_SUFFIX, Source
from qwenjax.quant.bits import float32_bits
from qwenjax.quant.format import NonFiniteError, check_finite
from qwenjax_ffi.weights import MX_BLOCK

# Input bytes of a piece. A piece and its result, 2.5 times as much together, exist once a thread whatever the
# size of the tensor: 1.3 GB on 128 cores.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """Rows `row` to `row + rows` of a part; a vector or scalar is one row."""

    part: Part
    row: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.rows * (self.part.bytes_in // max(1, self.part.shape[0] if self.part.shape else 1))


def pieces_of(part: Part) -> Iterator[Piece]:
    """The pieces of a part, in order."""
    rows = part.shape[0] if part.shape else 1
    each = max(1, PIECE_BYTES // max(1, part.bytes_in // max(1, rows)))
    for row in range(0, max(1, rows), each):
        yield Piece(part, row, min(each, rows - row))


def process(source: Source, writer: SafetensorsWriter, piece: Piece) -> Error:
    """Reads, converts and writes one piece. Raises NonFiniteError with the place in the source tensor."""
    part, first = piece.part, piece.part.first + piece.row
    lead = tuple(slice(i, i + 1) for i in part.index)
    index = (*lead, slice(first, first + piece.rows)) if part.shape else None
    values = source.checkpoint.read(part.source, index)
    values = values.reshape(values.shape[len(lead) :])
    scales = _block_scales(source, piece, first, values.shape) if part.dtype == FP8 else None
    try:
        if not part.quantised:
            kept = values if scales is None else _dequantise(values, scales)
            _check(kept)
            writer.write(part.name, kept, piece.row)
            return Error()
        flat = values.reshape(-1)
        codes, out_scales, error = encode(flat, None if scales is None else scales.reshape(-1))
    except NonFinite:
        _raise_at(part, first, values if scales is None else _dequantise(values, scales))
    writer.write(part.name, codes.view(ml_dtypes.float8_e4m3fn).reshape(values.shape), piece.row)
    writer.write(part.name + "_scale", out_scales.reshape(piece.rows, -1), piece.row)
    return error


def _block_scales(source: Source, piece: Piece, first: int, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 scales of the piece, one per row and 32 columns, from one per block of the source."""
    assert source.block is not None
    part = piece.part
    height, width = source.block
    scales = source.checkpoint.read(part.source + SCALE_SUFFIX, tuple(slice(i, i + 1) for i in part.index))
    scales = scales.reshape(scales.shape[len(part.index) :]).astype(np.float32)
    rows = scales[np.arange(first, first + piece.rows) // height]
    return np.ascontiguousarray(rows[:, np.arange(0, shape[-1], MX_BLOCK) // width])


def _dequantise(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """FP8 as bfloat16, for layers that are kept."""
    each = scales.repeat(MX_BLOCK, -1)[:, : values.shape[-1]]
    with np.errstate(invalid="ignore", over="ignore"):
        return (values.astype(np.float32) * each).astype(BF16)


def _check(values: np.ndarray) -> None:
    """Raises NonFinite. Sixteen bits at a time for the half-width types, which fill most of a checkpoint."""
    if values.size and values.dtype.itemsize == 2:
        infinity = 0x7F80 if values.dtype == BF16 else 0x7C00
        if int((values.view(np.uint16) & 0x7FFF).max()) >= infinity:
            raise NonFinite
    elif not np.isfinite(values).all():
        raise NonFinite


def _raise_at(part: Part, first: int, values: np.ndarray) -> None:
    try:
        check_finite(values, float32_bits(values))
    except NonFiniteError as error:
        row = (error.index[0] + first,) if error.index else ()
        raise NonFiniteError((*part.index, *row, *error.index[1:]), error.value, part.source) from None
    raise AssertionError(f"{part.source}: {math.prod(values.shape)} values are finite after all")
