"""Memory of every rank, mapped into every process: what a symmetric heap is made of. No JAX."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from qwenjax_ffi.symmetric_memory_driver import Driver, DriverError, HandleKind
from qwenjax_ffi.symmetric_memory_exchange import (
    TIMEOUT_VARIABLE,
    DescriptorServer,
    PeerError,
    Rendezvous,
    SymmetricMemoryError,
    SymmetricMemoryUnavailable,
    host_identity,
    receive_descriptors,
)
from qwenjax_kernels.heap_layout import FAILURES, RECORD_BYTES

logger = logging.getLogger(__name__)

MULTICAST_VARIABLE = "QWENJAX_MULTICAST"
_IMEX = (
    "; the ranks span hosts, and memory between hosts needs fabric handles: NVLink across them, a running "
    "nvidia-imex service and an IMEX channel (/dev/nvidia-caps-imex-channels) that this process may open"
)
_NO_MULTICAST = f"; {MULTICAST_VARIABLE}=1 asks for it: unset it in every process, and all runs without multicast"


def _hint(kind: HandleKind) -> str:
    return _IMEX if kind == "fabric" else ""


def multicast_wanted() -> bool:
    """Whether the user opted in to NVLink multicast. Raises ValueError for a value other than 0 and 1."""
    text = os.environ.get(MULTICAST_VARIABLE, "0")
    if text not in ("0", "1"):
        raise ValueError(f"{MULTICAST_VARIABLE} is {text!r}; it is 1 (use NVLink multicast where there is) or 0")
    return text == "1"


@contextlib.contextmanager
def _asking(
    what: str, hint: str = "", failure: type[SymmetricMemoryError] = SymmetricMemoryUnavailable
) -> Iterator[None]:
    """Makes the driver's refusal an error that says for what it was asked."""
    try:
        yield
    except DriverError as error:
        raise failure(f"{what}: {error}{hint}") from error


class MappedMemory:
    """num_bytes of zeroed memory on each rank's device, all of it mapped into this process for all its devices.

    local: this process's ranks and their CUDA devices; ranks: how many there are in all processes together. bases has
    every rank's address in this process, records the address of each local rank's failure record, multicast_base the
    address that means all ranks at once, or None. Every process of the rendezvous makes one at the same time.

    Raises SymmetricMemoryUnavailable where the driver cannot share memory between these ranks, SymmetricMemoryError
    for everything else that fails, PeerError for what fails in other processes. Nothing is left behind then.
    """

    def __init__(
        self, driver: Driver, local: dict[int, int], ranks: int, num_bytes: int, rendezvous: Rendezvous
    ) -> None:
        self.driver, self.local, self.ranks = driver, dict(local), ranks
        self.rendezvous = rendezvous
        self.bases: dict[int, int] = {}
        self.records: dict[int, int] = {}
        self.multicast_base: int | None = None
        self._handles: dict[int, Any] = {}  # of local ranks
        self._undo = contextlib.ExitStack()
        try:
            kind, multicast = self._agree(num_bytes)
            self.num_bytes = self._whole(num_bytes, kind, multicast)
            self._map_ranks(kind)
            if multicast:
                self._map_multicast(kind)
            for device in set(self.local.values()):
                self._later(self.driver.synchronise, device)  # what was put last is undone first
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps and frees everything, after what runs on the devices. A second call does nothing."""
        self._undo.close()

    def check(self) -> None:
        """Raises PeerError where a kernel of a local rank gave up waiting, and says for whom."""
        for rank, record in self.records.items():
            code, peer, epoch = (ctypes.c_uint32 * 3).from_address(record)
            if code:
                raise PeerError(
                    f"rank {rank}: {FAILURES.get(code, f'failure {code}')} (rank {peer}, collective {epoch}); "
                    "its kernel was stopped and the process's CUDA context with it: start a new process. If the rank "
                    f"is only slow, raise {TIMEOUT_VARIABLE}"
                )

    def _agree(self, num_bytes: int) -> tuple[HandleKind, bool]:
        """Compares what the processes want; returns how handles are shared, and whether to make a multicast object."""
        with self.rendezvous.phase("hello"):
            wanted = multicast_wanted()
            can = all(self.driver.can_multicast(device) for device in self.local.values())
            if wanted and not can:
                logger.warning("%s=1, and the driver of this machine has no NVLink multicast", MULTICAST_VARIABLE)
            mine = {"host": host_identity(), "ranks": sorted(self.local), "bytes": num_bytes, "multicast": wanted}
            found = self.rendezvous.gather("hello", mine | {"can_multicast": can})
        for name in ("bytes", "multicast"):
            values = [hello[name] for hello in found]
            if len(set(values)) > 1:
                raise SymmetricMemoryError(f"{self._name}: the processes want different {name}: {values}, by process")
        covered = sorted(rank for hello in found for rank in hello["ranks"])
        if covered != list(range(self.ranks)):
            raise SymmetricMemoryError(f"{self._name}: {self.ranks} ranks, and the processes have {covered}")
        self._process_of = {rank: process for process, hello in enumerate(found) for rank in hello["ranks"]}
        hosts = {hello["host"] for hello in found}
        kind: HandleKind = "posix" if len(hosts) == 1 else "fabric"
        with self.rendezvous.phase("able"):
            reason = self._unable(kind)
            if reason:
                raise SymmetricMemoryUnavailable(reason)
            self.rendezvous.gather("able", True)
        return kind, wanted and all(hello["can_multicast"] for hello in found)

    def _unable(self, kind: HandleKind) -> str | None:
        for device in self.local.values():
            if not self.driver.can_share(device, kind):
                return f"device {device} makes no {kind} handles{_hint(kind)}"
            for peer in self.local.values():
                if not self.driver.can_reach(device, peer):
                    return f"device {device} cannot map the memory of device {peer} (no NVLink and no PCIe peer access)"
        return None

    def _whole(self, num_bytes: int, kind: HandleKind, multicast: bool) -> int:
        """num_bytes up to a multiple of what every device, here and elsewhere, allocates in."""
        with self.rendezvous.phase("size"):
            with _asking(f"the granularity of memory on devices {sorted(self.local.values())}", _hint(kind)):
                unit = max(self.driver.granularity(device, kind) for device in self.local.values())
            if multicast:
                with self._asking_for_multicast():
                    unit = max(unit, self.driver.multicast_granularity(num_bytes, self.ranks, kind))
            unit = max(self.rendezvous.gather("size", unit))
        return -(-num_bytes // unit) * unit

    def _map_ranks(self, kind: HandleKind) -> None:
        with contextlib.ExitStack() as serving:
            with self.rendezvous.phase("handles"):
                for rank, device in self.local.items():
                    with _asking(f"{self._name}: device {device}", failure=SymmetricMemoryError):
                        self._handles[rank] = self._create(device, kind)
                        self._map(rank, self._handles[rank], kind)
                        self.driver.zero(self.bases[rank], self.num_bytes, device)
                        self.records[rank] = self.driver.host_allocate(RECORD_BYTES)
                    self._later(self.driver.host_free, self.records[rank])
                alone = self.rendezvous.processes == 1
                with _asking(f"sharing the memory of ranks {sorted(self.local)}", _hint(kind)):
                    shared = None if alone else self._share(self._handles, kind, serving)
                found = self.rendezvous.gather("handles", shared)
            with self.rendezvous.phase("mapped"):
                for process, theirs in enumerate(found):
                    if process != self.rendezvous.process:
                        with _asking(f"the memory of ranks {theirs['ranks']}, process {process}", _hint(kind)):
                            for rank, handle in self._receive(theirs, kind):
                                self._map(rank, handle, kind)
                # Others may still need the descriptors, and no one may write before all have zeroed.
                self.rendezvous.gather("mapped", True)

    def _map_multicast(self, kind: HandleKind) -> None:
        """One object over all ranks' devices, made by the process of rank 0; every rank binds its memory to it."""
        maker = self._process_of[0]
        with contextlib.ExitStack() as serving:
            with self.rendezvous.phase("multicast object"), self._asking_for_multicast():
                shared = None
                if maker == self.rendezvous.process:
                    multicast = self.driver.multicast_create(self.num_bytes, self.ranks, kind)
                    self._later(self.driver.release, multicast)
                    if self.rendezvous.processes > 1:
                        shared = self._share({0: multicast}, kind, serving)
                found = self.rendezvous.gather("multicast object", shared)
            with self.rendezvous.phase("multicast devices"), self._asking_for_multicast():
                if maker != self.rendezvous.process:
                    ((_, multicast),) = self._receive(found[maker], kind)
                for device in self.local.values():
                    self.driver.multicast_add(multicast, device)
                self.rendezvous.gather("multicast devices", True)  # no one may bind before all devices are in it
        with self.rendezvous.phase("multicast bound"), self._asking_for_multicast():
            for rank, device in self.local.items():
                self.driver.multicast_bind(multicast, self._handles[rank], self.num_bytes)
                self._later(self.driver.multicast_unbind, multicast, device, self.num_bytes)
            address = self.driver.map(multicast, self.num_bytes, list(self.local.values()))
            self._later(self.driver.unmap, address, self.num_bytes)
            self.multicast_base = address
            self.rendezvous.gather("multicast bound", True)

    def _create(self, device: int, kind: HandleKind) -> Any:
        try:
            handle = self.driver.create(self.num_bytes, device, kind)
        except DriverError as error:
            if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
                free, total = self.driver.memory(device)
                raise SymmetricMemoryError(
                    f"{self._name}: no room for {self.num_bytes:,} bytes on device {device}: {free:,} of {total:,} are "
                    "free outside XLA's pool. XLA takes XLA_PYTHON_CLIENT_MEM_FRACTION of the memory (now "
                    f"{os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.75, the default')}): set it lower"
                ) from error
            raise SymmetricMemoryUnavailable(f"device {device}: {error}{_hint(kind)}") from error
        self._later(self.driver.release, handle)
        return handle

    def _share(self, handles: dict[int, Any], kind: HandleKind, serving: contextlib.ExitStack) -> dict[str, Any]:
        """What other processes need to import these handles; descriptors are served until `serving` closes."""
        exported = [self.driver.export(handle, kind) for handle in handles.values()]
        if kind == "fabric":
            return {"ranks": list(handles), "fabric": [shared.hex() for shared in exported]}  # type: ignore[union-attr]
        server = serving.enter_context(DescriptorServer(exported))  # type: ignore[arg-type]
        return {"ranks": list(handles), "server": server.address}

    def _receive(self, shared: dict[str, Any], kind: HandleKind) -> Iterator[tuple[int, Any]]:
        """The ranks and imported handles of another process, which shares them so."""
        descriptors: list[int] = []
        try:
            if kind == "posix":
                descriptors = receive_descriptors(shared["server"], self.rendezvous.seconds)
            values: list[int | bytes] = [*descriptors] or [bytes.fromhex(text) for text in shared["fabric"]]
            for rank, value in zip(shared["ranks"], values, strict=True):
                handle = self.driver.import_handle(value, kind)
                self._later(self.driver.release, handle)
                yield rank, handle
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, rank: int, handle: Any, kind: HandleKind) -> None:
        devices = list(self.local.values())
        with _asking(f"devices {sorted(devices)} cannot map the memory of rank {rank}", _hint(kind)):
            address = self.driver.map(handle, self.num_bytes, devices)
        self._later(self.driver.unmap, address, self.num_bytes)
        self.bases[rank] = address

    def _later(self, undo: Callable[..., None], *arguments: Any) -> None:
        """Has something undone on close, last first; a device that failed does not keep the rest from being freed."""

        def step() -> None:
            try:
                undo(*arguments)
            except DriverError as error:
                logger.warning("%s: while freeing: %s", self._name, error)

        self._undo.callback(step)

    def _asking_for_multicast(self) -> contextlib.AbstractContextManager[None]:
        return _asking(f"{self._name}: NVLink multicast", _NO_MULTICAST, SymmetricMemoryError)

    @property
    def _name(self) -> str:
        return self.rendezvous.name
