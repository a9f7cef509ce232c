"""Block-scaled tiles of weights and rows against their written definition, byte by byte, and the ways back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax_ffi.activations import quantise_activations, quantise_mxfp8
from qwenjax_ffi.blackwell_packing import pack_rows, row_places, rows_shape, unpack_rows
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder, empty_packed, pack, pack_into, packed_shape, unpack
from qwenjax_ffi.weights import MXFP8Weight, decode
from qwenjax_kernels import block_scaled

# Row order, out, in: whole tiles, ragged ones, more than one tile each way.
CASES: list[tuple[RowOrder, int, int]] = [
    ("plain", 128, 128),
    ("plain", 160, 96),
    ("plain", 288, 416),
    ("gate_up", 256, 128),
    ("gate_up", 192, 160),
    ("gate_up", 320, 256),
]
PLACES = jax.jit(row_places, static_argnums=(1, 2))
SIZES = [0, 5, 16, 0, 17, 1, 32]


def random_weight(shape: tuple[int, ...], seed: int = 0) -> MXFP8Weight:
    """Any bytes, NaN elements and scales too."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, shape).astype(np.uint8)
    scales = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    return MXFP8Weight(jnp.asarray(elements.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scales))


def raw(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize(("order", "out", "k"), CASES)
def test_round_trip_is_exact(order: RowOrder, out: int, k: int) -> None:
    weight = random_weight((2, 3, out, k))
    packed = pack(weight, order, "block_scaled")
    assert packed.shape == (2, 3, out, k)
    assert packed.data.shape == packed_shape((2, 3, out, k), order, "block_scaled")
    back = unpack(packed)
    np.testing.assert_array_equal(raw(back.elements), raw(weight.elements))
    np.testing.assert_array_equal(raw(back.scales), raw(weight.scales))


@pytest.mark.parametrize(("order", "out", "k"), CASES)
def test_every_byte_lies_where_the_definition_says(order: RowOrder, out: int, k: int) -> None:
    weight = random_weight((out, k))
    elements, scales = raw(weight.elements), raw(weight.scales)
    data = np.asarray(pack(weight, order, "block_scaled").data)
    row_tiles, k_tiles, _ = data.shape
    gate_up = order == "gate_up"
    expected = np.zeros_like(data)
    for tile in range(row_tiles):
        for lane in range(128):
            row = block_scaled.weight_row(tile, lane, out // 2 if gate_up else out, gate_up)
            for k_tile in range(k_tiles):
                for block in range(4):
                    first = k_tile * 128 + block * 32
                    there = row >= 0 and first < k
                    place = 128 * 128 + block_scaled.scale_offset(lane, block)
                    expected[tile, k_tile, place] = scales[row, first // 32] if there else 127
                    if there:
                        places = block_scaled.element_offset(lane, block * 32 + np.arange(32))
                        expected[tile, k_tile, places] = elements[row, first : first + 32]
    np.testing.assert_array_equal(data, expected)


def test_layers_are_packed_into_a_donated_stack() -> None:
    layers = [random_weight((3, 192, 96), seed) for seed in range(3)]
    stack = empty_packed((3, 3, 192, 96), "gate_up", "block_scaled")
    for index, layer in enumerate(layers):
        before = stack.data
        stack = pack_into(stack, layer, jnp.int32(index))
        assert before.is_deleted()
    for index, layer in enumerate(layers):
        one = pack(layer, "gate_up", "block_scaled")
        np.testing.assert_array_equal(np.asarray(stack.data[index]), np.asarray(one.data))
    with pytest.raises(ValueError, match=r"\(3, 64, 96\) does not fit a stack of shape \(3, 3, 192, 96\)"):
        pack_into(stack, random_weight((3, 64, 96)), jnp.int32(0))


def test_shapes_that_cannot_be_packed_are_errors() -> None:
    with pytest.raises(ValueError, match="40 elements; MXFP8 needs a multiple of 32"):
        packed_shape((64, 40), "plain", "block_scaled")
    with pytest.raises(ValueError, match="gate and up have 63 rows together"):
        packed_shape((63, 64), "gate_up", "block_scaled")
    with pytest.raises(ValueError, match="40 features; MXFP8 needs a multiple of 32"):
        rows_shape(4, 40, 2, 16)


def test_quantised_elements_and_scales_decode_to_the_kept_activations() -> None:
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(40, 320)) * np.exp2(rng.integers(-140, 120, (40, 10))).repeat(32, 1)).astype(np.float32)
    x[3] = 0
    for dtype in (jnp.float32, jnp.bfloat16):
        values = jnp.asarray(x, dtype)
        kept = quantise_activations(values, "mxfp8")
        np.testing.assert_array_equal(np.asarray(decode(quantise_mxfp8(values), dtype)), np.asarray(kept))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_nan_or_infinity_is_nan_as_a_whole_and_no_other_is(bad: float) -> None:
    x = np.ones((2, 96), np.float32)
    x[1, 40] = bad
    values = np.asarray(decode(quantise_mxfp8(jnp.asarray(x)), jnp.float32))
    expected = np.ones((2, 96), np.float32)
    expected[1, 32:64] = np.nan
    np.testing.assert_array_equal(values, expected)


def test_the_kernels_scale_rule_is_the_references() -> None:
    drawn = np.random.default_rng(2).integers(0, 0x7F800000, 2000).astype(np.uint32).view(np.float32)
    corners = [0, 2.0**-130, 2.0**-109, 2.0**-108, 448, 449, 447.5, 480, 512, 448 * 2.0**3, 2.0**127, np.inf, np.nan]
    x = np.concatenate([drawn, np.asarray(corners, np.float32)])
    scales = np.asarray(quantise_mxfp8(jnp.asarray(x[:, None].repeat(32, 1))).scales[:, 0])
    assert [block_scaled.scale_byte(int(bits)) for bits in x.view(np.uint32)] == list(scales)


@given(st.lists(st.integers(0, 40), min_size=6, max_size=6), st.sampled_from([16, 32, 64]))
@settings(max_examples=60, deadline=None)
def test_rows_are_placed_in_tiles_of_one_group(sizes: list[int], tile_rows: int) -> None:
    expected: list[int] = []
    tile = 0
    for size in sizes:
        expected += [tile * tile_rows + row for row in range(size)]
        tile += -(-size // tile_rows)
    assert tile <= block_scaled.max_row_tiles(len(expected), len(sizes), tile_rows)
    rows = 250
    tiles = block_scaled.max_row_tiles(rows, len(sizes), tile_rows)
    places = np.asarray(PLACES(jnp.asarray(sizes, jnp.int32), rows, tile_rows))
    np.testing.assert_array_equal(places, [*expected, *[tiles * tile_rows] * (rows - len(expected))])


@pytest.mark.parametrize("tile_rows", [16, 32, 64, 128])
def test_every_row_lies_where_the_definition_says_and_comes_back(tile_rows: int) -> None:
    rows, features = sum(SIZES) + 3, 160
    x = jax.random.normal(jax.random.key(0), (rows, features), jnp.bfloat16)
    sizes = jnp.asarray(SIZES, jnp.int32)
    packed = pack_rows(x, sizes, tile_rows)
    quantised = quantise_mxfp8(x)
    elements, scales = raw(quantised.elements), raw(quantised.scales)
    data = np.asarray(packed.data)
    row, tile = 0, 0
    for size in SIZES:
        for first in range(0, size, tile_rows):
            for slot in range(tile_rows):
                inside = first + slot < size
                for block in range(8):
                    own = data[tile, block // 4]
                    there = inside and block < 5
                    place = tile_rows * 128 + block_scaled.scale_offset(slot, block % 4)
                    assert own[place] == (scales[row + first + slot, block] if there else 10)
                    places = block_scaled.element_offset(slot, block % 4 * 32 + np.arange(32))
                    kept = elements[row + first + slot, block * 32 : block * 32 + 32] if there else 0
                    np.testing.assert_array_equal(own[places], kept)
            tile += 1
        row += size
    back = np.asarray(unpack_rows(packed, sizes).astype(jnp.float32))
    expected = np.array(quantise_activations(x, "mxfp8").astype(jnp.float32))
    expected[sum(SIZES) :] = 0
    np.testing.assert_array_equal(back, expected)


def test_a_weight_of_two_parts_is_each_ranks_own_side_by_side() -> None:
    """Two ranks' rows, 96 each: a rank's share must be whole tiles."""
    weight = random_weight((192, 64))
    whole = jnp.concatenate([pack(weight[part], "plain", "block_scaled").data for part in (slice(96), slice(96, 192))])
    packed = PackedMXFP8Weight(whole, 96, 64, "plain", "block_scaled")
    assert packed.parts == (2, 1)
    assert packed.shape == (192, 64)
    with pytest.raises(ValueError, match=r"packed in \(2, 1\) parts"):
        unpack(packed)


def test_packed_weights_and_rows_are_pytrees_with_static_shapes() -> None:
    leaves, tree = jax.tree.flatten(empty_packed((2, 64, 96), "plain", "block_scaled"))
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8]
    rebuilt = jax.tree.unflatten(tree, leaves)
    assert isinstance(rebuilt, PackedMXFP8Weight)
    assert rebuilt.shape == (2, 64, 96)
    assert rebuilt.layout == "block_scaled"
    rows = jax.eval_shape(lambda x: pack_rows(x, jnp.full(2, 4, jnp.int32), 16), jnp.ones((8, 64)))
    assert rows.shape == (8, 64)
    assert rows.dtype == jnp.float32
