"""Compiles all-reduce kernels without a GPU: `python compile_all_reduce.py '["one_shot", 2, "bfloat16", 4096, 0]' ...`.

Each argument is [algorithm, ranks, dtype, elements, features of a row or 0], or ["barrier"] for the kernel of a test,
or ["without JAX", features of a row or 0] for the form that tests launch so.
With the algorithm "two_shot of rows" the message is the sums of eight rows a token, of 4,096 features.
The environment (CUTE_DSL_ARCH, CUTE_DSL_COMPILER_OPT, CUTE_DSL_DUMP_DIR) says for what and which reports come out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cutlass.jax
import jax
import jax.numpy as jnp

from qwenjax_ffi import all_reduce_kernel
from qwenjax_kernels.heap_layout import num_words

OF_ROWS, FEATURES = "two_shot of rows", 4096


def lower(algorithm: Any, ranks: int, dtype: str, elements: int, row: int) -> None:
    """Lowers one call for CUDA, which compiles its kernel."""
    epochs = jax.ShapeDtypeStruct((num_words(ranks, algorithm == "multicast"),), jnp.int32)
    checks = cutlass.jax.get_export_disabled_safety_checks()
    message = x = jax.ShapeDtypeStruct((elements // row, row) if row else (elements,), jnp.dtype(dtype))
    token_rows = None
    if algorithm == OF_ROWS:
        algorithm, tokens = "two_shot", elements // FEATURES
        x = jax.ShapeDtypeStruct((tokens * 8, FEATURES), jnp.dtype(dtype))
        token_rows = jax.ShapeDtypeStruct((tokens, 8), jnp.int32)
    if row:
        weight = jax.ShapeDtypeStruct((row,), jnp.dtype(dtype))
        call = jax.jit(
            lambda x, t, r, w, e: all_reduce_kernel.all_reduce_rms_norm(x, r, w, 1e-6, e, ranks, algorithm, t),
            donate_argnums=4,
        )
        jax.export.export(call, platforms=["cuda"], disabled_checks=checks)(x, token_rows, message, weight, epochs)
    else:
        call = jax.jit(lambda x, t, e: all_reduce_kernel.all_reduce(x, e, ranks, algorithm, t), donate_argnums=2)
        jax.export.export(call, platforms=["cuda"], disabled_checks=checks)(x, token_rows, epochs)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        case = json.loads(argument)
        if case == ["barrier"]:
            from tests.kernels.gpu_ranks import compiled_barrier

            compiled_barrier(24, 32, 2)
        elif case[0] == "without JAX":
            from tests.kernels.gpu_ranks import compiled

            compiled(2, "bfloat16", 4096, "one_shot", case[1])
        else:
            lower(*case)
        print(f"compiled {case}", flush=True)
