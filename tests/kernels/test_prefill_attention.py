"""Prefill attention without a GPU: what it compiles to, and what that PTX gives on an emulator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_kernels.prefill_attention_limits import BLOCK_ROWS, TILE_KEYS
from tests.ffi.paged_sequences import errors, expected, paged_sequences
from tests.kernels.compiling import compile_case
from tests.kernels.ptx_emulator import launch
from tests.kernels.ptx_warpgroup import TensorMap

COMPILE = Path(__file__).with_name("compile_paged_attention.py")
SLOW: list[Any] = [
    ((2048, 8, 4, 128, 64, jnp.bfloat16), 4),
    ((2048, 16, 4, 128, 64, jnp.bfloat16), 4),
    ((512, 16, 2, 128, 256, jnp.float16), 16),
]


def compiled(arrays: Any, shape: Any) -> tuple[str, str]:
    """The compiler's remarks and the PTX."""
    q, keys, _, table, _ = arrays
    (batch, tokens, q_heads, head_dim), (_, pages, kv_heads, page_size, _) = q.shape, keys.shape
    sizes = (batch, tokens, q_heads, kv_heads, head_dim, page_size, pages, table.shape[1])
    return compile_case(COMPILE, ("prefill", *sizes, jnp.dtype(shape[-1]).name), "sm_90a")


def check_compiled(remarks: str, ptx: str, dtype: Any) -> None:
    assert not re.search(r"\(C75\d\d\)", remarks), "ptxas serialises wgmma (C7510 to C7514) or ignores setmaxnreg"
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in remarks, remarks
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    steps = 3 * TILE_KEYS // 16  # of the first tile, masked ones and the others
    products = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.{name}\.{name} \{{[^}}]*\}}, (\S)", ptx)
    assert products.count("%") == steps, "queries and keys from shared memory"
    assert products.count("{") == steps, "weights from registers, values from shared memory"
    # setmaxnreg only moves registers about: more than the launch holds is a deadlock.
    (held,) = re.findall(r"Used (\d+) registers", remarks)
    fewer, more = (int(re.findall(rf"setmaxnreg\.{way}\.sync\.aligned\.u32\s+(\d+)", ptx)[0]) for way in ("dec", "inc"))
    assert fewer + 2 * more <= 3 * int(held)


def tensor_map(values: np.ndarray, rows: int) -> TensorMap:
    """A map whose boxes are `rows` of the last axis but one by 64 of the last; the kernel's have no axes of size 1."""
    kept = tuple(size for size in values.shape if size > 1)
    return TensorMap(values.reshape(kept), (64, rows, *(1 for _ in kept[2:])))


# Shape as `paged_sequences` has it, and lengths.
EMULATED: list[Any] = [
    # The second of two tiles has one page of 64 keys, of which 22 are there; padding; NaN wherever nothing was written.
    ((40, 1, 1, 128, 64, jnp.bfloat16), (150,)),
    pytest.param((150, 2, 1, 128, 64, jnp.bfloat16), (333, 64, 0, 1), marks=pytest.mark.slow),
    pytest.param((100, 2, 2, 128, 16, jnp.float16), (300, 101), marks=pytest.mark.slow),
    pytest.param((64, 1, 2, 128, 256, jnp.bfloat16), (500, 65), marks=pytest.mark.slow),
    pytest.param((130, 1, 1, 128, 128, jnp.bfloat16), (400,), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "lengths"), EMULATED, ids=str)
def test_compiles_without_spills_and_gives_the_references_result_on_an_emulator(
    shape: Any, lengths: tuple[int, ...]
) -> None:
    arrays = paged_sequences(shape, lengths)
    remarks, ptx = compiled(arrays, shape)
    check_compiled(remarks, ptx, shape[-1])
    q, keys, values, table, positions = (np.array(array) for array in arrays)
    page_size, out = shape[4], np.full_like(q, np.nan)
    maps = [tensor_map(q.transpose(0, 2, 1, 3), BLOCK_ROWS)]
    maps += [tensor_map(cache.reshape(-1, *cache.shape[2:]), min(page_size, TILE_KEYS)) for cache in (keys, values)]
    blocks = -(-q.shape[1] // BLOCK_ROWS) * q.shape[0] * q.shape[2]
    launch(ptx, [table, positions, np.array([1], np.int32), out], (blocks, 1), maps=maps)
    tolerance = 2**-7 if shape[-1] == jnp.bfloat16 else 2**-10
    assert errors(out, expected(*arrays, 1), positions).max() < tolerance
    assert not out[positions < 0].any()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "batch"), SLOW, ids=str)
def test_compiles_without_spills_at_large_shapes(shape: Any, batch: int) -> None:
    arrays = paged_sequences(shape, (shape[0],) * batch)
    check_compiled(*compiled(arrays, shape), shape[-1])
