"""Whose stage is it: the waits of the Hopper grouped GEMM's warpgroups for their stages, simulated in Python.

What is copied to a stage ends after any time, and a wait is over when a phase of the asked parity is the last that was
completed: of a fresh barrier, that of parity 1.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from qwenjax_kernels.grouped_gemm_sm90_bf16 import BF16GroupedGemmSm90
from qwenjax_kernels.grouped_gemm_sm90_mxfp8 import MXFP8GroupedGemmSm90
from qwenjax_kernels.tiles import BF16_TILES, K_BLOCKS, MXFP8_TILES, Tile

FORMS: dict[str, tuple[Any, Any]] = {
    "mxfp8": (MXFP8_TILES, MXFP8GroupedGemmSm90),
    "bf16": (BF16_TILES, BF16GroupedGemmSm90),
}
SPLIT = sorted(
    {
        (replace(tile, k_blocks=blocks), form, groups)
        for form, (tiles, _) in FORMS.items()
        for rows, fields in tiles.items()
        for tile in (Tile(rows, *field) for field in fields)
        if tile.split_k
        for groups in (1, 128, 512)
        for blocks in ((1, K_BLOCKS) if form == "mxfp8" and groups == 1 else (1,))
    },
    key=str,
)


def first_wrong_read(
    stages: int, warpgroups: int, units: int, tiles: int, seed: int, meet: bool = True
) -> tuple[int, int] | None:
    """A warpgroup and the unit of k that it took from a stage in which that was not, or not yet; None if none did.

    units: of k of a tile; warpgroup w takes the units w, w + warpgroups, ... of each. meet: whether the warpgroups wait
    for one another between tiles.
    """
    draw = random.Random(seed)
    slow = draw.randrange(units * tiles)  # whose copy ends after all others that can
    issued = 0
    copying: list[int] = []
    filled, freed = [0] * stages, [0] * stages  # completed phases of each barrier
    taken = [0] * warpgroups  # units that each has multiplied
    of_tile = [len(range(w, units, warpgroups)) for w in range(warpgroups)]
    while True:
        moves: list[tuple[str, int]] = [("end", unit) for unit in copying if unit != slow]
        if issued < units * tiles and freed[issued % stages] >= issued // stages:
            moves.append(("issue", issued))
        for w in range(warpgroups):
            if not of_tile[w]:
                continue
            tile, index = divmod(taken[w], of_tile[w])
            if tile == tiles or (meet and any(taken[o] < tile * of_tile[o] for o in range(warpgroups))):
                continue
            unit = tile * units + w + index * warpgroups
            if filled[unit % stages] % 2 != unit // stages % 2:
                moves.append(("take", w))
        if not moves and slow in copying:
            moves.append(("end", slow))
        if not moves:
            assert [tiles * count for count in of_tile] == taken, "the warpgroups wait for ever"
            return None
        move, which = draw.choice(moves)
        if move == "issue":
            copying.append(which)
            issued += 1
        elif move == "end":
            copying.remove(which)
            filled[which % stages] += 1
        else:
            tile, index = divmod(taken[which], of_tile[which])
            unit = tile * units + which + index * warpgroups
            if filled[unit % stages] != unit // stages + 1:
                return which, unit
            freed[unit % stages] += 1
            taken[which] += 1


@pytest.mark.parametrize(("tile", "form", "groups"), SPLIT, ids=str)
def test_a_warpgroup_takes_no_unit_of_k_before_it_is_there(tile: Tile, form: str, groups: int) -> None:
    _, kernel = FORMS[form]
    stages = tile.stages(groups, kernel.unit_bytes, kernel.unit_k)
    for seed in range(30):
        for units in (1, 6, 16, 31):
            assert first_wrong_read(stages, tile.warpgroups, units, 3, seed) is None


@pytest.mark.parametrize(
    ("stages", "units", "tiles", "meet"), [(7, 16, 1, True), (8, 7, 3, False)], ids=["stages", "tiles"]
)
def test_stages_that_change_hands_are_taken_too_early(stages: int, units: int, tiles: int, meet: bool) -> None:
    assert any(first_wrong_read(stages, 2, units, tiles, seed, meet) for seed in range(300))
