"""Symmetric memory: mapping in one process and several, errors that say what to do, nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax_ffi.symmetric_memory import SymmetricHeap, bytes_outside_xla
from qwenjax_ffi.symmetric_memory_exchange import (
    DescriptorServer,
    PeerError,
    Rendezvous,
    SymmetricMemoryError,
    SymmetricMemoryUnavailable,
    receive_descriptors,
    timeout_seconds,
)
from qwenjax_ffi.symmetric_memory_mapping import MappedMemory, multicast_wanted
from qwenjax_kernels.heap_layout import BASES_WORD, RANK_WORD, RECORD_WORD, HeapLayout, multicast_word, num_words
from tests.ffi.file_driver import PAGE, FileDriver

PROCESS = Path(__file__).with_name("heap_process.py")
ROOT = PROCESS.parent.parent.parent
MIB = 1 << 20


class NoStore:
    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str, seconds: float) -> str | None:
        return None


def map_alone(driver: FileDriver, ranks: int = 3, num_bytes: int = 5000) -> MappedMemory:
    local = {rank: rank for rank in range(ranks)}
    return MappedMemory(driver, local, ranks, num_bytes, Rendezvous(NoStore(), "heap", 0, 1, 1.0))


def run_processes(folder: Path, settings: list[dict[str, Any]], seconds: float = 60.0, absent: int = 0) -> list[str]:
    """What each process printed; `absent` more are expected by them and never come."""
    command = [sys.executable, str(PROCESS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    running = [
        subprocess.Popen(
            [*command, str(i), str(len(settings) + absent), str(folder), str(seconds), json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i, asked in enumerate(settings)
    ]
    printed = []
    for process in running:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        printed.append(out.strip())
    return printed


def test_one_process_maps_every_rank_zeroed_and_frees_it_all() -> None:
    driver = FileDriver()
    memory = map_alone(driver)
    assert memory.num_bytes == -(-5000 // PAGE) * PAGE
    assert len(set(memory.bases.values())) == 3
    for base in memory.bases.values():
        assert ctypes.string_at(base, memory.num_bytes) == bytes(memory.num_bytes)
    assert memory.multicast_base is None
    memory.close()
    memory.close()
    assert driver.live == []
    assert driver.calls.count("synchronise") == 3  # once a device, before its memory goes


FAILING = ["granularity", "create", "export", "import_handle", "map", "zero", "host_allocate"]
MULTICAST_FAILING = ["multicast_granularity", "multicast_create", "multicast_add", "multicast_bind"]


@pytest.mark.parametrize("call", [*FAILING, *MULTICAST_FAILING])
def test_nothing_is_left_behind_where_a_driver_call_fails(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWENJAX_MULTICAST", "1")
    driver = FileDriver({call: "CUDA_ERROR_UNKNOWN"}, multicast=True)
    if call in ("export", "import_handle"):
        map_alone(driver).close()  # one process shares no handle
    else:
        with pytest.raises(SymmetricMemoryError, match="CUDA_ERROR_UNKNOWN") as raised:
            map_alone(driver)
        assert ("QWENJAX_MULTICAST=1 asks for it: unset it" in str(raised.value)) == (call in MULTICAST_FAILING)
        falls_back = isinstance(raised.value, SymmetricMemoryUnavailable)
        assert falls_back == (call in ("granularity", "create", "map"))
    assert driver.live == []


def test_no_room_says_how_many_bytes_and_which_setting_frees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    with pytest.raises(SymmetricMemoryError, match=r"8,192 bytes on device 0: 1,000 of 2,000 .*MEM_FRACTION.*0\.9"):
        map_alone(FileDriver({"create": "CUDA_ERROR_OUT_OF_MEMORY"}))


@pytest.mark.parametrize("fails", ["can_reach", "can_share posix"])
def test_devices_that_cannot_reach_each_other_are_unavailable(fails: str) -> None:
    driver = FileDriver({fails: ""})
    with pytest.raises(SymmetricMemoryUnavailable, match="device 0"):
        map_alone(driver)
    assert "create" not in driver.calls


def test_multicast_objects_are_made_only_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    able = FileDriver(multicast=True)
    map_alone(able).close()
    assert not [call for call in able.calls if call.startswith("multicast")]
    monkeypatch.setenv("QWENJAX_MULTICAST", "1")
    unable = FileDriver(multicast=False)
    map_alone(unable).close()
    assert not [call for call in unable.calls if call.startswith("multicast")]
    memory = map_alone(able)
    assert memory.multicast_base is not None
    assert able.calls.count("multicast_create") == 1
    assert able.calls.count("multicast_bind") == 3
    memory.close()
    assert able.live == []
    monkeypatch.setenv("QWENJAX_MULTICAST", "yes")
    with pytest.raises(ValueError, match="'yes'; it is 1"):
        multicast_wanted()


@pytest.mark.parametrize("settings", [{}, {"multicast": True}], ids=["plain", "multicast"])
def test_three_processes_see_each_others_memory(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert run_processes(tmp_path, [settings] * 3) == ["ok; live: []"] * 3


def test_processes_of_different_hosts_share_fabric_handles(tmp_path: Path) -> None:
    assert run_processes(tmp_path, [{"host": "a"}, {"host": "b"}]) == ["ok; live: []"] * 2


@pytest.mark.parametrize("call", ["create", "granularity", "map", "export", "import_handle"])
def test_refused_fabric_handles_name_what_is_missing(call: str, tmp_path: Path) -> None:
    refused = {call: "CUDA_ERROR_NOT_PERMITTED"}
    printed = run_processes(tmp_path, [{"host": "a", "fails": refused}, {"host": "b", "fails": refused}])
    for text in printed:
        assert text.startswith("SymmetricMemoryUnavailable")
        assert "CUDA_ERROR_NOT_PERMITTED; the ranks span hosts" in text
        assert "IMEX channel" in text
        assert text.endswith("live: []")


def test_a_process_that_fails_fails_the_others_at_once_with_its_reason(tmp_path: Path) -> None:
    began = time.monotonic()
    full = {"fails": {"create": "CUDA_ERROR_OUT_OF_MEMORY"}}
    ok, failed = run_processes(tmp_path, [{}, full], seconds=80)
    assert failed.startswith("SymmetricMemoryError: heap: no room for")
    assert ok.startswith("PeerError: heap: process 1 failed in 'handles': heap: no room for")
    assert ok.endswith("live: []")
    assert time.monotonic() - began < 40


def test_where_multicast_is_refused_to_one_process_all_say_how_to_do_without(tmp_path: Path) -> None:
    refused = {"fails": {"multicast_add": "CUDA_ERROR_NOT_PERMITTED"}}
    ok, failed = run_processes(tmp_path, [{"multicast": True}, {"multicast": True} | refused])
    assert ok.startswith("PeerError: heap: process 1 failed in 'multicast devices': heap: NVLink multicast")
    assert failed.startswith("SymmetricMemoryError: heap: NVLink multicast: multicast_add answered CUDA_ERROR_NOT_PERM")
    for text in (ok, failed):
        assert "QWENJAX_MULTICAST=1 asks for it: unset it in every process" in text
        assert text.endswith("live: []")


def test_a_process_that_dies_gives_the_others_an_error_in_time(tmp_path: Path) -> None:
    survivor, dead = run_processes(tmp_path, [{}, {"dies": "able"}], seconds=1.0)
    assert dead == ""
    assert survivor.startswith("PeerError: heap: process 1 of 2 did not come to")
    assert "within 1 s" in survivor
    assert "QWENJAX_PEER_TIMEOUT" in survivor
    assert survivor.endswith("live: []")


def test_a_process_that_never_comes_gives_the_others_an_error_in_time(tmp_path: Path) -> None:
    (text,) = run_processes(tmp_path, [{}], seconds=0.5, absent=1)
    assert text.startswith("PeerError: heap: process 1 of 2 did not come to 'hello' within 0.5 s")


def test_processes_that_want_different_sizes_are_told_so(tmp_path: Path) -> None:
    for text in run_processes(tmp_path, [{"bytes": 1000}, {"bytes": 2000}]):
        assert text.startswith("SymmetricMemoryError: heap: the processes want different bytes: [1000, 2000]")


def test_descriptors_come_over_the_socket_or_from_the_process_itself(tmp_path: Path) -> None:
    source = os.memfd_create("source")
    os.write(source, b"shared")
    with DescriptorServer([os.dup(source)]) as server:
        addresses = [server.address, server.address | {"path": str(tmp_path / "elsewhere")}]
        for address in addresses:
            (received,) = receive_descriptors(address, 5.0)
            assert os.pread(received, 6, 0) == b"shared"
            os.close(received)
        with pytest.raises(SymmetricMemoryError, match=r"0 of 1 descriptors.*pidfd_getfd"):
            receive_descriptors(server.address | {"token": "0" * 32, "pid": 1 << 22}, 5.0)
    assert not Path(server.address["path"]).exists()
    os.close(source)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_timeout_is_a_positive_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWENJAX_PEER_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"QWENJAX_PEER_TIMEOUT is '{text}'"):
        timeout_seconds()


def mesh(ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]).reshape(1, ranks), ("data", "model"))


def address(row: np.ndarray, word: int) -> int:
    return int(row[word]) | int(row[word + 1]) << 32


def test_the_epoch_array_says_where_every_ranks_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWENJAX_MULTICAST", "1")
    with SymmetricHeap(mesh(4), "model", driver=FileDriver(multicast=True)) as heap:
        assert heap.is_mapped
        assert heap.has_multicast
        epochs = heap.epochs()
        assert epochs.dtype == np.int32
        assert epochs.sharding.is_equivalent_to(NamedSharding(mesh(4), PartitionSpec(("data", "model"))), 1)
        rows = np.asarray(epochs).view(np.uint32).reshape(4, num_words(4, multicast=True))
        for rank, row in enumerate(rows):
            assert row[0] == 0
            assert row[RANK_WORD] == rank
            addresses = [address(row, BASES_WORD + 2 * peer) for peer in range(4)]
            for peer, base in enumerate(addresses):
                # What rank 0 reads through its own row is what the others read.
                word = ctypes.c_uint64.from_address(base + HeapLayout.arrivals)
                assert word.value == (peer if rank else 0)
                word.value = peer
            assert address(row, multicast_word(4)) not in addresses
            assert address(row, RECORD_WORD)
        unarmed = np.asarray(heap.epochs(armed=False)).reshape(4, -1)
        assert (unarmed[:, RANK_WORD] < 0).all()


def test_processes_of_jax_distributed_meet_through_its_coordinator() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    program = PROCESS.with_name("heap_distributed.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(program), str(process), "2", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=100)
        assert out.endswith("ok\n"), err[-3000:]


def test_offsets_are_handed_out_until_the_heap_is_full() -> None:
    driver = FileDriver()
    with SymmetricHeap(mesh(2), "model", num_bytes=MIB, driver=driver) as heap:
        before = bytes_outside_xla()
        assert before >= heap.num_bytes >= HeapLayout(2).num_bytes + MIB
        first, second = heap.allocate(1000), heap.allocate(24)
        assert first >= HeapLayout(2).num_bytes
        assert first % 256 == second % 256 == 0
        assert first + 1000 <= second
        with pytest.raises(SymmetricMemoryError, match=r"2,097,152 bytes of a heap of .* larger num_bytes"):
            heap.allocate(2 * MIB)
    assert driver.live == []
    assert bytes_outside_xla() <= before - heap.num_bytes


def test_a_heap_is_freed_with_its_owner() -> None:
    driver = FileDriver()
    heap = SymmetricHeap(mesh(2), "model", driver=driver)
    assert driver.live
    del heap
    gc.collect()
    assert driver.live == []


def test_a_kernel_that_gave_up_is_an_error_that_says_for_whom() -> None:
    with SymmetricHeap(mesh(2), "model", driver=FileDriver()) as heap:
        heap.check()
        row = np.asarray(heap.epochs()).view(np.uint32).reshape(2, -1)[1]
        (ctypes.c_uint32 * 3).from_address(address(row, RECORD_WORD))[:] = (1, 0, 17)
        with pytest.raises(
            PeerError,
            match=r"rank 1: a peer did not arrive in time \(rank 0, collective 17\).*new process.*QWENJAX_PEER_TIMEOUT",
        ):
            heap.check()


def test_on_cpu_the_same_calls_work_without_memory() -> None:
    with SymmetricHeap(mesh(2), "model", num_bytes=1000) as heap:
        assert not heap.is_mapped
        assert not heap.has_multicast
        assert np.asarray(heap.epochs()).tolist() == [0, 0]
        assert heap.allocate(1000) == 0
        heap.check()


@pytest.mark.parametrize("axis", ["data", ("model", "data")])
def test_an_axis_that_leaves_devices_out_is_an_error(axis: Any) -> None:
    with pytest.raises(ValueError, match="takes all devices, in mesh order"):
        SymmetricHeap(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model")), axis)
