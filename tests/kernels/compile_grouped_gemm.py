"""Compiles grouped GEMM kernels without a GPU: `python compile_grouped_gemm.py '["moe_gate_up", 2048, ...]' ...`.

Each argument is [operation, k, outputs a row, groups, rows, tile, stacked, weights]: the tile as the arguments of
`Tile`, weights "mxfp8" or "bf16". A stacked weight has a layer axis; grouped_gemm gives float32 for one that is not.
The environment (CUTE_DSL_ARCH, CUTE_DSL_COMPILER_OPT, CUTE_DSL_DUMP_DIR) says for what and which reports come out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cutlass.jax
import jax
import jax.numpy as jnp

from qwenjax_ffi import grouped_gemm_kernel
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder, packed_shape
from qwenjax_kernels.tiles import Tile


def lower(op: str, k: int, width: int, groups: int, rows: int, tile: Tile, stacked: bool, weights: str) -> None:
    """Lowers one call for CUDA, which compiles its kernel."""
    order: RowOrder = "gate_up" if op == "moe_gate_up" else "plain"
    layers = (2,) if stacked else ()
    shape = (*layers, groups, width * (2 if op == "moe_gate_up" else 1), k)
    weight: Any = PackedMXFP8Weight(
        jax.ShapeDtypeStruct(packed_shape(shape, order), jnp.uint8),
        shape[-2],
        k,
        order,  # type: ignore[arg-type]
    )
    if weights == "bf16":
        weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
    row_token = jax.ShapeDtypeStruct((rows,), jnp.int32)
    row_weight = jax.ShapeDtypeStruct((rows,), jnp.float32)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    layer = jax.ShapeDtypeStruct((1,), jnp.int32) if stacked else None
    dtype = jnp.bfloat16 if stacked else jnp.float32
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "moe_gate_up": (
            lambda *a: grouped_gemm_kernel.moe_gate_up(*a, tile=tile),
            (x, row_token, sizes, weight, layer),
        ),
        "moe_down": (
            lambda *a: grouped_gemm_kernel.moe_down(*a, tile=tile),
            (x, sizes, weight, row_weight, layer),
        ),
        "grouped_gemm": (
            lambda *a: grouped_gemm_kernel.grouped_gemm(*a, tile=tile, out_dtype=dtype),
            (x, sizes, weight, layer),
        ),
    }
    call, arguments = calls[op]
    checks = cutlass.jax.get_export_disabled_safety_checks()
    jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(*arguments)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        op, k, width, groups, rows, tile, stacked, weights = json.loads(argument)
        lower(op, k, width, groups, rows, Tile(*tile), stacked, weights)
        print(f"compiled {op} {tile} {weights}", flush=True)
