"""The Blackwell kernels as JAX functions: quantising rows, and grouped matmuls of such rows with block-scaled weights.

They compile for sm_100a; no Blackwell GPU has run them. The references in `grouped_gemm` define the results, with
activation_format "mxfp8": the products are of MXFP8 rows, which those of the Hopper kernels are not.

The rows of a layer pass through in tiles (`blackwell_packing.BlockScaledRows`): `quantise_rows` gathers and rounds
them, `moe_gate_up` reads such rows and writes such rows, `moe_down` reads them. sum(group_sizes) may be less than the
rows, never more: rows at and after it are neither read nor written.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.blackwell_packing import BlockScaledRows, rows_shape
from qwenjax_ffi.implementation import gpu_unavailable
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder
from qwenjax_kernels.tiles import Epilogue
from qwenjax_kernels.tiles_sm100 import choose_tile_rows

B200_SMS = 148  # the blocks of a launch; GB200 has 152: right with any number, and as many tiles at a time
CAPABILITIES = ("10.0", "10.3")


def unavailable(
    x: jax.Array | BlockScaledRows,
    weight: PackedMXFP8Weight,
    row_order: RowOrder = "plain",
    activation_format: ActivationFormat = "mxfp8",
) -> str | None:
    """Why no kernel can take these arguments on this machine; None where one can."""
    if activation_format != "mxfp8":
        return f"the kernel multiplies MXFP8 rows: it needs activation_format='mxfp8', not {activation_format!r}"
    if weight.row_order != row_order:
        return f"the weight is packed for {weight.row_order!r}, this operation needs {row_order!r}"
    if x.dtype != jnp.bfloat16:
        return f"the rows are {x.dtype}, the kernel takes bfloat16"
    return machine_unavailable()


@functools.cache
def machine_unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None where they can."""
    return gpu_unavailable(CAPABILITIES, "Blackwell")


def quantise_rows(
    x: jax.Array, group_sizes: jax.Array, row_token: jax.Array | None = None, *, tile_rows: int | None = None
) -> BlockScaledRows:
    """The rows x[row_token[r]], or x[r], as MXFP8 tiles: `blackwell_packing.pack_rows` of the gathered rows.

    x: bfloat16 [tokens, features], features a multiple of 32; row_token: int32 [rows]; group_sizes: int32 [groups].
    tile_rows: 16, 32, 64 or 128; chosen by the mean group where None.
    """
    if x.ndim != 2 or x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be bfloat16[tokens, features]")
    rows = x.shape[0] if row_token is None else row_token.shape[0]
    if row_token is not None:
        _check_vector("row_token", row_token, rows, jnp.int32)
    _check_vector("group_sizes", group_sizes, group_sizes.shape[0], jnp.int32)
    num_groups = group_sizes.shape[0]
    tile_rows = tile_rows or choose_tile_rows(rows, num_groups)
    shape = rows_shape(rows, x.shape[1], num_groups, tile_rows)
    problem = (x.shape[1], num_groups, tile_rows, shape[0])
    from cutlass.jax import cutlass_call

    call = cutlass_call(
        _quantiser(*problem),
        output_shape_dtype=jax.ShapeDtypeStruct(shape, jnp.uint8),
        compile_key=("qwenjax quantise_rows", *problem),
    )
    return BlockScaledRows(call(x, group_sizes, row_token), rows, x.shape[1], tile_rows, x.dtype)


def grouped_gemm(
    x: jax.Array | BlockScaledRows,
    group_sizes: jax.Array,
    weight: PackedMXFP8Weight,
    layer: jax.Array | int | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """y[r] = weight[group of r] @ x[r]. Shapes as in the reference; out_dtype is bfloat16 (default) or float32."""
    _check("plain", weight, group_sizes, layer, x.shape[1])
    return _call("plain", _rows(x, group_sizes), weight, group_sizes, None, layer, jnp.dtype(out_dtype or x.dtype))


def moe_gate_up(
    x: jax.Array | BlockScaledRows,
    row_token: jax.Array | None,
    group_sizes: jax.Array,
    w13: PackedMXFP8Weight,
    layer: jax.Array | int | None = None,
) -> BlockScaledRows:
    """silu(gate) * up of each row's expert, with x gathered by row, rounded to bfloat16 and that to MXFP8.

    Shapes as in the reference. x may also be the rows themselves, gathered and quantised, with row_token None.
    """
    _check("swiglu", w13, group_sizes, layer, x.shape[1])
    rows = _rows(x, group_sizes, row_token)
    data = _call("swiglu", rows, w13, group_sizes, None, layer, jnp.dtype(jnp.uint8))
    return BlockScaledRows(data, rows.rows, w13.out_features // 2, rows.tile_rows, rows.dtype)


def moe_down(
    h: jax.Array | BlockScaledRows,
    group_sizes: jax.Array,
    w2: PackedMXFP8Weight,
    row_weight: jax.Array,
    layer: jax.Array | int | None = None,
) -> jax.Array:
    """The down projection of each row's expert, times the row's routing weight. Shapes as in the reference."""
    _check("row_weight", w2, group_sizes, layer, h.shape[1])
    _check_vector("row_weight", row_weight, h.shape[0], jnp.float32)
    return _call("row_weight", _rows(h, group_sizes), w2, group_sizes, row_weight, layer, jnp.dtype(h.dtype))


def _rows(
    x: jax.Array | BlockScaledRows, group_sizes: jax.Array, row_token: jax.Array | None = None
) -> BlockScaledRows:
    if not isinstance(x, BlockScaledRows):
        return quantise_rows(x, group_sizes, row_token)
    if row_token is not None:
        raise ValueError("rows that are quantised have been gathered; row_token must be None")
    return x


def _check_vector(name: str, value: jax.Array, size: int, dtype: Any) -> None:
    if value.shape != (size,) or value.dtype != dtype:
        raise ValueError(f"{name} is {value.dtype}{list(value.shape)}; it must be {jnp.dtype(dtype)}[{size}]")


def _row_order(epilogue: Epilogue) -> RowOrder:
    return "gate_up" if epilogue == "swiglu" else "plain"


def _check(
    epilogue: Epilogue,
    weight: PackedMXFP8Weight,
    group_sizes: jax.Array,
    layer: jax.Array | int | None,
    features: int,
) -> None:
    """Raises for a weight that the kernel does not take, before any row is quantised for it."""
    wanted = (_row_order(epilogue), "block_scaled")
    if not isinstance(weight, PackedMXFP8Weight) or (weight.row_order, weight.layout) != wanted:
        raise TypeError(
            f"the {epilogue} kernel takes a PackedMXFP8Weight of row order {wanted[0]!r} and layout {wanted[1]!r}, "
            f"not {weight!r}"
        )
    if weight.parts != (1, 1):
        raise ValueError(f"weight is packed in {weight.parts} parts, one for each rank; the kernel takes a rank's own")
    dims = 3 if layer is None else 4
    if weight.ndim != dims:
        raise ValueError(
            f"weight has shape {weight.shape}; with layer={'None' if dims == 3 else 'given'} it has {dims} axes"
        )
    _check_vector("group_sizes", group_sizes, weight.shape[-3], jnp.int32)
    if features != weight.in_features:
        raise ValueError(f"the rows have {features} features, the weight contracts {weight.in_features}")


def _call(
    epilogue: Epilogue,
    rows: BlockScaledRows,
    weight: PackedMXFP8Weight,
    group_sizes: jax.Array,
    row_weight: jax.Array | None,
    layer: jax.Array | int | None,
    dtype: jnp.dtype,
) -> jax.Array:
    num_groups = weight.shape[-3]
    expected = rows_shape(rows.rows, rows.features, num_groups, rows.tile_rows)
    if rows.data.shape != expected or rows.data.dtype != jnp.uint8:
        raise ValueError(
            f"the rows' tiles are {rows.data.dtype}{list(rows.data.shape)}; for {num_groups} groups they must be "
            f"uint8{list(expected)}"
        )
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.uint8):
        raise ValueError(f"the kernel writes bfloat16 or float32, not {dtype}")
    width = weight.out_features // 2 if epilogue == "swiglu" else weight.out_features
    if width % 2:
        raise ValueError(f"the kernel stores pairs: {width} outputs a row must be an even number")
    problem = (rows.features, width, num_groups, epilogue, rows.tile_rows, B200_SMS, dtype == jnp.float32)
    index = None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1)
    if epilogue == "swiglu":
        out_shape: tuple[int, ...] = rows_shape(rows.rows, width, num_groups, rows.tile_rows)
    else:
        out_shape = (rows.rows, width)
    from cutlass.jax import cutlass_call

    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=jax.ShapeDtypeStruct(out_shape, dtype),
        compile_key=("qwenjax grouped_gemm_sm100", *problem),
    )
    return call(rows.data, weight.data, group_sizes, row_weight, index)


@functools.cache
def _launcher(
    k: int, width: int, num_groups: int, epilogue: Epilogue, tile_rows: int, num_sms: int, float32_out: bool
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass.cute as cute

    from qwenjax_kernels.grouped_gemm_sm100 import GroupedGemmSm100

    kernel = GroupedGemmSm100(
        k=k,
        width=width,
        num_groups=num_groups,
        epilogue=epilogue,
        tile_rows=tile_rows,
        num_sms=num_sms,
        float32_out=float32_out,
    )

    @cute.jit
    def launch(stream, rows, weights, group_sizes, row_weight, layer, out):  # type: ignore[no-untyped-def]
        kernel.launch(stream, rows, weights, group_sizes, row_weight, layer, out)

    return launch


@functools.cache
def _quantiser(k: int, num_groups: int, tile_rows: int, row_tiles: int) -> Any:
    """The `@cute.jit` function that quantises the rows of one problem."""
    import cutlass.cute as cute

    from qwenjax_kernels.quantise_rows import QuantiseRows

    kernel = QuantiseRows(k=k, num_groups=num_groups, tile_rows=tile_rows, row_tiles=row_tiles)

    @cute.jit
    def launch(stream, x, group_sizes, row_token, out):  # type: ignore[no-untyped-def]
        kernel.launch(stream, x, group_sizes, row_token, out)

    return launch
