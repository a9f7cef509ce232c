"""The fragment order of packed MXFP8 weights: pure Python, shared by the packing and by the kernels that read it.

A packed weight is a grid of units, 64 rows by 128 of the contraction, one `wgmma` M tile by four MX blocks. A unit is
8,448 contiguous bytes: 4 vectors x 128 threads x 16 bytes of elements, then 64 x 4 bytes of UE8M0 scales. Thread t of
a warpgroup (warp t / 32, g = lane / 4, c = lane % 4) finds the bytes of its A fragments (PTX ISA, "Register Fragments
for wgmma.mma_async.m64nNk16") in order: vector v holds MX block v, its 32-bit word s * 2 + h the k16 step s of that
block and the row half h (fragment rows g and g + 8 of the warp's 16), and in the word are four e4m3 values, at
k = 16 s + 2 c + {0, 1} (the first register) and 16 s + 2 c + {8, 9} (the second).

The 16-bit half of a word holds two of them, p for the first register and q for the second, with the bits spread so
that each register is cut out with masks and one shift either way (five integer instructions for four values; the
plain byte order needs seven):

    bit      15   14 13 12   11   10 9 8 7 6 5 4   3 2 1 0
    holds    p.s  q.e3..e1   q.s  p.e3..e0 p.m2..0  q.e0 q.m2..0

Cut out, a value stands in bf16 with its 4-bit exponent at the bottom of the 8-bit one, which is the e4m3 value times
2^(7 - 127), e4m3 subnormals included; one multiplication by 2^(scale - 127 + 120) makes it exact. That factor is a
normal bf16 for scale bytes up to 134 (2^7).
"""

from __future__ import annotations

UNIT_ROWS = 64
UNIT_K = 128
MX_BLOCK = 32
UNIT_VECTORS = UNIT_K // MX_BLOCK
UNIT_ELEMENT_BYTES = UNIT_ROWS * UNIT_K
UNIT_BYTES = UNIT_ELEMENT_BYTES + UNIT_ROWS * UNIT_VECTORS

FIRST_MASK = 0x87F0
SECOND_LOW_MASK = 0x80F0  # after a shift to the left by 4: the sign, e0 and the mantissa
SECOND_HIGH_MASK = 0x0700  # after a shift to the right by 4: e3..e1

MAX_SCALE_BYTE = 134  # larger scales (2^8 and up) decode to infinity or NaN, never to a wrong number


def units(rows: int, k: int) -> tuple[int, int]:
    """How many units cover [rows, k]."""
    return -(-rows // UNIT_ROWS), -(-k // UNIT_K)


def plain_row(unit: int, warp: int, half: int, group: int) -> int:
    """The weight row in fragment row (warp, half, group) of a unit: the two halves are neighbouring outputs."""
    return unit * UNIT_ROWS + warp * 16 + group * 2 + half


def gate_up_row(unit: int, warp: int, half: int, group: int, width: int) -> int:
    """The same for a [2 * width, k] weight of gate rows, then up rows: half 0 is the gate, half 1 its up row.

    Returns -1 for the fragment rows past `width`, which hold zeros.
    """
    column = unit * (UNIT_ROWS // 2) + warp * 8 + group
    return -1 if column >= width else column + half * width
