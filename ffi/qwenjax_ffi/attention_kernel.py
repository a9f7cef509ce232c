"""Our kernels of paged attention as JAX functions: `paged_attention` and `page_writes` of `qwenjax_kernels`.

The references in `attention` define the results. `unavailable` says why attention cannot run with some arguments, and
`writes_unavailable` why the writes cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.implementation import gpu_unavailable
from qwenjax_kernels.attention_splits import HEAD_DIMS, MAX_BATCH, MAX_ROWS, PAGE_SIZES, Splits, choose_splits

H200_SMS = 132  # the blocks of a launch; on a chip with another number they are right, and less well balanced


def unavailable(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> str | None:
    """Why the kernel cannot run with these arguments on this machine; None where it can."""
    return machine_unavailable() or unsupported(q, k_cache, v_cache)


def unsupported(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> str | None:
    """Why the kernel does not take these arguments on any machine; None where it does."""
    if why := pages_unsupported(q, k_cache, v_cache, HEAD_DIMS, PAGE_SIZES):
        return why
    batch, tokens, q_heads, _ = q.shape
    kv_heads = k_cache.shape[2]
    rows = tokens * q_heads // kv_heads
    if rows > MAX_ROWS:
        return (
            f"{tokens} query tokens of {q_heads // kv_heads} query heads a kv head are {rows} rows; "
            f"the kernel takes up to {MAX_ROWS}"
        )
    if batch > MAX_BATCH:
        return f"the batch is {batch}; the kernel takes up to {MAX_BATCH}"
    return None


def pages_unsupported(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, head_dims: Sequence[int], page_sizes: Sequence[int]
) -> str | None:
    """Why a kernel of these head_dims and page_sizes does not take queries over these caches; None where it does."""
    _, _, q_heads, head_dim = q.shape
    _, _, kv_heads, page_size, cached_dim = k_cache.shape
    if not q.size or not k_cache.size:
        return f"queries are {list(q.shape)} and the cache {list(k_cache.shape)}; the kernel takes no empty ones"
    if (v_cache.shape, v_cache.dtype) != (k_cache.shape, k_cache.dtype):
        return f"keys lie in {told(k_cache)} and values in {told(v_cache)}; the kernel takes both alike"
    if q_heads % kv_heads:
        return f"{q_heads} query heads and {kv_heads} kv heads; the kernel takes a multiple of these"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_cache.dtype != q.dtype:
        return f"queries are {q.dtype} and the cache {k_cache.dtype}; the kernel takes bfloat16 or float16, both alike"
    if head_dim not in head_dims or cached_dim != head_dim:
        takes = " and ".join(map(str, head_dims))
        return f"head_dim is {head_dim} and the cache's {cached_dim}; the kernel takes {takes}, both alike"
    if page_size not in page_sizes:
        return f"page_size is {page_size}; the kernel takes {', '.join(map(str, page_sizes))}"
    return None


def writes_unavailable(k: jax.Array, v: jax.Array, key_cache: jax.Array, value_cache: jax.Array) -> str | None:
    """Why the kernel that writes pages cannot run with these arguments on this machine; None where it can."""
    if not k.size or not key_cache.size:
        return f"keys are {list(k.shape)} and their cache {list(key_cache.shape)}; the kernel takes no empty ones"
    if (k.shape, k.dtype, key_cache.shape) != (v.shape, v.dtype, value_cache.shape):
        return (
            f"keys are {told(k)} for {told(key_cache)} and values {told(v)} for {told(value_cache)}; "
            "the kernel takes both alike"
        )
    if (k.shape[2], k.shape[3]) != (key_cache.shape[2], key_cache.shape[4]):
        return f"keys are {told(k)} for {told(key_cache)}; the kernel writes as many heads of as many features"
    if (row_bytes := k.shape[-1] * k.dtype.itemsize) % 16:
        return f"a head's row is {row_bytes} bytes; the kernel copies multiples of 16"
    return machine_unavailable()


def told(array: jax.Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


@functools.cache
def machine_unavailable() -> str | None:
    """Why the kernel cannot run on this machine; None where it can."""
    return gpu_unavailable(("9.0",), "Hopper")


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
    *,
    splits: Splits | None = None,
    num_blocks: int = H200_SMS,
) -> jax.Array:
    """`qwenjax_ffi.attention.paged_attention` for what `unsupported` lets pass. Raises ValueError for anything else.

    The result's bits depend on splits, not on num_blocks.
    """
    if reason := unsupported(q, k_cache, v_cache):
        raise ValueError(f"paged_attention: {reason}")
    problem, between = problem_of(q, k_cache, page_table, splits, num_blocks)
    from cutlass.jax import cutlass_call

    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=(jax.ShapeDtypeStruct(q.shape, q.dtype), *between),
        compile_key=("qwenjax paged_attention", *problem),
    )
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    out, _, _ = call(q, k_cache, v_cache, page_table.astype(jnp.int32), positions.astype(jnp.int32), index)
    return out


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`write_pages` and `paged_attention` in one call, in which attention starts while the writes end.

    For what `writes_unavailable` and `unsupported` let pass. Returns the result and both caches.
    """
    problem, between = problem_of(q, k_cache, page_table)
    writes = writes_problem(k, k_cache, page_table)
    from cutlass.jax import cutlass_call

    caches = tuple(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_cache, v_cache))
    call = cutlass_call(
        _chain_launcher(writes, problem),
        output_shape_dtype=(*caches, jax.ShapeDtypeStruct(q.shape, q.dtype), *between),
        input_output_aliases={6: 0, 7: 1},
        compile_key=("qwenjax write_and_attend", *writes, *problem),
    )
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    keys, values, out, *_ = call(
        q, k, v, page_table.astype(jnp.int32), positions.astype(jnp.int32), index, k_cache, v_cache
    )
    return out, keys, values


def problem_of(
    q: jax.Array | jax.ShapeDtypeStruct,
    k_cache: jax.Array,
    page_table: jax.Array,
    splits: Splits | None = None,
    num_blocks: int = H200_SMS,
) -> tuple[tuple[Any, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """What attention is compiled for, and what passes between its two kernels."""
    batch, tokens, q_heads, head_dim = q.shape
    _, num_pages, kv_heads, page_size, _ = k_cache.shape
    splits = splits or choose_splits(batch * kv_heads)
    sizes = (batch, tokens, q_heads, kv_heads, head_dim, num_pages, page_size, page_table.shape[1])
    partial = (batch, kv_heads, splits.max_splits, tokens * q_heads // kv_heads)
    between = (jax.ShapeDtypeStruct((*partial, last), jnp.float32) for last in (head_dim, 2))
    return (q.dtype.name, *sizes, splits, num_blocks), tuple(between)


def write_pages(
    key_cache: jax.Array,
    value_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """Both caches with k and v, of the caches' dtype, at their positions: as `qwenjax_ffi.attention.write_pages`."""
    problem = writes_problem(k, key_cache, page_table)
    from cutlass.jax import cutlass_call

    call = cutlass_call(
        _writer(*problem),
        output_shape_dtype=tuple(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (key_cache, value_cache)),
        input_output_aliases={5: 0, 6: 1},
        compile_key=("qwenjax page_writes", k.dtype.name, *problem),
    )
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    return call(k, v, page_table.astype(jnp.int32), positions.astype(jnp.int32), index, key_cache, value_cache)


def writes_problem(k: jax.Array, cache: jax.Array, page_table: jax.Array) -> tuple[int, ...]:
    batch, tokens, kv_heads, head_dim = k.shape
    _, num_pages, _, page_size, _ = cache.shape
    return (batch, tokens, kv_heads, head_dim * k.dtype.itemsize, num_pages, page_size, page_table.shape[1])


def make_writes(
    follows: bool,
    batch: int,
    tokens: int,
    kv_heads: int,
    row_bytes: int,
    num_pages: int,
    page_size: int,
    max_pages: int,
) -> Any:
    from qwenjax_kernels.page_writes import PageWrites

    return PageWrites(
        batch=batch,
        tokens=tokens,
        kv_heads=kv_heads,
        row_bytes=row_bytes,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        follows=follows,
    )


def make_attention(
    follows: bool,
    dtype: str,
    batch: int,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    max_pages: int,
    splits: Splits,
    num_blocks: int,
) -> Any:
    import cutlass

    from qwenjax_kernels.paged_attention import PagedAttention

    return PagedAttention(
        dtype={"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype],
        batch=batch,
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        splits=splits,
        num_blocks=num_blocks,
        follows=follows,
    )


@functools.cache
def _writer(*problem: Any) -> Any:
    """The `@cute.jit` function of one problem's writes, kept so that its compilation is found again."""
    import cutlass.cute as cute

    kernel = make_writes(False, *problem)

    @cute.jit
    def launch(stream, k, v, page_table, positions, layer, keys, values):  # type: ignore[no-untyped-def]
        kernel.launch(stream, k, v, page_table, positions, layer, keys, values)

    return launch


@functools.cache
def _launcher(*problem: Any) -> Any:
    """The same of attention."""
    import cutlass.cute as cute

    kernel = make_attention(False, *problem)

    @cute.jit
    def launch(stream, q, k_cache, v_cache, page_table, positions, layer, out, partial, stats):  # type: ignore[no-untyped-def]
        kernel.launch(stream, q, k_cache, v_cache, page_table, positions, layer, out, partial, stats)

    return launch


@functools.cache
def _chain_launcher(writes_problem: tuple[int, ...], problem: tuple[Any, ...]) -> Any:
    """The same of both."""
    import cutlass.cute as cute

    writes = make_writes(False, *writes_problem)
    attention = make_attention(True, *problem)

    @cute.jit
    def launch(  # type: ignore[no-untyped-def]
        stream, q, k, v, page_table, positions, layer, keys, values, out, partial, stats
    ):
        writes.launch(stream, k, v, page_table, positions, layer, keys, values)
        attention.launch(stream, q, keys, values, page_table, positions, layer, out, partial, stats)

    return launch
