"""The experts' chain of kernels in one call, beside the same kernels called apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi import experts_kernel, token_kernels
from qwenjax_ffi.grouped_gemm import moe_down, moe_gate_up, sum_rows
from qwenjax_ffi.packing import PackedMXFP8Weight, pack
from qwenjax_ffi.routing import sort_rows
from qwenjax_ffi.weights import MXFP8Weight

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 3, 32, 4, 768, 256


def weight(seed: int, packed: bool, out: int, k: int) -> Any:
    values = jax.random.normal(jax.random.key(seed), (LAYERS, EXPERTS, out, k), jnp.bfloat16) * jnp.bfloat16(0.05)
    if not packed:
        return values
    scales = jnp.full((LAYERS, EXPERTS, out, k // 32), 122, jnp.uint8)
    elements = (values.astype(jnp.float32) * 32).astype(jnp.float8_e4m3fn)
    return pack(MXFP8Weight(elements, scales), "gate_up" if out == 2 * WIDTH else "plain")


def apart(x: jax.Array, ids: jax.Array, weights: jax.Array, w13: Any, w2: Any, layer: Any, first: int) -> jax.Array:
    rows = sort_rows(ids, weights, first, EXPERTS, implementation="kernel")
    h = moe_gate_up(x, rows.row_token, rows.group_sizes, w13, layer, implementation="kernel")
    out = moe_down(h, rows.group_sizes, w2, rows.row_weight, layer, implementation="kernel")
    return sum_rows(out, rows.token_rows, x.dtype, implementation="kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 2000])
def test_a_chain_in_a_loop_gives_the_bits_of_the_kernels_apart(tokens: int, packed: bool) -> None:
    w13, w2 = weight(0, packed, 2 * WIDTH, HIDDEN), weight(1, packed, HIDDEN, WIDTH)
    x = jax.random.normal(jax.random.key(2), (tokens, HIDDEN), jnp.bfloat16)

    def looped(function: Any, x: jax.Array, w13: Any, w2: Any) -> jax.Array:
        # Every turn has other experts and another layer, and x of the turn before: what is read too early is wrong.
        def turn(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, seen = carry
            key = jax.random.fold_in(jax.random.key(3), index)
            ids = jax.random.randint(key, (tokens, TOP_K), -1, EXPERTS + 5)
            weights = jax.random.uniform(jax.random.fold_in(key, 1), (tokens, TOP_K))
            out = function(x, ids, weights, w13, w2, index % LAYERS, 3)
            x = (x + out).astype(jnp.float32)
            x = (x / jnp.linalg.norm(x) * jnp.sqrt(x.size)).astype(jnp.bfloat16)
            return x, seen.at[index].set(out)

        turns = 12
        return jax.lax.fori_loop(0, turns, turn, (x, jnp.zeros((turns, tokens, HIDDEN), jnp.bfloat16)))[1]

    ours, expected = (
        np.asarray(jax.jit(looped, static_argnums=0)(function, x, w13, w2)).view(np.uint16)
        for function in (experts_kernel.local_experts, apart)
    )
    assert expected.any()
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_a_chain_that_ends_in_a_norm_gives_the_bits_of_both_apart(tokens: int) -> None:
    w13, w2 = weight(0, True, 2 * WIDTH, HIDDEN), weight(1, True, HIDDEN, WIDTH)
    x, residual = (jax.random.normal(jax.random.key(seed), (tokens, HIDDEN), jnp.bfloat16) for seed in (2, 4))
    norms = jax.random.normal(jax.random.key(5), (LAYERS, HIDDEN), jnp.bfloat16)
    ids = jax.random.randint(jax.random.key(3), (tokens, TOP_K), -1, EXPERTS + 5)
    operands = (x, ids, jax.random.uniform(jax.random.key(6), (tokens, TOP_K)), w13, w2, jnp.int32(1), 0)
    ours = jax.jit(lambda *a: experts_kernel.local_experts_add_rms_norm(*a, (residual, norms, jnp.int32(2)), 1e-6))(
        *operands
    )
    added = jax.jit(experts_kernel.local_experts)(*operands)
    expected = jax.jit(lambda *a: token_kernels.add_rms_norm(*a, norms, 2, 1e-6))(residual, added)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 64])
def test_a_chain_from_the_router_on_gives_the_bits_of_its_kernels_apart(tokens: int) -> None:
    w13, w2 = weight(0, True, 2 * WIDTH, HIDDEN), weight(1, True, HIDDEN, WIDTH)
    x = jax.random.normal(jax.random.key(2), (tokens, HIDDEN), jnp.bfloat16)
    gates = jax.random.normal(jax.random.key(3), (LAYERS, EXPERTS, HIDDEN), jnp.bfloat16) / 8
    norms = jax.random.normal(jax.random.key(5), (LAYERS, HIDDEN), jnp.bfloat16)
    valid = jnp.arange(tokens) % 5 < 4

    def chain(x: jax.Array, w13: Any, w2: Any, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        router = experts_kernel.Router(gates, valid, TOP_K, True)
        return experts_kernel.routed_experts_add_rms_norm(x, router, w13, w2, layer, (x, norms, layer), 1e-6)

    def apart(x: jax.Array, w13: Any, w2: Any, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = token_kernels.router_logits(x, gates, layer)
        weights, ids = token_kernels.top_k_experts(logits, valid.astype(jnp.int32), TOP_K, True)
        norm = x, norms, layer
        return experts_kernel.local_experts_add_rms_norm(x, ids, weights, w13, w2, layer, 0, norm, 1e-6)

    def looped(function: Any, x: jax.Array, w13: Any, w2: Any) -> jax.Array:
        # Every turn has another layer and x of the turn before: what is read too early is wrong.
        def turn(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, seen = carry
            total, normed = function(x, w13, w2, index % LAYERS)
            return normed, seen.at[index].set(total)

        turns = 12
        return jax.lax.fori_loop(0, turns, turn, (x, jnp.zeros((turns, tokens, HIDDEN), jnp.bfloat16)))[1]

    ours, expected = (
        np.asarray(jax.jit(looped, static_argnums=0)(function, x, w13, w2)).view(np.uint16)
        for function in (chain, apart)
    )
    assert expected.any()
    np.testing.assert_array_equal(ours, expected)


def test_unavailable_says_why() -> None:
    x, ids, weights = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4))
    w13 = PackedMXFP8Weight(jnp.zeros((1, 8, 2, 1, 8448), jnp.uint8), 128, 64, "gate_up")
    w2 = PackedMXFP8Weight(jnp.zeros((1, 8, 1, 1, 8448), jnp.uint8), 64, 64, "plain")
    assert "sum_rows takes other shapes" in str(experts_kernel.unavailable(x[:, :60], ids, weights, w13, w2))
    other = replace(w2, data=jnp.zeros((1, 8, 1, 1, 16896), jnp.uint8), layout="block_scaled")
    assert "packed for Blackwell" in str(experts_kernel.unavailable(x, ids, weights, w13, other))
    gates = jnp.zeros((1, 8, 64), jnp.bfloat16)
    router = experts_kernel.Router(gates, jnp.ones(2, bool), 4, True)
    many = jnp.zeros((65, 64), jnp.bfloat16)
    assert "65 tokens" in str(experts_kernel.routed_unavailable(many, router, w13, w2))
    plain = router._replace(weight=gates.astype(jnp.float32))
    assert "the weight float32" in str(experts_kernel.routed_unavailable(x, plain, w13, w2))
    if jax.default_backend() == "cpu":
        assert "the backend is cpu" in str(experts_kernel.unavailable(x, ids, weights, w13, w2))
        assert "the backend is cpu" in str(experts_kernel.routed_unavailable(x, router, w13, w2))
