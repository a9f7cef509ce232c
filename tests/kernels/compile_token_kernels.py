"""Compiles the kernels that take a token each: `python compile_token_kernels.py '["top_k_experts", ...]' ...`.

Each argument is ["add_rms_norm", tokens, features], ["sum_rows_add_rms_norm", tokens, features, top_k], ["head_norms",
tokens, q_heads, kv_heads, head_dim], ["router_logits", tokens, experts, features] or ["top_k_experts", tokens, experts,
top_k, normalise].
The environment (CUTE_DSL_ARCH, CUTE_DSL_COMPILER_OPT, CUTE_DSL_DUMP_DIR) says for what and which reports come out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cutlass.cute as cute
import cutlass.jax
import jax
import jax.numpy as jnp

from qwenjax_ffi import token_kernels
from qwenjax_kernels.add_rms_norm import AddRmsNorm

EPS = 1e-6


def lower(op: str, tokens: int, *sizes: Any) -> None:
    """Lowers one call for CUDA, which compiles its kernel."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = array(jnp.int32, 1)
    if op == "sum_rows_add_rms_norm":
        lower_sum(tokens, *sizes)
        return
    if op == "add_rms_norm":
        rows = array(jnp.bfloat16, tokens, sizes[0])
        call = jax.jit(lambda *a: token_kernels.add_rms_norm(*a, EPS))
        arguments: tuple[Any, ...] = (rows, rows, array(jnp.bfloat16, 3, sizes[0]), layer)
    elif op == "head_norms":
        q_heads, kv_heads, head_dim = sizes
        call = jax.jit(lambda *a: token_kernels.head_norms(*a[:4], EPS, *a[4:], kv_heads))
        norm, angles = array(jnp.bfloat16, 3, head_dim), array(jnp.float32, 1, tokens, head_dim // 2)
        qkv = array(jnp.bfloat16, 1, tokens, (q_heads + 2 * kv_heads) * head_dim)
        arguments = (qkv, norm, norm, layer, angles, angles)
    elif op == "router_logits":
        experts, features = sizes
        call = jax.jit(token_kernels.router_logits)
        arguments = (array(jnp.bfloat16, tokens, features), array(jnp.bfloat16, 3, experts, features), layer)
    else:
        experts, top_k, normalise = sizes
        call = jax.jit(lambda *a: token_kernels.top_k_experts(*a, top_k, normalise))
        arguments = (array(jnp.float32, tokens, experts), array(jnp.int32, tokens))
    checks = cutlass.jax.get_export_disabled_safety_checks()
    jax.export.export(call, platforms=["cuda"], disabled_checks=checks)(*arguments)


def lower_sum(tokens: int, features: int, top_k: int) -> None:
    """The form that adds up a token's rows first, which runs in chains alone."""
    kernel = AddRmsNorm(tokens=tokens, features=features, eps=EPS, top_k=top_k)

    @cute.jit
    def launch(stream, residual, rows, token_rows, weight, layer, total, normed):  # type: ignore[no-untyped-def]
        kernel.launch(stream, residual, rows, token_rows, weight, layer, total, normed)

    row = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    call = cutlass.jax.cutlass_call(launch, output_shape_dtype=(row, row), compile_key=(tokens, features, top_k))
    arguments = (
        row,
        jax.ShapeDtypeStruct((tokens * top_k, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
        jax.ShapeDtypeStruct((3, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    checks = cutlass.jax.get_export_disabled_safety_checks()
    jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(*arguments)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        lower(*json.loads(argument))
        print(f"compiled {argument}", flush=True)
