"""What of our kernel of prefill attention is its own: `test_both_attention_kernels.py` has the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax_ffi.attention import choose_form, paged_attention
from tests.ffi.paged_sequences import errors, expected, paged_sequences


@partial(jax.jit, static_argnames="implementation")
def attend(*arguments: Any, implementation: Any = "prefill_kernel") -> jax.Array:
    return paged_attention(*arguments, implementation=implementation)


@pytest.mark.gpu
def test_chunks_take_this_kernel_and_decode_steps_the_other() -> None:
    cache = jax.ShapeDtypeStruct((1, 4, 2, 64, 128), jnp.bfloat16)
    forms = [
        choose_form(jax.ShapeDtypeStruct((1, tokens, 8, 128), jnp.bfloat16), cache, cache, "auto")
        for tokens in (1, 32, 33, 2048)
    ]
    assert forms == ["kernel", "kernel", "prefill_kernel", "prefill_kernel"]


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
