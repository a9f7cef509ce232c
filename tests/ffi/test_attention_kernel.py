"""What of our kernel of decode attention is its own: `test_both_attention_kernels.py` has the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenjax_ffi import attention_kernel
from qwenjax_ffi.attention import choose_form, paged_attention, unavailable_forms, write_keys_and_values
from qwenjax_ffi.attention_kernel import paged_attention as kernel_attention
from qwenjax_ffi.attention_kernel import unsupported, writes_unavailable
from qwenjax_kernels.attention_splits import SHARED_BYTES, Splits, choose_splits, key_warps, row_tiles, stages
from tests.ffi.paged_sequences import Shape, errors, expected, paged_sequences, poison_free_memory


@partial(jax.jit, static_argnames="implementation")
def attend(*arguments: Any, implementation: Any = "kernel") -> jax.Array:
    return paged_attention(*arguments, implementation=implementation)


def in_turn(size: int) -> st.SearchStrategy[int]:
    return st.integers(1, size)


@given(tiles=in_turn(20000), min_tiles=in_turn(64), max_splits=in_turn(32))
def test_splits_are_as_many_as_asked_for_at_most_and_none_is_empty(tiles: int, min_tiles: int, max_splits: int) -> None:
    each = Splits(min_tiles, max_splits).tiles_each(tiles)
    count = -(-tiles // each)
    assert 1 <= count <= max_splits
    assert (count - 1) * each < tiles <= count * each
    assert each <= min_tiles or count == max_splits or (count + 1) * each > tiles


@given(rows=in_turn(128), head_dim=st.sampled_from([64, 128]), batch=in_turn(1024))
def test_every_problem_has_whole_warpgroups_of_consumers_and_stages_to_hide_latency(
    rows: int, head_dim: int, batch: int
) -> None:
    assert row_tiles(rows) * 16 >= rows
    assert row_tiles(rows) * key_warps(rows) in (4, 8)
    count = stages(rows, head_dim, batch)
    assert count * 2 * 64 * head_dim * 2 >= 98304, "the latency of memory times its rate is 40 KB a multiprocessor"
    assert count * 2 * 64 * head_dim * 2 <= SHARED_BYTES


def test_sums_of_splits_take_no_more_memory_with_more_sequences_up_to_512_pairs() -> None:
    sizes = [pairs * choose_splits(pairs).max_splits for pairs in (128, 256, 512)]
    assert sizes == [4096] * 3
    assert choose_splits(4).max_splits == 32
    assert choose_splits(4096).max_splits == 8


@pytest.mark.parametrize("values", [((1, 4, 2, 32, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.float16)])
def test_values_written_to_another_kind_of_cache_than_keys_have_a_reason(values: Any) -> None:
    keys, other = (jax.ShapeDtypeStruct(*spec) for spec in (((1, 4, 2, 64, 128), jnp.bfloat16), values))
    new_keys, new_values = (jax.ShapeDtypeStruct((1, 1, 2, 128), cache.dtype) for cache in (keys, other))
    assert "the kernel takes both alike" in str(writes_unavailable(new_keys, new_values, keys, other))


@pytest.mark.parametrize("new", [(0, 1, 2, 128), (1, 0, 2, 128), (1, 1, 2, 0)])
def test_no_keys_to_write_are_a_reason(new: tuple[int, ...]) -> None:
    k, cache = jax.ShapeDtypeStruct(new, jnp.bfloat16), jax.ShapeDtypeStruct((1, 4, 2, 64, 128), jnp.bfloat16)
    assert "no empty ones" in str(writes_unavailable(k, k, cache, cache))


def test_writes_of_other_heads_than_the_caches_are_refused_by_name() -> None:
    cache = jnp.zeros((1, 4, 2, 16, 64), jnp.bfloat16)
    for heads, head_dim in ((4, 64), (2, 32)):
        k = jnp.zeros((1, 1, heads, head_dim), jnp.bfloat16)
        assert "as many heads of as many features" in str(writes_unavailable(k, k, cache, cache))


def test_without_a_gpu_the_reference_runs_and_each_other_form_says_why() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    q, cache = jnp.zeros((1, 1, 8, 128), jnp.bfloat16), jnp.zeros((1, 4, 2, 64, 128), jnp.bfloat16)
    assert unsupported(q, cache, cache) is None
    assert choose_form(q, cache, cache, "auto") == "reference"
    assert set(unavailable_forms(q, cache, cache)) == {"kernel", "prefill_kernel", "cudnn"}
    with pytest.raises(ValueError, match="implementation is 'fastest'"):
        choose_form(q, cache, cache, "fastest")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 40, 130, 512])
def test_a_ragged_batch_of_any_size(batch: int) -> None:
    rng = np.random.default_rng(batch)
    lengths = tuple(int(x) for x in rng.choice([0, 1, 30, 300, 900, 6000], batch, p=[0.2, 0.2, 0.2, 0.2, 0.15, 0.05]))
    arrays = paged_sequences((1, 4, 2, 128, 64, jnp.bfloat16), (*lengths[:-1], 700))
    poison_free_memory()
    assert errors(attend(*arrays, 1), expected(*arrays, 1), arrays[-1]).max() < 2**-7


@pytest.mark.gpu
def test_a_padded_query_changes_nothing_in_the_others() -> None:
    q, keys, values, table, positions = paged_sequences((4, 8, 2, 128, 64, jnp.bfloat16), (300, 70, 900))
    padded = positions.at[:, 3].set(-1).at[1].set(-1)  # the last draft of each, and all of a sequence
    out = attend(q.at[:, 3].set(jnp.nan), keys, values, table, padded, 1)
    assert errors(out, expected(q, keys, values, table, padded, 1), padded).max() < 2**-7


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_number_of_blocks() -> None:
    arrays = paged_sequences((2, 8, 4, 128, 64, jnp.bfloat16), (700, 2047, 64, 3000, 0, 129, 1, 1000, 511))
    out = np.asarray(attend(*arrays, 1).astype(jnp.float32))
    for blocks in (7, 131):
        few = jax.jit(partial(kernel_attention, num_blocks=blocks))(*arrays, 1)
        np.testing.assert_array_equal(few.astype(jnp.float32), out)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "batch", "tokens"), [(jnp.bfloat16, 33, 1), (jnp.float32, 2, 300)])
def test_writes_are_those_of_the_reference_and_in_place(dtype: Any, batch: int, tokens: int) -> None:
    layers, kv_heads, head_dim, page_size, max_pages = 3, 4, 128, 64, 6
    rng = np.random.default_rng(0)
    pages = batch * max_pages
    table = jnp.asarray(rng.permutation(pages).reshape(batch, max_pages), jnp.int32)
    start = rng.integers(-1, page_size * max_pages + 2, (batch, 1))
    positions = jnp.asarray(np.where(start < 0, -1, start + np.arange(tokens)), jnp.int32)
    keys, values, k, v = (
        jax.random.normal(jax.random.key(seed), shape, dtype)
        for seed, shape in enumerate(
            2 * [(layers, pages, kv_heads, page_size, head_dim)] + 2 * [(batch, tokens, kv_heads, head_dim)]
        )
    )

    @partial(jax.jit, static_argnames="implementation", donate_argnums=(0, 1))
    def all_layers(keys: Any, values: Any, k: Any, v: Any, implementation: Any) -> Any:
        def body(layer: jax.Array, caches: Any) -> Any:
            return write_keys_and_values(*caches, k + layer, v, table, positions, layer, implementation=implementation)

        return jax.lax.fori_loop(1, layers, body, (keys, values))

    wanted = all_layers(keys.copy(), values.copy(), k, v, implementation="reference")
    compiled = all_layers.lower(keys, values, k, v, implementation="kernel").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < keys.nbytes, "no copy of a cache"
    for ours, theirs in zip(compiled(keys, values, k, v), wanted, strict=True):
        np.testing.assert_array_equal(ours.astype(jnp.float32), theirs.astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 8, 4, 128, 64, jnp.bfloat16), (4, 8, 4, 128, 64, jnp.bfloat16), (1, 16, 4, 128, 128, jnp.float16)]
)
def test_writes_and_attention_in_one_call_give_the_bits_of_both_apart(shape: Shape) -> None:
    """Keys that are read before they are written are NaN here, and in a later turn those of another layer."""
    q, keys, values, table, positions = paged_sequences(shape, (1, 63, 64, 65, 0, 255, 257, 2047, 2048, 4000))
    size = (*positions.shape, keys.shape[2], keys.shape[4])
    k, v = (jax.random.normal(jax.random.key(seed), size, keys.dtype) for seed in (8, 9))
    pages = jnp.minimum(table, keys.shape[1] - 1)

    def together(*arguments: Any) -> tuple[jax.Array, ...]:
        return attention_kernel.write_and_attend(*arguments)

    def apart(q: Any, k: Any, v: Any, keys: Any, values: Any, *rest: Any) -> tuple[jax.Array, ...]:
        keys, values = attention_kernel.write_pages(keys, values, k, v, *rest)
        return kernel_attention(q, keys, values, *rest), keys, values

    def looped(function: Any, q: Any, keys: Any, values: Any) -> tuple[jax.Array, ...]:
        def turn(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, keys, values = carry
            layer = index % keys.shape[0]
            return function(q + x, k + index, v - index, keys, values, pages, positions, layer)

        return jax.lax.fori_loop(0, 7, turn, (jnp.zeros_like(q), keys, values))

    results = [jax.jit(looped, static_argnums=0)(function, q, keys, values) for function in (together, apart)]
    for ours, other in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint16), np.asarray(other).view(np.uint16))
