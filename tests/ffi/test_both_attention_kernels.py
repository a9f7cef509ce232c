"""What both kernels of attention, of decode steps and of chunks of prompts, do alike: the reference in float32, on a
GPU, and the reasons for what they do not take, anywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi import attention_kernel, prefill_attention_kernel
from qwenjax_ffi.attention import paged_attention
from tests.ffi.paged_sequences import Shape, errors, expected, paged_sequences, poison_free_memory

FORMS = ("kernel", "prefill_kernel")
TOKENS = {"kernel": 1, "prefill_kernel": 300}  # of a call
# Chunks that start anywhere, shorter than the call's, empty, of one token; ends in the middle of pages and tiles.
LENGTHS = {
    "kernel": (1, 63, 64, 65, 0, 255, 257, 2047, 2048, 4000),
    "prefill_kernel": (1, 63, 64, 65, 0, 255, 257, 640, 2047),
}
SHAPES: dict[str, list[Shape]] = {
    "kernel": [
        (1, 8, 4, 128, 64, jnp.bfloat16),
        (2, 8, 4, 128, 64, jnp.bfloat16),
        (4, 8, 4, 128, 64, jnp.bfloat16),
        (8, 8, 1, 128, 64, jnp.bfloat16),
        (8, 16, 2, 128, 64, jnp.bfloat16),
        (16, 8, 1, 128, 64, jnp.bfloat16),
        (1, 1, 2, 128, 16, jnp.bfloat16),
        (3, 2, 2, 64, 32, jnp.float16),
        (1, 16, 4, 128, 128, jnp.float16),
        (5, 6, 3, 64, 256, jnp.bfloat16),
    ],
    "prefill_kernel": [
        (200, 8, 4, 128, 64, jnp.bfloat16),
        (512, 8, 1, 128, 64, jnp.bfloat16),
        (129, 16, 2, 128, 64, jnp.bfloat16),
        (33, 4, 2, 128, 64, jnp.bfloat16),
        (128, 1, 4, 128, 16, jnp.bfloat16),
        (250, 3, 2, 128, 32, jnp.float16),
        (300, 2, 2, 128, 128, jnp.bfloat16),
        (131, 16, 1, 128, 256, jnp.float16),
    ],
}
CALLS = {
    "kernel": (attention_kernel.unsupported, attention_kernel.paged_attention),
    "prefill_kernel": (prefill_attention_kernel.unsupported, prefill_attention_kernel.prefill_attention),
}


@partial(jax.jit, static_argnames="form")
def attend(*arguments: Any, form: Any) -> jax.Array:
    return paged_attention(*arguments, implementation=form)


@pytest.mark.parametrize(
    ("forms", "q", "cache", "reason"),
    [
        (FORMS, ((1, 32, 8, 128), jnp.float32), ((1, 4, 2, 64, 128), jnp.float32), "queries are float32"),
        (FORMS, ((1, 32, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.float16), "the cache float16"),
        (FORMS, ((1, 32, 8, 96), jnp.bfloat16), ((1, 4, 2, 64, 96), jnp.bfloat16), "head_dim is 96"),
        (FORMS[1:], ((1, 32, 8, 64), jnp.bfloat16), ((1, 4, 2, 64, 64), jnp.bfloat16), "head_dim is 64"),
        (FORMS, ((1, 32, 8, 128), jnp.bfloat16), ((1, 4, 2, 48, 128), jnp.bfloat16), "page_size is 48"),
        (FORMS[:1], ((1, 33, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.bfloat16), "132 rows"),
        (FORMS[:1], ((1025, 1, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.bfloat16), "batch is 1025"),
        (FORMS, ((0, 1, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.bfloat16), "no empty ones"),
        (FORMS, ((1, 0, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.bfloat16), "no empty ones"),
        (FORMS, ((1, 1, 8, 128), jnp.bfloat16), ((1, 4, 0, 64, 128), jnp.bfloat16), "no empty ones"),
        (FORMS, ((1, 32, 7, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.bfloat16), "7 query heads and 2 kv heads"),
        (FORMS, ((1, 32, 8, 128), jnp.bfloat16), ((1, 4, 2, 64, 64), jnp.bfloat16), "and the cache's 64"),
    ],
)
def test_what_a_kernel_does_not_take_has_a_reason(forms: tuple[str, ...], q: Any, cache: Any, reason: str) -> None:
    arrays = [jax.ShapeDtypeStruct(*spec) for spec in (q, cache, cache)]
    for form in forms:
        unsupported, call = CALLS[form]
        assert reason in str(unsupported(*arrays))
        with pytest.raises(ValueError, match=reason):
            call(*arrays, None, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", [((1, 4, 2, 32, 128), jnp.bfloat16), ((1, 4, 2, 64, 128), jnp.float16)])
def test_values_in_another_kind_of_cache_than_keys_have_a_reason(form: str, values: Any) -> None:
    q, keys = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 32, 8, 128), (1, 4, 2, 64, 128)))
    assert "the kernel takes both alike" in str(CALLS[form][0](q, keys, jax.ShapeDtypeStruct(*values)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "shape"),
    [pytest.param(form, s, id="-".join(map(str, (form, *s[:-1])))) for form in FORMS for s in SHAPES[form]],
)
def test_equals_the_reference_in_float32(form: str, shape: Shape) -> None:
    arrays = paged_sequences(shape, LENGTHS[form])
    poison_free_memory()
    out = attend(*arrays, 1, form=form)
    assert out.dtype == shape[-1]
    # Weights and results are rounded to 2^-9 (float16: 2^-12) of their value.
    tolerance = 2**-7 if shape[-1] == jnp.bfloat16 else 2**-10
    assert errors(out, expected(*arrays, 1), arrays[-1]).max() < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_neighbours_slots_or_repetition(form: str) -> None:
    lengths = (700, 2047, 64, 3000, 0, 129, 1, 1000, 511)
    q, keys, values, table, positions = paged_sequences((TOKENS[form] + 1, 8, 4, 128, 64, jnp.bfloat16), lengths)
    out = np.asarray(attend(q, keys, values, table, positions, 1, form=form).astype(jnp.float32))
    for _ in range(5):
        again = attend(q, keys, values, table, positions, 1, form=form).astype(jnp.float32)
        np.testing.assert_array_equal(again, out)
    order = np.random.default_rng(0).permutation(len(lengths))
    moved = attend(q[order], keys, values, table[order], positions[order], 1, form=form).astype(jnp.float32)
    np.testing.assert_array_equal(moved, out[order])
    alone = jnp.where(jnp.arange(len(lengths))[:, None] == 3, positions, -1)
    one = attend(q, keys, values, table, alone, 1, form=form)
    np.testing.assert_array_equal(one[3].astype(jnp.float32), out[3])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_in_a_loop_over_layers_it_gives_what_single_calls_give(form: str) -> None:
    layers = 5
    q, keys, values, table, positions = paged_sequences(
        (TOKENS[form], 8, 4, 128, 64, jnp.bfloat16), (500, 1500, 64), layers=layers
    )

    @jax.jit
    def loop(q: Any, keys: Any, values: Any) -> jax.Array:
        def body(layer: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            x, outs = carry
            x = paged_attention(x, keys, values, table, positions, layer, implementation=form)  # type: ignore[arg-type]
            return x, outs.at[layer].set(x)

        return jax.lax.fori_loop(0, layers, body, (q, jnp.zeros((layers, *q.shape), q.dtype)))[1]

    for _ in range(3):
        outs = loop(q, keys, values)
        x = q
        for layer in range(layers):
            x = attend(x, keys, values, table, positions, layer, form=form)
            np.testing.assert_array_equal(outs[layer].astype(jnp.float32), x.astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_caches_of_more_than_2_to_the_31_elements(form: str) -> None:
    layers, pages = 3, 50_000  # 2.5e9 elements: 4.9 GB each
    q, keys, values, table, positions = paged_sequences(
        (TOKENS[form], 8, 2, 128, 64, jnp.bfloat16), (64 * 40,), layers=1
    )
    wanted = expected(q, keys, values, table, positions, 0)
    count = keys.shape[1]
    large = [
        jnp.full((layers, pages, *cache.shape[2:]), jnp.nan, cache.dtype).at[-1, -count:].set(cache[0])
        for cache in (keys, values)
    ]
    shifted = jnp.where(table < count, table + pages - count, table)
    out = attend(q, *large, shifted, positions, layers - 1, form=form)
    assert errors(out, wanted, positions).max() < 2**-7
