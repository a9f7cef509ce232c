"""A layer's attention as a chain of kernels in one call, beside the same kernels called apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi.attention import write_and_attend
from qwenjax_ffi.attention_chain_kernel import AttentionWeights, attend, unavailable
from qwenjax_ffi.attention_inputs import attention_inputs
from qwenjax_ffi.linear import linear, linear_side_by_side
from qwenjax_ffi.norm import add_rms_norm
from qwenjax_ffi.packing import PackedMXFP8Weight, pack
from qwenjax_ffi.weights import MXFP8Weight

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 3, 512, 16, 2, 128, 64, 3
EPS = 1e-6


def weight(seed: int, out: int, k: int) -> PackedMXFP8Weight:
    values = jax.random.normal(jax.random.key(seed), (LAYERS, 1, out, k)) * 0.05
    scales = jnp.full((LAYERS, 1, out, k // 32), 122, jnp.uint8)
    packed = pack(MXFP8Weight((values * 32).astype(jnp.float8_e4m3fn), scales))
    return replace(packed, data=packed.data[:, 0])


def weights(layer: Any) -> AttentionWeights:
    width, kv_width = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    qkv = weight(0, width, HIDDEN), weight(1, kv_width, HIDDEN), weight(2, kv_width, HIDDEN)
    norms = tuple(1 + jax.random.normal(jax.random.key(seed), (LAYERS, HEAD_DIM), jnp.bfloat16) / 4 for seed in (3, 4))
    return AttentionWeights(qkv, weight(5, HIDDEN, width), norms, EPS, layer)  # type: ignore[arg-type]


def apart(
    x: jax.Array, weights: AttentionWeights, rotary: Any, keys: Any, values: Any, table: Any, positions: Any
) -> tuple[jax.Array, ...]:
    qkv = linear_side_by_side(x, weights.qkv, weights.layer, implementation="kernel")
    heads = attention_inputs(qkv, *weights.norms, weights.layer, EPS, *rotary, KV_HEADS, implementation="kernel")
    out, keys, values = write_and_attend(*heads, keys, values, table, positions, weights.layer)
    rows = out.reshape(*x.shape[:2], -1)
    return keys, values, linear(rows, weights.output, weights.layer, implementation="kernel")


def chain_with_norm(x: jax.Array, weights: AttentionWeights, *others: Any) -> tuple[jax.Array, ...]:
    keys, values, total, normed = attend(x, weights, *others, norm=(x, post_norms()))
    return keys, values, total + normed


def apart_with_norm(x: jax.Array, weights: AttentionWeights, *others: Any) -> tuple[jax.Array, ...]:
    keys, values, out = apart(x, weights, *others)
    total, normed = add_rms_norm(x, out, post_norms(), EPS, weights.layer, implementation="kernel")
    return keys, values, total + normed


def post_norms() -> jax.Array:
    return 1 + jax.random.normal(jax.random.key(11), (LAYERS, HIDDEN), jnp.bfloat16) / 4


@pytest.mark.gpu
@pytest.mark.parametrize("functions", [(attend, apart), (chain_with_norm, apart_with_norm)], ids=["", "norm"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 3), (16, 1), (64, 2), (200, 1)])
def test_a_chain_in_a_loop_gives_the_bits_of_the_kernels_apart(batch: int, tokens: int, functions: Any) -> None:
    shape = (LAYERS, batch * PAGES, KV_HEADS, PAGE, HEAD_DIM)
    table = jax.random.permutation(jax.random.key(6), batch * PAGES).reshape(batch, PAGES).astype(jnp.int32)
    start = jax.random.randint(jax.random.key(7), (batch, 1), -1, PAGES * PAGE - 40)
    x = jax.random.normal(jax.random.key(8), (batch, tokens, HIDDEN), jnp.bfloat16)

    def looped(function: Any, x: jax.Array, weights: AttentionWeights) -> Any:
        # Every turn has another layer, later positions and x of the turn before: what is read too early is wrong.
        def turn(index: jax.Array, carry: Any) -> Any:
            x, seen, keys, values = carry
            positions = jnp.where(start >= 0, start + index * tokens + jnp.arange(tokens), -1)
            angles = positions[..., None] * jnp.linspace(1, 0.01, HEAD_DIM // 2)
            rotary = jnp.cos(angles), jnp.sin(angles)
            now = weights._replace(layer=index % LAYERS, eps=EPS)  # no array
            keys, values, out = function(x, now, rotary, keys, values, table, positions)
            x = (x + out).astype(jnp.float32)
            x = (x / jnp.linalg.norm(x) * jnp.sqrt(x.size)).astype(jnp.bfloat16)
            return x, seen.at[index].set(out), keys, values

        turns = 12
        caches = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (9, 10))
        return jax.lax.fori_loop(0, turns, turn, (x, jnp.zeros((turns, *x.shape), x.dtype), *caches))[1:]

    ours, expected = (jax.jit(looped, static_argnums=0)(function, x, weights(0)) for function in functions)
    for one, other in zip(ours, expected, strict=True):
        assert np.asarray(other, np.float32).any()
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))


def test_unavailable_says_why() -> None:
    x, cache = jnp.zeros((2, 1, HIDDEN), jnp.bfloat16), jnp.zeros((LAYERS, 2, KV_HEADS, PAGE, HEAD_DIM), jnp.bfloat16)
    known = weights(0)
    plain = known._replace(output=jnp.zeros((LAYERS, HIDDEN, Q_HEADS * HEAD_DIM), jnp.bfloat16))
    assert "no PackedMXFP8Weight" in str(unavailable(x, plain, cache, cache))
    assert "the cache is float16" in str(unavailable(x, known, cache.astype(jnp.float16), cache))
    assert "9 tokens of a sequence" in str(unavailable(jnp.zeros((2, 9, HIDDEN), jnp.bfloat16), known, cache, cache))
    if jax.default_backend() == "cpu":
        assert "the backend is cpu" in str(unavailable(x, known, cache, cache))
