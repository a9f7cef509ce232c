"""Symmetric memory: one allocation a rank, the same offsets on all, every rank's memory mapped into every other.

    heap = SymmetricHeap(mesh, ("data", "model"))
    epochs = heap.epochs()    # handed to collectives, which give it back advanced

Kernels get the heap as a small array, the epoch array: a count of the collectives and every rank's address
(`qwenjax_kernels.heap_layout`). The memory is the driver's, beside XLA's pool: `SymmetricHeap.num_bytes` on each
rank's device. On CPU the same calls work without memory: the epoch array is the count alone, and collectives run their
references.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax_ffi.device_memory import device_memory_bytes
from qwenjax_ffi.symmetric_memory_driver import CudaDriver, Driver, unavailable
from qwenjax_ffi.symmetric_memory_exchange import (
    CoordinatorStore,
    Rendezvous,
    Store,
    SymmetricMemoryError,
    SymmetricMemoryUnavailable,
    timeout_seconds,
)
from qwenjax_ffi.symmetric_memory_mapping import MappedMemory
from qwenjax_kernels.heap_layout import BASES_WORD, RANK_WORD, RECORD_WORD, HeapLayout, multicast_word, num_words
from qwenjax_kernels.token_exchange_layout import ExchangeLayout

ALIGNMENT = 256
_numbers = itertools.count()  # every process makes its heaps in one order, so that a number names the same heap


class SymmetricHeap:
    """The heap of the ranks of a mesh, in the order of its devices; every process of the mesh makes it together.

    mesh, axis_name: an axis, or all axes in their order, that hold every device of the mesh. num_bytes: what is wanted
    on each rank beside what the collectives use; exchange_units: the room for dispatch and combine, in units of
    `qwenjax_kernels.token_exchange_layout`, none by default. driver, store: stand-ins of tests.

    Free it with `close`, as a context manager, or by letting go of it. A rank that dies or never comes gives the
    others a PeerError within QWENJAX_PEER_TIMEOUT seconds (default 60). Raises SymmetricMemoryUnavailable where the
    ranks cannot map each other's memory, SymmetricMemoryError where there is no room, ValueError for a wrong axis.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis_name: str | Sequence[str],
        num_bytes: int = 0,
        *,
        exchange_units: int = 0,
        driver: Driver | None = None,
        store: Store | None = None,
    ) -> None:
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        if num_bytes < 0 or exchange_units < 0:
            raise ValueError(f"num_bytes is {num_bytes}, exchange_units {exchange_units}")
        if math.prod(mesh.shape[name] for name in names) != mesh.size or list(names) != [
            name for name in mesh.axis_names if name in names
        ]:
            raise ValueError(f"a heap over {names} of the mesh {dict(mesh.shape)}; it takes all devices, in mesh order")
        self._sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
        devices = list(mesh.devices.flat)
        self.ranks = len(devices)
        self._local = {rank: d for rank, d in enumerate(devices) if d.process_index == jax.process_index()}
        self._memory: MappedMemory | None = None
        self._used = 0
        self._units = exchange_units
        self._finalizer: weakref.finalize | None = None
        if driver is None and devices[0].platform == "cpu":
            self.num_bytes = num_bytes
            return
        self._used = HeapLayout(self.ranks).num_bytes
        if exchange_units:
            self._used = ExchangeLayout(self.ranks, exchange_units).num_bytes
        self._memory = self._map(devices, self._used + num_bytes, driver, store)
        self.num_bytes = self._memory.num_bytes
        self._finalizer = weakref.finalize(self, self._memory.close)
        _open.add(self)

    def _map(
        self, devices: list[jax.Device], num_bytes: int, driver: Driver | None, store: Store | None
    ) -> MappedMemory:
        missing = unavailable() if driver is None else None
        if missing:
            raise SymmetricMemoryUnavailable(missing)
        processes = sorted({device.process_index for device in devices})
        if len(processes) > 1 and store is None:
            store = CoordinatorStore()
        rendezvous = Rendezvous(
            store or _Alone(),
            f"symmetric heap {next(_numbers)}",
            processes.index(jax.process_index()),
            len(processes),
            timeout_seconds(),
        )
        local = {rank: device.local_hardware_id or 0 for rank, device in self._local.items()}
        return MappedMemory(driver or CudaDriver(), local, self.ranks, num_bytes, rendezvous)

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory behind it; not on CPU."""
        return self._memory is not None

    @property
    def has_multicast(self) -> bool:
        """Whether NVLink multicast reaches all ranks: only with QWENJAX_MULTICAST=1 and a driver that has it."""
        return self._memory is not None and self._memory.multicast_base is not None

    def epochs(self, armed: bool = True) -> jax.Array:
        """A fresh epoch array, int32 [ranks * words], a row of words on each rank.

        Kernels that get one that is not armed return at once and write nothing. A program run with it once has its
        kernels loaded on every device; where one process drives several GPUs, do so before the first call that waits,
        since loading a kernel may wait for what runs, and what runs may wait for the kernel.
        """
        words = num_words(self.ranks, self.has_multicast, self._units) if self.is_mapped else 1
        rows = [jax.device_put(self._row(rank, words, armed), device) for rank, device in sorted(self._local.items())]
        return jax.make_array_from_single_device_arrays((self.ranks * words,), self._sharding, rows)

    def _row(self, rank: int, words: int, armed: bool) -> np.ndarray:
        row = np.zeros(words, np.uint32)
        memory = self._memory
        if memory is not None:
            row[RANK_WORD] = rank if armed else 1 << 31
            _put_address(row, RECORD_WORD, memory.records[rank])
            for peer in range(self.ranks):
                _put_address(row, BASES_WORD + 2 * peer, memory.bases[peer])
            if memory.multicast_base is not None:
                _put_address(row, multicast_word(self.ranks), memory.multicast_base)
        return row.view(np.int32)

    def allocate(self, num_bytes: int) -> int:
        """Takes num_bytes of every rank's memory; returns their offset, a multiple of 256, the same on all ranks.

        It is given back with the heap. Every process allocates in one order. Raises SymmetricMemoryError where the
        heap has not as many left.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes is {num_bytes}")
        offset = -(-self._used // ALIGNMENT) * ALIGNMENT
        if offset + num_bytes > self.num_bytes:
            raise SymmetricMemoryError(
                f"{num_bytes:,} bytes of a heap of {self.num_bytes:,} that has {max(0, self.num_bytes - offset):,} "
                "left; make the heap with a larger num_bytes"
            )
        self._used = offset + num_bytes
        return offset

    def check(self) -> None:
        """Raises PeerError where a kernel gave up waiting for a peer, and says for whom."""
        if self._memory is not None:
            self._memory.check()

    def close(self) -> None:
        """Frees the memory, once what runs on this process's devices is done. A second call does nothing."""
        if self._finalizer is not None:
            self._finalizer()
        self._memory = None
        _open.discard(self)

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_open: weakref.WeakSet[SymmetricHeap] = weakref.WeakSet()


def bytes_outside_xla() -> int:
    """What is open beside XLA's pool on a device of this process: heaps, which are on all alike, and what the device
    with most of it has of DeviceMemory."""
    return sum(heap.num_bytes for heap in _open) + device_memory_bytes()


class _Alone:
    """The store of a mesh in one process: no one asks."""

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str, seconds: float) -> str | None:
        return None


def _put_address(row: np.ndarray, word: int, address: int) -> None:
    row[word], row[word + 1] = address & 0xFFFFFFFF, address >> 32
