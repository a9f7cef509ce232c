"""Experts spread over ranks: replicated and sharded tokens against one rank's brute force."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from qwenjax_ffi import expert_parallel
from qwenjax_ffi.activations import quantise_activations
from qwenjax_ffi.expert_parallel import (
    ExpertWeights,
    moe_replicated_tokens,
    moe_replicated_tokens_rms_norm,
    moe_sharded_tokens,
)
from qwenjax_ffi.token_exchange import dispatch
from qwenjax_ffi.weights import MXFP8Weight

EXPERTS, TOP_K, HIDDEN, WIDTH, PER_RANK = 8, 3, 32, 64, 5
RANKS = (2, 4, 8)
AXIS = "ranks"
SPLIT, WHOLE = PartitionSpec(AXIS), PartitionSpec()
EXPERT_SPEC = ExpertWeights(PartitionSpec(None, AXIS), PartitionSpec(None, AXIS), WHOLE)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


W13, W2 = normal((2, EXPERTS, 2 * WIDTH, HIDDEN), 0), normal((2, EXPERTS, HIDDEN, WIDTH), 1)
LAYER = 1


def distinct_ids(tokens: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)


def routings(ranks: int) -> dict[str, np.ndarray]:
    """ids [tokens, top_k] of all tokens, rank after rank."""
    tokens, rng = ranks * PER_RANK, np.random.default_rng(2)
    random = distinct_ids(tokens, 3)
    idle = random.copy()
    idle[PER_RANK : 2 * PER_RANK] = -1
    skewed = np.sort(random, axis=1)
    skewed[:, 0] = 0
    skewed[:, 1:] = np.maximum(skewed[:, 1:], 1)
    skewed[rng.random(tokens) < 0.4] = -1
    return {
        "every token has experts of its own": random,
        "a rank has no tokens": idle,
        "a rank's experts have no tokens": np.where(random >= EXPERTS - EXPERTS // ranks, -1, random),
        "all tokens go to one expert": np.tile(np.array([-1, EXPERTS - 1, -1], np.int32), (tokens, 1)),
        "all tokens go to the first experts": np.tile(np.arange(TOP_K, dtype=np.int32), (tokens, 1)),
        "uneven, with padding": skewed,
        "all is padding": np.full((tokens, TOP_K), -1, np.int32),
        "one token in all": np.where(np.arange(tokens)[:, None] == tokens - 1, random, -1),
    }


def brute_force(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, w13: Any = W13, w2: Any = W2) -> np.ndarray:
    out = np.zeros(x.shape, np.float64)
    for token, choice in np.argwhere(ids >= 0):
        expert = ids[token, choice]
        gate, up = np.split(w13[LAYER, expert].astype(np.float64) @ x[token].astype(np.float64), 2)
        h = gate / (1 + np.exp(-gate)) * up
        out[token] += weights[token, choice] * (w2[LAYER, expert].astype(np.float64) @ h)
    return out


@cache
def program(ranks: int, kind: str, activation_format: str = "model", spec: Any = EXPERT_SPEC) -> Callable[..., Any]:
    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,))
    tokens, run = (WHOLE, moe_replicated_tokens) if kind == "replicated" else (SPLIT, moe_sharded_tokens)

    def per_rank(x: Any, ids: Any, weights: Any, experts: ExpertWeights, epochs: Any) -> Any:
        return run(x, ids, weights, experts, AXIS, epochs, activation_format)  # type: ignore[arg-type]

    specs = (tokens, tokens, tokens, spec, SPLIT)
    return jax.jit(jax.shard_map(per_rank, mesh=mesh, in_specs=specs, out_specs=(tokens, SPLIT), check_vma=False))


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.parametrize("ranks", RANKS)
def test_experts_over_ranks_equal_one_rank_by_brute_force(ranks: int, kind: str) -> None:
    weights = np.random.default_rng(4).random((ranks * PER_RANK, TOP_K)).astype(np.float32)
    for case, ids in routings(ranks).items():
        x = normal((ranks * PER_RANK, HIDDEN), 5)
        padding = (ids < 0).all(axis=1)
        x[padding] = np.nan  # no rank may read what goes nowhere
        epochs = np.arange(ranks, dtype=np.int32)
        out, advanced = program(ranks, kind)(x, ids, weights, ExpertWeights(W13, W2, LAYER), epochs)
        expected = brute_force(x, ids, weights)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3, err_msg=case)
        assert padding.all() or np.abs(expected).max() > 1
        # One collective, or dispatch and combine; the same number on every rank.
        assert (np.asarray(advanced) - epochs).tolist() == [1 if kind == "replicated" else 2] * ranks, case


def test_rows_that_the_all_reduce_adds_up_are_those_of_sums_and_differentiated_as_they(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, ids = 2, distinct_ids(2 * PER_RANK, 9)
    x, weights = normal((len(ids), HIDDEN), 10), np.random.default_rng(11).random(ids.shape).astype(np.float32)
    residual, norm_weight = normal((len(ids), HIDDEN), 12), normal((HIDDEN,), 13)
    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,))

    def results(as_rows: bool) -> Any:
        taken: list[bool] = []
        monkeypatch.setattr(expert_parallel, "adds_up_rows", lambda *a: taken.append(True) or as_rows)

        def per_rank(x: Any, weights: Any, epochs: Any) -> Any:
            experts = ExpertWeights(jnp.asarray(W13[:, :4]), jnp.asarray(W2[:, :4]), LAYER)
            norm = (jnp.asarray(residual), jnp.asarray(norm_weight)[None], 1e-6)
            operands = (x, jnp.asarray(ids), weights, experts)
            return moe_replicated_tokens_rms_norm(*operands, AXIS, *norm, epochs, norm_layer=jnp.zeros(1, jnp.int32))[1]

        call = jax.shard_map(per_rank, mesh=mesh, in_specs=(WHOLE, WHOLE, SPLIT), out_specs=WHOLE, check_vma=False)

        def loss(x: Any, weights: Any) -> Any:
            normed = call(x, weights, jnp.zeros(ranks, jnp.int32))
            return jnp.sum(normed**2), normed

        gradients, normed = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, weights)
        assert taken
        return normed, *gradients

    for one, other in zip(results(True), results(False), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_bfloat16_tokens_come_home_as_bfloat16_and_close() -> None:
    ranks, ids = 4, distinct_ids(4 * PER_RANK, 6)
    weights = np.full(ids.shape, 1 / TOP_K, np.float32)
    x, w13, w2 = (jnp.asarray(a, jnp.bfloat16) for a in (normal((len(ids), HIDDEN), 7), W13, W2))
    x32, w13_32, w2_32 = (np.asarray(a, np.float32) for a in (x, w13, w2))
    expected = brute_force(x32, ids, weights, w13_32, w2_32)
    for kind in ("replicated", "sharded"):
        out, _ = program(ranks, kind)(x, ids, weights, ExpertWeights(w13, w2, LAYER), np.zeros(ranks, np.int32))
        assert out.dtype == jnp.bfloat16
        # bfloat16 keeps 8 bits: each of a handful of roundings is at most 2^-9 of the largest value.
        assert np.abs(np.asarray(out, np.float32) - expected).max() < 2**-6 * np.abs(expected).max()


def test_mxfp8_weights_and_activations_are_the_same_on_both_ways() -> None:
    ranks, ids = 4, distinct_ids(4 * PER_RANK, 8)
    weights, x = np.random.default_rng(9).random(ids.shape).astype(np.float32), normal((len(ids), HIDDEN), 10)
    quantised = [
        MXFP8Weight(jnp.asarray(w, jnp.float8_e4m3fn), jnp.full((*w.shape[:-1], w.shape[-1] // 32), 127, jnp.uint8))
        for w in (W13, W2)
    ]
    results = [
        np.asarray(
            program(ranks, kind, "mxfp8")(x, ids, weights, ExpertWeights(*quantised, LAYER), np.zeros(ranks, np.int32))[
                0
            ]
        )
        for kind in ("replicated", "sharded")
    ]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)
    w13, w2 = (np.asarray(w.elements, np.float32) for w in quantised)
    expected = brute_force(np.asarray(quantise_activations(jnp.asarray(x), "mxfp8")), ids, weights, w13, w2)
    difference = np.abs(results[0] - expected).max() / np.abs(expected).max()
    # The down projection's rows are quantised too, which the brute force leaves out: e4m3 keeps 3 bits, 2^-4 at worst.
    assert 1e-3 < difference < 2**-4


@pytest.mark.parametrize("ranks", RANKS)
def test_dispatch_sends_each_token_once_to_each_rank_that_it_needs_and_drops_none(ranks: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,))
    run = partial(dispatch, experts_per_rank=EXPERTS // ranks, axis_name=AXIS)
    send = jax.jit(
        jax.shard_map(
            lambda x, ids, weights, epochs: run(x, ids, weights, epochs=epochs),
            mesh=mesh, in_specs=(SPLIT,) * 4, out_specs=SPLIT, check_vma=False,
        )
    )  # fmt: skip
    x = normal((ranks * PER_RANK, HIDDEN), 11)
    for case, ids in routings(ranks).items():
        there, _ = send(x, ids, np.ones(ids.shape, np.float32), np.zeros(ranks, np.int32))
        assert (there.ids.dtype, there.counts.dtype, there.slots.dtype) == (jnp.int32,) * 3
        # [to, from, slot, ...]: shard_map joins the ranks' results along the first axis.
        got_x, got_ids = (np.asarray(leaf).reshape(ranks, ranks, PER_RANK, -1) for leaf in (there.x, there.ids))
        counts = np.asarray(there.counts).reshape(ranks, ranks)
        slots = np.asarray(there.slots).reshape(ranks, PER_RANK, ranks)
        for source in range(ranks):
            own = slice(source * PER_RANK, (source + 1) * PER_RANK)
            for target in range(ranks):
                here = (ids[own] >= 0) & (ids[own] // (EXPERTS // ranks) == target)
                sent = np.flatnonzero(here.any(axis=1))
                assert counts[target, source] == len(sent), case
                np.testing.assert_array_equal(got_x[target, source, : len(sent)], x[own][sent])
                np.testing.assert_array_equal(got_ids[target, source, : len(sent)], ids[own][sent])
                assert (got_ids[target, source, len(sent) :] == -1).all()
                expected = np.full(PER_RANK, -1)
                expected[sent] = np.arange(len(sent))
                np.testing.assert_array_equal(slots[source, :, target], expected)
