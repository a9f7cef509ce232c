"""Memory of one GPU whose address stays, beside XLA's pool, and copies between it and the arrays of GPUs.

JAX promises no address for what it holds; whoever reads or writes a GPU's memory from outside of JAX needs one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from qwenjax_ffi.symmetric_memory_driver import CudaDriver, DriverError, unavailable

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream


_LARGEST_PITCH = 1 << 31  # bytes; CU_DEVICE_ATTRIBUTE_MAX_PITCH is one less


class DeviceMemoryError(RuntimeError):
    """Memory that cannot be had, with the way out."""


class Rows(NamedTuple):
    """`height` runs of `num_bytes` bytes, the first at the addresses and each pitch bytes behind the one before."""

    source: int
    target: int
    num_bytes: int
    source_pitch: int = 0
    target_pitch: int = 0
    height: int = 1


def strided(runs: Iterable[Sequence[int]] | np.ndarray) -> list[Rows]:
    """The same bytes as runs of (source, target, bytes), in fewer copies: runs of one size that lie at even distances
    are one."""
    table = np.array(runs if isinstance(runs, np.ndarray) else list(runs), np.int64).reshape(-1, 3)
    sizes, steps = table[:, 2], np.diff(table[:, :2], axis=0)
    pairs = (sizes[1:] == sizes[:-1]) & (steps >= sizes[:-1, None]).all(axis=1) & (steps < _LARGEST_PITCH).all(axis=1)
    # Where the step from a run to the next is not that from the run before.
    ends = np.flatnonzero(~(pairs[1:] & pairs[:-1] & (steps[1:] == steps[:-1]).all(axis=1))) + 1
    found, place = list[Rows](), 0
    while place < len(table):
        source, target, num_bytes = table[place].tolist()
        if place < len(pairs) and pairs[place]:
            after = np.searchsorted(ends, place, side="right")
            last = int(ends[after]) if after < len(ends) else len(table) - 1
            source_pitch, target_pitch = steps[place].tolist()
            found.append(Rows(source, target, num_bytes, source_pitch, target_pitch, last - place + 1))
            place = last + 1
        else:
            found.append(Rows(source, target, num_bytes))
            place += 1
    return found


class CopyDriver(Protocol):
    """What DeviceMemory needs. Every method raises DriverError where the driver refuses."""

    def memory(self, device: int) -> tuple[int, int]:
        """Free and all bytes of a device."""

    def allocate(self, num_bytes: int, device: int) -> int:
        """The address of so many zeroed bytes."""

    def free(self, address: int, device: int) -> None:
        """Undoes `allocate`."""

    def copy(self, rows: Iterable[Rows], device: int) -> None:
        """Copies between memory of this process's GPUs, and waits for it."""


class CudaCopyDriver(CudaDriver):
    """See CopyDriver."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[int, object] = {}

    def allocate(self, num_bytes: int, device: int) -> int:
        self._enter(device)
        address = int(self._call("cuMemAlloc", num_bytes))
        self.zero(address, num_bytes, device)
        return address

    def free(self, address: int, device: int) -> None:
        self.synchronise(device)
        if device in self._streams:
            self._call("cuStreamDestroy", self._streams.pop(device))
        self._call("cuMemFree", address)

    def copy(self, rows: Iterable[Rows], device: int) -> None:
        self._enter(device)
        if device not in self._streams:
            self._streams[device] = self._call("cuStreamCreate", _NON_BLOCKING)
        stream, unified = self._streams[device], self._cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        for each in rows:
            if each.height == 1:
                self._call("cuMemcpyAsync", each.target, each.source, each.num_bytes, stream)
                continue
            copy = self._cuda.CUDA_MEMCPY2D()
            copy.srcMemoryType = copy.dstMemoryType = unified
            copy.srcDevice, copy.srcPitch = each.source, each.source_pitch
            copy.dstDevice, copy.dstPitch = each.target, each.target_pitch
            copy.WidthInBytes, copy.Height = each.num_bytes, each.height
            self._call("cuMemcpy2DAsync", copy, stream)
        self._call("cuStreamSynchronize", stream)


class DeviceMemory:
    """num_bytes zeroed bytes of a GPU of this process. Free it with `close`, or by letting go of it.

    driver: a stand-in of tests. Raises DeviceMemoryError where there is no room, or no CUDA driver to ask.
    """

    def __init__(self, device: jax.Device, num_bytes: int, driver: CopyDriver | None = None) -> None:
        if driver is None and (missing := unavailable()):
            raise DeviceMemoryError(missing)
        self.driver: CopyDriver = driver or CudaCopyDriver()
        self.ordinal, self.num_bytes = device.local_hardware_id or 0, num_bytes
        try:
            self.address = self.driver.allocate(num_bytes, self.ordinal)
        except DriverError as error:
            free, total = self.driver.memory(self.ordinal)
            raise DeviceMemoryError(
                f"{num_bytes:,} bytes beside XLA's pool on {device}: {error}, with {free:,} free of {total:,}; ask for "
                "less, or leave more beside the pool (XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 by default)"
            ) from error
        self._finalizer = weakref.finalize(self, self.driver.free, self.address, self.ordinal)
        self._finalizer.atexit = False  # the driver may be gone by then, and frees it with the process
        _open.add(self)

    def copy(self, *runs: Iterable[Sequence[int]] | np.ndarray) -> None:
        """Copies runs of (source address, target address, bytes) between memory of this process's GPUs, and waits.
        Those given together lie within one allocation on either side: they may become one copy. What has not been
        computed yet is not waited for: block on arrays before."""
        self.driver.copy([rows for each in runs for rows in strided(each)], self.ordinal)

    def close(self) -> None:
        """Frees the memory, once what runs on the GPU is done. A second call does nothing."""
        self._finalizer()
        _open.discard(self)


_open: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()


def device_memory_bytes() -> int:
    """What is open on the device of this process that has most of it."""
    by_device = Counter[int]()
    for memory in _open:
        by_device[memory.ordinal] += memory.num_bytes
    return max(by_device.values(), default=0)
