"""Loading a Hugging Face checkpoint onto a mesh: every rank reads its own slices, in parallel, into place."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from tqdm import tqdm

from qwenjax.checkpoint.mapping import EMBEDDING, MTP_PREFIX, TIED_HEAD, Piece, plan
from qwenjax.checkpoint.resolve import resolve
from qwenjax.checkpoint.safetensors import Checkpoint, CheckpointError
from qwenjax.config import ModelConfig
from qwenjax.model import abstract_model
from qwenjax.sharded_model import ShardedModel, by_name, from_names, shardings

_READERS = 8  # threads: they wait for the disk and for copies, both outside the interpreter's lock
_MAX_CHUNK_BYTES = 32 << 20  # of a file in one read: large enough to stream, small beside any model
_MIN_CHUNK_BYTES = 64 << 10


def load_model(
    model: str | Path,
    mesh: Mesh,
    dtype: jnp.dtype | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> ShardedModel:
    """The checkpoint `model` (a folder or a Hugging Face repo id) on `mesh`, as `dtype` (default: config.json's).

    Host memory beyond the parameters stays under twice the largest tensor of the files: tensors are read in chunks and
    written into their place in the stacked parameters. Raises ConfigError, CheckpointError or MeshError, each before
    any weight is read, save for a file that changes meanwhile.
    """
    folder = resolve(model, revision)
    config = ModelConfig.from_folder(folder)
    if config.quantization is not None:
        method = config.quantization.get("quant_method")
        raise CheckpointError(f"{folder}: is quantised ({method!r}); this loader reads bf16, fp16 and fp32 weights")
    checkpoint = Checkpoint(folder)
    # Checkpoints in the wild hold a head without a word in config.json.
    if any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors):
        config = replace(config, mtp_num_hidden_layers=1)
        config.check()
    graphdef, abstract = abstract_model(config, mesh, dtype)
    try:
        pieces = plan(config, checkpoint.tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    _check_dtypes(checkpoint, pieces)
    if config.tie_word_embeddings and TIED_HEAD in checkpoint.tensors:
        _check_tied(checkpoint)
    filler = _Filler(checkpoint, by_name(shardings(abstract, mesh)), by_name(abstract), progress)
    return ShardedModel(config, mesh, graphdef, from_names(abstract, filler.fill(pieces)))


def _check_dtypes(checkpoint: Checkpoint, pieces: list[Piece]) -> None:
    floats = {np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)}
    for piece in pieces:
        dtype = checkpoint.tensors[piece.source].dtype
        if dtype not in floats:
            raise CheckpointError(
                f"{checkpoint.file_of(piece.source)}: tensor {piece.source!r} is {dtype}; "
                "weights are bf16, fp16 or fp32"
            )


def _check_tied(checkpoint: Checkpoint) -> None:
    head, embedding = checkpoint.tensors[TIED_HEAD], checkpoint.tensors[EMBEDDING]
    rows = max(1, _MAX_CHUNK_BYTES * embedding.shape[0] // max(embedding.nbytes, 1))
    same = head == embedding and all(
        np.array_equal(
            checkpoint.read(TIED_HEAD, (slice(row, row + rows),)).view(np.uint8),
            checkpoint.read(EMBEDDING, (slice(row, row + rows),)).view(np.uint8),
        )
        for row in range(0, head.shape[0], rows)
    )
    if not same:
        raise CheckpointError(
            f"{checkpoint.file_of(TIED_HEAD)}: {TIED_HEAD} differs from {EMBEDDING}, and config.json says "
            "tie_word_embeddings true: set it to false to use both"
        )


@dataclass(frozen=True)
class _Read:
    """One chunk of a tensor and the devices that want it, each with the chunk's start in its shard."""

    source: str
    index: tuple[slice, ...]
    box: tuple[int, ...]
    parameter: str
    targets: tuple[tuple[jax.Device, tuple[int, ...]], ...]


@dataclass
class _Shard:
    """A device's part of a parameter while it is filled; the lock orders the donated updates."""

    buffer: jax.Array
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Filler:
    """Makes the parameters on their devices and fills them from the checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, placed: dict[str, NamedSharding], shapes: dict[str, Any], progress: bool
    ) -> None:
        self.checkpoint, self.placed, self.shapes, self.progress = checkpoint, placed, shapes, progress
        largest = max(info.nbytes for info in checkpoint.tensors.values())
        # A chunk is on the host up to four times at once: as read, as converted (twice the size, from bf16 to fp32)
        # and staged by JAX. An eighth of the largest tensor keeps one chunk under it, and the budget all of them.
        self.chunk_bytes = min(_MAX_CHUNK_BYTES, max(largest // 8, _MIN_CHUNK_BYTES))
        self.budget = _Budget(largest)

    def fill(self, pieces: list[Piece]) -> dict[str, jax.Array]:
        boxes = {name: _boxes(sharding, self.shapes[name].shape) for name, sharding in self.placed.items()}
        self.shards = {
            (name, device): _Shard(_zeros(tuple(stop - start for start, stop in box), self.shapes[name].dtype, device))
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
        return int(np.prod(read.box)) * self.checkpoint.tensors[read.source].dtype.itemsize

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
        itemsize = self.checkpoint.tensors[piece.source].dtype.itemsize
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
        dtype = self.shapes[read.parameter].dtype
        nbytes = self._bytes(read)
        with self.budget.of(nbytes + 2 * int(np.prod(read.box)) * dtype.itemsize):
            values = self.checkpoint.read(read.source, read.index).reshape(read.box).astype(dtype, copy=False)
            for device, start in read.targets:
                shard = self.shards[read.parameter, device]
                with shard.lock:
                    shard.buffer = _write(shard.buffer, values, np.asarray(start, np.int32))
                    shard.buffer.block_until_ready()  # until then the update may read `values`
        return nbytes

    def _assemble(self, name: str, devices: list[jax.Device]) -> jax.Array:
        buffers = [self.shards[name, device].buffer for device in devices]
        return jax.make_array_from_single_device_arrays(self.shapes[name].shape, self.placed[name], buffers)


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


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device) -> jax.Array:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=SingleDeviceSharding(device))()


@partial(jax.jit, donate_argnums=0)
def _write(buffer: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, values, list(start))
