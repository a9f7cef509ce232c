"""Sampling parameters as arrays: one row a token to draw, of the same shapes for every batch."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.sampling_params import MAX_END_IDS, MAX_LOGIT_BIAS, SamplingParams

PAD_ID = np.iinfo(np.int32).max  # beyond any vocabulary: scatters drop it (a negative id would wrap around)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """What the sampler knows of each row. Idle rows are greedy.

    temperature: float32 [rows], 0 for greedy.
    top_k: int32 [rows], 0 for off. top_p, min_p: float32 [rows], 1 and 0 for off.
    repetition_penalty, presence_penalty, frequency_penalty: float32 [rows], 1, 0 and 0 for off.
    seed: uint32 [rows, 2], high word first. sample_index: int32 [rows], which of the request's n outputs.
    min_tokens, prompt_len: int32 [rows], tokens.
    end_ids: int32 [rows, end ids], the ids that end the output, padded with PAD_ID.
    bias_ids: int32 [rows, biases], distinct, padded with PAD_ID; bias_values: float32 [rows, biases].
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array
    sample_index: jax.Array
    min_tokens: jax.Array
    prompt_len: jax.Array
    end_ids: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array

    def repeat(self, times: int) -> SamplingArrays:
        """Each row `times` times in a row, [rows * times]: the positions of one slot share its parameters."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), self)

    def is_end(self, ids: jax.Array) -> jax.Array:
        """Whether each row's id (int32 [rows]) ends its output: bool [rows]."""
        return (ids[:, None] == self.end_ids).any(axis=1)


@dataclass(frozen=True)
class SamplingRow:
    """One row as the host knows it: an output's parameters and what its draws are keyed by.

    seed: in [0, 2^64). sample_index: which of the n outputs. prompt_len: tokens. end_ids:
    `params.end_ids(...)`.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    prompt_len: int
    end_ids: Sequence[int]


def new_seed(params: SamplingParams) -> int:
    """The request's seed, or one from the system's entropy where it has none. In [0, 2^64)."""
    return secrets.randbits(64) if params.seed is None else params.seed


def build_arrays(
    rows: Sequence[SamplingRow | None], *, num_end_ids: int = MAX_END_IDS, num_biases: int = MAX_LOGIT_BIAS
) -> SamplingArrays:
    """The rows' parameters as NumPy arrays of fixed widths; None is an idle row.

    The widths are part of the compiled program, so a process picks them once. An unwanted width costs little:
    9 kB a row at the defaults, sent when the batch changes.

    Raises ValueError where a row has more end ids or biases than the widths hold.
    """
    num_rows = len(rows)
    table: dict[str, Any] = {name: np.zeros(num_rows, np.float32) for name in ("temperature", "min_p")}
    table |= {name: np.zeros(num_rows, np.float32) for name in ("presence_penalty", "frequency_penalty")}
    table |= {name: np.ones(num_rows, np.float32) for name in ("top_p", "repetition_penalty")}
    table |= {name: np.zeros(num_rows, np.int32) for name in ("top_k", "sample_index", "min_tokens", "prompt_len")}
    table |= {"seed": np.zeros((num_rows, 2), np.uint32)}
    table |= {"end_ids": np.full((num_rows, num_end_ids), PAD_ID, np.int32)}
    table |= {"bias_ids": np.full((num_rows, num_biases), PAD_ID, np.int32)}
    table |= {"bias_values": np.zeros((num_rows, num_biases), np.float32)}
    for index, row in enumerate(rows):
        if row is not None:
            _fill(table, index, row)
    return SamplingArrays(**table)


def _fill(table: dict[str, np.ndarray], index: int, row: SamplingRow) -> None:
    params = row.params
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"):
        table[name][index] = getattr(params, name)
    if not params.greedy:  # truncation keeps the most likely id, so a greedy row does without its cost
        table["temperature"][index] = params.temperature
        table["top_k"][index] = min(max(params.top_k, 0), PAD_ID)
        table["top_p"][index] = params.top_p
        table["min_p"][index] = params.min_p
    table["seed"][index] = row.seed >> 32, row.seed & 0xFFFFFFFF
    table["sample_index"][index] = row.sample_index
    table["prompt_len"][index] = row.prompt_len
    bias = params.logit_bias or {}
    for name, values in (("end_ids", row.end_ids), ("bias_ids", bias.keys()), ("bias_values", bias.values())):
        width = table[name].shape[1]
        if len(values) > width:
            field = "stop_token_ids with EOS" if name == "end_ids" else "logit_bias"
            raise ValueError(f"{field} holds {len(values)} ids; the sampler's table holds {width}")
        table[name][index, : len(values)] = list(values)
