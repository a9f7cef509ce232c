"""The Hopper grouped GEMM compiles without a GPU: no spills, no serialised wgmma, the instructions that it is for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from qwenjax_kernels.grouped_gemm_sm90_bf16 import BF16GroupedGemmSm90
from qwenjax_kernels.grouped_gemm_sm90_mxfp8 import MXFP8GroupedGemmSm90
from qwenjax_kernels.tiles import BF16_TILES, MXFP8_TILES, Tile
from tests.kernels.compiling import compile_case

COMPILE = Path(__file__).with_name("compile_grouped_gemm.py")
TILES = {
    weights: [Tile(rows, *fields) for rows, choices in table.items() for fields in choices]
    for weights, table in (("mxfp8", MXFP8_TILES), ("bf16", BF16_TILES))
}
FORMS = {"mxfp8": MXFP8GroupedGemmSm90, "bf16": BF16GroupedGemmSm90}

Case = tuple[Any, ...]
FAST: list[Case] = [
    ("moe_gate_up", 2048, 768, 128, 512, (16, 2, 2), True, "mxfp8"),
    ("moe_down", 768, 2048, 128, 48000, (128, 2, 2), False, "mxfp8"),
    ("grouped_gemm", 96, 160, 5, 40, (16, 4, 1, True), False, "mxfp8"),
    ("moe_gate_up", 2048, 768, 128, 512, (16, 2, 1), True, "bf16"),
]
SLOW: list[Case] = [
    (op, k, width, groups, tile.rows * groups, dataclasses.astuple(tile), True, weights)
    for op, k, width, groups in (("moe_gate_up", 4096, 1536, 16), ("moe_down", 1536, 4096, 16))
    for weights, tiles in TILES.items()
    for tile in tiles
] + [
    ("grouped_gemm", 2048, 512, 1, tile.rows, dataclasses.astuple(tile), False, weights)
    for weights, tiles in TILES.items()
    for tile in tiles
    if tile.rows * tile.units <= 128  # as choose_tile has them for float32
]


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_compiles_to_wgmma_without_spills(case: Case) -> None:
    remarks, ptx = compile_case(COMPILE, case, "sm_90a")
    tile, weights = Tile(*case[5]), case[-1]
    # C7510 to C7514: ptxas serialises wgmma and says why.
    assert not re.search(r"\(C75\d\d\)", remarks), remarks
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in remarks, remarks
    # MXFP8: A from four registers, B from a shared memory descriptor; bf16: both from shared memory.
    a_operand = r"\{(%r\d+(, )?){4}\}" if weights == "mxfp8" else r"%rd\d+"
    wgmma = rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile.rows}k16\.f32\.bf16\.bf16 \{{[^}}]*\}}, {a_operand}, %rd"
    assert len(re.findall(wgmma, ptx)) == FORMS[weights].unit_k // 16 * tile.units
    if weights == "mxfp8":
        assert "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in ptx
        assert "mul.rn.bf16x2" in ptx
    else:
        assert "cp.async.bulk.tensor." in ptx

    # setmaxnreg only moves registers about: more than the launch holds is a deadlock.
    held = int(re.findall(r"Used (\d+) registers", remarks)[-1])
    producer, consumer = tile.registers()
    assert producer + tile.warpgroups * consumer <= held * (1 + tile.warpgroups)


@pytest.mark.parametrize(("weights", "tile"), [(w, tile) for w, tiles in TILES.items() for tile in tiles], ids=str)
@pytest.mark.parametrize("groups", [1, 128, 512])
def test_shared_memory_holds_two_stages(weights: str, tile: Tile, groups: int) -> None:
    form = FORMS[weights]
    stages = tile.stages(groups, form.unit_bytes, form.unit_k)
    assert stages >= max(2, tile.warpgroups if tile.split_k else 2)
    a_stage = tile.m_units * form.unit_bytes + tile.rows * form.unit_k * 2 + 16
    assert stages * a_stage + tile.exchange_bytes + 8 * groups <= 227 * 1024


def test_contraction_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="k is 40; it must be a multiple of 32"):
        MXFP8GroupedGemmSm90(k=40, width=64, num_groups=1, epilogue="plain", tile=Tile(16), num_sms=132)
