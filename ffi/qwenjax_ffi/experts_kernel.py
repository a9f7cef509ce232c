"""The experts of one rank as a chain of kernels in one call: sorting, both matmuls, adding up.

Each kernel is launched while the one before it still runs, as far as its blocks find room, and waits for it where it
needs what that one makes (programmatic dependent launch): its set-up and, for the down projection, its first weights
are then on their way already. That holds within one call alone, which is why there is one. The results are those of the
same kernels called apart, to the bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from qwenjax_ffi import expert_rows_kernel, grouped_gemm_kernel, token_kernels
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
    (out,) = _call(x, (ids, weights), w13, w2, layer, first_expert, (), None)
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
    total, normed = _call(x, (ids, weights), w13, w2, layer, first_expert, operands, eps)
    return total, normed


class Router(NamedTuple):
    """What chooses the experts of each token. weight: bfloat16 [layers, experts, hidden]; valid: bool [tokens], false
    for padding; top_k, normalise: as `routing.top_k_experts` takes them."""

    weight: jax.Array
    valid: jax.Array
    top_k: int
    normalise: bool


def routed_unavailable(
    x: jax.Array, router: Router, w13: AnyWeight, w2: AnyWeight, activation_format: ActivationFormat = "model"
) -> str | None:
    """Why `routed_experts_add_rms_norm` cannot run with these arguments on this machine; None where it can."""
    shapes = (router.top_k, jnp.int32), (router.top_k, jnp.float32), (w13.shape[1], jnp.float32)
    ids, weights, logits = cast(Any, [jax.ShapeDtypeStruct((x.shape[0], width), dtype) for width, dtype in shapes])
    return (
        token_kernels.router_logits_unavailable(x, router.weight)
        or token_kernels.top_k_unavailable(logits, router.top_k)
        or unavailable(x, ids, weights, w13, w2, activation_format)
    )


def routed_experts_add_rms_norm(
    x: jax.Array,
    router: Router,
    w13: AnyWeight,
    w2: AnyWeight,
    layer: jax.Array | int,
    norm: tuple[jax.Array, ...],
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """`local_experts_add_rms_norm` of all experts, those that the router chooses; the router's layer is theirs."""
    residual, norm_weight, norm_layer = norm
    operands = residual, norm_weight, jnp.asarray(norm_layer, jnp.int32).reshape(1)
    total, normed = _call(x, router, w13, w2, layer, 0, operands, eps)
    return total, normed


def _call(
    x: jax.Array,
    choice: tuple[jax.Array, jax.Array] | Router,
    w13: AnyWeight,
    w2: AnyWeight,
    layer: jax.Array | int,
    first_expert: jax.Array | int,
    norm: tuple[jax.Array, ...],
    eps: float | None,
) -> tuple[jax.Array, ...]:
    """choice: ids and weights, or who makes them; norm: nothing, or what `eps` belongs to: the residual, the weights of
    norms and the layer of theirs."""
    from cutlass.jax import cutlass_call

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens, experts = x.shape[0], w13.shape[1]
    top_k = choice.top_k if isinstance(choice, Router) else choice[0].shape[1]
    pairs = tokens * top_k
    up = grouped_gemm_kernel.problem_of_experts("swiglu", w13, pairs)  # type: ignore[arg-type]
    down = grouped_gemm_kernel.problem_of_experts("row_weight", w2, pairs)  # type: ignore[arg-type]
    normalise, chosen = None, choice
    made: tuple[jax.ShapeDtypeStruct, ...] = ()
    if isinstance(choice, Router):
        normalise = choice.normalise
        made = array(tokens, experts, dtype=jnp.float32), array(tokens, top_k), array(tokens, top_k, dtype=jnp.float32)
        chosen = choice.weight, choice.valid.astype(jnp.int32)
    problem = (tokens, top_k, experts, x.shape[1], up, down, eps, normalise)
    sorted_rows = (
        array(pairs),
        array(experts),
        array(pairs, dtype=jnp.float32),
        array(tokens, top_k),
        array(expert_rows_kernel.sort_chunks(tokens, top_k, experts), experts),
    )
    hidden = array(pairs, sum(up.widths), dtype=x.dtype), array(pairs, x.shape[1], dtype=x.dtype)
    results = (array(*x.shape, dtype=x.dtype),) * (1 if eps is None else 2)
    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=(made, sorted_rows, hidden, results),
        compile_key=("qwenjax local_experts", *problem),
    )
    matrices = tuple(weight.data if isinstance(weight, PackedMXFP8Weight) else weight for weight in (w13, w2))
    indices = tuple(jnp.asarray(index, jnp.int32).reshape(1) for index in (layer, first_expert))
    found: tuple[jax.Array, ...] = call((x, chosen, *matrices, *indices), norm)[-1]
    return found


@functools.cache
def _launcher(
    tokens: int,
    top_k: int,
    experts: int,
    features: int,
    up: Problem,
    down: Problem,
    eps: float | None,
    normalise: bool | None,
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again. normalise: None where ids
    and weights are there."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.add_rms_norm import AddRmsNorm
    from qwenjax_kernels.router_logits import RouterLogits
    from qwenjax_kernels.sort_rows import SortRows
    from qwenjax_kernels.sum_rows import SumRows
    from qwenjax_kernels.top_k_experts import TopKExperts

    routes = normalise is not None
    router: Any = RouterLogits(tokens=tokens, experts=experts, features=features) if routes else None
    choose: Any = None
    if normalise is not None:
        choose = TopKExperts(tokens=tokens, experts=experts, top_k=top_k, normalise=normalise, follows=True)
    sort = SortRows(tokens=tokens, top_k=top_k, experts=experts, follows=routes)
    gate_up = grouped_gemm_kernel.make_kernel(up, follows="groups")
    project = grouped_gemm_kernel.make_kernel(down, follows="rows")
    add: Any = None
    if eps is None:
        add = SumRows(tokens=tokens, top_k=top_k, features=features, out_dtype=cutlass.BFloat16, follows=True)
    else:
        add = AddRmsNorm(tokens=tokens, features=features, eps=eps, top_k=top_k, follows=True)

    @cute.jit
    def launch(stream, operands, norm, made, sorted_rows, hidden, results):  # type: ignore[no-untyped-def]
        x, choice, w13, w2, layer, first = operands
        row_token, sizes, row_weight, token_rows, counts = sorted_rows
        h, rows = hidden
        ids, weights = choice
        if cutlass.const_expr(routes):
            logits, ids, weights = made
            router.launch(stream, x, choice[0], layer, logits)
            choose.launch(stream, logits, choice[1], weights, ids)
        chunk_counts = counts if sort.chunks > 1 else None
        sort.launch(stream, ids, weights, first, row_token, sizes, row_weight, token_rows, chunk_counts)
        gate_up.launch(stream, x, w13, sizes, row_token, None, layer, h)
        project.launch(stream, h, w2, sizes, None, row_weight, layer, rows)
        if cutlass.const_expr(eps is None):
            add.launch(stream, rows, token_rows, results[0])
        else:
            residual, norm_weight, norm_layer = norm
            add.launch(stream, residual, rows, token_rows, norm_weight, norm_layer, *results)

    return launch
