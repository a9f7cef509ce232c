"""Compiles Blackwell kernels without a GPU: `python compile_grouped_gemm_sm100.py '["moe_gate_up", 2048, ...]' ...`.

Each argument is [operation, k, outputs a row, groups, rows, tile rows, stacked, blocks], where a stacked weight has a
layer axis and grouped_gemm gives float32 for one that is not; "quantise_rows" takes no outputs, gathers where stacked,
and has as many blocks as it needs. The environment (CUTE_DSL_ARCH, CUTE_DSL_COMPILER_OPT, CUTE_DSL_DUMP_DIR) says for
what and which reports come out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import cutlass.jax
import jax
import jax.numpy as jnp

from qwenjax_ffi import grouped_gemm_blackwell as blackwell
from qwenjax_ffi.blackwell_packing import BlockScaledRows, rows_shape
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder, packed_shape


def lower(op: str, k: int, width: int, groups: int, rows: int, tile_rows: int, stacked: bool, blocks: int) -> None:
    """Lowers one call for CUDA, which compiles its kernel."""
    blackwell.B200_SMS = blocks
    order: RowOrder = "gate_up" if op == "moe_gate_up" else "plain"
    shape = (*((2,) if stacked else ()), groups, width * (2 if op == "moe_gate_up" else 1), k)

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    data = array(packed_shape(shape, order, "block_scaled"), jnp.uint8)
    weight: Any = PackedMXFP8Weight(data, shape[-2], k, order, "block_scaled")
    tiles = array(rows_shape(rows, k, groups, tile_rows), jnp.uint8)
    packed: Any = BlockScaledRows(tiles, rows, k, tile_rows, jnp.dtype(jnp.bfloat16))
    sizes = array((groups,), jnp.int32)
    layer = array((1,), jnp.int32) if stacked else None
    dtype = jnp.bfloat16 if stacked else jnp.float32
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "moe_gate_up": (blackwell.moe_gate_up, (packed, None, sizes, weight, layer)),
        "moe_down": (blackwell.moe_down, (packed, sizes, weight, array((rows,), jnp.float32), layer)),
        "grouped_gemm": (lambda *a: blackwell.grouped_gemm(*a, out_dtype=dtype), (packed, sizes, weight, layer)),
        "quantise_rows": (
            lambda *a: blackwell.quantise_rows(*a, tile_rows=tile_rows).data,
            (array((rows, k), jnp.bfloat16), sizes, array((rows,), jnp.int32) if stacked else None),
        ),
    }
    call, arguments = calls[op]
    checks = cutlass.jax.get_export_disabled_safety_checks()
    jax.export.export(jax.jit(lambda *a: jax.tree.leaves(call(*a))), platforms=["cuda"], disabled_checks=checks)(
        *arguments
    )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        lower(*json.loads(argument))
        print(f"compiled {argument}", flush=True)
