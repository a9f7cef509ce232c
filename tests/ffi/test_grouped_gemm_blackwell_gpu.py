"""The Blackwell kernels on a GPU, against their references; quantising rows runs on Hopper too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi import grouped_gemm_blackwell as kernels
from qwenjax_ffi.blackwell_packing import pack_rows, unpack_rows
from qwenjax_ffi.grouped_gemm import grouped_gemm, moe_down, moe_gate_up
from qwenjax_ffi.packing import RowOrder, pack
from qwenjax_ffi.weights import MXFP8Weight
from qwenjax_kernels import block_scaled

pytestmark = pytest.mark.gpu

ODD_GROUPS = [127, 128, 129, 0, 1]


def blackwell_only() -> None:
    reason = kernels.machine_unavailable()
    if reason:
        pytest.skip(reason)


def random_weight(seed: int, shape: tuple[int, ...], order: RowOrder) -> Any:
    bits, scales = jax.random.split(jax.random.key(seed))
    elements = jax.random.bits(bits, shape, jnp.uint8)
    elements = jnp.where((elements & 0x7F) == 0x7F, elements ^ 0x08, elements)
    drawn = jax.random.randint(scales, (*shape[:-1], shape[-1] // 32), 110, 118).astype(jnp.uint8)
    return pack(MXFP8Weight(jax.lax.bitcast_convert_type(elements, jnp.float8_e4m3fn), drawn), order, "block_scaled")


def float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def used_bytes(data: jax.Array, sizes: list[int], tile_rows: int) -> np.ndarray:
    """The bytes of rows, and of the zeros that fill up their tiles."""
    row, block = np.meshgrid(np.arange(tile_rows), np.arange(4), indexing="ij")
    places = np.concatenate(
        [np.arange(tile_rows * 128), (tile_rows * 128 + block_scaled.scale_offset(row, block)).ravel()]
    )
    return np.asarray(data)[: sum(-(-size // tile_rows) for size in sizes)][..., places]


@pytest.mark.parametrize("features", [32, 160, 2048, 4096])
@pytest.mark.parametrize("tile_rows", [16, 128])
@pytest.mark.parametrize("gathers", [False, True])
def test_rows_are_quantised_as_the_reference_does_to_the_bit(features: int, tile_rows: int, gathers: bool) -> None:
    rows = sum(ODD_GROUPS) + 5
    sizes = jnp.asarray(ODD_GROUPS, jnp.int32)
    x = jax.random.normal(jax.random.key(0), (rows, features), jnp.bfloat16)
    x = x * jnp.exp2(jax.random.randint(jax.random.key(1), (rows, 1), -40, 40).astype(jnp.float32)).astype(x.dtype)
    tokens = jax.random.randint(jax.random.key(2), (rows,), 0, rows) if gathers else None
    found = jax.jit(lambda *a: kernels.quantise_rows(*a, tile_rows=tile_rows))(x, sizes, tokens)
    expected = pack_rows(x if tokens is None else x[tokens], sizes, tile_rows)
    np.testing.assert_array_equal(
        used_bytes(found.data, ODD_GROUPS, tile_rows), used_bytes(expected.data, ODD_GROUPS, tile_rows)
    )


def test_rows_of_more_than_2_31_elements_are_quantised_at_both_ends() -> None:
    rows, features, group = 65_537 * 8, 4096 + 32, 65_537
    x = jax.random.normal(jax.random.key(0), (1024, features), jnp.bfloat16)
    sizes = jnp.full(8, group, jnp.int32)
    tokens = jnp.arange(rows, dtype=jnp.int32) % 1024
    found = jax.jit(lambda *a: kernels.quantise_rows(*a, tile_rows=128))(x, sizes, tokens)
    tiles = -(-group // 128)
    for tile, first in ((0, 0), (tiles - 1, 65_536), (8 * tiles - 1, 8 * group - 1)):
        rows_of_tile = x[(first + jnp.arange(min(128, group - first % group))) % 1024]
        expected = pack_rows(rows_of_tile, jnp.asarray([rows_of_tile.shape[0]], jnp.int32), 128)
        sizes_of_tile = [rows_of_tile.shape[0]]
        np.testing.assert_array_equal(
            used_bytes(found.data[tile : tile + 1], sizes_of_tile, 128), used_bytes(expected.data, sizes_of_tile, 128)
        )


@pytest.mark.parametrize(
    ("k", "width", "sizes"),
    [
        (32, 32, [5]),
        (96, 160, [0, 1, 17, 9, 8]),
        (4096, 288, ODD_GROUPS),
        (2048, 1536, ODD_GROUPS),
        (768, 2048, [1] * 128),
    ],
    ids=str,
)
def test_products_equal_the_reference(k: int, width: int, sizes: list[int]) -> None:
    blackwell_only()
    weight = random_weight(0, (2, len(sizes), width, k), "plain")
    x = jax.random.normal(jax.random.key(1), (sum(sizes) + 3, k), jnp.bfloat16)
    arguments = (x, jnp.asarray(sizes, jnp.int32), weight, jnp.asarray([1], jnp.int32))
    found, expected = (
        float64(
            jax.jit(
                lambda *a, form=form: grouped_gemm(
                    *a, out_dtype=jnp.float32, activation_format="mxfp8", implementation=form
                )
            )(*arguments)
        )[: sum(sizes)]
        for form in ("kernel", "reference")
    )
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("mean", [1, 8, 40, 150])
def test_experts_equal_the_reference(mean: int) -> None:
    blackwell_only()
    groups, hidden, width, tokens = 16, 2048, 768, 64
    sizes = np.random.default_rng(0).multinomial(mean * groups, np.full(groups, 1 / groups)).astype(np.int32)
    rows = int(sizes.sum())
    w13 = random_weight(1, (2, groups, 2 * width, hidden), "gate_up")
    w2 = random_weight(2, (2, groups, hidden, width), "plain")
    x = jax.random.normal(jax.random.key(3), (tokens, hidden), jnp.bfloat16) * jnp.bfloat16(2.0**-6)
    row_token = jax.random.randint(jax.random.key(4), (rows,), 0, tokens)
    row_weight = jax.random.uniform(jax.random.key(5), (rows,))
    layer, group_sizes = jnp.asarray([1], jnp.int32), jnp.asarray(sizes)

    def experts(form: Any) -> tuple[np.ndarray, np.ndarray]:
        how: Any = {"activation_format": "mxfp8", "implementation": form}
        h = jax.jit(lambda *a: moe_gate_up(*a, **how))(x, row_token, group_sizes, w13, layer)
        y = jax.jit(lambda *a: moe_down(*a, **how))(h, group_sizes, w2, row_weight, layer)
        return float64(unpack_rows(h, group_sizes)), float64(y)

    for found, expected in zip(experts("kernel"), experts("reference"), strict=True):
        # A sum next to a tie of bfloat16 or e4m3 may round the other way: 2^-4 of that element, seldom.
        assert np.linalg.norm(found - expected) <= 2.0**-8 * np.linalg.norm(expected)
