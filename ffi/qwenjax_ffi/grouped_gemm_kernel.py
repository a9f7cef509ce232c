"""The grouped GEMM kernels as JAX functions: `qwenjax_kernels.grouped_gemm_sm90` through CuTeDSL's FFI.

The references in `grouped_gemm` define the results. `unavailable` says why a kernel cannot run with some arguments.
The kernels take packed MXFP8 weights (`packing`) and plain bf16 ones. sum(group_sizes) may be less than the rows, never
more: rows at and after it are neither read nor written, so those rows of the result hold whatever the memory held
before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.implementation import gpu_unavailable
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder
from qwenjax_ffi.weights import MX_BLOCK
from qwenjax_kernels import fragments
from qwenjax_kernels.tiles import Epilogue, Tile, choose_tile

H200_SMS = 132  # the blocks of a launch; on a chip with another number they are right, and less well balanced

KernelWeight = PackedMXFP8Weight | jax.Array


class Problem(NamedTuple):
    """What a kernel is compiled for, beside the dtypes and shapes of its arrays."""

    is_packed: bool
    k: int
    widths: tuple[int, ...]
    num_groups: int
    epilogue: Epilogue
    tile: Tile
    num_sms: int
    float32_out: bool
    layers: int


_TAKES = "PackedMXFP8Weight, or bfloat16 with outputs in multiples of 8 and inputs of 32"


def unavailable(
    x: jax.Array, weight: object, row_order: RowOrder = "plain", activation_format: ActivationFormat = "model"
) -> str | None:
    """Why no kernel can take these arguments on this machine; None where one can."""
    if activation_format != "model":
        return f"the kernel multiplies activations in their own format, not {activation_format!r}"
    if isinstance(weight, PackedMXFP8Weight):
        if weight.row_order != row_order:
            return f"the weight is packed for {weight.row_order!r}, this operation needs {row_order!r}"
    elif isinstance(weight, jax.Array):
        rows, k = weight.shape[-2:]
        width = rows // 2 if row_order == "gate_up" else rows
        if weight.dtype != jnp.bfloat16 or k % MX_BLOCK or width % 8:
            return f"the weight is {weight.dtype}{list(weight.shape)}, the kernel takes {_TAKES}"
    else:
        return f"the weight is {type(weight).__name__}, the kernel takes {_TAKES}"
    if x.dtype != jnp.bfloat16:
        return f"the rows are {x.dtype}, the kernel takes bfloat16"
    if not x.size:
        return f"there are no rows: x is {list(x.shape)}"
    return machine_unavailable()


@functools.cache
def machine_unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None where they can."""
    return gpu_unavailable(("9.0",), "Hopper")


def kernel_dtype(out: jnp.dtype) -> jnp.dtype:
    """What a kernel writes for a result of dtype `out`, which it is then rounded to: kernels write these two."""
    return jnp.dtype(jnp.bfloat16 if out == jnp.bfloat16 else jnp.float32)


def grouped_gemm(
    x: jax.Array,
    group_sizes: jax.Array,
    weight: KernelWeight,
    layer: jax.Array | int | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    tile: Tile | None = None,
) -> jax.Array:
    """y[r] = weight[group of r] @ x[r]. Shapes as in the reference; out_dtype is bfloat16 (default) or float32."""
    dtype = jnp.dtype(out_dtype or x.dtype)
    return _call("plain", x, weight, group_sizes, None, None, layer, x.shape[0], dtype, tile)


def side_by_side(
    x: jax.Array,
    weights: Sequence[PackedMXFP8Weight],
    layer: jax.Array | int | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    tile: Tile | None = None,
) -> jax.Array:
    """The products of x with several matrices in one launch: [rows, outputs of the first, of the second, ...].

    x: bfloat16 [rows, in]; weights: [out, in] each, or with `layer` [layers, out, in]; `apart` says which will do.
    out_dtype is bfloat16 (default) or float32.
    """
    if reason := apart(weights):
        raise ValueError(f"side_by_side: {reason}")
    for weight in weights:
        _check_weight("plain", weight)
        if weight.ndim != (2 if layer is None else 3) or weight.shape[-1] != weights[0].shape[-1]:
            shapes = [list(weight.shape) for weight in weights]
            raise ValueError(f"side_by_side takes matrices of one input, stacked where a layer is given; not {shapes}")
    dtype = jnp.dtype(out_dtype or x.dtype)
    data: Any = tuple(jnp.expand_dims(weight.data, -4) for weight in weights)
    data = data if len(data) > 1 else data[0]
    widths = tuple(weight.shape[-2] for weight in weights)
    sizes = jnp.full(1, x.shape[0], jnp.int32)
    k = weights[0].shape[-1]
    return _launch("plain", x, data, True, k, widths, 1, sizes, None, None, layer, x.shape[0], dtype, tile)


def apart(weights: Sequence[PackedMXFP8Weight]) -> str | None:
    """Why `side_by_side` cannot take these weights on any machine; None where it can."""
    ragged = [weight.shape[-2] for weight in weights[:-1] if weight.shape[-2] % fragments.UNIT_ROWS]
    if ragged:
        return f"a weight before the last has {ragged[0]} outputs; it takes multiples of {fragments.UNIT_ROWS} there"
    return None


def moe_gate_up(
    x: jax.Array,
    row_token: jax.Array,
    group_sizes: jax.Array,
    w13: KernelWeight,
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
    w2: KernelWeight,
    row_weight: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    tile: Tile | None = None,
) -> jax.Array:
    """The down projection of each row's expert, times the row's routing weight. Shapes as in the reference."""
    _check_vector("row_weight", row_weight, h.shape[0], jnp.float32)
    return _call("row_weight", h, w2, group_sizes, None, row_weight, layer, h.shape[0], h.dtype, tile)


def _check_vector(name: str, value: jax.Array, size: int, dtype: Any) -> None:
    if value.shape != (size,) or value.dtype != dtype:
        raise ValueError(f"{name} is {value.dtype}{list(value.shape)}; it must be {jnp.dtype(dtype)}[{size}]")


def _call(
    epilogue: Epilogue,
    x: jax.Array,
    weight: KernelWeight,
    group_sizes: jax.Array,
    row_token: jax.Array | None,
    row_weight: jax.Array | None,
    layer: jax.Array | int | None,
    rows: int,
    dtype: jnp.dtype,
    tile: Tile | None,
) -> jax.Array:
    _check_weight(epilogue, weight)
    dims = 3 if layer is None else 4
    if weight.ndim != dims:
        raise ValueError(
            f"weight has shape {weight.shape}; with layer={'None' if dims == 3 else 'given'} it has {dims} axes"
        )
    num_groups, outputs, k = weight.shape[-3:]
    _check_vector("group_sizes", group_sizes, num_groups, jnp.int32)
    # A packed stack is found by its address; TMA needs to know how many matrices there are.
    is_packed = isinstance(weight, PackedMXFP8Weight)
    layers = 1 if is_packed or layer is None else weight.shape[0]
    data = weight.data if isinstance(weight, PackedMXFP8Weight) else weight
    widths = (outputs // 2 if epilogue == "swiglu" else outputs,)
    return _launch(
        epilogue, x, data, is_packed, k, widths, layers, group_sizes, row_token, row_weight, layer, rows, dtype, tile
    )


def _check_weight(epilogue: Epilogue, weight: KernelWeight) -> None:
    row_order: RowOrder = "gate_up" if epilogue == "swiglu" else "plain"
    if isinstance(weight, PackedMXFP8Weight):
        if weight.row_order != row_order:
            raise TypeError(f"the {epilogue} kernel takes a weight of row order {row_order!r}, not {weight!r}")
        if weight.layout != "fragments":
            raise TypeError(f"the kernel takes a PackedMXFP8Weight of layout 'fragments', not {weight.layout!r}")
        if weight.parts != (1, 1):
            raise ValueError(f"weight is packed in {weight.parts} parts, one for each rank; the kernel takes a rank's")
    elif not isinstance(weight, jax.Array) or weight.dtype != jnp.bfloat16:
        raise TypeError(f"the {epilogue} kernel takes {_TAKES}, not {weight!r}")


def _launch(
    epilogue: Epilogue,
    x: jax.Array,
    data: jax.Array | tuple[jax.Array, ...],
    is_packed: bool,
    k: int,
    widths: tuple[int, ...],
    layers: int,
    group_sizes: jax.Array,
    row_token: jax.Array | None,
    row_weight: jax.Array | None,
    layer: jax.Array | int | None,
    rows: int,
    dtype: jnp.dtype,
    tile: Tile | None,
) -> jax.Array:
    """widths: the outputs of each weight in `data`; those of several stand side by side in the result."""
    if x.ndim != 2 or x.shape[1] != k or x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be bfloat16[rows, {k}]")
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the kernel writes bfloat16 or float32, not {dtype}")
    width, num_groups = sum(widths), group_sizes.shape[0]
    if width % (2 if is_packed else 8):
        raise ValueError(f"the kernel stores {'pairs' if is_packed else 'eights'}: {width} outputs a row do not divide")
    float32_out = dtype == jnp.float32
    problem = _problem(is_packed, k, widths, num_groups, epilogue, rows, float32_out, layers, tile)
    index = None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1)
    from cutlass.jax import cutlass_call

    call = cutlass_call(
        _launcher(problem),
        output_shape_dtype=jax.ShapeDtypeStruct((rows, width), dtype),
        compile_key=("qwenjax grouped_gemm_sm90", *problem),
    )
    return call(x, data, group_sizes, row_token, row_weight, index)


def _problem(
    is_packed: bool,
    k: int,
    widths: tuple[int, ...],
    num_groups: int,
    epilogue: Epilogue,
    rows: int,
    float32_out: bool,
    layers: int,
    tile: Tile | None,
) -> Problem:
    width = sum(widths)
    row_units, k_units = fragments.units(2 * (-(-width // 32) * 32) if epilogue == "swiglu" else width, k)
    if tile is None:
        tile = choose_tile(
            rows, num_groups, row_units, k_units, mxfp8=is_packed, float32_out=float32_out, num_sms=H200_SMS
        )
    blocks = -(-rows // tile.rows) * -(-row_units // tile.m_units) * tile.k_blocks
    if tile.k_blocks > 1 and (num_groups > 1 or blocks > H200_SMS):
        raise ValueError(
            f"{tile} for {rows} rows of {num_groups} groups takes {blocks} blocks; where blocks share k, a cluster has "
            f"one tile at most: it is for one group and up to {H200_SMS} blocks"
        )
    return Problem(is_packed, k, widths, num_groups, epilogue, tile, H200_SMS, float32_out, layers)


def problem_of_experts(epilogue: Epilogue, weight: KernelWeight, rows: int) -> Problem:
    """The problem of a stack [layers, experts, out, in] and as many rows at most, for a chain of kernels."""
    _check_weight(epilogue, weight)
    layers, num_groups, outputs, k = weight.shape
    is_packed = isinstance(weight, PackedMXFP8Weight)
    width = outputs // 2 if epilogue == "swiglu" else outputs
    return _problem(is_packed, k, (width,), num_groups, epilogue, rows, False, 1 if is_packed else layers, None)


def problem_of_one_group(weights: Sequence[PackedMXFP8Weight], rows: int) -> Problem:
    """The problem of `side_by_side` for so many rows, with a bfloat16 result, for a chain of kernels."""
    for weight in weights:
        _check_weight("plain", weight)
    widths = tuple(weight.shape[-2] for weight in weights)
    return _problem(True, weights[0].shape[-1], widths, 1, "plain", rows, False, 1, None)


def make_kernel(problem: Problem, follows: Literal["groups", "rows"] | None = None) -> Any:
    """The kernel of a problem; follows: what the kernel before it in a chain makes."""
    from qwenjax_kernels.grouped_gemm_sm90_bf16 import BF16GroupedGemmSm90
    from qwenjax_kernels.grouped_gemm_sm90_mxfp8 import MXFP8GroupedGemmSm90

    arguments: dict[str, Any] = {
        "k": problem.k,
        "width": sum(problem.widths),
        "num_groups": problem.num_groups,
        "epilogue": problem.epilogue,
        "tile": problem.tile,
        "num_sms": problem.num_sms,
        "float32_out": problem.float32_out,
        "layers": problem.layers,
        "follows": follows,
    }
    if problem.is_packed:
        return MXFP8GroupedGemmSm90(widths=problem.widths, **arguments)
    return BF16GroupedGemmSm90(**arguments)


@functools.cache
def _launcher(problem: Problem) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass.cute as cute

    kernel = make_kernel(problem)

    @cute.jit
    def launch(stream, x, weights, group_sizes, row_token, row_weight, layer, out):  # type: ignore[no-untyped-def]
        kernel.launch(stream, x, weights, group_sizes, row_token, row_weight, layer, out)

    return launch
