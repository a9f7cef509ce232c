"""The decode all-to-all's kernels as JAX functions: `qwenjax_kernels.token_dispatch`, its MXFP8 form, `token_combine`.

They take and return the epoch array of a symmetric heap that was made with room for them (`ExchangeRows`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi.symmetric_memory_exchange import timeout_seconds
from qwenjax_kernels.token_exchange_layout import units_for


class ExchangeRows(NamedTuple):
    """What a heap is to hold for dispatch and combine: rows of `hidden` elements of dtype, `tokens` a rank."""

    tokens: int
    hidden: int
    top_k: int
    dtype: Any

    @property
    def units(self) -> int:
        """The units of 1 MiB that each rank has in the inboxes of every other."""
        return units_for(self.tokens, self.hidden * jnp.dtype(self.dtype).itemsize, self.top_k)


def dispatch(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    epochs: jax.Array,
    ranks: int,
    units: int,
    experts_per_rank: int,
    mxfp8: bool,
) -> tuple[jax.Array, ...]:
    """The leaves of `token_exchange.Dispatched`, and the epochs. ranks, units: of the heap behind `epochs`; mxfp8: how
    rows travel."""
    from cutlass.jax import cutlass_call

    tokens, top_k = ids.shape
    name = "dispatch MXFP8" if mxfp8 else "dispatch"
    problem = (name, ranks, units, jnp.dtype(x.dtype).name, *x.shape, _timeout_ns(), top_k, experts_per_rank)
    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=(
            jax.ShapeDtypeStruct((ranks, *x.shape), x.dtype),
            jax.ShapeDtypeStruct((ranks, tokens, top_k), jnp.int32),
            jax.ShapeDtypeStruct((ranks, tokens, top_k), jnp.float32),
            jax.ShapeDtypeStruct((ranks,), jnp.int32),
            jax.ShapeDtypeStruct((tokens, ranks), jnp.int32),
            jax.ShapeDtypeStruct(epochs.shape, epochs.dtype),
        ),
        input_output_aliases={3: 5},
        compile_key=("qwenjax", *problem),
    )
    results: tuple[jax.Array, ...] = call(x, ids, weights, epochs)
    return results


def combine(
    partial: jax.Array, counts: jax.Array, slots: jax.Array, epochs: jax.Array, ranks: int, units: int
) -> tuple[jax.Array, jax.Array]:
    """The sums [tokens, hidden], and the epochs. ranks, units: of the heap behind `epochs`."""
    from cutlass.jax import cutlass_call

    shape = partial.shape[1:]
    problem = ("combine", ranks, units, jnp.dtype(partial.dtype).name, *shape, _timeout_ns())
    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=(
            jax.ShapeDtypeStruct(shape, partial.dtype),
            jax.ShapeDtypeStruct(epochs.shape, epochs.dtype),
        ),
        input_output_aliases={3: 1},
        compile_key=("qwenjax", *problem),
    )
    results: tuple[jax.Array, jax.Array] = call(partial, counts, slots, epochs)
    return results


def _timeout_ns() -> int:
    return round(timeout_seconds() * 1e9)


@functools.cache
def _launcher(
    name: str, ranks: int, units: int, dtype: str, tokens: int, hidden: int, timeout_ns: int, *routing: int
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.token_combine import TokenCombine
    from qwenjax_kernels.token_dispatch import TokenDispatch
    from qwenjax_kernels.token_dispatch_mxfp8 import MXFP8TokenDispatch

    dtypes = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
    sizes: dict[str, Any] = {"ranks": ranks, "units": units, "dtype": dtypes[dtype], "tokens": tokens, "hidden": hidden}
    if name != "combine":
        top_k, experts_per_rank = routing
        kind = MXFP8TokenDispatch if name == "dispatch MXFP8" else TokenDispatch
        send = kind(**sizes, timeout_ns=timeout_ns, top_k=top_k, experts_per_rank=experts_per_rank)

        @cute.jit
        def dispatching(  # type: ignore[no-untyped-def]
            stream, x, ids, weights, epochs, out_x, out_ids, out_weights, out_counts, out_slots
        ):
            send.launch(
                stream,
                x.iterator.toint(),
                ids.iterator.toint(),
                weights.iterator.toint(),
                epochs.iterator.toint(),
                out_x.iterator.toint(),
                out_ids.iterator.toint(),
                out_weights.iterator.toint(),
                out_counts.iterator.toint(),
                out_slots.iterator.toint(),
            )

        return dispatching
    bring = TokenCombine(**sizes, timeout_ns=timeout_ns)

    @cute.jit
    def combining(stream, partial, counts, slots, epochs, out):  # type: ignore[no-untyped-def]
        bring.launch(
            stream,
            partial.iterator.toint(),
            counts.iterator.toint(),
            slots.iterator.toint(),
            epochs.iterator.toint(),
            out.iterator.toint(),
        )

    return combining
