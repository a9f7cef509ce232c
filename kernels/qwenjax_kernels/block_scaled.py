"""The layouts of block-scaled `tcgen05.mma` (kind::mxf8f6f4): pure Python, shared by packing, references and kernels.

A tile is some rows by 128 of the contraction: e4m3 elements in 128-byte lines under the 128-byte swizzle, then UE8M0
scales, one per row and 32 elements, in the 128 x 4 layout. Tiles are contiguous in global memory, elements and scales,
so that one bulk copy each brings them to shared memory as the instruction reads them; no tensor map is needed.

- Weights are tiles of 128 rows, the M operand: [row tiles, k tiles, 16,896 bytes].
- Rows of activations, sorted by group, are cut into tiles of `tile_rows` (8 to 128), the N operand, each of one group
  only: the last tile of a group is filled with rows of zeros. [row tiles, k tiles, 128 * tile_rows + 512 bytes].

The functions take ints, NumPy arrays or a kernel's integers; numbers are not negative.
Sources: PTX ISA 8.7, "Shared Memory Layout and Swizzling" and "Scale Factor A Layout" for scale_vec::1X; cuBLAS 12.9,
"1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from typing import Any, TypeAlias

Integer: TypeAlias = Any  # an int, a NumPy array or a kernel's Int32

TILE_K = 128
WEIGHT_ROWS = 128
MX_BLOCK = 32
BLOCKS = TILE_K // MX_BLOCK
SCALE_TILE_BYTES = 512  # 128 rows x 4 scales
SCALE_TILE_ROWS = 128

E4M3_MAX_EXPONENT = 8  # 448 is 1.75 * 2^8
E4M3_MAX_MANTISSA = 0x600000
MIN_SCALE, MAX_SCALE, NAN_SCALE = 10, 252, 255  # 2^-117 and 2^125: see qwenjax_ffi.activations


def element_offset(row: Integer, k: Integer) -> Integer:
    """The byte of element (row, k) of a tile: chunks of 16 bytes, exchanged within a line by its row modulo 8."""
    return row * 128 + ((k >> 4) ^ (row & 7)) * 16 + (k & 15)


def scale_offset(row: Integer, block: Integer) -> Integer:
    """The byte of the scale of a row's MX block, from the first scale of the tile (row below 128, block below 4).

    Rows 32 apart are neighbours: 32 lines of 16 bytes, each of four rows with four scales.
    """
    return (row & 31) * 16 + (row >> 5) * 4 + block


def tile_bytes(rows: int) -> int:
    """Bytes of a tile of so many rows. The scales take 512 whatever the rows are."""
    return rows * TILE_K + SCALE_TILE_BYTES


def k_tiles(k: int) -> int:
    """How many tiles cover a contraction of k; what is past k is zero elements."""
    return -(-k // TILE_K)


def max_row_tiles(rows: int, num_groups: int, tile_rows: int) -> int:
    """The most tiles that `rows` rows in `num_groups` groups can need: each group adds at most one that is not full."""
    return max(1, rows // tile_rows + min(num_groups, rows))


def weight_row(tile: int, lane: int, width: int, gate_up: bool) -> int:
    """The weight row in row `lane` of a weight's row tile; -1 past the last row.

    gate_up: for a [2 * width, k] weight of gate rows, then up rows, even tiles hold gate rows and the odd tile after
    each the up rows of the same outputs, so that one thread finds both in the same lane of two accumulators.
    """
    if not gate_up:
        row = tile * WEIGHT_ROWS + lane
        return row if row < width else -1
    output = tile // 2 * WEIGHT_ROWS + lane
    return -1 if output >= width else output + tile % 2 * width


def weight_row_tiles(width: int, gate_up: bool) -> int:
    """Row tiles of a weight with `width` outputs (of gate and of up each)."""
    return -(-width // WEIGHT_ROWS) * (2 if gate_up else 1)


def scale_byte(amax_bits: int) -> int:
    """UE8M0 byte of a block from the bits of the largest magnitude as float32: the smallest scale that clips nothing.

    The rule of `qwenjax_ffi.activations`, but for a block that holds NaN or an infinity: that one is NaN as a whole.
    """
    if amax_bits >= 0x7F800000:
        return NAN_SCALE
    exponent = (amax_bits >> 23) + ((amax_bits & 0x7FFFFF) > E4M3_MAX_MANTISSA) - E4M3_MAX_EXPONENT
    return min(max(exponent, MIN_SCALE), MAX_SCALE)


def transpose_selectors(lane: int) -> tuple[int, int]:
    """The `prmt` selectors with which a quad's lanes turn a 4 x 4 of bytes in two exchanges, with lanes 1 and 2 apart.

    Before, lane i of a quad holds bytes (i, 0) to (i, 3) in a word; after, bytes (0, i) to (3, i).
    """
    return (0x3715 if lane & 1 else 0x6240), (0x3276 if lane & 2 else 0x5410)


def quantised_place(warp: Integer, lane: Integer, column: Integer) -> tuple[Integer, Integer]:
    """(row of the tile, first of four k of the tile) that an epilogue thread stores after the exchange.

    warp of four, of which each has the 32 outputs of one MX block in its lanes; column: the first of four accumulator
    columns, the rows of the tile.
    """
    return column + (lane & 3), warp * MX_BLOCK + (lane >> 2) * 4
