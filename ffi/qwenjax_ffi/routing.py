"""Which tokens go to which experts, and the rows of a rank's experts in the order its matmuls want."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwenjax_ffi import expert_rows_kernel as kernels
from qwenjax_ffi import token_kernels
from qwenjax_ffi.implementation import Implementation, choose, with_gradient


def top_k_experts(
    logits: jax.Array,
    top_k: int,
    normalise: bool,
    valid: jax.Array | None = None,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Qwen3-MoE's router: softmax over all experts in float32, then the top k.

    logits: [tokens, experts]; valid: bool or int32 [tokens], false for padding (default: none is). Returns weights
    float32 [tokens, top_k], divided by their sum where `normalise`, and ids int32 [tokens, top_k], -1 for padding. Ties
    go to the lowest id; a token's ids are distinct whatever the logits are (NaN, infinite, all equal). The kernel takes
    probabilities below 2^-126 for zeros.
    """
    logits = logits.astype(jnp.float32)
    if valid is None:
        valid = jnp.ones(logits.shape[0], jnp.int32)
    valid = valid.astype(jnp.int32)

    def reference(logits: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
        if normalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, jnp.where(valid[:, None] != 0, ids.astype(jnp.int32), -1)

    unavailable = token_kernels.top_k_unavailable(logits, top_k)
    if choose("top_k_experts", implementation, unavailable) == "reference":
        return reference(logits, valid)
    call = with_gradient(lambda logits, valid: token_kernels.top_k_experts(logits, valid, top_k, normalise), reference)
    chosen: tuple[jax.Array, jax.Array] = call(logits, valid)
    return chosen


class ExpertRows(NamedTuple):
    """The (token, choice) pairs of some consecutive experts, sorted by expert; within one, by token, then by choice.

    row_token: int32 [tokens * top_k], the token of each row. group_sizes: int32 [experts], rows of each expert; rows
    at and after their sum are padding, never written and never read: what they hold is not defined (the reference puts
    the other pairs there, the kernel leaves the memory as it was), and a gather with them has to be masked afterwards.
    row_weight: float32 [tokens * top_k], the routing weight of each row. token_rows: int32 [tokens, top_k], the row of
    each pair, -1 where its expert is not among these.
    """

    row_token: jax.Array
    group_sizes: jax.Array
    row_weight: jax.Array
    token_rows: jax.Array


def sort_rows(
    ids: jax.Array,
    weights: jax.Array,
    first_expert: jax.Array | int,
    num_experts: int,
    *,
    implementation: Implementation = "auto",
) -> ExpertRows:
    """The rows of experts first_expert to first_expert + num_experts - 1.

    ids: int32 [tokens, top_k]; -1 marks a pair that goes nowhere (padding). weights: float32 [tokens, top_k].
    """
    if weights.shape != ids.shape:
        raise ValueError(f"ids are {list(ids.shape)} and weights {list(weights.shape)}; both are [tokens, top_k]")
    if choose("sort_rows", implementation, kernels.sort_unavailable(ids, weights, num_experts)) == "kernel":
        return ExpertRows(*kernels.sort_rows(ids, weights, first_expert, num_experts))
    tokens, top_k = ids.shape
    local = ids.reshape(-1) - first_expert
    here = (ids.reshape(-1) >= 0) & (local >= 0) & (local < num_experts)
    group = jnp.where(here, local, num_experts)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    sizes = jnp.zeros(num_experts + 1, jnp.int32).at[group].add(1)[:num_experts]
    return ExpertRows(
        row_token=order // top_k,
        group_sizes=sizes,
        row_weight=weights.reshape(-1)[order],
        token_rows=jnp.where(here, rank, -1).reshape(tokens, top_k),
    )
