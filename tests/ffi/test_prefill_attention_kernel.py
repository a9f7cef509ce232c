"""Our kernel of prefill attention against the reference in float32, on a GPU; what it takes, anywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi.attention import choose_form, paged_attention
from qwenjax_ffi.prefill_attention_kernel import prefill_attention, unsupported
from tests.ffi.paged_sequences import Shape, errors, expected, paged_sequences

# Chunks that start anywhere, shorter than the call's, empty, of one token; ends in the middle of pages and tiles.
LENGTHS = (1, 63, 64, 65, 0, 255, 257, 640, 2047)
SHAPES: list[Shape] = [
    (200, 8, 4, 128, 64, jnp.bfloat16),
    (512, 8, 1, 128, 64, jnp.bfloat16),
    (129, 16, 2, 128, 64, jnp.bfloat16),
    (33, 4, 2, 128, 64, jnp.bfloat16),
    (128, 1, 4, 128, 16, jnp.bfloat16),
    (250, 3, 2, 128, 32, jnp.float16),
    (300, 2, 2, 128, 128, jnp.bfloat16),
    (131, 16, 1, 128, 256, jnp.float16),
]


@partial(jax.jit, static_argnames="implementation")
def attend(*arguments: Any, implementation: Any = "prefill_kernel") -> jax.Array:
    return paged_attention(*arguments, implementation=implementation)


@pytest.mark.parametrize(
    ("q", "cache", "reason"),
    [
        (((1, 200, 8, 128), jnp.float32), ((1, 4, 2, 64, 128), jnp.float32), "queries are float32"),
        (((1, 200, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.float16), "the cache float16"),
        (((1, 200, 8, 64), jnp.bfloat16), ((1, 4, 2, 64, 64), jnp.bfloat16), "head_dim is 64"),
        (((1, 200, 8, 128), jnp.bfloat16), ((1, 4, 2, 48, 128), jnp.bfloat16), "page_size is 48"),
        (((1, 0, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.bfloat16), "no empty ones"),
        (((1, 200, 7, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.bfloat16), "7 query heads and 2 kv heads"),
    ],
)
def test_what_the_kernel_does_not_take_has_a_reason(q: Any, cache: Any, reason: str) -> None:
    arrays = [jax.ShapeDtypeStruct(*spec) for spec in (q, cache, cache)]
    assert reason in str(unsupported(*arrays))
    with pytest.raises(ValueError, match=reason):
        prefill_attention(*arrays, None, None, 0)  # type: ignore[arg-type]


def test_values_in_another_kind_of_cache_than_keys_have_a_reason() -> None:
    q, keys = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 200, 8, 128), (1, 4, 2, 64, 128)))
    values = jax.ShapeDtypeStruct((1, 4, 2, 32, 128), jnp.bfloat16)
    assert "the kernel takes both alike" in str(unsupported(q, keys, values))


@pytest.mark.gpu
def test_chunks_take_this_kernel_and_decode_steps_the_other() -> None:
    cache = jax.ShapeDtypeStruct((1, 4, 2, 64, 128), jnp.bfloat16)
    forms = [
        choose_form(jax.ShapeDtypeStruct((1, tokens, 8, 128), jnp.bfloat16), cache, cache, "auto")
        for tokens in (1, 32, 33, 2048)
    ]
    assert forms == ["kernel", "kernel", "prefill_kernel", "prefill_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape[:-1])))
def test_equals_the_reference_in_float32(shape: Shape) -> None:
    arrays = paged_sequences(shape, LENGTHS)
    out = attend(*arrays, 1)
    assert out.dtype == shape[-1]
    # Weights and results are rounded to 2^-9 (float16: 2^-12) of their value.
    tolerance = 2**-7 if shape[-1] == jnp.bfloat16 else 2**-10
    assert errors(out, expected(*arrays, 1), arrays[-1]).max() < tolerance


@pytest.mark.gpu
def test_a_whole_prompt_in_rows_of_one_call_equals_the_reference() -> None:
    """As the engine makes them: rows of one prompt share its pages, the last has padding."""
    length, row = 1500, 512
    q, keys, values, table, positions = paged_sequences((length, 8, 2, 128, 64, jnp.bfloat16), (length,))
    wanted = expected(q, keys, values, table, positions, 1)
    rows = -(-length // row)
    place = np.arange(rows * row).reshape(rows, row)
    parts = jnp.where(place < length, place, -1)
    out = attend(q[0, np.minimum(place, length - 1)], keys, values, jnp.tile(table, (rows, 1)), parts, 1)
    out = out.reshape(1, -1, *out.shape[2:])[:, :length]
    assert errors(out, wanted, positions).max() < 2**-7


@pytest.mark.gpu
def test_padding_is_zeros_and_changes_nothing_in_the_others() -> None:
    q, keys, values, table, positions = paged_sequences((300, 8, 2, 128, 64, jnp.bfloat16), (300, 700, 900))
    padded = positions.at[0, 130:].set(-1).at[1].set(-1)
    whole = attend(q, keys, values, table, positions, 1).astype(jnp.float32)
    out = attend(jnp.where(padded[..., None, None] < 0, jnp.nan, q), keys, values, table, padded, 1).astype(jnp.float32)
    assert not np.asarray(out)[np.asarray(padded) < 0].any()
    assert errors(out, np.asarray(whole), padded).max() < 2**-7


@pytest.mark.gpu
def test_positions_need_not_rise_by_one() -> None:
    q, keys, values, table, positions = paged_sequences((300, 4, 2, 128, 64, jnp.bfloat16), (1000, 777))
    shuffled = jnp.asarray(np.random.default_rng(0).integers(-1, 777, positions.shape), jnp.int32)
    shuffled = shuffled.at[0, 7].set(999)
    out = attend(q, keys, values, table, shuffled, 1)
    assert errors(out, expected(q, keys, values, table, shuffled, 1), shuffled).max() < 2**-7


@pytest.mark.gpu
def test_bits_do_not_depend_on_neighbours_places_or_repetition() -> None:
    lengths = (700, 2047, 64, 3000, 0, 129, 1, 1000, 511)
    q, keys, values, table, positions = paged_sequences((300, 8, 4, 128, 64, jnp.bfloat16), lengths)
    out = np.asarray(attend(q, keys, values, table, positions, 1).astype(jnp.float32))
    for _ in range(5):
        again = attend(q, keys, values, table, positions, 1).astype(jnp.float32)
        np.testing.assert_array_equal(again, out)
    order = np.random.default_rng(0).permutation(len(lengths))
    moved = attend(q[order], keys, values, table[order], positions[order], 1).astype(jnp.float32)
    np.testing.assert_array_equal(moved, out[order])
    alone = attend(q, keys, values, table, jnp.where(jnp.arange(len(lengths))[:, None] == 3, positions, -1), 1)
    np.testing.assert_array_equal(alone[3].astype(jnp.float32), out[3])


@pytest.mark.gpu
def test_in_a_loop_over_layers_it_gives_what_single_calls_give() -> None:
    layers = 4
    q, keys, values, table, positions = paged_sequences(
        (300, 8, 2, 128, 64, jnp.bfloat16), (500, 1500, 64), layers=layers
    )

    @jax.jit
    def loop(q: Any, keys: Any, values: Any) -> jax.Array:
        def body(layer: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            x, outs = carry
            x = paged_attention(x, keys, values, table, positions, layer, implementation="prefill_kernel")
            return x, outs.at[layer].set(x)

        return jax.lax.fori_loop(0, layers, body, (q, jnp.zeros((layers, *q.shape), q.dtype)))[1]

    for _ in range(3):
        outs = loop(q, keys, values)
        x = q
        for layer in range(layers):
            x = attend(x, keys, values, table, positions, layer)
            np.testing.assert_array_equal(outs[layer].astype(jnp.float32), x.astype(jnp.float32))


@pytest.mark.gpu
def test_caches_of_more_than_2_to_the_31_elements() -> None:
    layers, pages = 3, 50_000  # 2.5e9 elements: 4.9 GB each
    q, keys, values, table, positions = paged_sequences((200, 8, 2, 128, 64, jnp.bfloat16), (64 * 40,), layers=1)
    wanted = expected(q, keys, values, table, positions, 0)
    count = keys.shape[1]
    large = [
        jnp.full((layers, pages, *cache.shape[2:]), jnp.nan, cache.dtype).at[-1, -count:].set(cache[0])
        for cache in (keys, values)
    ]
    shifted = jnp.where(table < count, table + pages - count, table)
    out = attend(q, *large, shifted, positions, layers - 1)
    assert errors(out, wanted, positions).max() < 2**-7
