"""Our safetensors reader and writer against the reference package, and the ways in which a checkpoint can be broken."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qwenjax.checkpoint.safetensors import Checkpoint, CheckpointError, SafetensorsFile, TensorInfo
from qwenjax.checkpoint.writer import SafetensorsWriter

RNG = np.random.default_rng(0)
ARRAYS = {
    "matrix": RNG.standard_normal((33, 40), np.float32),
    "wide": RNG.standard_normal((6, 20000)).astype(ml_dtypes.bfloat16),
    "stack": RNG.integers(0, 100, (3, 5, 7, 4), dtype=np.int64),
    "half": RNG.standard_normal((4, 4)).astype(np.float16),
    "fp8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(8, 32),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 5), np.float32),
}


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def raw(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsFile:
    path = tmp_path_factory.mktemp("reference") / "model.safetensors"
    save_file({name: to_torch(array) for name, array in ARRAYS.items()}, path, metadata={"format": "pt"})
    return SafetensorsFile(path)


def test_reads_what_the_reference_writes(file: SafetensorsFile) -> None:
    assert file.tensors.keys() == ARRAYS.keys()
    assert file.metadata == {"format": "pt"}
    for name, array in ARRAYS.items():
        assert file.tensors[name] == TensorInfo(array.dtype, array.shape)
        assert file.tensors[name].nbytes == array.nbytes
        got = file.read(name)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert raw(got) == raw(array)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_slice_is_the_slice_of_the_whole(file: SafetensorsFile, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in ARRAYS if name != "scalar"]))
    array = ARRAYS[name]
    ends = [st.integers(-n - 2, n + 2) | st.none() for n in array.shape]
    index = tuple(slice(data.draw(end), data.draw(end)) for end in ends[: data.draw(st.integers(0, array.ndim))])
    got = file.read(name, index)
    assert got.shape == array[index].shape
    assert raw(got) == raw(array[index])
    assert got.flags.c_contiguous
    assert got.flags.writeable


def test_a_slice_reads_no_more_bytes_than_it_has(file: SafetensorsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(sum(map(len, views))) or real(fd, views, at))
    file.read("stack", (slice(1, 2), slice(2, 4)))
    file.read("wide", (slice(2, 5), slice(1000, 12000)))  # runs of 22 kB
    assert sum(read) == 2 * 7 * 4 * 8 + 3 * 11000 * 2
    read.clear()
    file.read("matrix", (slice(10, 20), slice(3, 5)))  # runs of 8 bytes: rows, in one go
    assert read == [10 * 40 * 4]


def test_threads_share_a_file(file: SafetensorsFile) -> None:
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda row: file.read("wide", (slice(row, row + 1),)), list(range(6)) * 20))
    assert all(raw(row) == raw(ARRAYS["wide"][i % 6 : i % 6 + 1]) for i, row in enumerate(rows))


@pytest.mark.parametrize("index", [(slice(0, 4, 2),), (slice(None, None, -1),), (slice(None),) * 3])
def test_strides_and_too_many_axes_are_refused(file: SafetensorsFile, index: tuple[slice, ...]) -> None:
    with pytest.raises(ValueError, match="matrix"):
        file.read("matrix", index)


def test_an_absent_tensor_is_named_with_its_file(file: SafetensorsFile) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'nothing'"):
        file.read("nothing")


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


BROKEN: dict[str, tuple[object, bytes, int | None, str]] = {
    "header longer than the file": ({}, b"", 10**6, "truncated"),
    "header of 200 MB": ({}, b"", 2 * 10**8, "header of 200,000,000"),
    "not JSON": (b"{nope", b"", None, "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "not JSON"),
    "a list": ([], b"", None, "not an object"),
    "one name twice": (b'{"a": 1, "a": 1}', b"", None, "'a' twice"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"1", None, "'a' lacks"),
    "unknown dtype": ({"a": entry(0, 1, dtype="F4")}, b"1", None, "'a' has dtype 'F4'"),
    "dtype a list": ({"a": entry(0, 1, dtype=["U8"])}, b"1", None, "'a' has dtype"),
    "negative size": ({"a": entry(0, 1, [-1])}, b"1", None, "'a' has shape"),
    "size a bool": ({"a": entry(0, 1, [True])}, b"1", None, "'a' has shape"),
    "offsets backwards": ({"a": entry(2, 1, [1])}, b"12", None, "'a' has data_offsets"),
    "offsets and shape disagree": ({"a": entry(0, 2, [3])}, b"12", None, "'a'.*needs 3 bytes"),
    "overlap": ({"a": entry(0, 2), "b": entry(1, 3)}, b"123", None, "'b'.*overlaps 'a'"),
    "hole": ({"a": entry(0, 1), "b": entry(2, 3)}, b"123", None, "'b'.*unused bytes after 'a'"),
    "out of range": ({"a": entry(0, 1), "b": entry(1, 9)}, b"123", None, "truncated.*'b'"),
    "bytes of no tensor": ({"a": entry(0, 1)}, b"123", None, "2 bytes after the last"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_the_tensors(case: str, tmp_path: Path) -> None:
    header, data, length, message = BROKEN[case]
    path = write_raw(tmp_path / "broken.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=rf"broken\.safetensors.*{message}"):
        SafetensorsFile(path)


@given(cut=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_is_refused(
    file: SafetensorsFile, tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    whole = file.path.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.safetensors"
    path.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        SafetensorsFile(path)


def test_a_file_that_shrinks_while_open_fails_with_its_tensor(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.safetensors", {"a": entry(0, 100)}, bytes(100))
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 50)
    with pytest.raises(CheckpointError, match="'a'"):
        file.read("a")


def shards(folder: Path) -> Path:
    folder.mkdir()
    save_file({"a": torch.arange(4)}, folder / "model-1.safetensors")
    save_file({"b": torch.arange(6), "c": torch.ones(2)}, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_a_sharded_folder_reads_as_one(tmp_path: Path) -> None:
    folder = shards(tmp_path / "model")
    (folder / "stray.safetensors").write_bytes(b"not even a header")  # unlisted, so not read
    checkpoint = Checkpoint(folder)
    assert checkpoint.tensors.keys() == {"a", "b", "c"}
    assert checkpoint.file_of("b") == folder / "model-2.safetensors"
    np.testing.assert_array_equal(checkpoint.read("b", (slice(1, 3),)), [1, 2])
    with pytest.raises(CheckpointError, match="'d'"):
        checkpoint.read("d")


def test_a_folder_with_one_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4)}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(Checkpoint(tmp_path).read("a"), [0, 1, 2, 3])


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: (f / "model-2.safetensors").unlink(), r"1 of 2 shards.*model-2\.safetensors"),
    "truncated shard": (lambda f: os.truncate(f / "model-2.safetensors", 20), r"model-2\.safetensors"),
    "listed and absent": (lambda f: edit_index(f, lambda m: m.update(d="model-1.safetensors")), r"model-1.*lacks d"),
    "present and unlisted": (lambda f: edit_index(f, lambda m: m.pop("c")), r"model-2.*holds c"),
    "index elsewhere": (lambda f: edit_index(f, lambda m: m.update(a="../model-1.safetensors")), r"'a'.*\.\./model-1"),
    "empty index": (lambda f: edit_index(f, lambda m: m.clear()), "lists no tensor"),
    "index not JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "weight_map"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "neither"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_that_is_not_whole_is_refused(case: str, tmp_path: Path) -> None:
    damage, message = BAD_FOLDERS[case]
    folder = shards(tmp_path / "model")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


def test_empty_and_absent_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "nowhere")


def test_the_reference_reads_what_the_writer_writes_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    infos = {name: TensorInfo(array.dtype, array.shape) for name, array in ARRAYS.items()}
    writer = SafetensorsWriter(path, infos, {"format": "pt"})
    for name, array in reversed(ARRAYS.items()):
        for row in reversed(range(0, len(array), 2)) if array.ndim else [0]:
            writer.write(name, array[row : row + 2] if array.ndim else array, row)
    assert not path.exists()
    writer.close()
    read = load_file(path)
    assert read.keys() == ARRAYS.keys()
    assert all(raw(SafetensorsFile(path).read(name)) == raw(array) for name, array in ARRAYS.items())
    assert all(torch.equal(read[name], to_torch(array)) for name, array in ARRAYS.items() if name != "fp8")
    assert torch.equal(read["fp8"].view(torch.uint8), to_torch(ARRAYS["fp8"]).view(torch.uint8))


def test_the_writer_refuses_a_file_that_is_not_whole_and_arrays_that_do_not_fit(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "out.safetensors", {"a": TensorInfo(np.dtype(np.float32), (4, 2))})
    writer.write("a", np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"'a'.*float64"):
        writer.write("a", np.zeros((1, 2)), 3)
    with pytest.raises(ValueError, match="'a' has 4 rows"):
        writer.write("a", np.zeros((2, 2), np.float32), 3)
    with pytest.raises(ValueError, match="a"):
        writer.close()
    assert not (tmp_path / "out.safetensors").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
