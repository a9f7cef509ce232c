"""The experts of one rank as a chain of kernels in one call: sorting, both matmuls, adding up.

Each kernel is launched while the one before it still runs, as far as its blocks find room, and waits for it where it
needs what that one makes (programmatic dependent launch): its set-up and, for the down projection, its first weights
are then on their way already. That holds within one call alone, which is why there is one. The results are those of the
same kernels called apart, to the bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi import expert_rows_kernel, grouped_gemm_kernel
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.grouped_gemm_kernel import Problem
from qwenjax_ffi.packing import AnyWeight, PackedMXFP8Weight
from qwenjax_kernels.expert_rows_limits import MAX_TOP_K


def unavailable(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: AnyWeight,
    w2: AnyWeight,
    activation_format: ActivationFormat = "model",
) -> str | None:
    """Why the chain cannot run with these arguments on this machine; None where it can."""
    if any(isinstance(weight, PackedMXFP8Weight) and weight.layout != "fragments" for weight in (w13, w2)):
        return "a weight is packed for Blackwell, whose kernels are called apart"
    if ids.shape[1] > MAX_TOP_K or x.shape[1] % 8 or not x.size:
        return f"x is {list(x.shape)} with {ids.shape[1]} experts a token; sum_rows takes other shapes"
    return (
        expert_rows_kernel.sort_unavailable(ids, weights, w13.shape[1])
        or grouped_gemm_kernel.unavailable(x, w13, "gate_up", activation_format)
        or grouped_gemm_kernel.unavailable(x, w2, "plain", activation_format)
    )


def local_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: AnyWeight,
    w2: AnyWeight,
    layer: jax.Array | int,
    first_expert: jax.Array | int,
) -> jax.Array:
    """As `expert_parallel.local_experts`, for what `unavailable` lets pass."""
    (out,) = _call(x, ids, weights, w13, w2, layer, first_expert, (), None)
    return out


def local_experts_add_rms_norm(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: AnyWeight,
    w2: AnyWeight,
    layer: jax.Array | int,
    first_expert: jax.Array | int,
    norm: tuple[jax.Array, ...],
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """`norm.add_rms_norm` of a residual and what `local_experts` gives, its last kernel and the sum of rows in one.

    norm: the residual [tokens, hidden], the weights of norms [layers, hidden], as
    `token_kernels.add_rms_norm_unavailable` lets them pass, and the layer of theirs, int32.
    """
    residual, norm_weight, norm_layer = norm
    operands = residual, norm_weight, jnp.asarray(norm_layer, jnp.int32).reshape(1)
    total, normed = _call(x, ids, weights, w13, w2, layer, first_expert, operands, eps)
    return total, normed


def _call(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: AnyWeight,
    w2: AnyWeight,
    layer: jax.Array | int,
    first_expert: jax.Array | int,
    norm: tuple[jax.Array, ...],
    eps: float | None,
) -> tuple[jax.Array, ...]:
    """norm: nothing, or what `eps` belongs to: the residual, the weights of norms and the layer of theirs."""
    from cutlass.jax import cutlass_call

    tokens, top_k = ids.shape
    experts = w13.shape[1]
    pairs = tokens * top_k
    up = grouped_gemm_kernel.problem_of_experts("swiglu", w13, pairs)  # type: ignore[arg-type]
    down = grouped_gemm_kernel.problem_of_experts("row_weight", w2, pairs)  # type: ignore[arg-type]
    problem = (tokens, top_k, experts, x.shape[1], up, down, eps)
    between = (
        ((pairs,), jnp.int32),
        ((experts,), jnp.int32),
        ((pairs,), jnp.float32),
        ((tokens, top_k), jnp.int32),
        ((expert_rows_kernel.sort_chunks(tokens, top_k, experts), experts), jnp.int32),
        ((pairs, sum(up.widths)), x.dtype),
        ((pairs, x.shape[1]), x.dtype),
    )
    results = ((x.shape, x.dtype),) * (1 if eps is None else 2)
    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=tuple(jax.ShapeDtypeStruct(*shape) for shape in between + results),
        compile_key=("qwenjax local_experts", *problem),
    )
    matrices = tuple(weight.data if isinstance(weight, PackedMXFP8Weight) else weight for weight in (w13, w2))
    indices = tuple(jnp.asarray(index, jnp.int32).reshape(1) for index in (layer, first_expert))
    return tuple(call((x, ids, weights, *matrices, *indices), norm)[len(between) :])


@functools.cache
def _launcher(
    tokens: int, top_k: int, experts: int, features: int, up: Problem, down: Problem, eps: float | None
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.add_rms_norm import AddRmsNorm
    from qwenjax_kernels.sort_rows import SortRows
    from qwenjax_kernels.sum_rows import SumRows

    sort = SortRows(tokens=tokens, top_k=top_k, experts=experts)
    gate_up = grouped_gemm_kernel.make_kernel(up, follows="groups")
    project = grouped_gemm_kernel.make_kernel(down, follows="rows")

    @cute.jit
    def multiply(stream, operands, sorted_rows, h, rows):  # type: ignore[no-untyped-def]
        x, ids, weights, w13, w2, layer, first = operands
        row_token, sizes, row_weight, token_rows, counts = sorted_rows
        chunk_counts = counts if sort.chunks > 1 else None
        sort.launch(stream, ids, weights, first, row_token, sizes, row_weight, token_rows, chunk_counts)
        gate_up.launch(stream, x, w13, sizes, row_token, None, layer, h)
        project.launch(stream, h, w2, sizes, None, row_weight, layer, rows)

    if eps is None:
        add = SumRows(tokens=tokens, top_k=top_k, features=features, out_dtype=cutlass.BFloat16, follows=True)

        @cute.jit
        def launch(  # type: ignore[no-untyped-def]
            stream, operands, norm, row_token, sizes, row_weight, token_rows, counts, h, rows, out
        ):
            multiply(stream, operands, (row_token, sizes, row_weight, token_rows, counts), h, rows)
            add.launch(stream, rows, token_rows, out)

        return launch

    add_norm = AddRmsNorm(tokens=tokens, features=features, eps=eps, top_k=top_k, follows=True)

    @cute.jit
    def launch_with_norm(  # type: ignore[no-untyped-def]
        stream, operands, norm, row_token, sizes, row_weight, token_rows, counts, h, rows, total, normed
    ):
        residual, norm_weight, norm_layer = norm
        multiply(stream, operands, (row_token, sizes, row_weight, token_rows, counts), h, rows)
        add_norm.launch(stream, residual, rows, token_rows, norm_weight, norm_layer, total, normed)

    return launch_with_norm
