"""Compiles sort_rows and sum_rows without a GPU: `python compile_expert_rows.py '["sort_rows", 64, 8, 32]' ...`.

Each argument is ["sort_rows", tokens, top_k, experts] or ["sum_rows", tokens, top_k, features, dtype of the sums].
The environment (CUTE_DSL_ARCH, CUTE_DSL_COMPILER_OPT, CUTE_DSL_DUMP_DIR) says for what and which reports come out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cutlass.jax
import jax
import jax.numpy as jnp

from qwenjax_ffi import expert_rows_kernel


def lower(op: str, tokens: int, top_k: int, size: int, dtype: str = "bfloat16") -> None:
    """Lowers one call for CUDA, which compiles its kernels."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ids = array(jnp.int32, tokens, top_k)
    if op == "sort_rows":
        call = jax.jit(lambda *a: expert_rows_kernel.sort_rows(*a, size))
        arguments = (ids, array(jnp.float32, tokens, top_k), array(jnp.int32))
    else:
        call = jax.jit(lambda *a: expert_rows_kernel.sum_rows(*a, jnp.dtype(dtype)))
        arguments = (array(jnp.bfloat16, tokens * top_k, size), ids)
    checks = cutlass.jax.get_export_disabled_safety_checks()
    jax.export.export(call, platforms=["cuda"], disabled_checks=checks)(*arguments)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        lower(*json.loads(argument))
        print(f"compiled {argument}", flush=True)
