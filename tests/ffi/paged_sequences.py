"""Sequences in pages of a cache whose other memory is NaN, and what the reference gives for them in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax_ffi.attention import paged_attention

Shape = tuple[
    int, int, int, int, int, Any
]  # query tokens, query heads of a kv head, kv heads, head_dim, page size, dtype


def paged_sequences(shape: Shape, lengths: tuple[int, ...], seed: int = 0, layers: int = 2) -> tuple[Any, ...]:
    """q, caches, table and positions of sequences whose newest tokens are the queries; all that no one wrote is NaN."""
    tokens, group, kv_heads, head_dim, page_size, dtype = shape
    rng = np.random.default_rng(seed)
    max_pages = -(-max(*lengths, 1) // page_size) + 1
    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 1
    numbers = rng.permutation(pages - 1) + 1  # page 0 is no one's
    table = np.full((len(lengths), max_pages), 2**31 - 1, np.int32)  # not to be followed
    q, keys, values = (
        jax.random.normal(jax.random.key(seed + i), size, dtype)
        for i, size in enumerate(
            [
                (len(lengths), tokens, group * kv_heads, head_dim),
                *2 * [(layers, pages, kv_heads, page_size, head_dim)],
            ]
        )
    )
    written = np.zeros((pages, page_size), bool)
    positions = np.full((len(lengths), tokens), -1, np.int32)
    begin = 0
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = numbers[begin : begin + count]
        begin += count
        table[sequence, :count] = own
        for index, page in enumerate(own):
            written[page, : length - index * page_size] = True
        new = min(tokens, length)
        positions[sequence, :new] = np.arange(length - new, length)
    caches = [jnp.where(written[None, :, None, :, None], cache, jnp.nan) for cache in (keys, values)]
    return q, *caches, jnp.asarray(table), jnp.asarray(positions)


_reference = jax.jit(partial(paged_attention, implementation="reference"))


def expected(q: Any, keys: Any, values: Any, table: Any, positions: Any, layer: Any) -> np.ndarray:
    """In float32, and not in the TF32 that a GPU takes for it."""
    wide = [x.astype(jnp.float32) for x in (q, keys, values)]
    pages = jnp.minimum(table, keys.shape[1] - 1)
    with jax.default_matmul_precision("highest"):
        return np.asarray(_reference(*wide, pages, positions, layer))


def errors(out: Any, wanted: np.ndarray, positions: Any) -> np.ndarray:
    """Norm of the error of each query's heads over the norm of what is expected."""
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all(), "padding is finite, too"
    valid = np.asarray(positions) >= 0
    return np.linalg.norm(out[valid] - wanted[valid], axis=-1) / np.linalg.norm(wanted[valid], axis=-1)


def poison_free_memory() -> None:
    """Workspaces come out of memory that was NaN."""
    jnp.full(1 << 27, jnp.nan, jnp.float32).block_until_ready().delete()
