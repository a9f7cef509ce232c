"""The packed order of MXFP8 weights against its written definition, the round trip, and what the binding refuses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenjax_ffi import grouped_gemm_kernel
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder, empty_packed, pack, pack_into, packed_shape, unpack
from qwenjax_ffi.weights import MXFP8Weight
from qwenjax_kernels import fragments
from qwenjax_kernels.tiles import Tile, choose_tile

# Row order, out, in: whole units, ragged ones, more than one unit each way.
CASES: list[tuple[RowOrder, int, int]] = [
    ("plain", 64, 128),
    ("plain", 96, 160),
    ("plain", 192, 384),
    ("gate_up", 64, 128),
    ("gate_up", 80, 96),
    ("gate_up", 192, 256),
]


def random_weight(shape: tuple[int, ...], seed: int = 0) -> MXFP8Weight:
    """Any bytes but NaN elements: subnormals and both zeros, every scale."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, shape).astype(np.uint8)
    elements[(elements & 0x7F) == 0x7F] = 0
    scales = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    return MXFP8Weight(jnp.asarray(elements.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scales))


def raw(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize(("order", "out", "k"), CASES)
def test_round_trip_is_exact(order: RowOrder, out: int, k: int) -> None:
    weight = random_weight((2, 3, out, k))
    packed = pack(weight, order)
    assert packed.shape == (2, 3, out, k)
    assert packed.data.shape == packed_shape((2, 3, out, k), order)
    back = unpack(packed)
    np.testing.assert_array_equal(raw(back.elements), raw(weight.elements))
    np.testing.assert_array_equal(raw(back.scales), raw(weight.scales))


def as_bf16_bits(element: int) -> int:
    """An e4m3 byte as fragments.py places it: the sign on top, exponent and mantissa down to bit 4."""
    return (element & 0x80) << 8 | (element & 0x7F) << 4


@pytest.mark.parametrize(("order", "out", "k"), CASES)
def test_every_byte_lies_where_the_definition_says(order: RowOrder, out: int, k: int) -> None:
    weight = random_weight((out, k))
    elements, scales = raw(weight.elements), raw(weight.scales)
    data = np.asarray(pack(weight, order).data)
    words = data[..., : fragments.UNIT_ELEMENT_BYTES].view(np.uint16).astype(int)
    scale_bytes = data[..., fragments.UNIT_ELEMENT_BYTES :]

    def element(row: int, column: int) -> int:
        return int(elements[row, column]) if 0 <= row < out and column < k else 0

    for unit, k_unit, thread in np.ndindex(*data.shape[:2], 128):
        warp, group, pair = thread // 32, thread % 32 // 4, thread % 4
        for half in range(2):
            if order == "plain":
                row = fragments.plain_row(unit, warp, half, group)
            else:
                row = fragments.gate_up_row(unit, warp, half, group, out // 2)
            for vector in range(4):
                block = k_unit * 4 + vector
                inside = 0 <= row < out and block < k // 32
                stored = scale_bytes[unit, k_unit, (warp * 8 + group) * 8 + half * 4 + vector]
                assert stored == (scales[row, block] if inside else 127)
                for step, one in np.ndindex(2, 2):
                    word = words[unit, k_unit, (vector * 128 + thread) * 8 + (step * 2 + half) * 2 + one]
                    column = k_unit * 128 + vector * 32 + step * 16 + pair * 2 + one
                    assert word & fragments.FIRST_MASK == as_bf16_bits(element(row, column))
                    second = word << 4 & fragments.SECOND_LOW_MASK | word >> 4 & fragments.SECOND_HIGH_MASK
                    assert second == as_bf16_bits(element(row, column + 8))


def test_the_decode_arithmetic_is_exact() -> None:
    """bf16 of the placed bits times 2^(scale - 7), for every element and every scale that the kernel takes."""
    elements = np.arange(256, dtype=np.uint8)
    finite = (elements & 0x7F) != 0x7F
    bits = np.array([as_bf16_bits(int(e)) for e in elements], np.uint16)
    placed = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    for scale in range(10, fragments.MAX_SCALE_BYTE + 1):
        factor_bits = min(scale * 128 + 0x3C00, 0x7FC0)
        factor = np.array([factor_bits], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
        product = (placed * factor).astype(ml_dtypes.bfloat16).astype(np.float64)
        expected = elements.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(product[finite], expected[finite])
    for scale in range(fragments.MAX_SCALE_BYTE + 1, 256):
        factor_bits = min(scale * 128 + 0x3C00, 0x7FC0)
        assert not np.isfinite(np.array([factor_bits], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64))


def test_a_nan_element_becomes_its_blocks_nan_scale() -> None:
    weight = random_weight((64, 128))
    elements = raw(weight.elements).copy()
    elements[5, 40] = 0xFF
    poisoned = MXFP8Weight(jnp.asarray(elements.view(ml_dtypes.float8_e4m3fn)), weight.scales)
    scales = np.array(weight.scales)
    scales[5, 1] = 255
    np.testing.assert_array_equal(np.asarray(unpack(pack(poisoned)).scales), scales)


def test_filling_a_stack_layer_by_layer_equals_packing_it_whole() -> None:
    weight = random_weight((3, 2, 128, 96))
    stack = empty_packed(weight.shape, "gate_up")
    for layer in range(3):
        one = MXFP8Weight(weight.elements[layer], weight.scales[layer])
        before = stack.data
        stack = pack_into(stack, one, jnp.int32(layer))
        assert before.is_deleted()  # donated: no second stack
    np.testing.assert_array_equal(np.asarray(stack.data), np.asarray(pack(weight, "gate_up").data))


def test_a_layer_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a stack"):
        pack_into(empty_packed((3, 2, 128, 96), "plain"), random_weight((2, 256, 96)), jnp.int32(0))


@pytest.mark.parametrize(
    ("shape", "order", "message"),
    [((64, 40), "plain", "multiple of 32"), ((63, 64), "gate_up", "as many each")],
)
def test_shapes_that_cannot_be_packed_are_refused(shape: tuple[int, int], order: RowOrder, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_shape(shape, order)


def arguments(**changes: Any) -> dict[str, Any]:
    """Abstract arguments of a good `grouped_gemm` call, with changes."""
    good: dict[str, Any] = {
        "x": jax.ShapeDtypeStruct((40, 96), jnp.bfloat16),
        "group_sizes": jax.ShapeDtypeStruct((5,), jnp.int32),
        "weight": jax.eval_shape(lambda: empty_packed((2, 5, 64, 96), "plain")),
        "layer": jax.ShapeDtypeStruct((1,), jnp.int32),
        "out_dtype": jnp.bfloat16,
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jax.ShapeDtypeStruct((40, 96), jnp.float32)}, r"x is float32\[40, 96\]"),
        ({"x": jax.ShapeDtypeStruct((40, 64), jnp.bfloat16)}, r"must be bfloat16\[rows, 96\]"),
        ({"group_sizes": jax.ShapeDtypeStruct((4,), jnp.int32)}, r"must be int32\[5\]"),
        ({"group_sizes": jax.ShapeDtypeStruct((5,), jnp.float32)}, r"must be int32\[5\]"),
        ({"layer": None}, "has 3 axes"),
        ({"out_dtype": jnp.float16}, "bfloat16 or float32, not float16"),
        ({"weight": jax.eval_shape(lambda: empty_packed((2, 5, 64, 96), "gate_up"))}, "row order 'plain'"),
    ],
)
def test_wrong_arguments_are_refused_at_trace_time(changes: dict[str, Any], message: str) -> None:
    values = arguments(**changes)
    dtype = values.pop("out_dtype")
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(lambda kw: grouped_gemm_kernel.grouped_gemm(**kw, out_dtype=dtype), values)


def test_more_tiles_than_clusters_share_are_refused() -> None:
    # Gate and up: 160 units of 64 rows, 80 tiles, of which 66 clusters would have two.
    w13 = jax.eval_shape(lambda: empty_packed((1, 2 * 5120, 256), "gate_up"))
    x, sizes, rows = (
        jax.ShapeDtypeStruct(*like) for like in (((8, 256), jnp.bfloat16), ((1,), jnp.int32), ((8,), jnp.int32))
    )
    call = functools.partial(grouped_gemm_kernel.moe_gate_up, tile=Tile(8, 2, k_blocks=2))
    with pytest.raises(ValueError, match="takes 160 blocks; where blocks share k, a cluster has one tile at most"):
        jax.eval_shape(call, x, rows, sizes, w13)


def test_unavailable_says_why() -> None:
    x = jnp.zeros((4, 96), jnp.bfloat16)
    packed = empty_packed((5, 64, 96), "plain")
    assert "takes PackedMXFP8Weight" in str(grouped_gemm_kernel.unavailable(x, random_weight((5, 64, 96))))
    for shape in ((5, 64, 40), (5, 60, 96)):
        assert "multiples of 8" in str(grouped_gemm_kernel.unavailable(x, jnp.zeros(shape, jnp.bfloat16)))
    assert "is float32[5, 64, 96]" in str(grouped_gemm_kernel.unavailable(x, jnp.zeros((5, 64, 96))))
    assert "packed for 'plain'" in str(grouped_gemm_kernel.unavailable(x, packed, "gate_up"))
    assert "the rows are float32" in str(grouped_gemm_kernel.unavailable(x.astype(jnp.float32), packed))
    assert "there are no rows" in str(grouped_gemm_kernel.unavailable(x[:0], packed))
    if jax.default_backend() == "cpu":
        for weight in (packed, jnp.zeros((5, 64, 96), jnp.bfloat16)):
            assert grouped_gemm_kernel.unavailable(x, weight) == "the backend is cpu, not an NVIDIA GPU"


@pytest.mark.parametrize(
    ("mean", "groups", "row_units", "tile"),
    [
        (5, 128, 24, Tile(16, 2, 2)),  # 30B gate/up
        (8, 16, 48, Tile(16, 3, 1)),  # 235B gate/up at EP=8: 192 tiles of four units would take two waves of 132
        (1 / 16, 128, 24, Tile(8, 2, 1)),  # 30B gate/up of one token: eight experts, not 128, share the multiprocessors
        (1 / 16, 128, 32, Tile(8, 2, 1)),  # and down
        (1, 128, 24, Tile(8, 2, 2)),  # 16 tokens: as the 82 experts that have rows on average are told from 128
        (4, 128, 24, Tile(8, 2, 2)),  # 64 tokens: 23 units in the longest queue, of tiles of one unit, are nearly 24
        (4, 128, 32, Tile(8, 2, 2)),
        (64, 128, 24, Tile(64, 2, 3)),
        (64, 128, 32, Tile(64, 2, 2)),  # 30B down: six units do not divide 32
        (375, 128, 24, Tile(128, 2, 2)),
        (8, 1, 64, Tile(8, 4, 1, split_k=True)),  # 30B q_proj: 64 blocks of one unit, not 32 of two
        (16, 1, 64, Tile(16, 4, 1, split_k=True)),  # a single group has as many rows as it is said to have
        (1, 2, 48, Tile(8, 4, 1, split_k=True)),  # 235B gate/up at EP=64
        (256, 1, 64, Tile(128, 2, 1, split_k=True)),
    ],
)
def test_tile_choice(mean: float, groups: int, row_units: int, tile: Tile) -> None:
    assert choose_tile(round(mean * groups), groups, row_units, mxfp8=True) == tile


def test_blocks_share_k_where_a_single_matrix_has_few_tiles() -> None:
    assert choose_tile(64, 1, 32, 32, mxfp8=True) == Tile(64, 2, 1, split_k=True, k_blocks=2)  # 30B o_proj
    assert choose_tile(64, 1, 80, 16, mxfp8=True).k_blocks == 1  # q, k and v: 160 blocks would take two waves of 132
    assert choose_tile(64, 1, 32, 31, mxfp8=True).k_blocks == 1
    assert choose_tile(1, 1, 32, 4, mxfp8=True).k_blocks == 1  # four warpgroups share the k of a block already
    assert choose_tile(64, 2, 32, 32, mxfp8=True).k_blocks == 1
    assert choose_tile(64, 1, 32, 32, mxfp8=False).k_blocks == 1


@given(st.integers(0, 20_000), st.integers(1, 128), st.integers(1, 200), st.booleans())
def test_tiles_for_float32_have_room_for_every_accumulator_twice(
    rows: int, groups: int, row_units: int, mxfp8: bool
) -> None:
    tile = choose_tile(rows, groups, row_units, mxfp8=mxfp8, float32_out=True)
    assert tile.rows * tile.units <= 128


def test_a_weight_of_several_parts_has_its_whole_shape_and_is_taken_by_its_ranks_alone() -> None:
    one = empty_packed((5, 96, 160), "plain")
    whole = PackedMXFP8Weight(jnp.tile(one.data, (1, 2, 3, 1)), 96, 160, "plain")
    assert (whole.parts, whole.shape) == ((2, 3), (5, 192, 480))
    with pytest.raises(ValueError, match=r"packed in \(2, 3\) parts"):
        unpack(whole)
    x, sizes = jnp.zeros((40, 480), jnp.bfloat16), jnp.zeros(5, jnp.int32)
    with pytest.raises(ValueError, match=r"packed in \(2, 3\) parts"):
        grouped_gemm_kernel.grouped_gemm(x, sizes, whole)


def test_packed_weights_are_pytrees_with_static_shapes() -> None:
    leaves, tree = jax.tree.flatten(empty_packed((2, 64, 96), "plain"))
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8]
    rebuilt = jax.tree.unflatten(tree, leaves)
    assert isinstance(rebuilt, PackedMXFP8Weight)
    assert rebuilt.shape == (2, 64, 96)
