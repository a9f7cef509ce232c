"""Paged attention without a GPU: what it compiles to, and what that PTX gives on an emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi.attention import write_pages
from qwenjax_kernels.attention_combine import WARPS
from qwenjax_kernels.page_writes import THREADS
from tests.ffi.paged_sequences import errors, expected, paged_sequences
from tests.kernels.compiling import compile_case
from tests.kernels.ptx_emulator import launch

COMPILE = Path(__file__).with_name("compile_paged_attention.py")

Case = tuple[Any, ...]  # as compile_paged_attention.py has them
SLOW: list[Case] = [
    ("attention", batch, tokens, q_heads, 4, 128, page_size, 20_000, 640, "bfloat16", (8, 16), 132)
    for q_heads in (32, 64)
    for batch, tokens, page_size in ((1, 1, 64), (512, 1, 16), (64, 2, 64), (64, 4, 128), (16, 8, 64))
]


def compiled(case: Case, arch: str) -> tuple[str, str]:
    """The compiler's remarks and the PTX of both kernels."""
    return compile_case(COMPILE, case, arch)


def check_compiled(remarks: str, ptx: str, case: Case) -> None:
    assert remarks.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2, remarks
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    name = {"bfloat16": "bf16", "float16": "f16"}[case[9]]
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32" in ptx
    assert "cp.async.cg.shared.global" in ptx
    # Sums and stats are written while the second kernel waits: .nc, which is for what no one writes, only before.
    (combine,) = (entry for entry in ptx.split(".entry ") if "AttentionCombine" in entry.partition("(")[0])
    before, after = combine.split("griddepcontrol.wait;")
    assert "ld.global." not in before.replace("ld.global.nc.", "")
    assert "ld.global.f32" in after
    assert "ld.global.v4.b32" in after
    assert "ld.global.nc" not in after


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_compiles_without_spills(case: Case, arch: str) -> None:
    check_compiled(*compiled(case, arch), case)


# Shape, lengths, splits, blocks, architecture, and how far past the table the newest position lies.
EMULATED: list[Any] = [
    # Two blocks; an empty sequence; the splits of the last are two, the last of them with one tile of four keys.
    ((1, 8, 1, 128, 64, jnp.bfloat16), (70, 0, 132), (2, 4), 2, "sm_90a", 0),
    # Pages smaller than a tile; the first sequence has fewer tokens than the call.
    ((3, 4, 1, 64, 16, jnp.float16), (2, 80), (1, 2), 1, "sm_100a", 1),
    # No warps that share keys; pages larger than a tile.
    pytest.param((8, 16, 1, 128, 128, jnp.bfloat16), (150, 8), (1, 2), 1, "sm_90a", 0, marks=pytest.mark.slow),
    # Four tiles of rows of which three are there, and two warps that share keys; a block more than there is work.
    pytest.param((6, 8, 1, 64, 32, jnp.bfloat16), (200, 61, 0), (1, 3), 8, "sm_90a", 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "lengths", "splits", "blocks", "arch", "past"), EMULATED, ids=str)
def test_compiles_without_spills_and_gives_the_references_result_on_an_emulator(
    shape: Any, lengths: tuple[int, ...], splits: tuple[int, int], blocks: int, arch: str, past: int
) -> None:
    arrays = paged_sequences(shape, lengths)
    q, keys, values, table, positions = (np.array(array) for array in arrays)
    if past:
        table, last = table[:, :-1].copy(), lengths[-1] - 1
        assert last + 1 == table.shape[1] * keys.shape[3]
        positions[-1] += past
        arrays = *arrays[:-1], np.minimum(positions, last)
    (batch, tokens, q_heads, head_dim), (_, pages, kv_heads, page_size, _) = q.shape, keys.shape
    dtype = jnp.dtype(shape[-1]).name
    sizes = (batch, tokens, q_heads, kv_heads, head_dim, page_size, pages, table.shape[1])
    case = ("attention", *sizes, dtype, splits, blocks)
    remarks, ptx = compiled(case, arch)
    check_compiled(remarks, ptx, case)
    partial = np.full((batch, kv_heads, splits[1], tokens * q_heads // kv_heads, head_dim), np.nan, np.float32)
    stats = np.full((*partial.shape[:-1], 2), np.nan, np.float32)
    out = np.full_like(q, np.nan)
    layer = np.array([1], np.int32)
    launch(ptx, [q, keys, values, table, positions, layer, partial, stats], (blocks, 1), kernel="PagedAttention")
    launch(ptx, [partial, stats, positions, out], (-(-batch * tokens * q_heads // WARPS), 1), kernel="AttentionCombine")
    tolerance = 2**-7 if dtype == "bfloat16" else 2**-10
    assert errors(out, expected(*arrays, 1), positions).max() < tolerance


def test_page_writes_give_the_references_result_on_an_emulator() -> None:
    """Padding, places past the table and page numbers that mean nothing are not written."""
    batch, tokens, kv_heads, head_dim, page_size, pages, max_pages = 4, 2, 3, 16, 4, 9, 2
    _, ptx = compiled(("writes", batch, tokens, kv_heads, head_dim, page_size, pages, max_pages, "bfloat16"), "sm_90a")
    rng = np.random.default_rng(0)
    k, v = (rng.integers(0, 2**15, (batch, tokens, kv_heads, head_dim)).astype(np.int16) for _ in range(2))
    caches = [np.full((2, pages, kv_heads, page_size, head_dim), -1, np.int16) for _ in range(2)]
    table = np.array([[7, 2], [0, 4], [3, 2**31 - 1], [-1, 5]], np.int32)
    positions = np.array([[0, -1], [7, 8], [3, 4], [1, 4]], np.int32)
    layer = np.array([1], np.int32)
    wanted = [
        np.asarray(write_pages(jnp.asarray(c), n, table, positions, 1)) for c, n in zip(caches, (k, v), strict=True)
    ]
    launch(ptx, [k, v, table, positions, layer, *caches], (-(-k.size * 2 // 16 // THREADS), 1))
    for cache, expected_cache in zip(caches, wanted, strict=True):
        assert (cache >= 0).any()
        np.testing.assert_array_equal(cache, expected_cache)
