"""What attention attends to: the paged KV cache of a mesh, which programs take, write in place and return, or nothing
but the tokens of the call itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax.config import ModelConfig
from qwenjax.mesh import DATA, MODEL
from qwenjax_ffi import attention_chain_kernel
from qwenjax_ffi.activations import ActivationFormat
from qwenjax_ffi.attention import causal_attention, write_and_attend
from qwenjax_ffi.attention_chain_kernel import AttentionWeights

PAGE_SIZE = 64  # tokens a page; TMA and cuDNN want 64 or more, smaller pages waste less of a short sequence's last one

# Pages are spread over the data ranks, each with its own requests; heads over the model ranks.
CACHE_SPEC = PartitionSpec(None, DATA, MODEL, None, None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values, [layers, pages, kv_heads, page_size, head_dim] each (HND pages).

    kv_heads is the model's number, or the model ranks' where there are more of those (each then holds a copy of the
    one head that its query heads share).
    """

    keys: jax.Array
    values: jax.Array

    @property
    def page_size(self) -> int:
        return self.keys.shape[3]


def create_cache(
    config: ModelConfig, mesh: Mesh, pages_per_rank: int, dtype: jnp.dtype, page_size: int = PAGE_SIZE
) -> KVCache:
    """A zeroed cache of `pages_per_rank` pages on each data rank, sharded by CACHE_SPEC."""
    kv_heads = max(config.num_key_value_heads, mesh.shape[MODEL])
    shape = (config.num_hidden_layers, pages_per_rank * mesh.shape[DATA], kv_heads, page_size, config.head_dim)
    # Made on the devices: a host array of this size would be the largest of the program.
    sharding = NamedSharding(mesh, CACHE_SPEC)
    zeros = jax.jit(lambda: KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)), out_shardings=sharding)
    return zeros()


class AttentionContext(Protocol):
    """The tokens of a call and what else they may attend to; a pytree, carried through the layers.

    positions: int32 [batch, tokens], -1 for padding.
    """

    @property
    def positions(self) -> jax.Array: ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> tuple[jax.Array, Self]:
        """Attention of q [batch, tokens, q_heads, head_dim] over k and v [batch, tokens, kv_heads, head_dim] and what
        came before them, in q's shape; and the context that holds them for later calls."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedContext:
    """Attends over cached pages, the call's own tokens included. page_table: int32 [batch, max_pages]."""

    cache: KVCache
    page_table: jax.Array
    positions: jax.Array

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> tuple[jax.Array, Self]:
        out, keys, values = write_and_attend(
            q, k, v, self.cache.keys, self.cache.values, self.page_table, self.positions, layer
        )
        return out, replace(self, cache=KVCache(keys, values))

    def attend_layer(
        self,
        x: jax.Array,
        weights: AttentionWeights,
        rotary: tuple[jax.Array, jax.Array],
        activation_format: ActivationFormat,
        norm: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[tuple[jax.Array, ...], Self] | None:
        """`attend` from a layer's input to its output projection or, with norm, past it, with the arguments and results
        of `attention_chain_kernel.attend`; None where its kernels cannot run."""
        caches = self.cache.keys, self.cache.values
        if attention_chain_kernel.unavailable(x, weights, *caches, activation_format, norm) is not None:
            return None
        keys, values, *found = attention_chain_kernel.attend(
            x, weights, rotary, *caches, self.page_table, self.positions, norm
        )
        return tuple(found), replace(self, cache=KVCache(keys, values))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SelfContext:
    """Attends over the call's own tokens alone: whole sequences, as in training."""

    positions: jax.Array

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> tuple[jax.Array, Self]:
        return causal_attention(q, k, v, self.positions), self
