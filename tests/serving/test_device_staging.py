"""Staging in GPU memory: the same bytes as in host memory. On a CPU a stand-in for the driver copies host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from qwenjax.engine.decode_engine import DevicePages
from qwenjax.engine.prefill_engine import StagedPages
from qwenjax.kv_transfer import KVLayout, Pages, plan_transfer
from qwenjax.mesh import MODEL, make_mesh
from qwenjax_ffi.device_memory import (
    CudaCopyDriver,
    DeviceMemory,
    DeviceMemoryError,
    Rows,
    device_memory_bytes,
    strided,
)
from qwenjax_ffi.symmetric_memory_driver import DriverError
from qwenjax_serving.transfer.device_staging import DeviceStagingBuffer
from qwenjax_serving.transfer.staging import StagingBuffer, byte_ranges

PLANES, WIDTH, SLOTS = 6, 4, 24


class HostDriver:
    """Memory of the host for a GPU's."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.copies = room, list[Rows]()
        self.held = dict[int, np.ndarray]()

    def memory(self, device: int) -> tuple[int, int]:
        return self.room, self.room

    def allocate(self, num_bytes: int, device: int) -> int:
        if num_bytes > self.room:
            raise DriverError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
        memory = np.zeros(num_bytes, np.uint8)
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int, device: int) -> None:
        del self.held[address]

    def copy(self, rows: Iterable[Rows], device: int) -> None:
        for each in rows:
            self.copies.append(each)
            for place in range(each.height):
                source, target = each.source + place * each.source_pitch, each.target + place * each.target_pitch
                ctypes.memmove(target, source, each.num_bytes)


def driver() -> HostDriver | None:
    """None, CUDA's own, where there is a GPU."""
    return HostDriver() if jax.devices()[0].platform == "cpu" else None


def buffers(
    layout: KVLayout, data_ranks: int = 1, bounds: tuple[int, ...] = (0, 2, 5, 6)
) -> tuple[DeviceStagingBuffer, StagingBuffer]:
    devices = jax.devices()
    of_ranks = [
        [devices[(d * layout.ranks + r) % len(devices)] for r in range(layout.ranks)] for d in range(data_ranks)
    ]
    sizes = layout, PLANES, WIDTH, np.float32, SLOTS
    return DeviceStagingBuffer(of_ranks, *sizes, bounds=bounds, driver=driver()), StagingBuffer(*sizes)


def staged_pages(layout: KVLayout, count: int, planes: int, seed: int) -> StagedPages:
    """As a prefill engine gives them: of at most 16 pages an array, the last padded."""
    mesh, whole = make_mesh(1, layout.ranks), np.random.default_rng(seed)
    arrays, heads = [], layout.heads_per_rank * layout.ranks
    while count > 0:
        size = 16 if count > 4 else 4
        pages = whole.standard_normal((size, heads, planes, layout.page_size, WIDTH), np.float32)
        arrays.append(jax.device_put(jnp.asarray(pages), NamedSharding(mesh, PartitionSpec(None, MODEL))))
        count -= 16
    return StagedPages(arrays, 0, ())


@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_are_put_into_gpu_memory_and_taken_out_as_on_a_host(ranks: int) -> None:
    if ranks > len(jax.devices()):
        pytest.skip(f"{len(jax.devices())} devices")
    layout = KVLayout(4, 8, ranks)
    device, host = buffers(layout, data_ranks=2)
    for first, slots, planes in (
        (0, [0, 1, 2, 3, 9, 8], (0, 2)),
        (3, list(range(20)), (2, 5)),  # over two arrays, merged in each
        (1, [22, -1, 23, -1], (5, 6)),
    ):
        pages = staged_pages(layout, first + len(slots), planes[1] - planes[0], seed=first)
        for each in (device, host):
            each.begin(pages)
            each.put(each.fetch(pages), first, slots, planes)
    for slots in ([], [5, 6, 7, 22], [23, *range(18)]):
        want = host.take_out(slots, 0)
        for data_rank in (0, 1):
            found = device.take_out(slots, data_rank)
            assert isinstance(found, DevicePages)
            assert found.count == len(slots)
            for rank in range(ranks):
                blocks = [block[rank] for block in found.blocks]
                assert {block.device for block in blocks if block is not None} == {device._devices[data_rank][rank]}
                np.testing.assert_array_equal(np.concatenate([np.asarray(b) for b in blocks])[: len(slots)], want[rank])
    device.close()


def test_neighbouring_pages_are_one_copy() -> None:
    if jax.devices()[0].platform != "cpu":
        pytest.skip("counts the calls of a stand-in")
    layout = KVLayout(4, 8)
    device, _ = buffers(layout, bounds=(0, 2, 4, 6))
    played = device._parts[0].driver
    assert isinstance(played, HostDriver)
    played.copies.clear()
    pages = staged_pages(layout, 16, 2, seed=0)
    device.put(device.fetch(pages), 0, list(range(4, 20)), (2, 4))
    assert [each.height * each.num_bytes for each in played.copies] == [16 * 4 * 2 * 8 * WIDTH * 4]
    device.put(device.fetch(pages), 0, [4, 5, 7], (2, 4))
    assert len(played.copies) == 3
    device.take_out(list(range(16)), 0)
    assert len(played.copies) == 6  # one for each group


def test_a_plan_is_executed_between_buffers_of_one_process() -> None:
    sides = KVLayout(4, 8, 1), KVLayout(4, 16, 1)
    (source, plain_source), (target, plain_target) = (buffers(side) for side in sides)
    pages = staged_pages(sides[0], SLOTS, PLANES, seed=4)
    for each in (source, plain_source):
        each.put(each.fetch(pages), 0, list(range(SLOTS)), (0, PLANES))
    plan = plan_transfer(*sides, Pages([3, 9, 4, 20, 1], [7, 2, 5], 5, 37))
    for one, other in ((source, target), (plain_source, plain_target)):
        ranges = byte_ranges(plan.copies, one.layout, other.layout, (1, 5))
        other.copy(ranges)
        assert ranges[:, 2].sum() == plan.num_bytes(4, WIDTH * 4)
    [block] = target.take_out([7, 2, 5], 0).blocks
    want = plain_target.take_out([7, 2, 5], 0)
    assert isinstance(want, np.ndarray)
    assert want.any()
    np.testing.assert_array_equal(np.asarray(block[0])[:3], want[0])
    for each in (source, target):
        each.close()


def test_what_goes_from_one_gpu_or_into_one_is_copied_by_itself() -> None:
    if jax.devices()[0].platform != "cpu" or len(jax.devices()) < 2:
        pytest.skip("looks at the calls of a stand-in, for two devices")
    one, two = KVLayout(4, 8, 1), KVLayout(4, 8, 2)
    for source_side, target_side in ((two, one), (one, two), (two, two)):
        (source, _), (target, _) = buffers(source_side), buffers(target_side)
        ranges = byte_ranges(
            plan_transfer(source_side, target_side, Pages([3], [3], 0, 8)).copies,
            source.layout,
            target.layout,
            (0, PLANES),
        )
        host = target._parts[0].driver
        assert isinstance(host, HostDriver)
        host.copies.clear()
        target.copy(ranges)
        assert sum(row.height * row.num_bytes for row in host.copies) == ranges[:, 2].sum()
        for row in host.copies:
            assert inside(row.target, row.target_pitch, row, target._parts)
            assert inside(row.source, row.source_pitch, row, source._parts)
        for each in (source, target):
            each.close()


def inside(start: int, pitch: int, row: Rows, parts: Iterable[DeviceMemory]) -> bool:
    """Whether one side of a copy lies within one of some allocations."""
    stop = start + (row.height - 1) * pitch + row.num_bytes
    return any(part.address <= start and stop <= part.address + part.num_bytes for part in parts)


def test_pages_of_two_arrays_are_two_copies_wherever_they_lie() -> None:
    layout = KVLayout(4, 8)
    host = HostDriver()
    device = DeviceStagingBuffer([jax.devices("cpu")[:1]], layout, PLANES, WIDTH, np.float32, SLOTS, driver=host)
    size = int(np.prod(device.shape[1:])) * 4
    pages = np.random.default_rng(0).integers(0, 256, 20 * size, np.uint8)

    class Array:
        def __init__(self, place: int) -> None:
            self.place = place

        def unsafe_buffer_pointer(self) -> int:
            return int(pages.ctypes.data + self.place * size)

    host.copies.clear()
    device.put([[Array(0)], [Array(16)]], 0, list(range(20)), (0, PLANES))
    assert [row.height * row.num_bytes for row in host.copies] == [16 * size, 4 * size]
    device.close()


def test_the_stream_of_copies_goes_with_the_memory() -> None:
    class Recording(CudaCopyDriver):
        def __init__(self) -> None:
            self.called, self._streams = list[str](), {0: "stream"}

        def synchronise(self, device: int) -> None:
            pass

        def _call(self, name: str, *arguments: object) -> object:
            self.called.append(name)
            return None

    driver = Recording()
    driver.free(1, 0)
    driver.free(1, 0)
    assert driver.called == ["cuStreamDestroy", "cuMemFree", "cuMemFree"]


def test_ranges_do_not_run_on_from_one_gpu_into_another() -> None:
    layout = KVLayout(2, 4, 2)
    device, _ = buffers(layout, 1, (0, PLANES)) if len(jax.devices()) > 1 else (None, None)
    if device is None:
        pytest.skip("one device")
    import msgspec

    part = device.layout.row_bytes * 4 * PLANES * SLOTS  # the second part follows the first, as if by chance
    beside = msgspec.structs.replace(device.layout, addresses=(1 << 20, (1 << 20) + part), devices=(0, 1))
    plan = plan_transfer(layout, layout, Pages([SLOTS - 1], [SLOTS - 1], 0, 4))
    copies = [*plan.copies[:1], plan.copies[1]._replace(source_page=0, target_page=0)]
    assert len(byte_ranges(copies, beside, beside, (0, PLANES))) == 2
    same = msgspec.structs.replace(beside, devices=(0, 0))
    assert len(byte_ranges(copies, same, same, (0, PLANES))) == 1
    device.close()


def test_memory_beside_the_pool_is_counted_and_refused_with_the_way_out_where_there_is_none() -> None:
    [first, *_] = jax.devices()
    before, played = device_memory_bytes(), HostDriver(room=1000)
    memory = DeviceMemory(first, 900, played)
    assert device_memory_bytes() == before + 900
    memory.close()
    memory.close()
    assert device_memory_bytes() == before
    assert not played.held
    with pytest.raises(
        DeviceMemoryError, match=r"1,001 bytes .* 1,000 free of 1,000; .*XLA_PYTHON_CLIENT_MEM_FRACTION"
    ):
        DeviceMemory(first, 1001, played)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([2, 3])), max_size=12),
    st.sampled_from([1, 3]),
)
def test_strided_copies_are_the_runs(places: list[tuple[int, int, int]], spacing: int) -> None:
    runs = [(1000 + spacing * source, 2000 + spacing * target, size) for source, target, size in places]
    found = [
        (row.source + place * row.source_pitch, row.target + place * row.target_pitch, row.num_bytes)
        for row in strided(runs)
        for place in range(row.height)
    ]
    assert found == runs


def test_runs_at_even_distances_are_one_copy() -> None:
    runs = [(10 * place, 100 + 7 * place, 5) for place in range(6)]
    assert strided(runs) == [Rows(0, 100, 5, 10, 7, 6)]
    assert len(strided([*runs, (60, 142, 4), (0, 0, 4)])) == 3  # another size, and back
