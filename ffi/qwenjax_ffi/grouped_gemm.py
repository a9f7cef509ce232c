"""Matmuls of rows that are grouped by expert: the plain form, and the two of an MoE layer. References in jnp.

Rows are sorted by group; group e has group_sizes[e] of them (int32, on device, any of them 0). Rows at and after
sum(group_sizes) are padding: kernels neither read nor write them, the references return zeros there.

Each takes `implementation`: "auto" runs the kernel of qwenjax_ffi.grouped_gemm_kernel (Hopper) or of
qwenjax_ffi.grouped_gemm_blackwell where it takes the weight (MXFP8 packed for it; on Hopper bf16 as well) and the GPU
is one that it is for, else the reference; see qwenjax_ffi.implementation. The Blackwell kernels multiply quantised
rows, which is never chosen here: they run with activation_format "mxfp8" alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TypeGuard

import jax
import jax.numpy as jnp

from qwenjax_ffi import expert_rows_kernel
from qwenjax_ffi import grouped_gemm_blackwell as blackwell
from qwenjax_ffi import grouped_gemm_kernel as kernel
from qwenjax_ffi.activations import ActivationFormat, quantise_activations
from qwenjax_ffi.blackwell_packing import BlockScaledRows, pack_rows, unpack_rows
from qwenjax_ffi.implementation import Implementation, choose
from qwenjax_ffi.packing import AnyWeight, PackedMXFP8Weight, RowOrder, unpack
from qwenjax_ffi.row_blocks import RowBlocks
from qwenjax_ffi.weights import Weight, decode, select_layer
from qwenjax_kernels.tiles_sm100 import choose_tile_rows

logger = logging.getLogger(__name__)


def grouped_gemm(
    x: jax.Array,
    group_sizes: jax.Array,
    weight: AnyWeight,
    layer: jax.Array | int | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    activation_format: ActivationFormat = "model",
    implementation: Implementation = "auto",
) -> jax.Array:
    """y[r] = weight[group of r] @ x[r], summed in float32.

    x: [rows, in]; weight: [groups, out, in], or [layers, groups, out, in] with `layer` (int32 [1] or scalar).
    Returns [rows, out] of `out_dtype` (default: x's dtype).
    """
    _check_groups(group_sizes, weight, layer, x.shape[1])
    if _use_kernel(weight, "grouped_gemm", implementation, x, activation_format, "plain"):
        out = jnp.dtype(out_dtype or x.dtype)
        return (
            _kernels(weight).grouped_gemm(x, group_sizes, weight, layer, out_dtype=kernel.kernel_dtype(out)).astype(out)
        )
    weight, layer = _plain(weight, layer)
    x = quantise_activations(x, activation_format)

    def block(rows: jax.Array, group: jax.Array) -> jax.Array:
        return _rows_times(x[rows], weight, layer, group)

    return _by_blocks(block, x.shape[0], weight.shape[-2], group_sizes, out_dtype or x.dtype)


def moe_gate_up(
    x: jax.Array,
    row_token: jax.Array,
    group_sizes: jax.Array,
    w13: AnyWeight,
    layer: jax.Array | int | None = None,
    *,
    activation_format: ActivationFormat = "model",
    implementation: Implementation = "auto",
) -> jax.Array | BlockScaledRows:
    """silu(gate) * up of each row's expert, with x gathered by row.

    x: [tokens, in]; row_token: int32 [rows]; w13: [groups, 2 * width, in] or [layers, groups, 2 * width, in], gate
    rows first. Returns [rows, width] of x's dtype; gate, up and their product are float32 until then. Where w13 is
    packed as "block_scaled" and activation_format is "mxfp8", the result is quantised too, as moe_down would do.
    """
    _check_groups(group_sizes, w13, layer, x.shape[1])
    if _use_kernel(w13, "moe_gate_up", implementation, x, activation_format, "gate_up"):
        return _kernels(w13).moe_gate_up(x, row_token, group_sizes, w13, layer)
    quantises = _is_block_scaled(w13) and activation_format == "mxfp8"
    w13, layer = _plain(w13, layer)
    x = quantise_activations(x, activation_format)

    def block(rows: jax.Array, group: jax.Array) -> jax.Array:
        gate, up = jnp.split(_rows_times(x[row_token[rows]], w13, layer, group), 2, axis=-1)
        return jax.nn.silu(gate) * up

    h = _by_blocks(block, row_token.shape[0], w13.shape[-2] // 2, group_sizes, x.dtype)
    return pack_rows(h, group_sizes, choose_tile_rows(h.shape[0], group_sizes.shape[0])) if quantises else h


def moe_down(
    h: jax.Array | BlockScaledRows,
    group_sizes: jax.Array,
    w2: AnyWeight,
    row_weight: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    activation_format: ActivationFormat = "model",
    implementation: Implementation = "auto",
) -> jax.Array:
    """The down projection of each row's expert, times the row's routing weight.

    h: [rows, width]; w2: [groups, out, width] or [layers, groups, out, width]; row_weight: float32 [rows].
    Returns [rows, out] of h's dtype, rounded once, after the weight. Quantised rows are of activation_format "mxfp8".
    """
    if isinstance(h, BlockScaledRows) and activation_format != "mxfp8":
        raise ValueError(f"the rows are quantised to MXFP8, and activation_format is {activation_format!r}")
    _check_groups(group_sizes, w2, layer, h.shape[1])
    if _use_kernel(w2, "moe_down", implementation, h, activation_format, "plain"):
        return _kernels(w2).moe_down(h, group_sizes, w2, row_weight, layer)
    w2, layer = _plain(w2, layer)
    x = unpack_rows(h, group_sizes) if isinstance(h, BlockScaledRows) else quantise_activations(h, activation_format)

    def block(rows: jax.Array, group: jax.Array) -> jax.Array:
        return _rows_times(x[rows], w2, layer, group) * row_weight[rows][:, None]

    return _by_blocks(block, x.shape[0], w2.shape[-2], group_sizes, x.dtype)


def sum_rows(
    rows: jax.Array,
    token_rows: jax.Array,
    dtype: jnp.dtype | None = None,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Each token's rows, summed in float32 in the order of its choices; zeros for a token without rows.

    rows: [rows, features]; token_rows: int32 [tokens, top_k], -1 for none. Returns [tokens, features] of `dtype`
    (default float32), rounded once. The kernel gives the same bits.
    """
    dtype = jnp.dtype(dtype or jnp.float32)
    unavailable = expert_rows_kernel.sum_unavailable(rows, token_rows, dtype)
    if choose("sum_rows", implementation, unavailable) == "kernel":
        return expert_rows_kernel.sum_rows(rows, token_rows, dtype)
    # Unrolled: a loop would end the command buffer that the kernels around it are captured in.
    total = jnp.zeros((token_rows.shape[0], rows.shape[1]), jnp.float32)
    for choice in range(token_rows.shape[1]):
        row = token_rows[:, choice]
        # where, not a product with 0: a padding row may hold NaN.
        total = total + jnp.where((row >= 0)[:, None], rows[jnp.maximum(row, 0)].astype(jnp.float32), 0.0)
    return total.astype(dtype)


def _use_kernel(
    weight: AnyWeight,
    op: str,
    implementation: Implementation,
    x: jax.Array | BlockScaledRows,
    activation_format: ActivationFormat,
    row_order: RowOrder,
) -> TypeGuard[PackedMXFP8Weight | jax.Array]:
    unavailable = _kernels(weight).unavailable(x, weight, row_order, activation_format)
    chosen = choose(op, implementation, unavailable)
    if chosen == "reference" and implementation == "auto" and jax.default_backend() == "gpu":
        _warn_once(op, str(unavailable))
    return chosen == "kernel"


@functools.cache
def _warn_once(op: str, unavailable: str) -> None:
    logger.warning("%s runs its reference, which is slow on a GPU: %s", op, unavailable)


def _kernels(weight: AnyWeight) -> ModuleType:
    return blackwell if _is_block_scaled(weight) else kernel


def _is_block_scaled(weight: AnyWeight) -> bool:
    return isinstance(weight, PackedMXFP8Weight) and weight.layout == "block_scaled"


def _plain(weight: AnyWeight, layer: jax.Array | int | None) -> tuple[Weight, jax.Array | int | None]:
    """A weight as the references take it: one layer of a packed stack is unpacked."""
    if not isinstance(weight, PackedMXFP8Weight):
        return weight, layer
    return unpack(select_layer(weight, layer)), None


def _check_groups(group_sizes: jax.Array, weight: AnyWeight, layer: jax.Array | int | None, features: int) -> None:
    dims = 3 if layer is None else 4
    if weight.ndim != dims:
        raise ValueError(
            f"weight has shape {weight.shape}; with layer={'None' if dims == 3 else 'given'} it has {dims} axes"
        )
    if weight.shape[-1] != features:
        raise ValueError(f"weight contracts {weight.shape[-1]} features, the rows have {features}")
    if group_sizes.shape != (weight.shape[-3],) or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; it must be int32[{weight.shape[-3]}]"
        )


def _rows_times(x: jax.Array, weight: Weight, layer: jax.Array | int | None, group: jax.Array) -> jax.Array:
    """x [rows, in] times one group's matrix, as float32 [rows, out]."""
    stack = weight if layer is None else jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weight)
    index = group if layer is None else jnp.asarray(layer, jnp.int32).reshape(()) * weight.shape[1] + group
    matrix = decode(select_layer(stack, index), x.dtype)
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _by_blocks(
    block: Callable[[jax.Array, jax.Array], jax.Array],
    num_rows: int,
    width: int,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
    """Runs `block(rows int32 [block], group) -> float32 [block, width]` over blocks of rows of one group each.

    Work grows with the rows and the groups that have any, not with their product, as a masked or a
    `jax.lax.ragged_dot` reference would on a CPU.
    """
    if num_rows == 0:
        return jnp.zeros((0, width), dtype)
    blocks = RowBlocks(group_sizes, num_rows)

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        here = blocks.at(index)
        y = jnp.where(here.inside[:, None], block(here.rows, here.group), 0.0)
        # Zeros written past a group's end are written over by the next group's first block.
        return jax.lax.dynamic_update_slice(out, y.astype(dtype), (here.start, 0))

    out = jax.lax.fori_loop(0, blocks.count, step, jnp.zeros((num_rows + blocks.size, width), dtype))
    return out[:num_rows]
