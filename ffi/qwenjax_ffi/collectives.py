"""Collectives over a mesh axis: XLA's, and kernels of our own over symmetric memory where the ranks have it.

Every collective takes and returns `epochs`, the int32 array in which a rank counts the collectives it ran. It makes
the order of collectives a data dependency, so that all ranks run them in the same order (kernels that spin on their
peers would deadlock otherwise), and holds the count in device memory, where a replayed CUDA graph can advance it. With
a symmetric heap behind it, it also says where every rank's memory is: the count is its first word, and the rest, which
collectives leave as it is, are addresses (`qwenjax_kernels.heap_layout`). `fresh_epochs` makes it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax_ffi import all_reduce_kernel as kernels
from qwenjax_ffi.all_reduce_choice import Algorithm, choose_algorithm
from qwenjax_ffi.expert_rows_kernel import sum_unavailable
from qwenjax_ffi.grouped_gemm import sum_rows
from qwenjax_ffi.implementation import Implementation, choose, with_gradient
from qwenjax_ffi.norm import add_rms_norm
from qwenjax_ffi.symmetric_memory import SymmetricHeap
from qwenjax_ffi.symmetric_memory_exchange import PeerError, SymmetricMemoryUnavailable
from qwenjax_ffi.token_exchange_kernel import ExchangeRows
from qwenjax_ffi.weights import select_layer
from qwenjax_kernels.heap_layout import (
    MAX_BLOCKS,
    MAX_RANKS,
    RANK_WORD,
    TEAM_THREADS,
    TILE_BYTES,
    UNIT_WORDS,
    VECTOR,
    num_words,
)

logger = logging.getLogger(__name__)

AxisName = str | Sequence[str]
KERNEL_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class Heap(NamedTuple):
    """What is known of the heap behind an epoch array while a program is traced."""

    ranks: int
    multicast: bool
    units: int = 0  # of room for dispatch and combine


def fresh_epochs(mesh: Mesh, axis_name: str, exchange: ExchangeRows | None = None) -> jax.Array:
    """A mesh's epoch array before its first collective: int32 [ranks * words], `words` of them on each rank.

    exchange: the rows that dispatch and combine will move at most, where they are used.

    Where `axis_name` holds all devices of the mesh, more than one, and they are GPUs that can map each other's memory,
    a heap is behind it, which the mesh keeps until `close_heap`. Elsewhere words is 1; where that is because the
    memory cannot be mapped, a warning says so, once. Raises PeerError where a collective of the heap gave up waiting.
    """
    heap = mesh_heap(mesh, axis_name, exchange)
    if heap is not None:
        heap.check()
        with jax.ensure_compile_time_eval():  # addresses are values, also where shapes alone are asked for
            return heap.epochs()
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    return jax.device_put(np.zeros(mesh.size, np.int32), sharding)


def close_heap(mesh: Mesh, axis_name: str) -> None:
    """Frees the heaps behind `fresh_epochs`; their epoch arrays are void then, and new heaps are made if asked for."""
    for key in [key for key in _heaps if key[:2] == (mesh, axis_name)]:
        heap = _heaps.pop(key)
        if heap is not None:
            heap.close()


def mesh_heap(mesh: Mesh, axis_name: str, exchange: ExchangeRows | None = None) -> SymmetricHeap | None:
    """The heap behind `fresh_epochs`, made when it is first asked for; None where there is none.

    One with more room for `exchange` than is asked for does as well; with less, another heap is made beside it.
    """
    units = exchange.units if exchange else 0
    roomy = [key for key in _heaps if key[:2] == (mesh, axis_name) and key[2] >= units]
    key = min(roomy, key=lambda key: key[2], default=(mesh, axis_name, units))
    if key not in _heaps:
        _heaps[key] = _make_heap(*key)
    return _heaps[key]


_heaps: dict[tuple[Mesh, str, int], SymmetricHeap | None] = {}


def _make_heap(mesh: Mesh, axis_name: str, units: int) -> SymmetricHeap | None:
    device = mesh.local_devices[0]
    if mesh.size == 1 or mesh.shape[axis_name] != mesh.size or device.platform == "cpu":
        return None
    try:
        if mesh.size > MAX_RANKS:
            raise SymmetricMemoryUnavailable(f"{mesh.size} ranks; the kernels are for {MAX_RANKS} and fewer")
        if importlib.util.find_spec("cutlass") is None:
            raise SymmetricMemoryUnavailable("CuTeDSL (nvidia-cutlass-dsl) is not installed")
        capability = getattr(device, "compute_capability", "unknown")
        if capability not in ("9.0", "10.0", "10.3"):
            raise SymmetricMemoryUnavailable(f"compute capability {capability}; the kernels are for 9.0 and 10.x")
        processors = getattr(device, "core_count", MAX_BLOCKS)
        if processors < MAX_BLOCKS:
            raise SymmetricMemoryUnavailable(
                f"{processors} multiprocessors; blocks that wait for one another are {MAX_BLOCKS}, all resident at once"
            )
        return SymmetricHeap(mesh, axis_name, exchange_units=units)
    except SymmetricMemoryUnavailable as error:
        logger.warning(
            "no symmetric memory over %s: %s. Collectives there run as XLA's (psum, all_to_all)", axis_name, error
        )
        return None


def unarmed(epochs: jax.Array, ranks: int) -> jax.Array:
    """An epoch array of all ranks with which kernels return at once and write nothing, as `SymmetricHeap.epochs` says.

    epochs: int32 [ranks * words]; returned as it is where no heap is behind it.
    """
    if epochs.size == ranks:
        return epochs

    def without_rank(epochs: jax.Array) -> jax.Array:
        return epochs.reshape(ranks, -1).at[:, RANK_WORD].set(-(1 << 31)).reshape(-1)

    # Of the same sharding, or a jitted function might be compiled once for these and once for others.
    return jax.jit(without_rank, out_shardings=epochs.sharding)(epochs)


def peer_failure(mesh: Mesh) -> PeerError | None:
    """What a collective of this process on the mesh failed with, where it gave up waiting for a rank."""
    for (of, *_), heap in _heaps.items():
        if of == mesh and heap is not None:
            try:
                heap.check()
            except PeerError as error:
                return error
    return None


def advance(epochs: jax.Array) -> jax.Array:
    """The epochs after one more collective that was not a kernel's."""
    return epochs + 1 if epochs.shape[0] == 1 else epochs.at[0].add(1)


def heap_of(epochs: jax.Array, ranks: int) -> Heap | None:
    """The heap of `ranks` ranks behind an epoch array; None where there is none, or it is of other ranks."""
    units = epochs.shape[0] // UNIT_WORDS
    for multicast in (False, True):
        if ranks > 1 and epochs.shape[0] == num_words(ranks, multicast, units):
            return Heap(ranks, multicast, units)
    return None


def heap_behind(axis_name: AxisName, epochs: jax.Array) -> tuple[Heap | None, str | None]:
    """The heap behind the epochs, of the ranks of `axis_name`; or why there is none."""
    ranks = jax.lax.axis_size(axis_name)
    heap = heap_of(epochs, ranks)
    if epochs.shape[0] == 1:
        return None, "no symmetric heap is behind the epochs (qwenjax_ffi.collectives.fresh_epochs makes it)"
    if heap is None:
        return None, f"the axis {axis_name} has {ranks} ranks, the heap behind the epochs has others"
    return heap, None


def all_reduce(
    x: jax.Array,
    axis_name: AxisName,
    epochs: jax.Array,
    *,
    token_rows: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The sum of x over the ranks of `axis_name`, on every rank; call it under shard_map.

    x: any shape and float dtype, the same on every rank; epochs: int32 [words]. Returns (sum, epochs, advanced by one;
    x and the epochs as they are on an axis of one rank).
    The kernel takes bfloat16, float16 and float32, adds in float32 (over peer memory in the order of the ranks) and
    rounds once; all ranks get the same bits. Ranks that call it with different shapes fail instead of mixing them up.

    token_rows: int32 [tokens, top_k]; where given, x is rows [rows, features], as many as a rank has, and what is
    summed over the ranks is `grouped_gemm.sum_rows` of them, rounded to x's dtype: [tokens, features]. The two-shot
    kernel over peer memory adds the rows up as it sends them, with the same bits.
    """
    message = _summed_over(x, token_rows)
    heap, why = _kernel_for(message, axis_name, epochs)
    if token_rows is not None and (implementation == "reference" or not adds_up_rows(x, token_rows, axis_name, epochs)):
        x, token_rows = sum_rows(x, token_rows, x.dtype, implementation=implementation), None
    if choose("all_reduce", implementation, why) == "reference":
        return _all_reduce_reference(x, axis_name, epochs)
    assert heap is not None
    if x.size == 0:
        return x, advance(epochs)
    algorithm = _algorithm(message, heap)
    call = with_gradient(
        lambda x, rows, epochs: kernels.all_reduce(x, epochs, heap.ranks, algorithm, rows),
        lambda x, rows, epochs: all_reduce(x, axis_name, epochs, token_rows=rows, implementation="reference"),
    )
    return call(x, token_rows, epochs)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    eps: float,
    axis_name: AxisName,
    epochs: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    token_rows: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """residual + the sum of x over the ranks of `axis_name`, and its RMSNorm: what follows attention in a layer.

    x, residual: [..., features]; weight: [features], or a stack [layers, features] of which `layer` (int32 [1] or
    scalar) is taken, all of one dtype; token_rows and x with it: as `all_reduce` has them, residual [tokens, features]
    then. Returns (residual + sum, its norm times weight, the advanced epochs); the sum is rounded to x's dtype before
    it is added, as where the three are called apart. On an axis of one rank it is `norm.add_rms_norm`.
    """
    message = _summed_over(x, token_rows)
    heap, why = _kernel_for(message, axis_name, epochs)
    row_bytes = message.shape[-1] * message.dtype.itemsize
    if why is None and (residual.dtype != x.dtype or weight.dtype != x.dtype):
        why = f"x is {x.dtype}, the residual {residual.dtype} and the weight {weight.dtype}; the kernel takes one dtype"
    if why is None and (message.size == 0 or row_bytes % VECTOR or row_bytes > TILE_BYTES):
        shape = list(message.shape)
        why = f"x is {shape}: rows of {row_bytes} bytes; the kernel takes multiples of {VECTOR} to {TILE_BYTES}"
    features = message.shape[-1:]
    if residual.shape != message.shape or weight.shape[-1:] != features or weight.ndim != (1 if layer is None else 2):
        raise ValueError(f"residual {residual.shape} and weight {weight.shape} do not fit x {message.shape}")
    adds_up = why is None and implementation != "reference"
    if token_rows is not None and not (adds_up and adds_up_rows(x, token_rows, axis_name, epochs)):
        x, token_rows = sum_rows(x, token_rows, x.dtype, implementation=implementation), None
    if jax.lax.axis_size(axis_name) == 1 and implementation != "kernel":
        return *add_rms_norm(residual, x, weight, eps, layer, implementation=implementation), epochs
    weight = select_layer(weight, layer)

    def apart(
        summing: Implementation,
        x: jax.Array,
        token_rows: jax.Array | None,
        residual: jax.Array,
        weight: jax.Array,
        epochs: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        total, epochs = all_reduce(x, axis_name, epochs, token_rows=token_rows, implementation=summing)
        return *add_rms_norm(residual, total, weight, eps, implementation="reference"), epochs

    if choose("all_reduce_rms_norm", implementation, why) == "reference":
        return apart(implementation, x, token_rows, residual, weight, epochs)
    assert heap is not None
    algorithm = _algorithm(message, heap)
    call = with_gradient(
        lambda x, rows, residual, weight, epochs: kernels.all_reduce_rms_norm(
            x, residual, weight, eps, epochs, heap.ranks, algorithm, rows
        ),
        functools.partial(apart, "reference"),
    )
    return call(x, token_rows, residual, weight, epochs)


def _summed_over(
    x: jax.Array | jax.ShapeDtypeStruct, token_rows: jax.Array | jax.ShapeDtypeStruct | None
) -> jax.ShapeDtypeStruct:
    """What is summed over the ranks: x, or a token's rows of it, added up."""
    return jax.ShapeDtypeStruct(x.shape if token_rows is None else (token_rows.shape[0], x.shape[1]), x.dtype)


def _algorithm(message: jax.ShapeDtypeStruct, heap: Heap) -> Algorithm:
    return choose_algorithm(message.size * message.dtype.itemsize, heap.ranks, heap.multicast)


def adds_up_rows(
    x: jax.Array | jax.ShapeDtypeStruct,
    token_rows: jax.Array | jax.ShapeDtypeStruct,
    axis_name: AxisName,
    epochs: jax.Array,
) -> bool:
    """Whether a kernel of `all_reduce` adds such rows up as it sends them: two-shot over peer memory alone does, where
    a row is tiles of 512 bytes and more, or one of less; tiles of 4,168 features would be of 16 bytes."""
    message = _summed_over(x, token_rows)
    heap, _ = _kernel_for(message, axis_name, epochs)
    return (
        heap is not None
        and _algorithm(message, heap) == "two_shot"
        and fits_tiles(x.shape[1])
        and sum_unavailable(x, token_rows, x.dtype) is None
    )


def fits_tiles(features: int) -> bool:
    """Whether bfloat16 rows of so many features divide into tiles of 32 vectors and more, whatever the tiles' limit,
    which is TEAM_THREADS and more."""
    vectors = 2 * features // VECTOR
    return any(vectors % tile == 0 for tile in range(max(1, min(vectors, 32)), TEAM_THREADS + 1))


def _all_reduce_reference(x: jax.Array, axis_name: AxisName, epochs: jax.Array) -> tuple[jax.Array, jax.Array]:
    if jax.lax.axis_size(axis_name) == 1:
        return x, epochs
    x, epochs = jax.lax.optimization_barrier((x, epochs))
    # A second barrier, or the next collective might begin before this one has its result.
    return jax.lax.optimization_barrier((jax.lax.psum(x, axis_name), advance(epochs)))


def _kernel_for(x: jax.ShapeDtypeStruct, axis_name: AxisName, epochs: jax.Array) -> tuple[Heap | None, str | None]:
    """The heap that an all-reduce kernel would use; or why there can be none."""
    heap, why = heap_behind(axis_name, epochs)
    if heap is None:
        return None, why
    if x.dtype not in KERNEL_DTYPES:
        return None, f"x is {x.dtype}, the kernel takes bfloat16, float16 and float32"
    if x.size >= 1 << 31:
        return None, f"x has {x.size:,} elements, the kernel takes fewer than 2^31"
    return heap, None
