"""Collectives over a mesh axis, in the form that kernels of our own can take over.

Every collective takes and returns `epochs`, the int32 array [1] in which a rank counts the collectives it ran. It
makes the order of collectives a data dependency, so that all ranks run them in the same order (kernels that spin on
their peers would deadlock otherwise), and holds the count in device memory, where a replayed CUDA graph can advance it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

AxisName = str | Sequence[str]


def all_reduce(x: jax.Array, axis_name: AxisName, epochs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of x over the ranks of `axis_name`, on every rank; call it under shard_map.

    x: any shape and float dtype, the same on every rank; epochs: int32 [1]. Returns (sum, epochs + 1).
    """
    x, epochs = jax.lax.optimization_barrier((x, epochs))
    # A second barrier, or the next collective might begin before this one has its result.
    return jax.lax.optimization_barrier((jax.lax.psum(x, axis_name), epochs + 1))
