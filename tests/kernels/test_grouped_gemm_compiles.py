"""The Hopper grouped GEMM compiles without a GPU: no spills, no serialised wgmma, the instructions that it is for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwenjax_ffi.grouped_gemm_kernel import TILE_HEIGHTS
from qwenjax_kernels.grouped_gemm_sm90 import GroupedGemmSm90
from qwenjax_kernels.tiles import Tile

COMPILE = Path(__file__).with_name("compile_grouped_gemm.py")
EVERY_TILE = [Tile(rows, *height) for rows, heights in TILE_HEIGHTS.items() for height in heights]

Case = tuple[Any, ...]
FAST: list[Case] = [
    ("moe_gate_up", 2048, 768, 128, 512, 16, 2, 2, True),
    ("moe_down", 768, 2048, 128, 512, 16, 2, 2, True),
    ("moe_down", 768, 2048, 128, 48000, 128, 2, 2, False),
    ("grouped_gemm", 96, 160, 5, 40, 16, 2, 1, False),
]
SLOW: list[Case] = [
    (op, k, width, groups, tile.rows * groups, tile.rows, tile.warpgroups, tile.units, True)
    for op, k, width, groups in (("moe_gate_up", 4096, 1536, 16), ("moe_down", 1536, 4096, 16))
    for tile in EVERY_TILE
]


def compile_case(case: Case, folder: Path) -> tuple[str, str]:
    """The compiler's remarks and the PTX of one kernel."""
    environment = os.environ | {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "JAX_PLATFORMS": "cpu",
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    run = subprocess.run(
        [sys.executable, str(COMPILE), json.dumps(case)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (ptx,) = folder.glob("*.ptx")
    return run.stdout + run.stderr, ptx.read_text()


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_compiles_to_register_wgmma_without_spills(case: Case, tmp_path: Path) -> None:
    remarks, ptx = compile_case(case, tmp_path)
    _, _, _, _, _, rows, warpgroups, units, _ = case
    # C7510 to C7514: ptxas serialises wgmma and says why.
    assert not re.search(r"\(C75\d\d\)", remarks), remarks
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in remarks, remarks
    # A from registers (four of them), B from a shared memory descriptor.
    wgmma = rf"wgmma\.mma_async\.sync\.aligned\.m64n{rows}k16\.f32\.bf16\.bf16 "
    wgmma += r"\{[^}]*\}, \{(%r\d+(, )?){4}\}, %rd"
    assert len(re.findall(wgmma, ptx)) == 8 * units
    assert "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in ptx
    assert "mul.rn.bf16x2" in ptx

    # setmaxnreg only moves registers about: more than the launch holds is a deadlock.
    held = int(re.findall(r"Used (\d+) registers", remarks)[-1])
    producer, consumer = Tile(rows, warpgroups, units).registers()
    assert producer + warpgroups * consumer <= held * (1 + warpgroups)


@pytest.mark.parametrize("tile", EVERY_TILE, ids=str)
@pytest.mark.parametrize("groups", [1, 128, 512])
def test_shared_memory_holds_two_stages(tile: Tile, groups: int) -> None:
    stages = tile.stages(groups)
    assert stages >= 2
    used = stages * (tile.weight_stage_bytes + tile.row_stage_bytes + 16) + 8 * groups
    assert used <= 227 * 1024


def test_contraction_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="k is 40; it must be a multiple of 32"):
        GroupedGemmSm90(k=40, width=64, num_groups=1, epilogue="plain", tile=Tile(16), num_sms=132)
