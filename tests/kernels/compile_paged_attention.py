"""Compiles paged attention, or its page writes, without a GPU: `python compile_paged_attention.py CASE ...`.

Each CASE is JSON: ["attention", batch, tokens, q heads, kv heads, head_dim, page size, pages, pages of a sequence,
dtype, [tiles of a split, splits], blocks]; ["prefill", the same up to the dtype]; or ["writes", batch,
tokens, kv heads, head_dim, page size, pages, pages of a sequence, dtype]. The environment (CUTE_DSL_ARCH,
CUTE_DSL_COMPILER_OPT, CUTE_DSL_DUMP_DIR) says for what and which reports come out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass.jax
import jax
import jax.numpy as jnp

from qwenjax_ffi.attention_kernel import paged_attention, write_pages
from qwenjax_ffi.prefill_attention_kernel import prefill_attention
from qwenjax_kernels.attention_splits import Splits


def lower_attention(
    batch: int,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pages: int,
    max_pages: int,
    dtype: str,
    splits: tuple[int, int],
    blocks: int,
) -> None:
    call = partial(paged_attention, splits=Splits(*splits), num_blocks=blocks)
    lower(call, *arguments_of(batch, tokens, q_heads, kv_heads, head_dim, page_size, pages, max_pages, dtype))


def lower_prefill(*sizes: Any) -> None:
    lower(prefill_attention, *arguments_of(*sizes))


def arguments_of(
    batch: int,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pages: int,
    max_pages: int,
    dtype: str,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    q = jax.ShapeDtypeStruct((batch, tokens, q_heads, head_dim), dtype)
    cache = jax.ShapeDtypeStruct((2, pages, kv_heads, page_size, head_dim), dtype)
    table = jax.ShapeDtypeStruct((batch, max_pages), jnp.int32)
    positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    return q, cache, cache, table, positions, jax.ShapeDtypeStruct((1,), jnp.int32)


def lower_writes(
    batch: int, tokens: int, kv_heads: int, head_dim: int, page_size: int, pages: int, max_pages: int, dtype: str
) -> None:
    new = jax.ShapeDtypeStruct((batch, tokens, kv_heads, head_dim), dtype)
    cache = jax.ShapeDtypeStruct((2, pages, kv_heads, page_size, head_dim), dtype)
    table = jax.ShapeDtypeStruct((batch, max_pages), jnp.int32)
    positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    lower(write_pages, cache, cache, new, new, table, positions, jax.ShapeDtypeStruct((1,), jnp.int32))


def lower(call: Callable[..., Any], *arguments: Any) -> None:
    """Lowers one call for CUDA, which compiles its kernels."""
    checks = cutlass.jax.get_export_disabled_safety_checks()
    jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(*arguments)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        what, *case = json.loads(argument)
        {"attention": lower_attention, "prefill": lower_prefill, "writes": lower_writes}[what](*case)
        print(f"compiled {argument}", flush=True)
