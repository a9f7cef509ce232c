"""All-reduce as an operation: the reference, when the kernel is taken, and what both do to the epoch array."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from qwenjax_ffi import collectives
from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.implementation import KernelUnavailableError
from qwenjax_ffi.norm import add_rms_norm, rms_norm
from qwenjax_ffi.symmetric_memory_exchange import PeerError, SymmetricMemoryUnavailable
from qwenjax_kernels.heap_layout import RANK_WORD, num_words

RANKS = 4
BY_RANK = PartitionSpec(("data", "model"))


@functools.cache
def mesh(data: int = 1, model: int = RANKS) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def on_ranks(function: Any, *arguments: Any, ranks: int = RANKS) -> Any:
    """Runs per-rank code; every argument and result has its ranks leading."""
    call = jax.shard_map(
        lambda *a: jax.tree.map(lambda x: x[None], function(*(x[0] for x in a))),
        mesh=mesh(1, ranks),
        in_specs=BY_RANK,
        out_specs=BY_RANK,
        check_vma=False,
    )
    return jax.jit(call)(*arguments)


def integers(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Small integers, whose sums are exact in every dtype."""
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 8, shape), dtype)


def heap_epochs(multicast: bool = False, ranks: int = RANKS) -> jax.Array:
    """Epoch arrays as with a heap behind them, whose words no reference may change."""
    words = num_words(ranks, multicast)
    return jnp.arange(ranks * words, dtype=jnp.int32).reshape(ranks, words)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernels that call the reference, and the (name, ranks, algorithm) of each call; "rows" behind it for rows."""
    calls: list[tuple[Any, ...]] = []

    def summed(x: jax.Array, name: str, ranks: int, algorithm: str, rows: jax.Array | None) -> jax.Array:
        calls.append((name, ranks, algorithm) if rows is None else (name, ranks, algorithm, "rows"))
        return jax.lax.psum(x if rows is None else sum_rows(x, rows, x.dtype), "model")

    def all_reduce(
        x: jax.Array, epochs: jax.Array, ranks: int, algorithm: str, rows: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        return summed(x, "all_reduce", ranks, algorithm, rows), epochs.at[0].add(1)

    def fused(
        x: jax.Array,
        residual: jax.Array,
        weight: jax.Array,
        eps: float,
        epochs: jax.Array,
        ranks: int,
        algorithm: str,
        rows: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        total = summed(x, "all_reduce_rms_norm", ranks, algorithm, rows)
        return *add_rms_norm(residual, total, weight, eps), epochs.at[0].add(1)

    monkeypatch.setattr(collectives.kernels, "all_reduce", all_reduce)
    monkeypatch.setattr(collectives.kernels, "all_reduce_rms_norm", fused)
    return calls


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (1001,), (2, 2880)])
def test_the_reference_sums_any_shape_and_counts_the_collective(dtype: Any, shape: tuple[int, ...]) -> None:
    x = integers(0, RANKS, *shape, dtype=dtype)
    total, epochs = on_ranks(lambda x, e: collectives.all_reduce(x, "model", e), x, jnp.zeros((RANKS, 1), jnp.int32))
    assert total.dtype == dtype
    expected = np.broadcast_to(np.asarray(x, np.float32).sum(axis=0), x.shape)
    np.testing.assert_array_equal(np.asarray(total, np.float32), expected)
    assert np.asarray(epochs).ravel().tolist() == [1] * RANKS


@pytest.mark.parametrize("multicast", [False, True])
def test_a_heap_behind_the_epochs_takes_the_kernel_and_keeps_its_addresses(
    multicast: bool, called: list[tuple[Any, ...]]
) -> None:
    x, before = integers(1, RANKS, 1001), heap_epochs(multicast)
    total, epochs = on_ranks(lambda x, e: collectives.all_reduce(x, "model", e), x, before)
    np.testing.assert_array_equal(total[0], np.asarray(x).sum(axis=0))
    assert called == [("all_reduce", RANKS, "one_shot")]
    np.testing.assert_array_equal(epochs, before.at[:, 0].add(1))
    big = jax.ShapeDtypeStruct((RANKS, 1 << 22), jnp.bfloat16)
    jax.eval_shape(lambda x: on_ranks(lambda x, e: collectives.all_reduce(x, "model", e), x, before), big)
    assert called[1:] == [("all_reduce", RANKS, "multicast" if multicast else "two_shot")]


@pytest.mark.parametrize("tokens", [8, 2048])
def test_rows_are_added_up_by_the_two_shot_kernel_alone_with_the_same_bits(
    tokens: int, called: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "sum_unavailable", lambda *a: None)
    draw = np.random.default_rng(tokens)
    rows = jnp.asarray(draw.normal(0, 1, (RANKS, 3 * tokens, 256)), jnp.bfloat16)
    token_rows = jnp.asarray(draw.integers(-1, 3 * tokens, (RANKS, tokens, 3)), jnp.int32)
    residual, weight = jnp.ones((RANKS, tokens, 256), jnp.bfloat16), jnp.ones((RANKS, 256), jnp.bfloat16)

    def call(implementation: Any, rows: jax.Array, named: jax.Array, r: jax.Array, w: jax.Array, e: jax.Array) -> Any:
        how = {"token_rows": named, "implementation": implementation}
        total, e = collectives.all_reduce(rows, "model", e, **how)
        return total, *collectives.all_reduce_rms_norm(rows, r, w, 1e-6, "model", e, **how)

    operands = (rows, token_rows, residual, weight, heap_epochs())
    found, expected = (on_ranks(functools.partial(call, form), *operands) for form in ("auto", "reference"))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    form = ("two_shot", "rows") if tokens > 1024 else ("one_shot",)
    assert called == [(name, RANKS, *form) for name in ("all_reduce", "all_reduce_rms_norm")]


@settings(deadline=None)  # the first example imports CuTeDSL
@given(vectors=st.integers(1, 1024), tokens=st.integers(1, 100_000))
@example(vectors=1031, tokens=100_000)  # tiles of one vector: more than the kernel counts
def test_rows_that_the_kernel_adds_up_fill_its_tiles(vectors: int, tokens: int) -> None:
    pytest.importorskip("cutlass")
    from cutlass import BFloat16

    from qwenjax_kernels.all_reduce import AllReduce

    features = 8 * vectors
    if collectives.fits_tiles(features) and tokens * features < 1 << 31:
        kernel = AllReduce(
            ranks=2, dtype=BFloat16, elements=tokens * features, algorithm="two_shot", top_k=8, features=features
        )
        assert kernel.tile_vectors >= min(vectors, 32)


@pytest.mark.parametrize(("features", "divide"), [(2880, True), (4168, False), (7168, True)])
def test_rows_that_do_not_divide_into_tiles_are_summed_apart(
    features: int, divide: bool, called: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "sum_unavailable", lambda *a: None)
    rows = jax.ShapeDtypeStruct((RANKS, 8, features), jnp.bfloat16)
    token_rows = jax.ShapeDtypeStruct((RANKS, 2048, 8), jnp.int32)

    def call(rows: jax.Array, token_rows: jax.Array, epochs: jax.Array) -> Any:
        return collectives.all_reduce(rows, "model", epochs, token_rows=token_rows)

    jax.eval_shape(lambda *operands: on_ranks(call, *operands, heap_epochs()), rows, token_rows)
    assert called == [("all_reduce", RANKS, "two_shot", *(["rows"] if divide else []))]


def test_a_message_of_two_to_the_31_elements_is_left_to_xla(called: list[tuple[Any, ...]]) -> None:
    def trace(implementation: Any, rows: int) -> None:
        def call(x: jax.Array, epochs: jax.Array) -> Any:
            total, normed, epochs = collectives.all_reduce_rms_norm(
                x, x, x[0], 1e-6, "model", epochs, implementation=implementation
            )
            return total, normed, collectives.all_reduce(x, "model", epochs, implementation=implementation)

        x = jax.ShapeDtypeStruct((RANKS, rows, 1024), jnp.bfloat16)
        jax.eval_shape(lambda x: on_ranks(call, x, heap_epochs()), x)

    trace("auto", 1 << 21)
    assert called == []
    with pytest.raises(KernelUnavailableError, match="2,147,483,648 elements, the kernel takes fewer"):
        trace("kernel", 1 << 21)
    trace("auto", (1 << 21) - 1)
    assert [name for name, *_ in called] == ["all_reduce_rms_norm", "all_reduce"]


def test_unarmed_epochs_differ_in_the_rank_alone() -> None:
    before = heap_epochs().reshape(-1)
    after = np.asarray(collectives.unarmed(before, RANKS)).reshape(RANKS, -1)
    changed = np.argwhere(after != np.asarray(before).reshape(RANKS, -1))
    assert changed.tolist() == [[rank, RANK_WORD] for rank in range(RANKS)]
    assert (after[:, RANK_WORD] < 0).all()
    assert collectives.unarmed(before, RANKS).sharding == before.sharding
    none_behind = jnp.zeros(RANKS, jnp.int32)
    assert collectives.unarmed(none_behind, RANKS) is none_behind


def test_what_a_collective_failed_with_is_found_by_its_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def check(self) -> None:
            raise PeerError("rank 1 did not come")

    monkeypatch.setattr(collectives, "_heaps", {(mesh(), "model", 0): Failed(), (mesh(RANKS, 1), "data", 0): None})
    assert str(collectives.peer_failure(mesh())) == "rank 1 did not come"
    assert collectives.peer_failure(mesh(RANKS, 1)) is None
    with pytest.raises(PeerError, match="rank 1 did not come"):
        collectives.fresh_epochs(mesh(), "model")


@pytest.mark.parametrize("implementation", ["auto", "kernel"])
def test_an_empty_message_launches_nothing_and_is_counted(implementation: Any, called: list[tuple[Any, ...]]) -> None:
    before = heap_epochs()
    total, epochs = on_ranks(
        lambda x, e: collectives.all_reduce(x, "model", e, implementation=implementation), jnp.zeros((RANKS, 0)), before
    )
    assert total.shape == (RANKS, 0)
    np.testing.assert_array_equal(epochs, before.at[:, 0].add(1))
    assert called == []


def test_the_reference_leaves_the_heaps_addresses_alone(called: list[tuple[Any, ...]]) -> None:
    before = heap_epochs()
    _, epochs = on_ranks(
        lambda x, e: collectives.all_reduce(x, "model", e, implementation="reference"), jnp.ones((RANKS, 3)), before
    )
    np.testing.assert_array_equal(epochs, before.at[:, 0].add(1))
    assert called == []


@pytest.mark.parametrize(
    ("x", "epochs", "why"),
    [
        (jnp.ones((RANKS, 3)), jnp.zeros((RANKS, 1), jnp.int32), "no symmetric heap is behind the epochs"),
        (jnp.ones((RANKS, 3), jnp.int32), heap_epochs(), "x is int32, the kernel takes"),
        (jnp.ones((RANKS, 3)), jnp.zeros((RANKS, num_words(8, False)), jnp.int32), "4 ranks, the heap .* others"),
    ],
    ids=["no heap", "int32", "other ranks"],
)
def test_a_kernel_that_cannot_run_is_an_error_where_it_is_asked_for_and_else_the_reference(
    x: jax.Array, epochs: jax.Array, why: str, called: list[tuple[Any, ...]]
) -> None:
    with pytest.raises(KernelUnavailableError, match=why):
        on_ranks(lambda x, e: collectives.all_reduce(x, "model", e, implementation="kernel"), x, epochs)
    total, _ = on_ranks(lambda x, e: collectives.all_reduce(x, "model", e), x, epochs)
    np.testing.assert_array_equal(total, np.full((RANKS, 3), RANKS))
    assert called == []


def fused_operands(features: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    draw = functools.partial(np.random.default_rng(2).normal, 0, 1)
    residual, weight = draw(size=(1, 5, features)), draw(size=(1, features))
    everywhere = (np.broadcast_to(value, (RANKS, *value.shape[1:])) for value in (residual, weight))
    return tuple(jnp.asarray(value, dtype) for value in (draw(size=(RANKS, 5, features)), *everywhere))


@pytest.mark.parametrize("features", [64, 60])  # rows of 60 are no whole vectors: the kernel is not for them
def test_fused_norm_equals_its_three_steps_to_the_bit(features: int, called: list[tuple[Any, ...]]) -> None:
    def apart(x: jax.Array, residual: jax.Array, weight: jax.Array, e: jax.Array) -> tuple[jax.Array, ...]:
        total, e = collectives.all_reduce(x, "model", e)
        # Rounded by name: within one program XLA would hand the float32 sum to the norm.
        total = jax.lax.reduce_precision(residual + total, exponent_bits=8, mantissa_bits=7)
        return total, rms_norm(total, weight, 1e-6), e

    def fused(x: jax.Array, residual: jax.Array, weight: jax.Array, e: jax.Array) -> tuple[jax.Array, ...]:
        return collectives.all_reduce_rms_norm(x, residual, weight, 1e-6, "model", e)

    operands = fused_operands(features)
    plain = jnp.zeros((RANKS, 1), jnp.int32)
    for epochs in (plain, heap_epochs()):
        for got, expected in zip(on_ranks(fused, *operands, epochs), on_ranks(apart, *operands, plain), strict=True):
            if got.shape == expected.shape:  # the epochs of a heap have more words
                np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
    names = [name for name, *_ in called]
    assert names == ["all_reduce_rms_norm" if features == 64 else "all_reduce"]


def test_fused_operands_that_do_not_fit_are_an_error() -> None:
    x, residual, weight = fused_operands(64)
    with pytest.raises(ValueError, match="do not fit"):
        on_ranks(
            lambda x, r, w, e: collectives.all_reduce_rms_norm(x, r, w[:60], 1e-6, "model", e)[:2],
            *(x, residual, weight, heap_epochs()),
        )


def test_the_kernel_is_differentiated_as_the_reference_is(called: list[tuple[Any, ...]]) -> None:
    x, residual, weight = fused_operands(64, jnp.float32)

    def gradients(implementation: Any) -> Any:
        def loss(x: jax.Array, residual: jax.Array, weight: jax.Array, epochs: jax.Array) -> jax.Array:
            total, normed, epochs = collectives.all_reduce_rms_norm(
                x, residual, weight, 1e-6, "model", epochs, implementation=implementation
            )
            again, _ = collectives.all_reduce(normed * x, "model", epochs, implementation=implementation)
            return jnp.sum(total * again)

        return on_ranks(jax.grad(loss, argnums=(0, 1, 2)), x, residual, weight, heap_epochs())

    expected = gradients("reference")
    assert called == []
    for got, wanted in zip(gradients("kernel"), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert [name for name, *_ in called] == ["all_reduce_rms_norm", "all_reduce"]


def test_epochs_of_a_cpu_mesh_are_counts() -> None:
    for shape in ((1, 1), (1, 4), (2, 2)):
        epochs = collectives.fresh_epochs(mesh(*shape), "model")
        assert epochs.dtype == jnp.int32
        assert np.asarray(epochs).tolist() == [0] * (shape[0] * shape[1])
        assert len({shard.device for shard in epochs.addressable_shards}) == shape[0] * shape[1]


class GpuMesh:
    """As much of a mesh of GPUs as the decision for a heap looks at."""

    class Device:
        platform, compute_capability, core_count = "gpu", "9.0", 132

    def __init__(self, data: int, model: int, capability: str = "9.0", processors: int = 132) -> None:
        device = self.Device()
        device.compute_capability, device.core_count = capability, processors
        self.local_devices, self.size = [device] * (data * model), data * model
        self.shape, self.axis_names = {"data": data, "model": model}, ("data", "model")


def test_ranks_that_cannot_be_mapped_run_the_reference_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("cutlass")

    def refuse(mesh: Any, axis_name: str, exchange_units: int) -> None:
        raise SymmetricMemoryUnavailable("device 0 cannot map the memory of device 1")

    monkeypatch.setattr(collectives, "SymmetricHeap", refuse)
    gpus: Any = GpuMesh(1, 2)
    with caplog.at_level(logging.WARNING):
        assert collectives.mesh_heap(gpus, "model") is None
        assert collectives.mesh_heap(gpus, "model") is None
    (record,) = caplog.records
    assert "over model: device 0 cannot map the memory of device 1. Collectives there run as XLA's" in record.message


def test_a_heap_with_more_room_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    monkeypatch.setattr(collectives, "SymmetricHeap", lambda mesh, axis_name, exchange_units: exchange_units)
    gpus: Any = GpuMesh(1, 2)
    few, many = (collectives.ExchangeRows(tokens, 4096, 8, jnp.dtype(jnp.bfloat16)) for tokens in (1, 1024))
    made = [collectives.mesh_heap(gpus, "model", rows) for rows in (few, many, few, None)]
    assert made[0] == few.units < many.units == made[1]
    assert made[2:] == [few.units, few.units]
    other: Any = GpuMesh(1, 2)
    assert [collectives.mesh_heap(other, "model", rows) for rows in (many, few)] == [many.units] * 2


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (GpuMesh(1, 32), "32 ranks; the kernels are for 16 and fewer"),
        (GpuMesh(1, 2, "8.0"), "compute capability 8.0"),
        (GpuMesh(1, 2, processors=114), "114 multiprocessors; blocks that wait for one another are 128"),
        (GpuMesh(2, 1), None),
        (GpuMesh(2, 2), None),
        (GpuMesh(1, 1), None),
    ],
    ids=["too many", "Ampere", "H100 PCIe", "decode", "both axes", "one rank"],
)
def test_meshes_without_a_heap(gpus: Any, why: str | None, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("cutlass")
    with caplog.at_level(logging.WARNING):
        assert collectives.mesh_heap(gpus, "model") is None
    assert [why in record.message for record in caplog.records] == [True] * (why is not None)  # type: ignore[operator]
