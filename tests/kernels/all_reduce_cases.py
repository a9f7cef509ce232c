"""What an all-reduce gives, in numpy: sums in float32 in the order of the ranks, rounded once, and what follows."""

from __future__ import annotations

from typing import Any

import numpy as np

EPS, TOP_K = 1e-6, 8


def summed(values: np.ndarray) -> np.ndarray:
    """The sum [...] of values [ranks, ...]."""
    total = values[0].astype(np.float32)
    for value in values[1:]:
        total = total + value.astype(np.float32)
    return total.astype(values.dtype)


def rows_of_tokens(seed: int, ranks: int, tokens: int, features: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows [ranks, 3 * tokens, features] and the rows of each token, int32 [ranks, tokens, TOP_K]: most choices are of
    other ranks (-1), a token has none, and the first row, which is NaN, is no token's."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((ranks, 3 * tokens, features), np.float32).astype(dtype)
    rows[:, 0] = np.nan
    named = draw.integers(-4 * tokens, 3 * tokens, (ranks, tokens, TOP_K), np.int32)
    named[named < 1] = -1
    named[:, tokens // 2] = -1
    return rows, named


def added_up(rows: np.ndarray, named: np.ndarray) -> np.ndarray:
    """Each token's rows added up in float32 in the order of its choices and rounded: [ranks, tokens, features]."""
    total = np.zeros((*named.shape[:2], rows.shape[-1]), np.float32)
    for rank, choices in enumerate(named):
        for choice in choices.T:
            total[rank] += np.where(choice[:, None] >= 0, rows[rank][choice].astype(np.float32), 0)
    return total.astype(rows.dtype)


def with_residual(total: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """residual + total, rounded."""
    added: np.ndarray = (residual.astype(np.float32) + total.astype(np.float32)).astype(total.dtype)
    return added


def check_norm(got: np.ndarray, added: np.ndarray, weight: np.ndarray, where: str = "") -> None:
    """Holds got against the RMSNorm of added [rows, features] times weight, by two roundings to its dtype."""
    wide = added.astype(np.float64)
    normed = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)).astype(added.dtype).astype(np.float64)
    expected = normed * weight.astype(np.float64)
    # Rounded twice; where the norm lies between two values of the dtype, either.
    step = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-19}[str(added.dtype)]
    worst = (np.abs(got.astype(np.float64) - expected) - step * np.abs(expected)).max()
    assert worst <= 1e-6, f"off by {worst} {where}"


def bits(value: np.ndarray) -> np.ndarray:
    return value.view(f"u{value.dtype.itemsize}")
