"""Named columns of one int32 table: what the host tells the device travels as a single array a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.sampling import SamplingArrays, SamplingRow, build_arrays

_IDLE = build_arrays([None])


class Columns:
    """Where each field lies in a row. groups: columns of each field, in order; no name may come twice."""

    def __init__(self, *groups: Mapping[str, int]) -> None:
        self.places: dict[str, slice] = {}
        self.width = 0
        for name, width in (item for group in groups for item in group.items()):
            if name in self.places:
                raise ValueError(f"two fields are called {name!r}")
            self.places[name] = slice(self.width, self.width + width)
            self.width += width

    def table(self, rows: int) -> np.ndarray:
        """Zeros, int32 [rows, width]."""
        return np.zeros((rows, self.width), np.int32)

    def of(self, table: Any, name: str) -> Any:
        """A field's columns [rows, its width] of a table, on the host (a view) or the device."""
        return table[:, self.places[name]]

    def one(self, table: Any, name: str) -> Any:
        """A field of one column as [rows]."""
        return table[:, self.places[name].start]


def sampling_widths() -> dict[str, int]:
    """The columns of SamplingArrays' fields."""
    return {field.name: getattr(_IDLE, field.name)[0].size for field in fields(SamplingArrays)}


def put_sampling(columns: Columns, table: np.ndarray, rows: list[SamplingRow | None]) -> None:
    """Writes the rows' parameters, idle ones for None, bit for bit: floats as the integers of their bits."""
    built = build_arrays(rows)
    for field in fields(SamplingArrays):
        values = getattr(built, field.name)
        columns.of(table, field.name)[:] = values.reshape(len(rows), -1).view(np.int32)


def get_sampling(columns: Columns, table: jax.Array) -> SamplingArrays:
    """The rows' parameters, on the device."""

    def field_of(name: str) -> jax.Array:
        like = getattr(_IDLE, name)
        values = jax.lax.bitcast_convert_type(columns.of(table, name), jnp.dtype(like.dtype))
        return values.reshape(table.shape[0], *like.shape[1:])

    return SamplingArrays(**{field.name: field_of(field.name) for field in fields(SamplingArrays)})
