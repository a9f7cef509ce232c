"""A decoder layer's small kernels as JAX functions, those that treat each token by itself: norms, rotation, routing.

`norm.add_rms_norm`, `attention_inputs` and `routing.top_k_experts` define the results; the functions here that end in
`unavailable` say why a kernel cannot run. A weight or norm is a stack of all layers, of which `layer`, int32 [1], is
taken: a slice of it would be a launch by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax_ffi.implementation import gpu_unavailable
from qwenjax_kernels.expert_rows_limits import MAX_EXPERTS, MAX_TOP_K

MAX_FEATURES = 16384  # of add_rms_norm, whose threads keep a row in registers
MAX_HEAD_DIM = 256
MAX_ROUTED_TOKENS, MAX_ROUTED_FEATURES = 64, 4096  # of router_logits


@functools.cache
def machine_unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None where they can."""
    return gpu_unavailable(("9.0", "10.0", "10.3"), "Hopper and Blackwell")


def add_rms_norm_unavailable(residual: jax.Array, x: jax.Array, weight: jax.Array) -> str | None:
    """Why no kernel can add and normalise these on this machine; None where one can."""
    if any(array.dtype != jnp.bfloat16 for array in (residual, x, weight)):
        return f"the residual is {residual.dtype}, x {x.dtype} and the weight {weight.dtype}; the kernel takes bfloat16"
    if not x.size:
        return f"x is {list(x.shape)}, which is empty"
    if x.shape[-1] % 8 or x.shape[-1] > MAX_FEATURES:
        return f"rows of {x.shape[-1]} features; the kernel takes multiples of 8 up to {MAX_FEATURES}"
    return machine_unavailable()


def head_norms_unavailable(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> str | None:
    """Why no kernel can norm and rotate these heads on this machine; None where one can."""
    if any(array.dtype != jnp.bfloat16 for array in (qkv, q_norm, k_norm)):
        return f"heads are {qkv.dtype} and their norms {q_norm.dtype} and {k_norm.dtype}; the kernel takes bfloat16"
    if not qkv.size:
        return f"the heads are {list(qkv.shape)}, which is empty"
    if q_norm.shape[-1] % 4 or q_norm.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim is {q_norm.shape[-1]}; the kernel takes multiples of 4 up to {MAX_HEAD_DIM}"
    return machine_unavailable()


def top_k_unavailable(logits: jax.Array, top_k: int) -> str | None:
    """Why no kernel can route by these logits on this machine; None where one can."""
    if logits.dtype != jnp.float32 or logits.ndim != 2:
        return f"logits are {logits.dtype}{list(logits.shape)}; the kernel takes float32[tokens, experts]"
    if not logits.size:
        return "there are no tokens"
    if logits.shape[1] > MAX_EXPERTS or not 1 <= top_k <= min(MAX_TOP_K, logits.shape[1]):
        return f"{top_k} of {logits.shape[1]} experts; the kernel is for 1 to {MAX_TOP_K} of at most {MAX_EXPERTS}"
    return machine_unavailable()


def router_logits_unavailable(x: jax.Array, weight: jax.Array) -> str | None:
    """Why no kernel can make these logits on this machine; None where one can."""
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"x is {x.dtype} and the weight {weight.dtype}; the kernel takes bfloat16"
    if not 1 <= x.shape[0] <= MAX_ROUTED_TOKENS:
        return f"{x.shape[0]} tokens; the kernel is for 1 to {MAX_ROUTED_TOKENS}"
    if x.shape[1] % 8 or not 8 <= x.shape[1] <= MAX_ROUTED_FEATURES:
        return f"rows of {x.shape[1]} features; the kernel takes multiples of 8 up to {MAX_ROUTED_FEATURES}"
    return machine_unavailable()


def add_rms_norm(
    residual: jax.Array, x: jax.Array, weight: jax.Array, layer: jax.Array | int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """residual, x: [..., features]; weight: [layers, features]. Returns the sum and its norm, both of x's shape."""
    from cutlass.jax import cutlass_call

    features = x.shape[-1]
    problem = (x.size // features, features, eps)
    rows = jax.ShapeDtypeStruct((x.size // features, features), x.dtype)
    call = cutlass_call(
        _add_rms_norm_launcher(*problem),
        output_shape_dtype=(rows, rows),
        compile_key=("qwenjax add_rms_norm", *problem),
    )
    total, normed = call(residual.reshape(rows.shape), x.reshape(rows.shape), weight, _index(layer))
    return total.reshape(x.shape), normed.reshape(x.shape)


def head_norms(
    qkv: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    layer: jax.Array | int,
    eps: float,
    cos: jax.Array,
    sin: jax.Array,
    kv_heads: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Shapes as `attention_inputs`'."""
    from cutlass.jax import cutlass_call

    *lead, width = qkv.shape
    head_dim = q_norm.shape[-1]
    q_heads = width // head_dim - 2 * kv_heads
    tokens = qkv.size // width
    problem = (tokens, q_heads, kv_heads, head_dim, eps)
    call = cutlass_call(
        _head_norms_launcher(*problem),
        output_shape_dtype=tuple(
            jax.ShapeDtypeStruct((*lead, heads, head_dim), qkv.dtype) for heads in (q_heads, kv_heads, kv_heads)
        ),
        compile_key=("qwenjax head_norms", *problem),
    )
    return call(qkv, q_norm, k_norm, _index(layer), cos, sin)


def top_k_experts(logits: jax.Array, valid: jax.Array, top_k: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """logits: float32 [tokens, experts]; valid: int32 [tokens], 0 for padding."""
    from cutlass.jax import cutlass_call

    tokens, experts = logits.shape
    problem = (tokens, experts, top_k, normalise)
    call = cutlass_call(
        _top_k_launcher(*problem),
        output_shape_dtype=tuple(jax.ShapeDtypeStruct((tokens, top_k), dtype) for dtype in (jnp.float32, jnp.int32)),
        compile_key=("qwenjax top_k_experts", *problem),
    )
    return call(logits, valid)


def router_logits(x: jax.Array, weight: jax.Array, layer: jax.Array | int) -> jax.Array:
    """float32 [tokens, experts] of bfloat16 x [tokens, features] and a layer of weight [layers, experts, features].

    The kernel by itself, which tests hold that of `experts_kernel`'s chain against; the model runs it there alone. For
    what `router_logits_unavailable` lets pass.
    """
    from cutlass.jax import cutlass_call

    problem = (x.shape[0], weight.shape[1], x.shape[1])
    call = cutlass_call(
        _router_launcher(*problem),
        output_shape_dtype=jax.ShapeDtypeStruct(problem[:2], jnp.float32),
        compile_key=("qwenjax router_logits", *problem),
    )
    logits: jax.Array = call(x, weight, _index(layer))
    return logits


def _index(layer: jax.Array | int) -> jax.Array:
    return jnp.asarray(layer, jnp.int32).reshape(1)


@functools.cache
def _add_rms_norm_launcher(tokens: int, features: int, eps: float) -> Any:
    """The `@cute.jit` function of one problem, kept so that its compilation is found again."""
    import cutlass.cute as cute

    from qwenjax_kernels.add_rms_norm import AddRmsNorm

    kernel = AddRmsNorm(tokens=tokens, features=features, eps=eps)

    @cute.jit
    def launch(stream, residual, x, weight, layer, total, normed):  # type: ignore[no-untyped-def]
        kernel.launch(stream, residual, x, None, weight, layer, total, normed)

    return launch


@functools.cache
def _head_norms_launcher(tokens: int, q_heads: int, kv_heads: int, head_dim: int, eps: float) -> Any:
    """The same of the heads."""
    import cutlass.cute as cute

    from qwenjax_kernels.head_norms import HeadNorms

    kernel = HeadNorms(tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, eps=eps)

    @cute.jit
    def launch(stream, qkv, q_norm, k_norm, layer, cos, sin, q, k, v):  # type: ignore[no-untyped-def]
        kernel.launch(stream, qkv, q_norm, k_norm, layer, cos, sin, q, k, v)

    return launch


@functools.cache
def _top_k_launcher(tokens: int, experts: int, top_k: int, normalise: bool) -> Any:
    """The same of the router."""
    import cutlass.cute as cute

    from qwenjax_kernels.top_k_experts import TopKExperts

    kernel = TopKExperts(tokens=tokens, experts=experts, top_k=top_k, normalise=normalise)

    @cute.jit
    def launch(stream, logits, valid, weights, ids):  # type: ignore[no-untyped-def]
        kernel.launch(stream, logits, valid, weights, ids)

    return launch


@functools.cache
def _router_launcher(tokens: int, experts: int, features: int) -> Any:
    """The same of its logits."""
    import cutlass.cute as cute

    from qwenjax_kernels.router_logits import RouterLogits

    kernel = RouterLogits(tokens=tokens, experts=experts, features=features)

    @cute.jit
    def launch(stream, x, weight, layer, logits):  # type: ignore[no-untyped-def]
        kernel.launch(stream, x, weight, layer, logits)

    return launch
