"""Dispatch and combine as operations: when the kernels are taken, what room a heap has for them, gradients."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from qwenjax_ffi import collectives, token_exchange
from qwenjax_ffi.activations import quantise_activations
from qwenjax_ffi.implementation import KernelUnavailableError
from qwenjax_ffi.symmetric_memory import SymmetricHeap, bytes_outside_xla
from qwenjax_ffi.token_exchange import Dispatched, combine, dispatch
from qwenjax_ffi.token_exchange_kernel import ExchangeRows
from qwenjax_kernels.heap_layout import HeapLayout, num_words
from qwenjax_kernels.token_exchange_layout import ExchangeLayout
from tests.ffi.file_driver import FileDriver

RANKS, TOKENS, HIDDEN, TOP_K, PER_RANK = 2, 5, 8, 3, 4
BY_RANK = PartitionSpec("data")


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]).reshape(RANKS, 1), ("data", "model"))


def on_ranks(function: Any, *arguments: Any) -> Any:
    """Runs per-rank code; every argument and result has its ranks leading."""
    call = jax.shard_map(
        lambda *a: jax.tree.map(lambda x: x[None], function(*(x[0] for x in a))),
        mesh=mesh(),
        in_specs=BY_RANK,
        out_specs=BY_RANK,
        check_vma=False,
    )
    return jax.jit(call)(*arguments)


def epochs_of(units: int) -> jax.Array:
    return jnp.zeros((RANKS, num_words(RANKS, False, units)), jnp.int32)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernels that call the references, and (name, ranks, units) of each call."""
    calls: list[tuple[Any, ...]] = []

    def send(
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        epochs: jax.Array,
        ranks: int,
        units: int,
        per_rank: int,
        mxfp8: bool,
    ) -> tuple[jax.Array, ...]:
        calls.append(("dispatch MXFP8" if mxfp8 else "dispatch", ranks, units))
        row_format: Any = "mxfp8" if mxfp8 else "model"
        there, epochs = dispatch(
            x, ids, weights, per_rank, "data", epochs, row_format=row_format, implementation="reference"
        )
        return *there, epochs

    def bring(
        partial: jax.Array, counts: jax.Array, slots: jax.Array, epochs: jax.Array, ranks: int, units: int
    ) -> tuple[jax.Array, jax.Array]:
        calls.append(("combine", ranks, units))
        return combine(partial, counts, slots, "data", epochs, implementation="reference")

    monkeypatch.setattr(token_exchange.kernels, "dispatch", send)
    monkeypatch.setattr(token_exchange.kernels, "combine", bring)
    return calls


def operands(
    tokens: int = TOKENS, dtype: Any = jnp.float32, hidden: int = HIDDEN
) -> tuple[jax.Array, jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(RANKS, tokens, hidden)), dtype)
    ids = draw.integers(-1, RANKS * PER_RANK, (RANKS, tokens, TOP_K)).astype(np.int32)
    return x, jnp.asarray(ids), jnp.asarray(draw.random(ids.shape, np.float32))


def there_and_back(implementation: Any, x: jax.Array, ids: jax.Array, weights: jax.Array, epochs: jax.Array) -> Any:
    there, epochs = dispatch(x, ids, weights, PER_RANK, "data", epochs, implementation=implementation)
    partial = there.x * jnp.sum(there.weights, axis=-1, keepdims=True).astype(x.dtype)
    return combine(partial, there.counts, there.slots, "data", epochs, implementation=implementation)


def test_a_heap_with_room_takes_the_kernels(called: list[tuple[Any, ...]]) -> None:
    home, epochs = on_ranks(functools.partial(there_and_back, "auto"), *operands(), epochs_of(3))
    assert called == [("dispatch", RANKS, 3), ("combine", RANKS, 3)]
    expected, _ = on_ranks(functools.partial(there_and_back, "reference"), *operands(), epochs_of(3))
    np.testing.assert_array_equal(home, expected)
    assert np.asarray(epochs)[:, 0].tolist() == [2] * RANKS


@pytest.mark.parametrize(
    ("tokens", "dtype", "hidden", "units", "why"),
    [
        (TOKENS, jnp.float32, HIDDEN, 0, "the heap has no room for dispatch and combine"),
        (TOKENS, jnp.float8_e4m3fn, HIDDEN, 1, "rows are float8_e4m3fn"),
        (TOKENS, jnp.float32, 16388, 1, "rows are 65,552 bytes; the kernel takes up to 65,536"),
        (1025, jnp.float32, HIDDEN, 1, "1025 tokens a rank of 64 bytes each; the heap holds 1024"),
    ],
)
def test_what_the_kernels_do_not_take_runs_through_xla_or_is_refused(
    tokens: int, dtype: Any, hidden: int, units: int, why: str, called: list[tuple[Any, ...]]
) -> None:
    arguments = *operands(tokens, dtype, hidden), epochs_of(units)
    with pytest.raises(KernelUnavailableError, match=why):
        jax.eval_shape(lambda *a: on_ranks(functools.partial(there_and_back, "kernel"), *a), *arguments)
    jax.eval_shape(lambda *a: on_ranks(functools.partial(there_and_back, "auto"), *a), *arguments)
    assert called == []


def test_epochs_without_a_heap_are_said_to_have_none() -> None:
    with pytest.raises(KernelUnavailableError, match="no symmetric heap is behind the epochs"):
        on_ranks(functools.partial(there_and_back, "kernel"), *operands(), jnp.zeros((RANKS, 1), jnp.int32))


def test_more_tokens_than_a_heap_holds_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    arguments = *operands(1030), epochs_of(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(lambda *a: on_ranks(functools.partial(there_and_back, "auto"), *a), *arguments)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "dispatch runs through XLA's all_to_all",
        "combine runs through XLA's all_to_all",
    ]


def test_the_kernels_are_differentiated_as_the_references_are(called: list[tuple[Any, ...]]) -> None:
    x, ids, weights = operands()

    def gradients(implementation: Any) -> Any:
        def loss(x: jax.Array, weights: jax.Array, ids: jax.Array, epochs: jax.Array) -> jax.Array:
            home, _ = there_and_back(implementation, x, ids, weights, epochs)
            return jnp.sum(home * x)

        return on_ranks(jax.grad(loss, argnums=(0, 1)), x, weights, ids, epochs_of(1))

    expected = gradients("reference")
    assert called == []
    for got, wanted in zip(gradients("kernel"), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        assert np.abs(wanted).max() > 0
    assert [name for name, *_ in called] == ["dispatch", "combine"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_travel_as_mxfp8_where_asked_and_arrive_as_they_are_quantised(
    dtype: Any, called: list[tuple[Any, ...]]
) -> None:
    x, ids, weights = operands(dtype=dtype)
    x = jnp.tile(x, (1, 1, 4))  # 32 elements a row

    def call(row_format: Any, x: jax.Array, *others: jax.Array) -> Any:
        *routes, epochs = others
        return dispatch(x, *routes, PER_RANK, "data", epochs, row_format=row_format)[0]  # type: ignore[misc]

    got = on_ranks(functools.partial(call, "mxfp8"), x, ids, weights, epochs_of(1))
    assert called == ([("dispatch MXFP8", RANKS, 1)] if dtype == jnp.bfloat16 else [])
    rounded = quantise_activations(x, "mxfp8")
    expected = on_ranks(functools.partial(call, "model"), rounded, ids, weights, jnp.zeros((RANKS, 1), jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert (np.asarray(rounded) != np.asarray(x)).any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=32, max_size=32))
def test_rounding_to_mxfp8_once_more_changes_nothing(values: list[float]) -> None:
    once = quantise_activations(jnp.asarray([values], jnp.bfloat16), "mxfp8")
    np.testing.assert_array_equal(quantise_activations(once, "mxfp8"), once)


def test_rows_behind_the_counts_are_not_read() -> None:
    x, ids, weights = operands()

    def call(x: jax.Array, ids: jax.Array, weights: jax.Array, epochs: jax.Array) -> tuple[jax.Array, Dispatched]:
        there, epochs = dispatch(x, ids, weights, PER_RANK, "data", epochs)
        used = jnp.arange(TOKENS) < there.counts[:, None]
        partial = jnp.where(used[..., None], there.x, jnp.nan)
        return combine(partial, there.counts, there.slots, "data", epochs)[0], there

    home, there = on_ranks(call, x, ids, weights, jnp.zeros((RANKS, 1), jnp.int32))
    assert (np.asarray(there.counts) < TOKENS).any()
    ranks = (np.asarray(there.slots) >= 0).sum(-1, keepdims=True)
    np.testing.assert_allclose(home, np.asarray(x) * ranks, rtol=1e-6)


@given(ranks=st.integers(2, 16), multicast=st.booleans(), units=st.integers(0, 40))
def test_the_length_of_an_epoch_array_says_what_its_heap_is(ranks: int, multicast: bool, units: int) -> None:
    epochs = np.zeros(num_words(ranks, multicast, units), np.int32)
    found = collectives.heap_of(epochs, ranks)  # type: ignore[arg-type]
    assert found == (ranks, multicast, units)


def test_a_heap_counts_the_room_for_dispatch_and_says_it_in_its_epochs() -> None:
    rows = ExchangeRows(tokens=256, hidden=4096, top_k=8, dtype=jnp.bfloat16)
    assert rows.units == 3  # 256 rows of 8,256 bytes are 2.02 MiB
    before = bytes_outside_xla()
    with SymmetricHeap(mesh(), "data", 1000, exchange_units=rows.units, driver=FileDriver()) as heap:
        room = ExchangeLayout(RANKS, rows.units).num_bytes
        assert bytes_outside_xla() - before == heap.num_bytes >= room > HeapLayout(RANKS).num_bytes + 12 * (1 << 20)
        assert heap.allocate(1000) >= room
        assert heap.epochs().shape == (RANKS * num_words(RANKS, False, rows.units),)
