"""Dispatch and combine called from JAX on all GPUs there are, in one process and in one a GPU, against their
references."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from qwenjax_ffi.token_exchange import combine, dispatch
from tests.ffi import token_exchange_process as process
from tests.ffi.gpu_processes import check, check_ranks, most_ranks, start

pytestmark = pytest.mark.gpu

PROGRAM = Path(process.__file__)


@functools.cache
def mesh() -> Mesh:
    """As many GPUs as there are, down to a power of two."""
    found = len(jax.devices())
    if found < 2:
        pytest.skip("needs two GPUs")
    return process.gpu_mesh(most_ranks(found))


def routed(
    implementation: Any, per_rank: int, row_format: Any, epochs: jax.Array, x: jax.Array, ids: jax.Array, w: jax.Array
) -> Any:
    """What arrives, with rows that no one reads made zeros, and what comes home of it."""
    there, epochs = dispatch(x, ids, w, per_rank, "data", epochs, row_format=row_format, implementation=implementation)
    used = (jnp.arange(x.shape[0]) < there.counts[:, None])[..., None]
    partial = jnp.where(used, there.x * jnp.sum(there.weights, -1, keepdims=True).astype(x.dtype), jnp.nan)
    home, _ = combine(partial, there.counts, there.slots, "data", epochs, implementation=implementation)
    return jnp.where(used, there.x, 0), there.ids, there.weights, there.counts, there.slots, home


@pytest.mark.parametrize(
    ("dtype", "tokens", "hidden", "top_k", "row_format"),
    [
        (jnp.bfloat16, 1, 2048, 8, "model"),
        (jnp.bfloat16, 64, 4096, 8, "model"),
        (jnp.float16, 7, 24, 3, "model"),
        (jnp.float32, 33, 128, 6, "model"),
        (jnp.bfloat16, 64, 4096, 8, "mxfp8"),
    ],
)
def test_results_are_those_of_the_references(dtype: Any, tokens: int, hidden: int, top_k: int, row_format: Any) -> None:
    ranks = mesh().size
    per_rank = 64 // ranks
    draw = np.random.default_rng(tokens)
    ids = np.stack([draw.permutation(64)[:top_k] for _ in range(ranks * tokens)]).astype(np.int32)
    ids[draw.random(len(ids)) < 0.2] = -1
    x = draw.normal(size=(ranks * tokens, hidden)).astype(dtype)
    weights = draw.random(ids.shape).astype(np.float32)
    got, expected = (
        process.on_ranks(mesh(), functools.partial(routed, implementation, per_rank, row_format), x, ids, weights)
        for implementation in ("kernel", "reference")
    )
    for name, a, b in zip(("x", "ids", "weights", "counts", "slots", "home"), got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)
    assert np.abs(np.asarray(got[-1], np.float32)).max() > 0


def test_more_tokens_than_the_heap_holds_are_refused_before_anything_runs() -> None:
    from qwenjax_ffi.implementation import KernelUnavailableError

    x = jnp.zeros((mesh().size * 256, 4096), jnp.bfloat16)
    ids, weights = jnp.zeros((len(x), 8), jnp.int32), jnp.zeros((len(x), 8))
    with pytest.raises(KernelUnavailableError, match="256 tokens a rank of 8256 bytes each; the heap holds 127"):
        process.on_ranks(mesh(), functools.partial(routed, "kernel", 64, "model"), x, ids, weights)


@pytest.mark.parametrize("late", [True, False])
def test_a_thousand_iterations_of_two_layers_in_flight(late: bool) -> None:
    assert process.many_layers(mesh(), 1024, late) == 0


def test_without_command_buffers() -> None:
    mesh()
    check(start(PROGRAM, 1024, XLA_FLAGS="--xla_gpu_enable_command_buffer="))


def test_a_process_a_gpu() -> None:
    check_ranks(PROGRAM, range(mesh().size), 1024)
