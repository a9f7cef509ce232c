"""All-reduce called from JAX on all GPUs there are, in one process and in one a GPU, against its reference."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from qwenjax_ffi import all_reduce_kernel, collectives
from qwenjax_ffi.grouped_gemm import sum_rows
from tests.ffi import all_reduce_process
from tests.ffi.gpu_processes import check, check_ranks, most_ranks, start

pytestmark = pytest.mark.gpu

PROGRAM = Path(all_reduce_process.__file__)


@functools.cache
def mesh() -> Mesh:
    """As many GPUs as there are, down to a power of two."""
    found = len(jax.devices())
    if found < 2:
        pytest.skip("needs two GPUs")
    return all_reduce_process.gpu_mesh(most_ranks(found))


def spread(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Other normal numbers on every rank, along the first axis."""
    return jax.random.normal(jax.random.key(seed), (mesh().size * shape[0], *shape[1:]), dtype)


def run(function: Any, *arguments: Any) -> Any:
    return all_reduce_process.on_ranks(mesh(), function, *arguments)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize(
    ("dtype", "elements"),
    [
        *((jnp.bfloat16, elements) for elements in (0, 1, 3, 1001, 2880, 1 << 18)),
        (jnp.float16, 1001),
        (jnp.float32, 1001),
    ],
)
def test_sums_are_those_of_float32_in_rank_order(dtype: Any, elements: int, algorithm: Any) -> None:
    ranks = mesh().size
    x = spread(elements, elements, dtype=dtype)

    def call(epochs: jax.Array, x: jax.Array) -> jax.Array:
        if elements:
            return all_reduce_kernel.all_reduce(x, epochs, ranks, algorithm)[0]
        return collectives.all_reduce(x, "model", epochs, implementation="kernel")[0]

    got = run(call, x).reshape(ranks, elements)
    values = np.asarray(x).reshape(ranks, elements).astype(np.float32)
    total = functools.reduce(np.add, values).astype(x.dtype)
    for row in got:
        np.testing.assert_array_equal(bits(row), total.view(f"u{x.dtype.itemsize}"))


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_the_fused_form_equals_its_three_steps(rows: int) -> None:
    x, residual = spread(1, rows, 2048), jnp.tile(spread(2, rows, 2048)[:rows], (mesh().size, 1))
    weight = jnp.tile(jax.random.normal(jax.random.key(3), (2048,), jnp.bfloat16), mesh().size)

    def call(implementation: Any, epochs: jax.Array, *operands: jax.Array) -> Any:
        return collectives.all_reduce_rms_norm(*operands, 1e-6, "model", epochs, implementation=implementation)[:2]

    total, normed = run(functools.partial(call, "kernel"), x, residual, weight)
    expected_total, _ = run(functools.partial(call, "reference"), x, residual, weight)
    # In float32: NCCL rounds a sum of bfloat16 at every rank that it passes.
    wide = (value.astype(jnp.float32) for value in (x, residual, weight))
    _, expected = run(functools.partial(call, "reference"), *wide)
    ranks = bits(normed).reshape(mesh().size, -1)
    assert (ranks == ranks[0]).all()
    if mesh().size == 2:  # where the order of the sum does not matter
        np.testing.assert_array_equal(bits(total), bits(expected_total))
    np.testing.assert_allclose(
        np.asarray(normed, np.float32), np.asarray(expected, np.float32), rtol=2.0**-6, atol=2.0**-6
    )


@pytest.mark.parametrize(("tokens", "features"), [(1, 4096), (77, 2880), (1000, 2048), (4096, 4096), (3000, 64)])
def test_rows_are_added_up_as_they_are_sent_with_the_bits_of_the_sum_apart(tokens: int, features: int) -> None:
    ranks, top_k = mesh().size, 8
    rows = spread(tokens, 3 * tokens, features)
    # Most choices are of other ranks; what no choice names is never read.
    named = np.random.default_rng(tokens).integers(-4 * tokens, 3 * tokens, (ranks, tokens, top_k)).clip(-1)
    named[:, 0] = -1
    rows = rows.at[0].set(jnp.nan)
    token_rows = jnp.asarray(np.where(named == 0, -1, named).reshape(-1, top_k), jnp.int32)
    residual = jnp.tile(spread(2, tokens, features)[:tokens], (ranks, 1))
    weight = jnp.tile(jax.random.normal(jax.random.key(3), (features,), jnp.bfloat16), ranks)

    def call(apart: bool, epochs: jax.Array, rows: jax.Array, named: jax.Array, *others: jax.Array) -> Any:
        x, *added = (sum_rows(rows, named, rows.dtype),) if apart else (rows, named)
        total, epochs = all_reduce_kernel.all_reduce(x, epochs, ranks, "two_shot", *added)
        return total, *all_reduce_kernel.all_reduce_rms_norm(x, *others, 1e-6, epochs, ranks, "two_shot", *added)[:2]

    found, expected = (
        run(functools.partial(call, apart), rows, token_rows, residual, weight) for apart in (False, True)
    )
    for one, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
    # Norms add the squares up by team, of which there are others: seen on two H200s, a row in 4,096 rounds otherwise.
    np.testing.assert_allclose(*(np.asarray(norm[2], np.float32) for norm in (found, expected)), rtol=2.0**-6)
    ranks_of_norm = bits(found[2]).reshape(ranks, -1)
    assert (ranks_of_norm == ranks_of_norm[0]).all()


@pytest.mark.parametrize("late", [True, False])
def test_ten_thousand_calls_of_two_sizes_in_turn(late: bool) -> None:
    assert all_reduce_process.many_calls(mesh(), 5000, late) == 0


def test_without_command_buffers() -> None:
    mesh()
    check(start(PROGRAM, 5000, XLA_FLAGS="--xla_gpu_enable_command_buffer="))


@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_command_buffer="], ids=["graphs", "no graphs"])
def test_a_process_a_gpu(flags: str) -> None:
    check_ranks(PROGRAM, range(mesh().size), 5000, XLA_FLAGS=flags)


def test_two_processes_that_share_a_gpu() -> None:
    check_ranks(PROGRAM, [0, 0], 10)
