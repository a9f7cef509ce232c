"""The layouts of block-scaled products: the written definitions, and CuTe's own layouts of the same instruction."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import numpy as np
import pytest

from qwenjax_kernels import block_scaled

ROWS = 48  # of the N operand
# CuTe's shared memory layouts of two stages, as "name shape:stride", strides in bytes.
PRINT_LAYOUTS = """
import cutlass.cute as cute
from cutlass import Float8E4M3FN
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

@cute.jit
def show():
    op = tcgen05.MmaMXF8F6F4Op(Float8E4M3FN, Float8E4M3FN, (128, ROWS, 32), tcgen05.CtaGroup.ONE,
                               tcgen05.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K)
    mma = cute.make_tiled_mma(op)
    shape = (128, ROWS, 128)
    print("weights", blackwell_helpers.make_smem_layout_a(mma, shape, Float8E4M3FN, 2))
    print("rows", blackwell_helpers.make_smem_layout_b(mma, shape, Float8E4M3FN, 2))
    print("weight_scales", blockscaled_layout.make_smem_layout_sfa(mma, shape, 32, 2))
    print("row_scales", blockscaled_layout.make_smem_layout_sfb(mma, shape, 32, 2))

show()
"""


def flat(modes: object) -> list[int]:
    return [modes] if isinstance(modes, int) else [size for mode in modes for size in flat(mode)]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def layouts() -> dict[str, tuple[str, list[int], list[int]]]:
    """Name: (swizzle, flat shape, flat stride)."""
    source = PRINT_LAYOUTS.replace("ROWS", str(ROWS))
    # The DSL reads its functions' source from a file.
    code = (
        f"import pathlib, tempfile, runpy\nwith tempfile.TemporaryDirectory() as folder:\n"
        f"    path = pathlib.Path(folder) / 'show.py'\n    path.write_text({source!r})\n    runpy.run_path(str(path))"
    )
    environment = os.environ | {"CUTE_DSL_ARCH": "sm_100a"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    found = {}
    for line in run.stdout.splitlines():
        name, _, layout = line.partition(" ")
        swizzle, _, plain = layout.rpartition(" o ")
        shape, stride = plain.split(":")
        found[name] = (swizzle, flat(ast.literal_eval(shape)), flat(ast.literal_eval(stride)))
    assert len(found) == 4, run.stderr[-2000:]
    return found


def test_scales_lie_in_the_128_by_4_layout() -> None:
    """cuBLAS, "1D Block Scaling Factors Layout": offset = (outer % 32) * 16 + (outer / 32) * 4 + inner."""
    outer, inner = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    offsets = block_scaled.scale_offset(outer, inner)
    np.testing.assert_array_equal(offsets, outer % 32 * 16 + outer // 32 * 4 + inner)
    assert sorted(offsets.ravel()) == list(range(512))


def test_elements_lie_under_the_128_byte_swizzle() -> None:
    """PTX ISA, 128-byte swizzle: address bits 4 to 6 are XORed with bits 7 to 9."""
    row, k = np.meshgrid(np.arange(128), np.arange(128), indexing="ij")
    linear = row * 128 + k
    offsets = block_scaled.element_offset(row, k)
    np.testing.assert_array_equal(offsets, linear ^ ((linear >> 7 & 7) << 4))
    assert sorted(offsets.ravel()) == list(range(128 * 128))


@pytest.mark.parametrize(("name", "rows"), [("weights", 128), ("rows", ROWS)])
def test_elements_lie_where_cute_lays_them(
    layouts: dict[str, tuple[str, list[int], list[int]]], name: str, rows: int
) -> None:
    swizzle, shape, stride = layouts[name]
    assert swizzle == "S<3,4,3> o 0"  # three bits from bit 7 to bit 4
    assert shape == [rows, 32, 1, 4, 2]
    row, k = np.meshgrid(np.arange(rows), np.arange(128), indexing="ij")
    linear = row * stride[0] + k % 32 * stride[1] + k // 32 * stride[3]
    np.testing.assert_array_equal(block_scaled.element_offset(row, k), linear ^ ((linear >> 7 & 7) << 4))
    assert stride[4] == rows * 128


@pytest.mark.parametrize("name", ["weight_scales", "row_scales"])
def test_scales_lie_where_cute_lays_them(layouts: dict[str, tuple[str, list[int], list[int]]], name: str) -> None:
    _, shape, stride = layouts[name]
    assert shape == [32, 4, 1, 32, 1, 1, 4, 2]
    row, block = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    place = row % 32 * stride[0] + row // 32 * stride[1] + block * stride[6]
    np.testing.assert_array_equal(block_scaled.scale_offset(row, block), place)
    assert stride[3] == 0  # the 32 elements of a block share one
    assert stride[7] == block_scaled.SCALE_TILE_BYTES


def test_a_quad_turns_its_bytes_in_two_exchanges() -> None:
    def prmt(a: int, b: int, selector: int) -> int:
        both = a | b << 32
        return sum((both >> 8 * (selector >> 4 * byte & 7) & 255) << 8 * byte for byte in range(4))

    words = [sum((16 * lane + column) << 8 * column for column in range(4)) for lane in range(4)]
    for step, distance in ((0, 1), (1, 2)):
        words = [
            prmt(words[lane], words[lane ^ distance], block_scaled.transpose_selectors(lane)[step]) for lane in range(4)
        ]
    assert words == [sum((16 * lane + column) << 8 * lane for lane in range(4)) for column in range(4)]


def test_an_epilogue_stores_each_four_elements_of_a_tile_once() -> None:
    places = set()
    for warp in range(4):
        for lane in range(32):
            for column in range(0, 64, 4):
                row, k = block_scaled.quantised_place(warp, lane, column)
                assert k // 32 == warp
                places.add((row, k))
    assert places == {(row, k) for row in range(64) for k in range(0, 128, 4)}


def test_each_weight_row_lies_in_one_tile_and_gate_beside_up() -> None:
    for width in (32, 128, 160):
        for gate_up in (False, True):
            tiles = block_scaled.weight_row_tiles(width, gate_up)
            rows = [block_scaled.weight_row(tile, lane, width, gate_up) for tile in range(tiles) for lane in range(128)]
            assert sorted(row for row in rows if row >= 0) == list(range(width * (2 if gate_up else 1)))
    for lane in range(32):
        assert block_scaled.weight_row(3, lane, 160, True) == block_scaled.weight_row(2, lane, 160, True) + 160
