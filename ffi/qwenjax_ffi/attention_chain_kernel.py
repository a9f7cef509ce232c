"""Attention of a layer as a chain of kernels in one call: from its input to the output projection's result.

The projections to queries, keys and values, the norms and rotation of heads, the writes to pages, attention and the
output projection. Each kernel is launched while the one before it still runs (programmatic dependent launch), as in
`experts_kernel`: the output projection's first weights are there when attention has ended. The results are those of the
same kernels called apart, to the bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi import attention_kernel, grouped_gemm_kernel, token_kernels
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.grouped_gemm_kernel import Problem
from qwenjax_ffi.packing import AnyWeight, PackedMXFP8Weight

MAX_STEP_TOKENS = (
    8  # of a sequence: a step with drafts. The kernels take more; as a chain they were compared with three
)


class AttentionWeights(NamedTuple):
    """A layer's attention, without biases. qkv: of queries, keys and values, [layers, heads * head_dim, hidden] each;
    output: [layers, hidden, query heads * head_dim]; norms: of query and key heads, [layers, head_dim] each, and what
    is added to their mean squares; layer: int32 scalar or [1], the layer of all stacks to use."""

    qkv: tuple[AnyWeight, ...]
    output: AnyWeight
    norms: tuple[jax.Array, jax.Array]
    eps: float
    layer: jax.Array | int


def unavailable(
    x: jax.Array,
    weights: AttentionWeights,
    key_cache: jax.Array,
    value_cache: jax.Array,
    activation_format: ActivationFormat = "model",
    norm: tuple[jax.Array, jax.Array] | None = None,
) -> str | None:
    """Why the chain cannot run with these arguments of `attend` on this machine; None where it can."""
    if x.shape[1] > MAX_STEP_TOKENS:
        return f"{x.shape[1]} tokens of a sequence; the chain is for decode steps of up to {MAX_STEP_TOKENS}"
    packed = [weight for weight in (*weights.qkv, weights.output) if isinstance(weight, PackedMXFP8Weight)]
    if len(packed) < 4 or any(weight.layout != "fragments" for weight in packed):
        return "a weight is no PackedMXFP8Weight of layout 'fragments'"
    if key_cache.dtype != x.dtype:
        return f"the tokens are {x.dtype} and the cache is {key_cache.dtype}"
    q, k, v = _heads(x, weights)
    width = sum(weight.shape[-2] for weight in packed[:3])
    rows: Any = jax.ShapeDtypeStruct((*x.shape[:2], width), x.dtype)
    reasons = (grouped_gemm_kernel.unavailable(x, weight, activation_format=activation_format) for weight in packed)
    return (
        grouped_gemm_kernel.apart(packed[:3])
        or next(filter(None, reasons), None)
        or token_kernels.head_norms_unavailable(rows, *weights.norms)
        or attention_kernel.writes_unavailable(k, v, key_cache, value_cache)
        or attention_kernel.unavailable(q, key_cache, value_cache)
        or (norm and token_kernels.add_rms_norm_unavailable(norm[0], x, norm[1]))
        or None
    )


def attend(
    x: jax.Array,
    weights: AttentionWeights,
    rotary: tuple[jax.Array, jax.Array],
    key_cache: jax.Array,
    value_cache: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    norm: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Both caches with the tokens in them, and what a layer's attention makes of x [batch, tokens, hidden], alike; with
    norm, the residual [batch, tokens, hidden] and the weights of norms [layers, hidden], instead of that
    `norm.add_rms_norm` of the residual and it.

    For what `unavailable` lets pass. rotary: cosines and sines as `attention_inputs` takes them; caches, page_table and
    positions as `attention.write_and_attend`.
    """
    from cutlass.jax import cutlass_call

    q, k, v = _heads(x, weights)
    tokens, hidden = q.shape[0] * q.shape[1], x.shape[-1]
    features = [array.size // tokens for array in (q, k, v)]
    attention, between = attention_kernel.problem_of(q, key_cache, page_table)
    problem = (
        grouped_gemm_kernel.problem_of_one_group(weights.qkv, tokens),  # type: ignore[arg-type]
        (tokens, q.shape[2], k.shape[2], q.shape[3], weights.eps),
        attention_kernel.writes_problem(k, key_cache, page_table),
        attention,
        grouped_gemm_kernel.problem_of_one_group([weights.output], tokens),  # type: ignore[list-item]
        None if norm is None else (tokens, hidden, weights.eps),
    )
    rows = jax.ShapeDtypeStruct((tokens, hidden), x.dtype)
    results = (
        jax.ShapeDtypeStruct(key_cache.shape, key_cache.dtype),
        jax.ShapeDtypeStruct(value_cache.shape, value_cache.dtype),
        (rows,) if norm is None else (rows, rows, rows),
        jax.ShapeDtypeStruct((tokens, sum(features)), x.dtype),
        *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, k, v)),
        jax.ShapeDtypeStruct((tokens, features[0]), x.dtype),
        *between,
    )
    call = cutlass_call(
        _launcher(*problem),
        output_shape_dtype=results,
        input_output_aliases={4: 0, 5: 1},
        compile_key=("qwenjax attention chain", *problem),
    )
    *projections, output = [jnp.expand_dims(weight.data, -4) for weight in (*weights.qkv, weights.output)]  # type: ignore[union-attr]
    index = jnp.asarray(weights.layer, jnp.int32).reshape(1)
    keys, values, found, *_ = call(
        (x.reshape(rows.shape), tuple(projections), output, jnp.full(1, tokens, jnp.int32)),
        (*weights.norms, *rotary),
        (page_table.astype(jnp.int32), positions.astype(jnp.int32), index),
        () if norm is None else (norm[0].reshape(rows.shape), norm[1]),
        key_cache,
        value_cache,
    )
    return keys, values, *(array.reshape(x.shape) for array in (found if norm is None else found[1:]))


def _heads(x: jax.Array, weights: AttentionWeights) -> tuple[Any, ...]:
    """Shapes and dtypes of queries, keys and values [batch, tokens, heads, head_dim]."""
    head_dim = weights.norms[0].shape[-1]
    return tuple(
        jax.ShapeDtypeStruct((*x.shape[:2], weight.shape[-2] // head_dim, head_dim), x.dtype) for weight in weights.qkv
    )


@functools.cache
def _launcher(
    qkv: Problem,
    heads: tuple[Any, ...],
    writes: tuple[int, ...],
    attention: tuple[Any, ...],
    output: Problem,
    norm: tuple[Any, ...] | None,
) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass
    import cutlass.cute as cute

    from qwenjax_kernels.add_rms_norm import AddRmsNorm
    from qwenjax_kernels.head_norms import HeadNorms

    project = grouped_gemm_kernel.make_kernel(qkv)
    tokens, q_heads, kv_heads, head_dim, eps = heads
    norm_heads = HeadNorms(tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, eps=eps, follows=True)
    write = attention_kernel.make_writes(True, *writes)
    attend = attention_kernel.make_attention(True, *attention)
    project_back = grouped_gemm_kernel.make_kernel(output, follows="rows")
    add_norm: Any = None
    if norm is not None:
        add_norm = AddRmsNorm(tokens=norm[0], features=norm[1], eps=norm[2], follows=True)

    @cute.jit
    def launch(  # type: ignore[no-untyped-def]
        stream, matrices, angles, paged, norm, keys, values, out, rows, q, k, v, attended, partial, stats
    ):
        x, projections, output, sizes = matrices
        q_norm, k_norm, cos, sin = angles
        page_table, positions, layer = paged
        project.launch(stream, x, projections, sizes, None, None, layer, rows)
        norm_heads.launch(stream, rows, q_norm, k_norm, layer, cos, sin, q, k, v)
        write.launch(stream, k, v, page_table, positions, layer, keys, values)
        attend.launch(stream, q, keys, values, page_table, positions, layer, attended, partial, stats)
        project_back.launch(stream, attended, output, sizes, None, None, layer, out[0])
        if cutlass.const_expr(add_norm is not None):
            residual, weight = norm
            add_norm.launch(stream, residual, out[0], None, weight, layer, out[1], out[2])

    return launch
