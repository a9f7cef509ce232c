"""The grouped GEMM kernels as JAX functions: `qwenjax_kernels.grouped_gemm_sm90` through CuTeDSL's FFI.

The references in `grouped_gemm` define the results. `unavailable` says why a kernel cannot run with some arguments.
The kernels take packed weights (`packing`). sum(group_sizes) may be less than the rows, never more: rows at and after
it are neither read nor written, so those rows of the result hold whatever the memory held before.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder
from qwenjax_kernels.tiles import Epilogue, Tile

H200_SMS = 132  # the blocks of a launch; on a chip with another number they are right, and less well balanced

# Rows of a tile, and the largest mean group that it is chosen for.
TILE_ROWS = ((16, 8.0), (32, 16.0), (64, 64.0), (128, float("inf")))
# (consumer warpgroups, 64-row units a warpgroup) that were measured for each: bench/results/grouped_gemm.
TILE_HEIGHTS = {
    16: ((2, 2), (3, 1), (2, 1)),
    32: ((2, 2), (3, 1), (2, 1)),
    64: ((2, 3), (2, 2), (2, 1)),
    128: ((2, 2),),
}


def unavailable(
    x: jax.Array, weight: object, row_order: RowOrder = "plain", activation_format: ActivationFormat = "model"
) -> str | None:
    """Why no kernel can take these arguments on this machine; None where one can."""
    if activation_format != "model":
        return f"the kernel multiplies activations in their own format, not {activation_format!r}"
    if not isinstance(weight, PackedMXFP8Weight):
        return f"the weight is {type(weight).__name__}, the kernel takes PackedMXFP8Weight"
    if weight.row_order != row_order:
        return f"the weight is packed for {weight.row_order!r}, this operation needs {row_order!r}"
    if x.dtype != jnp.bfloat16:
        return f"the rows are {x.dtype}, the kernel takes bfloat16"
    return machine_unavailable()


@functools.cache
def machine_unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None where they can."""
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not an NVIDIA GPU"
    if importlib.util.find_spec("cutlass") is None:
        return "CuTeDSL (nvidia-cutlass-dsl) is not installed"
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"the GPU has compute capability {capability}, the kernel is for 9.0 (Hopper)"
    return None


def grouped_gemm(
    x: jax.Array,
    group_sizes: jax.Array,
    weight: PackedMXFP8Weight,
    layer: jax.Array | int | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    tile: Tile | None = None,
) -> jax.Array:
    """y[r] = weight[group of r] @ x[r]. Shapes as in the reference; out_dtype is bfloat16 (default) or float32."""
    dtype = jnp.dtype(out_dtype or x.dtype)
    return _call("plain", x, weight, group_sizes, None, None, layer, x.shape[0], dtype, tile)


def moe_gate_up(
    x: jax.Array,
    row_token: jax.Array,
    group_sizes: jax.Array,
    w13: PackedMXFP8Weight,
    layer: jax.Array | int | None = None,
    *,
    tile: Tile | None = None,
) -> jax.Array:
    """silu(gate) * up of each row's expert, with x gathered by row. Shapes as in the reference."""
    _check_vector("row_token", row_token, row_token.shape[0], jnp.int32)
    return _call("swiglu", x, w13, group_sizes, row_token, None, layer, row_token.shape[0], x.dtype, tile)


def moe_down(
    h: jax.Array,
    group_sizes: jax.Array,
    w2: PackedMXFP8Weight,
    row_weight: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    tile: Tile | None = None,
) -> jax.Array:
    """The down projection of each row's expert, times the row's routing weight. Shapes as in the reference."""
    _check_vector("row_weight", row_weight, h.shape[0], jnp.float32)
    return _call("row_weight", h, w2, group_sizes, None, row_weight, layer, h.shape[0], h.dtype, tile)


def choose_tile(rows: int, num_groups: int, row_units: int, num_sms: int = H200_SMS) -> Tile:
    """The tile of a call with `rows` rows over `num_groups` groups whose weights are `row_units` units high.

    The rows of a tile follow the mean group: a group past it costs a second tile, whose weights come from the L2.
    Its height is the one that keeps the multiprocessors busy with the fewest units in the longest queue; among
    equals the highest, which reads the rows least often.
    """
    mean = rows / num_groups
    tile_rows = next(size for size, largest_mean in TILE_ROWS if mean <= largest_mean)
    row_tiles = num_groups * math.ceil(mean / tile_rows)

    def longest_queue(tile: Tile) -> int:
        return math.ceil(row_tiles * math.ceil(row_units / tile.m_units) / num_sms) * tile.m_units

    tiles = [Tile(tile_rows, warpgroups=w, units=u) for w, u in TILE_HEIGHTS[tile_rows]]
    return min(tiles, key=lambda tile: (longest_queue(tile), -tile.m_units))


def _check_vector(name: str, value: jax.Array, size: int, dtype: Any) -> None:
    if value.shape != (size,) or value.dtype != dtype:
        raise ValueError(f"{name} is {value.dtype}{list(value.shape)}; it must be {jnp.dtype(dtype)}[{size}]")


def _call(
    epilogue: Epilogue,
    x: jax.Array,
    weight: PackedMXFP8Weight,
    group_sizes: jax.Array,
    row_token: jax.Array | None,
    row_weight: jax.Array | None,
    layer: jax.Array | int | None,
    rows: int,
    dtype: jnp.dtype,
    tile: Tile | None,
) -> jax.Array:
    row_order: RowOrder = "gate_up" if epilogue == "swiglu" else "plain"
    if not isinstance(weight, PackedMXFP8Weight) or weight.row_order != row_order:
        raise TypeError(f"the {epilogue} kernel takes a PackedMXFP8Weight of row order {row_order!r}, not {weight!r}")
    if weight.layout != "fragments":
        raise TypeError(f"the kernel takes a PackedMXFP8Weight of layout 'fragments', not {weight.layout!r}")
    if weight.parts != (1, 1):
        raise ValueError(f"weight is packed in {weight.parts} parts, one for each rank; the kernel takes a rank's own")
    dims = 3 if layer is None else 4
    if weight.ndim != dims:
        raise ValueError(
            f"weight has shape {weight.shape}; with layer={'None' if dims == 3 else 'given'} it has {dims} axes"
        )
    if x.ndim != 2 or x.shape[1] != weight.in_features or x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be bfloat16[rows, {weight.in_features}]")
    num_groups = weight.shape[-3]
    _check_vector("group_sizes", group_sizes, num_groups, jnp.int32)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the kernel writes bfloat16 or float32, not {dtype}")
    width = weight.out_features // 2 if epilogue == "swiglu" else weight.out_features
    if width % 2:
        raise ValueError(f"the kernel stores pairs: {width} outputs a row must be an even number")
    tile = tile or choose_tile(rows, num_groups, weight.data.shape[-3])
    problem = (weight.in_features, width, num_groups, epilogue, tile, H200_SMS, dtype == jnp.float32)
    index = None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1)
    from cutlass.jax import cutlass_call

    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=jax.ShapeDtypeStruct((rows, width), dtype),
        compile_key=("qwenjax grouped_gemm_sm90", *problem),
    )
    return call(x, weight.data, group_sizes, row_token, row_weight, index)


@functools.cache
def _launcher(
    k: int, width: int, num_groups: int, epilogue: Epilogue, tile: Tile, num_sms: int, float32_out: bool
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass.cute as cute

    from qwenjax_kernels.grouped_gemm_sm90 import GroupedGemmSm90

    kernel = GroupedGemmSm90(
        k=k,
        width=width,
        num_groups=num_groups,
        epilogue=epilogue,
        tile=tile,
        num_sms=num_sms,
        float32_out=float32_out,
    )

    @cute.jit
    def launch(stream, x, weights, group_sizes, row_token, row_weight, layer, out):  # type: ignore[no-untyped-def]
        kernel.launch(stream, x, weights, group_sizes, row_token, row_weight, layer, out)

    return launch
