"""The CUDA driver's virtual memory calls that symmetric memory is made of, through cuda-python.

`CudaDriver` is the one that runs; anything with the same methods may stand in for it, as the tests' does, whose memory
is files. Sizes are bytes, devices CUDA ordinals, addresses integers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, Protocol

HandleKind = Literal["posix", "fabric"]
Handle = Any


class DriverError(RuntimeError):
    """A driver call that failed. name: the CUresult, as "CUDA_ERROR_OUT_OF_MEMORY"."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} answered {name}")
        self.call, self.name = call, name


class Driver(Protocol):
    """What a heap needs. Every method raises DriverError where the driver refuses."""

    def can_share(self, device: int, kind: HandleKind) -> bool:
        """Whether the device's driver says that it makes handles of this kind."""

    def can_reach(self, device: int, peer: int) -> bool:
        """Whether a device can map the memory of another one that this process sees."""

    def can_multicast(self, device: int) -> bool:
        """Whether the device's driver says that it has NVLink multicast."""

    def granularity(self, device: int, kind: HandleKind) -> int:
        """What sizes of an allocation are multiples of."""

    def memory(self, device: int) -> tuple[int, int]:
        """Free and all bytes of a device."""

    def create(self, num_bytes: int, device: int, kind: HandleKind) -> Handle:
        """Physical memory on a device."""

    def export(self, handle: Handle, kind: HandleKind) -> int | bytes:
        """A file descriptor (posix), owned by the caller, or 64 bytes (fabric) that another process imports."""

    def import_handle(self, shared: int | bytes, kind: HandleKind) -> Handle:
        """The memory behind a descriptor or bytes of another process; the descriptor stays the caller's."""

    def map(self, handle: Handle, num_bytes: int, devices: Sequence[int]) -> int:
        """Maps memory for reading and writing from these devices; returns its address."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undoes `map`."""

    def release(self, handle: Handle) -> None:
        """Gives memory back once nothing maps it."""

    def zero(self, address: int, num_bytes: int, device: int) -> None:
        """Fills with zeros, and waits for it."""

    def synchronise(self, device: int) -> None:
        """Waits for everything that runs on a device."""

    def host_allocate(self, num_bytes: int) -> int:
        """Zeroed host memory at the same address for the host and every device."""

    def host_free(self, address: int) -> None:
        """Undoes `host_allocate`."""

    def multicast_granularity(self, num_bytes: int, num_devices: int, kind: HandleKind) -> int:
        """What the size of a multicast object, and of memory bound to it, is a multiple of."""

    def multicast_create(self, num_bytes: int, num_devices: int, kind: HandleKind) -> Handle:
        """A multicast object, which is exported, imported and mapped as memory is."""

    def multicast_add(self, multicast: Handle, device: int) -> None:
        """Makes a device one of the object's; all must be before any binds."""

    def multicast_bind(self, multicast: Handle, handle: Handle, num_bytes: int) -> None:
        """Makes memory the object's on its device."""

    def multicast_unbind(self, multicast: Handle, device: int, num_bytes: int) -> None:
        """Undoes `multicast_bind`."""


def unavailable() -> str | None:
    """Why there is no CUDA driver to call here; None where there is."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-python is not installed (the extras cuda12 and cuda13 have it)"
    return None


class CudaDriver:
    """See Driver. Contexts are the devices' primary ones, which JAX uses too."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._cuda = driver
        self._contexts: dict[int, Any] = {}
        self._call("cuInit", 0)

    def can_share(self, device: int, kind: HandleKind) -> bool:
        attributes = self._cuda.CUdevice_attribute
        names = {
            "posix": attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            "fabric": attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
        }
        return bool(self._call("cuDeviceGetAttribute", names[kind], self._device(device)))

    def can_reach(self, device: int, peer: int) -> bool:
        if device == peer:
            return True
        return bool(self._call("cuDeviceCanAccessPeer", self._device(device), self._device(peer)))

    def can_multicast(self, device: int) -> bool:
        name = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        return bool(self._call("cuDeviceGetAttribute", name, self._device(device)))

    def granularity(self, device: int, kind: HandleKind) -> int:
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device, kind), minimum))

    def memory(self, device: int) -> tuple[int, int]:
        self._enter(device)
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def create(self, num_bytes: int, device: int, kind: HandleKind) -> Handle:
        self._enter(device)
        return self._call("cuMemCreate", num_bytes, self._properties(device, kind), 0)

    def export(self, handle: Handle, kind: HandleKind) -> int | bytes:
        shared = self._call("cuMemExportToShareableHandle", handle, self._kind(kind), 0)
        return int(shared) if kind == "posix" else bytes(getattr(shared, "data", shared))

    def import_handle(self, shared: int | bytes, kind: HandleKind) -> Handle:
        value: Any = shared
        if kind == "fabric":
            value = self._cuda.CUmemFabricHandle()
            value.data = shared
        return self._call("cuMemImportFromShareableHandle", value, self._kind(kind))

    def map(self, handle: Handle, num_bytes: int, devices: Sequence[int]) -> int:
        address = int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        except DriverError:
            self._call("cuMemAddressFree", address, num_bytes)
            raise
        try:
            accesses = []
            for device in devices:
                access = self._cuda.CUmemAccessDesc()
                access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                access.location.id = device
                access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                accesses.append(access)
            self._call("cuMemSetAccess", address, num_bytes, accesses, len(accesses))
        except DriverError:
            self.unmap(address, num_bytes)
            raise
        return address

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)
        self._call("cuMemAddressFree", address, num_bytes)

    def release(self, handle: Handle) -> None:
        self._call("cuMemRelease", handle)

    def zero(self, address: int, num_bytes: int, device: int) -> None:
        self._enter(device)
        self._call("cuMemsetD8", address, 0, num_bytes)
        self._call("cuCtxSynchronize")

    def synchronise(self, device: int) -> None:
        self._enter(device)
        self._call("cuCtxSynchronize")

    def host_allocate(self, num_bytes: int) -> int:
        # Portable: for the contexts of all devices. Mapped, and under unified addressing at the host's address.
        flags = self._cuda.CU_MEMHOSTALLOC_PORTABLE | self._cuda.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(self._call("cuMemHostAlloc", num_bytes, flags))
        import ctypes

        ctypes.memset(address, 0, num_bytes)
        return address

    def host_free(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def multicast_granularity(self, num_bytes: int, num_devices: int, kind: HandleKind) -> int:
        recommended = self._cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
        properties = self._multicast_properties(num_bytes, num_devices, kind)
        return int(self._call("cuMulticastGetGranularity", properties, recommended))

    def multicast_create(self, num_bytes: int, num_devices: int, kind: HandleKind) -> Handle:
        return self._call("cuMulticastCreate", self._multicast_properties(num_bytes, num_devices, kind))

    def multicast_add(self, multicast: Handle, device: int) -> None:
        self._call("cuMulticastAddDevice", multicast, self._device(device))

    def multicast_bind(self, multicast: Handle, handle: Handle, num_bytes: int) -> None:
        self._call("cuMulticastBindMem", multicast, 0, handle, 0, num_bytes, 0)

    def multicast_unbind(self, multicast: Handle, device: int, num_bytes: int) -> None:
        self._call("cuMulticastUnbind", multicast, self._device(device), 0, num_bytes)

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._cuda, name)(*arguments)
        if int(result) != 0:
            raise DriverError(name, getattr(result, "name", str(result)))
        return values[0] if len(values) == 1 else tuple(values)

    def _device(self, device: int) -> Any:
        return self._call("cuDeviceGet", device)

    def _enter(self, device: int) -> None:
        if device not in self._contexts:
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", self._device(device))
        self._call("cuCtxSetCurrent", self._contexts[device])

    def _kind(self, kind: HandleKind) -> Any:
        kinds = self._cuda.CUmemAllocationHandleType
        if kind == "posix":
            return kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return kinds.CU_MEM_HANDLE_TYPE_FABRIC

    def _properties(self, device: int, kind: HandleKind) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = self._kind(kind)
        return properties

    def _multicast_properties(self, num_bytes: int, num_devices: int, kind: HandleKind) -> Any:
        properties = self._cuda.CUmulticastObjectProp()
        properties.size, properties.numDevices, properties.flags = num_bytes, num_devices, 0
        properties.handleTypes = int(self._kind(kind))
        return properties
