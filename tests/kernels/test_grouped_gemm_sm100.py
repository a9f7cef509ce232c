"""The Blackwell kernels without a Blackwell GPU: what they compile to, and what that PTX gives on an emulator."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax_ffi.blackwell_packing import pack_rows, pack_weight, rows_shape, unpack_rows
from qwenjax_ffi.weights import MXFP8Weight, decode
from qwenjax_kernels import block_scaled
from qwenjax_kernels.grouped_gemm_sm100 import GroupedGemmSm100
from qwenjax_kernels.quantise_rows import QuantiseRows
from qwenjax_kernels.tiles_sm100 import SHARED_BYTES, TENSOR_MEMORY_COLUMNS, TILE_ROWS, Tile, choose_tile_rows
from tests.kernels.compiling import compile_case
from tests.kernels.ptx_emulator import WAIT, EmulationError, Window, launch

COMPILE = Path(__file__).with_name("compile_grouped_gemm_sm100.py")
Case = tuple[Any, ...]

# Two tiles of the contraction and of the outputs, both ragged; one block, so that it passes through its rings more than
# once: 8 tiles in 4 records and 2 accumulators, of 2 stages each in 6 (gate_up) or 3 in 11 (down).
ROWS, SIZES, LAYER = 24, [3, 0, 17, 1], 1
QUANTISE: Case = ("quantise_rows", 160, 0, 4, ROWS, 16, True, 1)
WIDE_QUANTISE: Case = ("quantise_rows", 288, 0, 3, 140, 128, True, 1)
GATE_UP: Case = ("moe_gate_up", 160, 160, 4, ROWS, 16, True, 1)
DOWN: Case = ("moe_down", 288, 160, 4, ROWS, 16, True, 1)
# One accumulator, and rows of a group in two tiles of 128.
WIDE_GATE_UP: Case = ("moe_gate_up", 96, 96, 3, 140, 128, False, 1)
PLAIN: Case = ("grouped_gemm", 96, 160, 3, 72, 64, False, 2)
SLOW: list[Case] = [
    (op, k, width, groups, rows * groups, rows, True, 148)
    for op, k, width, groups in (
        ("moe_gate_up", 2048, 768, 128),
        ("moe_down", 768, 2048, 128),
        ("moe_gate_up", 4096, 1536, 16),
        ("moe_down", 1536, 4096, 16),
        ("grouped_gemm", 4096, 151936, 1),
        ("quantise_rows", 4096, 0, 16),
    )
    for rows in TILE_ROWS
]


@functools.cache
def compiled(case: Case, arch: str = "sm_100a") -> tuple[str, str]:
    """The compiler's remarks and the PTX of one kernel."""
    return compile_case(COMPILE, case, arch)


@pytest.mark.parametrize(
    "case",
    [QUANTISE, GATE_UP, DOWN, PLAIN, *(pytest.param(case, marks=pytest.mark.slow) for case in [WIDE_GATE_UP, *SLOW])],
    ids=str,
)
def test_compiles_to_block_scaled_products_without_spills(case: Case) -> None:
    remarks, ptx = compiled(case)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in remarks, remarks
    op, rows = case[0], case[5]
    if op == "quantise_rows":
        assert "ld.global.nc.v4.b32" in ptx
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
        return
    units = 2 if op == "moe_gate_up" else 1
    products = re.findall(r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale\.block32", ptx)
    assert len(products) == 4 * units
    assert len(re.findall(r"tcgen05\.cp\.cta_group::1\.32x128b\.warpx4", ptx)) == 1 + units
    assert ptx.count("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") == 2 * (1 + units)
    assert "tcgen05.ld.sync.aligned.32x32b.x16.b32" in ptx
    # The instruction descriptor: M = 128, N = the tile's rows, e4m3, UE8M0 scales.
    assert str(1 << 27 | 1 << 23 | rows // 8 << 17) in ptx
    assert ("redux.sync.max" in ptx) == (op == "moe_gate_up")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "arch"), [(QUANTISE, "sm_90a"), (GATE_UP, "sm_103a"), (DOWN, "sm_103a")], ids=str)
def test_compiles_for_the_other_gpus_that_it_is_for(case: Case, arch: str) -> None:
    remarks, ptx = compiled(case, arch)
    assert f".target {arch}" in ptx
    assert "0 bytes spill stores, 0 bytes spill loads" in remarks


def random_weight(seed: int, shape: tuple[int, ...]) -> MXFP8Weight:
    """Any element but NaN, scales over four binades."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, shape).astype(np.uint8)
    elements[(elements & 0x7F) == 0x7F] ^= 8
    scales = rng.integers(116, 120, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    return MXFP8Weight(jnp.asarray(elements.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scales))


def float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def grouped(x: np.ndarray, sizes: list[int], weight: np.ndarray) -> np.ndarray:
    """Each row times its group's matrix."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return np.einsum("rk,rok->ro", x[: len(groups)], weight[groups])


def tile_rows_of(sizes: list[int], tile_rows: int) -> int:
    return sum(-(-size // tile_rows) for size in sizes)


def poisoned_tiles(x: jax.Array, sizes: list[int], tile_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The tiles of x, NaN where no row is, and the values that they hold."""
    group_sizes = jnp.asarray(sizes, jnp.int32)
    packed = pack_rows(x, group_sizes, tile_rows)
    tiles = np.array(packed.data)
    tiles[tile_rows_of(sizes, tile_rows) :] = 0xFF
    return tiles, float64(unpack_rows(packed, group_sizes))[: sum(sizes)]


def written(tile_rows: int) -> np.ndarray:
    """The bytes of a tile that hold elements or scales of its rows."""
    row, block = np.meshgrid(np.arange(tile_rows), np.arange(4), indexing="ij")
    scales = tile_rows * 128 + block_scaled.scale_offset(row, block)
    return np.concatenate([np.arange(tile_rows * 128), np.sort(scales.ravel())])


def assert_tiles(tiles: np.ndarray, expected: np.ndarray, sizes: list[int], tile_rows: int) -> None:
    """All bytes of the tiles in use are as expected, and no others were written."""
    used, bytes_ = tile_rows_of(sizes, tile_rows), written(tile_rows)
    np.testing.assert_array_equal(tiles[:used][..., bytes_], expected[:used][..., bytes_])
    assert (tiles[used:] == 0xAA).all()
    assert (np.delete(tiles, bytes_, axis=2) == 0xAA).all()


@pytest.mark.parametrize(
    ("case", "sizes"),
    [(QUANTISE, SIZES), pytest.param(WIDE_QUANTISE, [129, 0, 3], marks=pytest.mark.slow)],
    ids=str,
)
def test_emulated_rows_are_gathered_and_quantised_as_the_reference_does(case: Case, sizes: list[int]) -> None:
    _, k, _, groups, rows, tile_rows, _, _ = case
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(9, k)) * 2.0 ** rng.integers(-30, 30, (9, k // 32)).repeat(32, 1)).astype(ml_dtypes.bfloat16)
    x[2, 32:64] = 0
    tokens = rng.integers(0, 9, rows).astype(np.int32)
    expected = pack_rows(jnp.asarray(x[tokens]), jnp.asarray(sizes, jnp.int32), tile_rows)
    tokens[sum(sizes) :] = 1 << 28  # rows of no group are not read
    tiles = np.full(expected.data.shape, 0xAA, np.uint8)
    kernel = QuantiseRows(k=k, num_groups=groups, tile_rows=tile_rows, row_tiles=tiles.shape[0])
    launch(compiled(case)[1], [x, np.asarray(sizes, np.int32), tokens, tiles], (tiles.shape[0], kernel.slabs))
    assert_tiles(tiles, np.asarray(expected.data), sizes, tile_rows)


@pytest.mark.parametrize(
    ("case", "sizes"), [(GATE_UP, SIZES), pytest.param(WIDE_GATE_UP, [129, 0, 3], marks=pytest.mark.slow)], ids=str
)
def test_emulated_swiglu_is_quantised_to_the_tiles_of_the_reference(case: Case, sizes: list[int]) -> None:
    _, k, width, groups, rows, tile_rows, stacked, _ = case
    weight = random_weight(1, (*((2,) if stacked else ()), groups, 2 * width, k))
    tiles, x = poisoned_tiles(jax.random.normal(jax.random.key(0), (rows, k), jnp.bfloat16), sizes, tile_rows)
    out = np.full(rows_shape(rows, width, groups, tile_rows), 0xAA, np.uint8)
    layer = [np.asarray([LAYER], np.int32)] if stacked else []
    data = np.asarray(pack_weight(weight, gate_up=True))
    launch(compiled(case)[1], [tiles, data, np.asarray(sizes, np.int32), *layer, out], (1, 1))

    matrices = float64(decode(weight, jnp.float32))
    gate, up = np.split(grouped(x, sizes, matrices[LAYER] if stacked else matrices), 2, axis=1)
    assert np.abs(gate).max() > 4  # neither flat nor straight
    h = np.zeros((rows, width))
    h[: len(gate)] = gate / (1 + np.exp(-gate)) * up
    expected = pack_rows(jnp.asarray(h, jnp.bfloat16), jnp.asarray(sizes, jnp.int32), tile_rows)
    assert_tiles(out, np.asarray(expected.data), sizes, tile_rows)


def assert_down_projection(ptx: str, seed: int) -> None:
    """What DOWN's kernel gives equals float64 products; NaN scales of others, and of one output, touch no more."""
    _, k, width, groups, rows, tile_rows, _, _ = DOWN
    weight = random_weight(2, (2, groups, width, k))
    matrices = float64(decode(weight, jnp.float32))[LAYER]
    poison = np.array(weight.scales)
    poison[1 - LAYER] = poison[LAYER, 1] = 255  # the other layer, and an expert without rows
    poison[LAYER, 3, 5, 2] = 255
    data = np.asarray(pack_weight(MXFP8Weight(weight.elements, jnp.asarray(poison))))
    tiles, x = poisoned_tiles(jax.random.normal(jax.random.key(seed), (rows, k), jnp.bfloat16), SIZES, tile_rows)
    row_weight = np.random.default_rng(3).normal(size=rows).astype(np.float32)
    y = np.full((rows, width), np.nan, ml_dtypes.bfloat16)
    buffers = [tiles, data, np.asarray(SIZES, np.int32), row_weight, np.asarray([LAYER], np.int32), y]
    launch(ptx, buffers, (1, 1), seed)

    there = sum(SIZES)
    expected = grouped(x, SIZES, matrices) * row_weight[:there, None]
    magnitude = grouped(np.abs(x), SIZES, np.abs(matrices)) * np.abs(row_weight[:there, None])
    expected[-1, 5] = np.nan
    error = np.abs(y[:there].astype(np.float64) - expected)
    bound = 2.0**-8 * np.abs(expected) + 4 * np.sqrt(k) * 2.0**-24 * magnitude
    np.testing.assert_array_equal(np.isnan(error), np.isnan(expected))
    assert (error <= bound)[~np.isnan(error)].all()
    assert np.isnan(y[there:].astype(np.float32)).all()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))], ids=str
)
def test_emulated_down_projection_equals_float64_and_nan_stays_with_its_expert(seed: int) -> None:
    assert_down_projection(compiled(DOWN)[1], seed)


@pytest.mark.slow
def test_each_wait_that_is_left_out_shows_but_the_one_after_the_last_copy() -> None:
    """That one keeps the block's shared memory until the last arrivals, which are always in time here."""
    ptx = compiled(DOWN)[1]
    waits = [match.span() for match in WAIT.finditer(ptx)]

    def shows(start: int, stop: int, seed: int) -> bool:
        try:
            assert_down_projection(ptx[:start] + ptx[stop:], seed)
        except (EmulationError, AssertionError):
            return True
        return False

    silent = [span for span in waits if not any(shows(*span, seed) for seed in range(20))]
    assert len(silent) <= 1, silent


def test_emulated_weights_of_a_layer_past_4_gib_are_found() -> None:
    _, k, width, groups, rows, tile_rows, _, _ = DOWN
    weight = random_weight(2, (groups, width, k))
    layer = pack_weight(weight)
    last = -(-(1 << 32) // layer.size) + 1
    tiles, x = poisoned_tiles(jax.random.normal(jax.random.key(0), (rows, k), jnp.bfloat16), SIZES, tile_rows)
    sizes, factors = np.asarray(SIZES, np.int32), np.ones(rows, np.float32)
    y = np.full((rows, width), np.nan, ml_dtypes.bfloat16)
    stack = Window(last * layer.size, np.asarray(layer))
    launch(compiled(DOWN)[1], [tiles, stack, sizes, factors, np.asarray([last], np.int32), y], (1, 1))
    expected = grouped(x, SIZES, float64(decode(weight, jnp.float32)))
    np.testing.assert_allclose(y[: sum(SIZES)].astype(np.float64), expected, rtol=2.0**-7, atol=1e-3)


def test_emulated_float32_result_equals_float64_with_tiles_spread_over_blocks() -> None:
    _, k, width, groups, rows, tile_rows, _, blocks = PLAIN
    sizes = [65, 0, 3]
    weight = random_weight(4, (groups, width, k))
    tiles, x = poisoned_tiles(jax.random.normal(jax.random.key(0), (rows, k), jnp.bfloat16), sizes, tile_rows)
    y = np.full((rows, width), np.nan, np.float32)
    data = np.asarray(pack_weight(weight))
    launch(compiled(PLAIN)[1], [tiles, data, np.asarray(sizes, np.int32), y], (blocks, 1))
    expected = grouped(x, sizes, float64(decode(weight, jnp.float32)))
    assert np.linalg.norm(y[: sum(sizes)] - expected) <= 1e-6 * np.linalg.norm(expected)
    assert np.isnan(y[sum(sizes) :]).all()


@pytest.mark.parametrize(
    ("what", "by", "message"),
    [
        (r"\ttcgen05\.commit[^;]*;", "", "deadlock"),
        (r"\tmbarrier\.arrive\.expect_tx[^;]*;", "", "more arrivals|deadlock|ended before"),
        (r"(\tcp\.async\.bulk[^;]*), 16384, ", r"\1, 16368, ", "deadlock"),
        (r"(tcgen05\.dealloc[^;]*), (%r\d+);", r"\1, 16;", "given back"),
    ],
)
def test_the_emulator_notices_what_would_hang_or_fail_on_a_gpu(what: str, by: str, message: str) -> None:
    ptx, changes = re.subn(what, by, compiled(DOWN)[1], count=1)
    assert changes == 1
    _, k, width, groups, rows, tile_rows, _, _ = DOWN
    tiles, _ = poisoned_tiles(jnp.ones((rows, k), jnp.bfloat16), SIZES, tile_rows)
    data = np.asarray(pack_weight(random_weight(2, (2, groups, width, k))))
    y = np.zeros((rows, width), ml_dtypes.bfloat16)
    sizes, factors, layer = np.asarray(SIZES, np.int32), np.ones(rows, np.float32), np.asarray([LAYER], np.int32)
    with pytest.raises(EmulationError, match=message):
        launch(ptx, [tiles, data, sizes, factors, layer, y], (1, 1))


@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("groups", [1, 128, 512])
def test_tiles_fit_in_shared_and_tensor_memory(rows: int, units: int, groups: int) -> None:
    tile = Tile(rows, units)
    assert tile.stages(groups) >= 3
    assert tile.stages(groups) * (tile.stage_bytes + 16) + 8 * groups + 2048 <= SHARED_BYTES
    assert tile.accumulators >= 1
    assert tile.accumulators * units * rows + tile.scale_columns <= tile.columns <= TENSOR_MEMORY_COLUMNS


def test_tile_rows_follow_the_mean_group() -> None:
    assert [choose_tile_rows(mean * 128, 128) for mean in (1, 16, 17, 64, 65, 375)] == [16, 16, 32, 64, 128, 128]
    with pytest.raises(ValueError, match=r"rows are one of \(16, 32, 64, 128\)"):
        Tile(24)


def test_contraction_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="k is 40; it must be a multiple of 32"):
        GroupedGemmSm100(k=40, width=64, num_groups=1, epilogue="plain", tile_rows=16, num_sms=148)
    with pytest.raises(ValueError, match="k is 40; it must be a multiple of 32"):
        QuantiseRows(k=40, num_groups=1, tile_rows=16, row_tiles=1)
