"""Staging buffers in GPU memory: pages go from the cache's GPU to that of another without passing through a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from qwenjax.engine.decode_engine import DevicePages
from qwenjax.engine.handover import PAGES_PER_COPY, copies_of
from qwenjax.engine.prefill_engine import StagedPages
from qwenjax.kv_transfer import KVLayout
from qwenjax_ffi.device_memory import CopyDriver, DeviceMemory
from qwenjax_serving.transfer.staging import MemoryKind, Region, StagingBuffer


class DeviceStagingBuffer(StagingBuffer):
    """See StagingBuffer. Each rank's part is memory of its own on a GPU of this process."""

    memory: MemoryKind = "VRAM"

    def __init__(
        self,
        devices: Sequence[Sequence[jax.Device | None]],
        layout: KVLayout,
        planes: int,
        head_dim: int,
        dtype: Any,
        num_slots: int,
        ranks: Sequence[int] | None = None,
        process: int = 0,
        bounds: Sequence[int] | None = None,
        driver: CopyDriver | None = None,
    ) -> None:
        """devices: of every data rank those of `ranks`, None where one is another process's. A rank's part is on the
        first of them; requests of other data ranks go on from there. driver: a stand-in of tests. Raises
        DeviceMemoryError where the GPUs have no room."""
        self._devices, self._driver = devices, driver
        super().__init__(layout, planes, head_dim, dtype, num_slots, ranks, process, bounds)
        self._landing = {
            (device, size): jax.jit(
                lambda size=size: jnp.zeros((size, *self.shape[1:]), self.dtype),
                out_shardings=SingleDeviceSharding(device),
            )
            .lower()
            .compile()
            for device in {device for row in devices for device in row if device is not None}
            for size in PAGES_PER_COPY
        }
        # What they load on the GPUs has to be there before collectives run that wait for each other.
        for size in PAGES_PER_COPY:
            for data_rank in range(len(devices)):
                self.take_out(range(min(size, num_slots)), data_rank)

    def _allocate(self) -> list[Region]:
        num_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        columns = ([device for device in column if device is not None] for column in zip(*self._devices, strict=True))
        self._parts = [DeviceMemory(column[0], num_bytes, self._driver) for column in columns]
        return self.regions

    @property
    def regions(self) -> list[Region]:
        return [Region(part.address, part.num_bytes, part.ordinal) for part in self._parts]

    @property
    def _plane_bytes(self) -> int:
        return int(np.prod(self.shape[3:])) * self.dtype.itemsize

    def _places(self, address: int, slots: int, group: int) -> tuple[int, int]:
        """Of a group's block in memory [slots, heads, planes, ...] at an address: its address, and a head's bytes."""
        start, stop = self.bounds[group : group + 2]
        return address + start * slots * self.shape[1] * self._plane_bytes, (stop - start) * self._plane_bytes

    def begin(self, staged: StagedPages) -> None:
        pass

    def fetch(self, staged: StagedPages) -> list[list[jax.Array]]:
        found = []
        for array in jax.block_until_ready(list(staged.arrays)):
            shards = sorted(array.addressable_shards, key=lambda shard: shard.index[1].start or 0)
            found.append([shard.data for shard in shards])
        return found

    def put(self, fetched: Any, first: int, slots: Sequence[int], planes: tuple[int, int]) -> None:
        num_slots, heads, *_ = self.shape
        width = (planes[1] - planes[0]) * self._plane_bytes
        for rank, part in enumerate(self._parts):
            runs: dict[int, list[tuple[int, int, int]]] = {}  # by array: two are no one's neighbours
            for group, own, given in self._within(planes):
                block, pitch = self._places(part.address, num_slots, group)
                num_bytes = (own[1] - own[0]) * self._plane_bytes
                for place, slot in enumerate(slots, first):
                    if slot < 0:
                        continue
                    # As many as each program takes, but for the last.
                    number = place // PAGES_PER_COPY[-1]
                    array = fetched[number][rank]
                    source = array.unsafe_buffer_pointer() + place % PAGES_PER_COPY[-1] * heads * width
                    source += given[0] * self._plane_bytes
                    target = block + slot * heads * pitch + own[0] * self._plane_bytes
                    own_runs = runs.setdefault(number, [])
                    own_runs += [(source + head * width, target + head * pitch, num_bytes) for head in range(heads)]
            part.copy(*runs.values())

    def take_out(self, slots: Sequence[int], data_rank: int) -> DevicePages:
        blocks = []
        for start, stop, size in copies_of(len(slots)):
            block = list[jax.Array | None]()
            for part, device in zip(self._parts, self._devices[data_rank], strict=True):
                if device is None:
                    block.append(None)
                    continue
                # Nobody else knows this array yet: what is copied into it is as if the program had computed it.
                array = self._landing[device, size]().block_until_ready()
                part.copy(self._runs_out(part.address, slots[start:stop], array.unsafe_buffer_pointer()))
                block.append(array)
            blocks.append(block)
        return DevicePages(len(slots), blocks)

    def _runs_out(self, address: int, slots: Sequence[int], target: int) -> list[tuple[int, int, int]]:
        """From a part's slots to an array [slots, heads, planes, ...]."""
        num_slots, heads, all_planes, *_ = self.shape
        pitch, runs = all_planes * self._plane_bytes, list[tuple[int, int, int]]()
        for group, first in enumerate(self.bounds[:-1]):
            block, width = self._places(address, num_slots, group)
            rows = target + first * self._plane_bytes
            for place, slot in enumerate(slots):
                source, row = block + slot * heads * width, rows + place * heads * pitch
                runs += [(source + head * width, row + head * pitch, width) for head in range(heads)]
        return runs

    def copy(self, ranges: np.ndarray) -> None:
        parts = {part.ordinal: part for part in self._parts}
        for devices in np.unique(ranges[:, 3:], axis=0):  # by GPUs, whose allocations are no neighbours
            parts[int(devices[1])].copy(ranges[(ranges[:, 3:] == devices).all(axis=1), :3])

    def close(self) -> None:
        for part in self._parts:
            part.close()
