"""A driver of symmetric memory whose devices' memory is files: mapped for real, also between processes."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

from qwenjax_ffi.symmetric_memory_driver import DriverError, HandleKind

PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.calloc.restype = ctypes.c_void_p
_libc.free.argtypes = [ctypes.c_void_p]


class FileDriver:
    """See qwenjax_ffi.symmetric_memory_driver.Driver. A handle is a file descriptor.

    fails: the CUresult with which a method answers. Everything that is taken and not given back is in `live`; calls
    has the names of all methods that were called.
    """

    def __init__(self, fails: dict[str, str] | None = None, multicast: bool = False) -> None:
        self.fails, self.multicast = fails or {}, multicast
        self.live: list[tuple[str, Any]] = []
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise DriverError(name, self.fails[name])

    def can_share(self, device: int, kind: HandleKind) -> bool:
        return f"can_share {kind}" not in self.fails

    def can_reach(self, device: int, peer: int) -> bool:
        return device == peer or "can_reach" not in self.fails

    def can_multicast(self, device: int) -> bool:
        return self.multicast

    def granularity(self, device: int, kind: HandleKind) -> int:
        self._called("granularity")
        return PAGE

    def memory(self, device: int) -> tuple[int, int]:
        return 1000, 2000

    def create(self, num_bytes: int, device: int, kind: HandleKind) -> int:
        self._called("create")
        assert num_bytes % PAGE == 0
        return self._new_file(num_bytes)

    def export(self, handle: int, kind: HandleKind) -> int | bytes:
        self._called("export")
        if kind == "fabric":
            return f"{os.getpid()}:{handle}".encode().ljust(64, b"\0")
        return os.dup(handle)

    def import_handle(self, shared: int | bytes, kind: HandleKind) -> int:
        self._called("import_handle")
        if isinstance(shared, bytes):
            pid, number = shared.rstrip(b"\0").decode().split(":")
            handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        else:
            handle = os.dup(shared)
        self.live.append(("handle", handle))
        return handle

    def map(self, handle: int, num_bytes: int, devices: Sequence[int]) -> int:
        self._called("map")
        assert devices
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle, 0)
        assert address not in (None, ctypes.c_void_p(-1).value)
        self.live.append(("mapping", address))
        return int(address)

    def unmap(self, address: int, num_bytes: int) -> None:
        self.live.remove(("mapping", address))
        assert _libc.munmap(address, num_bytes) == 0

    def release(self, handle: int) -> None:
        self.live.remove(("handle", handle))
        os.close(handle)

    def zero(self, address: int, num_bytes: int, device: int) -> None:
        self._called("zero")
        ctypes.memset(address, 0, num_bytes)

    def synchronise(self, device: int) -> None:
        self.calls.append("synchronise")

    def host_allocate(self, num_bytes: int) -> int:
        self._called("host_allocate")
        address = _libc.calloc(1, num_bytes)
        self.live.append(("host", address))
        return int(address)

    def host_free(self, address: int) -> None:
        self.live.remove(("host", address))
        _libc.free(address)

    def multicast_granularity(self, num_bytes: int, num_devices: int, kind: HandleKind) -> int:
        self._called("multicast_granularity")
        return 2 * PAGE

    def multicast_create(self, num_bytes: int, num_devices: int, kind: HandleKind) -> int:
        self._called("multicast_create")
        return self._new_file(num_bytes)

    def multicast_add(self, multicast: int, device: int) -> None:
        self._called("multicast_add")

    def multicast_bind(self, multicast: int, handle: int, num_bytes: int) -> None:
        self._called("multicast_bind")
        self.live.append(("bound", multicast))

    def multicast_unbind(self, multicast: int, device: int, num_bytes: int) -> None:
        self.live.remove(("bound", multicast))

    def _new_file(self, num_bytes: int) -> int:
        handle = os.memfd_create("device memory")
        os.ftruncate(handle, num_bytes)
        self.live.append(("handle", handle))
        return handle
