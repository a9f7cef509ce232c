"""Filling the parameters of a mesh from a checkpoint: chunk by chunk, in parallel, each rank its own share."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from tqdm import tqdm

from qwenjax.checkpoint.mapping import Piece
from qwenjax.checkpoint.stored import StoredWeights
from qwenjax.quant.bits import float32_bits
from qwenjax.quant.format import NonFiniteError, check_finite
from qwenjax.quant.mxfp8 import quantise_weight
from qwenjax_ffi.packing import AnyWeight, PackedMXFP8Weight, empty_packed, pack, pack_into
from qwenjax_ffi.weights import MX_BLOCK, MXFP8Weight, Weight

_READERS = 8  # threads: they wait for the disk and for copies, both outside the interpreter's lock
MAX_CHUNK_BYTES = 32 << 20  # of a file in one read: large enough to stream, small beside any model
_MIN_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class _Read:
    """One chunk of a tensor and the devices that want it, each with the chunk's start in its shard."""

    source: str
    index: tuple[slice, ...]
    box: tuple[int, ...]
    parameter: str
    targets: tuple[tuple[jax.Device, tuple[int, ...]], ...]


class _Shard:
    """A device's part of a parameter while it is filled; the lock orders the donated updates.

    shape: the whole parameter's, abstract; local: the logical shape of the part. Where the parameter is packed, a layer
    is gathered beside the stack and packed into it when its last element has come.
    """

    def __init__(self, shape: Any, local: tuple[int, ...], device: jax.Device) -> None:
        self.local, self.device, self.lock = local, device, threading.Lock()
        self.buffer: AnyWeight = _zeros(shape, local, device)
        self.layers: dict[int, MXFP8Weight] = {}
        self.left = defaultdict[int, int](lambda: math.prod(local[self._layer_axes :]))

    @property
    def _layer_axes(self) -> int:
        return 1 if len(self.local) > 2 else 0

    def write(self, values: Any, start: np.ndarray, write: Callable[..., Weight]) -> None:
        """Writes a chunk and returns when it is done, since until then the update may read `values`."""
        with self.lock:
            if isinstance(self.buffer, PackedMXFP8Weight):
                self._write_packed(values, start, write)
            else:
                self.buffer = write(self.buffer, values, start)
            jax.block_until_ready(self.buffer)

    def _write_packed(self, values: Any, start: np.ndarray, write: Callable[..., Weight]) -> None:
        assert isinstance(self.buffer, PackedMXFP8Weight)
        layer = int(start[0]) if self._layer_axes else 0
        if layer not in self.layers:
            self.layers[layer] = _zeros_mxfp8((1,) * self._layer_axes + self.local[self._layer_axes :], self.device)
        start = np.where(np.arange(len(start)) < self._layer_axes, 0, start)
        written = jax.block_until_ready(write(self.layers[layer], values, start))
        assert isinstance(written, MXFP8Weight)
        self.layers[layer] = written
        self.left[layer] -= math.prod(values.shape)
        if self.left[layer] == 0:
            whole = self.layers.pop(layer)
            if self._layer_axes:
                self.buffer = _pack_layer(self.buffer, whole, np.int32(layer))
            else:
                self.buffer = pack(whole, self.buffer.row_order, self.buffer.layout)


class Filler:
    """Makes the parameters on their devices and fills them from the checkpoint."""

    def __init__(
        self, stored: StoredWeights, placed: dict[str, NamedSharding], shapes: dict[str, Any], progress: bool
    ) -> None:
        self.stored, self.placed, self.shapes, self.progress = stored, placed, shapes, progress
        largest = max(info.nbytes for info in stored.tensors.values())
        # A chunk is on the host up to four times at once: as read, as converted (twice the size, from bf16 to fp32)
        # and staged by JAX. The budget bounds all of them; but each thread's heap keeps the pages of what it freed.
        # Measured for 150 MB of bf16, loaded as such and as fp32: 3 to 4.5 times the largest tensor with chunks of an
        # eighth of it, 1 to 1.4 times with these.
        self.chunk_bytes = min(MAX_CHUNK_BYTES, max(largest // 64, _MIN_CHUNK_BYTES))
        self.budget = _Budget(largest)

    def fill(self, pieces: list[Piece]) -> dict[str, AnyWeight]:
        boxes = {name: _boxes(sharding, self.shapes[name].shape) for name, sharding in self.placed.items()}
        self.shards = {
            (name, device): _Shard(self.shapes[name], tuple(stop - start for start, stop in box), device)
            for name, by_device in boxes.items()
            for device, box in by_device.items()
        }
        reads = [read for piece in pieces for read in self._reads(piece, boxes[piece.parameter])]
        total = sum(self._bytes(read) for read in reads)
        with (
            ThreadPoolExecutor(_READERS) as pool,
            tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not self.progress) as bar,
        ):
            try:
                for done in pool.map(self._fill, reads):
                    bar.update(done)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return {name: self._assemble(name, list(by_device)) for name, by_device in boxes.items()}

    def _bytes(self, read: _Read) -> int:
        return self.stored.nbytes(read.source, read.box)

    def _reads(self, piece: Piece, boxes: dict[jax.Device, list[tuple[int, int]]]) -> Iterator[_Read]:
        """The chunks of a piece that this process's devices want, each read once however many want it."""
        wanted: dict[tuple[tuple[int, int], ...], list[jax.Device]] = defaultdict(list)
        for device, box in boxes.items():
            part = tuple(
                (max(start, low), min(start + size, high))
                for start, size, (low, high) in zip(piece.start, piece.box, box, strict=True)
            )
            if all(low < high for low, high in part):
                wanted[part].append(device)
        itemsize = self.stored.tensors[piece.source].dtype.itemsize
        for part, devices in wanted.items():
            for chunk in _chunks(part, max(1, self.chunk_bytes // itemsize)):
                index = tuple(
                    slice(low - start, high - start) for (low, high), start in zip(chunk, piece.start, strict=True)
                )
                targets = tuple(
                    (device, tuple(low - first for (low, _), (first, _) in zip(chunk, boxes[device], strict=True)))
                    for device in devices
                )
                counts = tuple(high - low for low, high in chunk)
                yield _Read(piece.source, index[-len(piece.shape) :], counts, piece.parameter, targets)

    def _fill(self, read: _Read) -> int:
        nbytes = self._bytes(read)
        values_bytes = int(np.prod(read.box)) * self._itemsize(read)
        with self.budget.of(nbytes + 2 * values_bytes):
            values = self._values(read)
            write = _write
            if self._is_quantised(read) and not isinstance(values, MXFP8Weight):
                _check_finite(values, read)
                write = _quantise_and_write
            for device, start in read.targets:
                self.shards[read.parameter, device].write(values, np.asarray(start, np.int32), write)
        return nbytes

    def _is_quantised(self, read: _Read) -> bool:
        return isinstance(self.shapes[read.parameter], MXFP8Weight | PackedMXFP8Weight)

    def _itemsize(self, read: _Read) -> int:
        return 4 if self._is_quantised(read) else self.shapes[read.parameter].dtype.itemsize

    def _values(self, read: _Read) -> np.ndarray | MXFP8Weight:
        """What to write: plain values of the parameter's dtype, those to quantise, or elements and scales as stored."""
        quantised = self._is_quantised(read)
        if quantised and self.stored.storage(read.source) == "mxfp8":
            elements, scales = self.stored.read_mxfp8(read.source, read.index)
            scales = scales.reshape(*read.box[:-1], read.box[-1] // MX_BLOCK)
            return MXFP8Weight(elements.reshape(read.box), scales)  # type: ignore[arg-type]
        values = self.stored.read(read.source, read.index).reshape(read.box)
        return values if quantised else values.astype(self.shapes[read.parameter].dtype, copy=False)

    def _assemble(self, name: str, devices: list[jax.Device]) -> AnyWeight:
        def whole(shape: jax.ShapeDtypeStruct, *buffers: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(shape.shape, self.placed[name], list(buffers))

        return jax.tree.map(whole, self.shapes[name], *[self.shards[name, device].buffer for device in devices])


class _Budget:
    """Bounds the bytes in flight; what is larger than all of it goes alone."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.changed = limit, 0, threading.Condition()

    def of(self, nbytes: int) -> _Claim:
        return _Claim(self, nbytes)


@dataclass
class _Claim:
    budget: _Budget
    nbytes: int

    def __enter__(self) -> None:
        with self.budget.changed:
            self.budget.changed.wait_for(
                lambda: self.budget.used == 0 or self.budget.used + self.nbytes <= self.budget.limit
            )
            self.budget.used += self.nbytes

    def __exit__(self, *_: object) -> None:
        with self.budget.changed:
            self.budget.used -= self.nbytes
            self.budget.changed.notify_all()


def _check_finite(values: np.ndarray, read: _Read) -> None:
    """Raises NonFiniteError with the name of the tensor and the place in it, as `qwenjax convert` does."""
    try:
        check_finite(values, float32_bits(values))
    except NonFiniteError as error:
        # The box has the parameter's axes; those that the tensor lacks lead.
        inside = error.index[len(error.index) - len(read.index) :]
        index = tuple(part.start + place for part, place in zip(read.index, inside, strict=True))
        raise NonFiniteError(index, error.value, read.source) from None


def _boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, list[tuple[int, int]]]:
    """Start and stop along every axis of each local device's shard."""
    return {
        device: [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    }


def _chunks(box: tuple[tuple[int, int], ...], elements: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The box in slabs of at most `elements`, cut along its first axes; single rows of the last axis stay whole."""
    size = int(np.prod([high - low for low, high in box]))
    axis = next((i for i, (low, high) in enumerate(box[:-1]) if high - low > 1), None)
    if size <= elements or axis is None:
        yield box
        return
    low, high = box[axis]
    step = max(1, elements * (high - low) // size)
    for start in range(low, high, step):
        slab = (*box[:axis], (start, min(start + step, high)), *box[axis + 1 :])
        yield from _chunks(slab, elements)


def _zeros(shape: Any, local: tuple[int, ...], device: jax.Device) -> AnyWeight:
    """Zeros of a part of a parameter that is an array, MXFP8Weight or PackedMXFP8Weight of abstract arrays."""
    if isinstance(shape, MXFP8Weight):
        return _zeros_mxfp8(local, device)

    def make() -> AnyWeight:
        if isinstance(shape, PackedMXFP8Weight):
            return empty_packed(local, shape.row_order, shape.layout)
        return jnp.zeros(local, shape.dtype)

    return jax.jit(make, out_shardings=SingleDeviceSharding(device))()


def _zeros_mxfp8(local: tuple[int, ...], device: jax.Device) -> MXFP8Weight:
    def make() -> MXFP8Weight:
        scales = jnp.zeros((*local[:-1], local[-1] // MX_BLOCK), jnp.uint8)
        return MXFP8Weight(jnp.zeros(local, jnp.float8_e4m3fn), scales)

    return jax.jit(make, out_shardings=SingleDeviceSharding(device))()


@partial(jax.jit, donate_argnums=0)
def _write(buffer: Weight, values: Weight, start: jax.Array) -> Weight:
    if isinstance(buffer, MXFP8Weight) and isinstance(values, MXFP8Weight):
        of_scales = [*start[:-1], start[-1] // MX_BLOCK]
        return MXFP8Weight(
            _update(buffer.elements, values.elements, list(start)),
            _update(buffer.scales, values.scales, of_scales),
        )
    assert not isinstance(buffer, MXFP8Weight)
    assert not isinstance(values, MXFP8Weight)
    return _update(buffer, values, list(start))


def _update(buffer: jax.Array, values: jax.Array, start: list[jax.Array]) -> jax.Array:
    if buffer.dtype.itemsize >= 4:
        return jax.lax.dynamic_update_slice(buffer, values, start)
    # XLA's CPU backend takes narrow floats through float32, the whole buffer at each write: 7.5 ms for 84 MB of
    # bfloat16, and as bits 0.35.
    bits = jnp.uint16 if buffer.dtype.itemsize == 2 else jnp.uint8
    into, update = (jax.lax.bitcast_convert_type(array, bits) for array in (buffer, values))
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(into, update, start), buffer.dtype)


@partial(jax.jit, donate_argnums=0)
def _quantise_and_write(buffer: MXFP8Weight, values: jax.Array, start: jax.Array) -> Weight:
    return _write(buffer, quantise_weight(values), start)


@partial(jax.jit, donate_argnums=0)
def _pack_layer(stack: PackedMXFP8Weight, whole: MXFP8Weight, layer: jax.Array) -> PackedMXFP8Weight:
    """whole: [1, ...], one layer of the stack."""
    return pack_into(stack, whole[0], layer)
