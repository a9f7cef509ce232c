"""Loading: equal results however a checkpoint is written, nothing unread or unset, and errors before any read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import qwenjax.checkpoint.load as load_module
from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.resolve import resolve
from qwenjax.checkpoint.safetensors import CheckpointError, SafetensorsFile
from qwenjax.config import ConfigError
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import by_name
from tests.helpers import (
    assert_same_parameters,
    fuse_experts,
    model_from_tensors,
    random_tensors,
    tiny,
    write_checkpoint,
)

ROOT = Path(__file__).resolve().parents[2]
RAW = tiny(num_hidden_layers=3, mlp_only_layers=[1])
TENSORS = random_tensors(RAW)
FUSED = fuse_experts(TENSORS, RAW["num_experts"])
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path, shape: tuple[int, int] = (1, 1), **options: Any) -> Any:
    return load_model(folder, make_mesh(*shape), progress=False, **options)


def run(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A Python program in a process of its own, with the packages at hand, on the CPU."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "ffi", "kernels", "serving"))
    outer = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={**outer, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> Any:
    """What the program printed last, as JSON."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("tensors", "shards"), [(TENSORS, 1), (FUSED, 1), (TENSORS, 3)], ids=["per expert", "fused", "in shards"]
)
def test_every_spelling_of_a_checkpoint_gives_the_same_parameters(
    tmp_path: Path, tensors: dict[str, np.ndarray], shards: int, shape: tuple[int, int]
) -> None:
    loaded = load(write_checkpoint(tmp_path, RAW, tensors, shards), shape)
    assert_same_parameters(loaded, model_from_tensors(RAW, make_mesh(*shape), TENSORS))
    assert loaded.num_parameters == sum(tensor.size for tensor in TENSORS.values())


def test_a_checkpoint_may_be_fused_in_some_layers(tmp_path: Path) -> None:
    mixed = {**TENSORS, **FUSED}
    mixed = {n: t for n, t in mixed.items() if not (n.startswith("model.layers.0.mlp.experts.") and n in TENSORS)}
    mixed = {n: t for n, t in mixed.items() if not (n.startswith("model.layers.2.mlp.experts.") and n in FUSED)}
    loaded = load(write_checkpoint(tmp_path, RAW, mixed))
    assert_same_parameters(loaded, model_from_tensors(RAW, make_mesh(), TENSORS))


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (np.float32, jnp.bfloat16),
        (np.float32, jnp.float16),
        (ml_dtypes.bfloat16, jnp.float32),
        (ml_dtypes.bfloat16, jnp.bfloat16),
        (np.float16, jnp.float32),
        (np.float16, jnp.bfloat16),
    ],
)
def test_weights_are_converted_as_they_are_read(tmp_path: Path, stored: Any, dtype: Any) -> None:
    tensors = random_tensors(RAW, dtype=stored)
    name = jnp.dtype(dtype).name
    expected = model_from_tensors({**RAW, "torch_dtype": name}, make_mesh(), tensors)
    folder = write_checkpoint(tmp_path, {**RAW, "torch_dtype": "float32"}, tensors)
    assert_same_parameters(load(folder, dtype=dtype), expected)
    (folder / "config.json").write_text(json.dumps({**RAW, "torch_dtype": name}))
    assert_same_parameters(load(folder), expected)


def test_files_of_mixed_types_load_as_one(tmp_path: Path) -> None:
    mixed = {name: t.astype(np.float16 if "norm" in name else ml_dtypes.bfloat16) for name, t in TENSORS.items()}
    loaded = load(write_checkpoint(tmp_path, RAW, mixed))
    assert_same_parameters(loaded, model_from_tensors(RAW, make_mesh(), mixed))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("has_head", [True, False], ids=["with lm_head", "without lm_head"])
def test_tied_and_untied_with_and_without_lm_head(tmp_path: Path, tied: bool, has_head: bool) -> None:
    tensors = dict(TENSORS)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if not has_head:
        del tensors["lm_head.weight"]
    folder = write_checkpoint(tmp_path, {**RAW, "tie_word_embeddings": tied}, tensors)
    if tied or has_head:
        parameters = by_name(load(folder).state)
        assert ("lm_head" in parameters) == (not tied)
        np.testing.assert_array_equal(parameters["embed_tokens"], TENSORS["model.embed_tokens.weight"])
    else:
        with pytest.raises(CheckpointError, match=r"not in the files: lm_head\.weight; .*tie_word_embeddings false"):
            load(folder)


def test_a_tied_checkpoint_with_another_lm_head_is_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {**RAW, "tie_word_embeddings": True}, TENSORS)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight") as error:
        load(folder)
    assert str(folder / "model.safetensors") in str(error.value)


def rewrite(**changes: np.ndarray | None) -> Callable[[Path], None]:
    tensors = {name: t for name, t in {**TENSORS, **changes}.items() if t is not None}
    return lambda folder: (write_checkpoint(folder, RAW, tensors, 3), None)[1]


def edit(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: ((folder / file).write_bytes(change((folder / file).read_bytes())), None)[1]


def edit_config(**changes: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda content: json.dumps({**json.loads(content), **changes}).encode())


def edit_index(name: str, file: str | None) -> Callable[[Path], None]:
    def change(content: bytes) -> bytes:
        index = json.loads(content)
        index["weight_map"].pop(name, None)
        index["weight_map"].update({} if file is None else {name: file})
        return json.dumps(index).encode()

    return edit(INDEX, change)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def only_config(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


BROKEN: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a missing shard": (lambda folder: (folder / SHARD).unlink(), [SHARD, "missing"]),
    "a shard that is a folder": (
        lambda folder: ((folder / SHARD).unlink(), (folder / SHARD).mkdir(), None)[2],
        [SHARD],
    ),
    "a truncated file": (edit(SHARD, lambda content: content[:-1]), [SHARD, "truncated"]),
    "a file truncated in its header": (edit(SHARD, lambda content: content[:100]), [SHARD]),
    "a file of nothing": (edit(SHARD, lambda content: b""), [SHARD]),
    "bytes at the end": (edit(SHARD, lambda content: content + b"1"), [SHARD, "belong to none"]),
    "a broken header": (edit(SHARD, lambda content: content.replace(b'"dtype"', b'"etype"')), [SHARD]),
    "a page of a web server": (edit(SHARD, lambda content: b"<!DOCTYPE html><html>" * 99), [SHARD]),
    "an empty folder": (empty, ["config.json", "no such file"]),
    "a config and no weights": (only_config, ["model.safetensors", INDEX]),
    "an index that is not JSON": (edit(INDEX, lambda content: content[:50]), [INDEX]),
    "an index without files": (edit(INDEX, lambda content: b'{"weight_map": {}}'), [INDEX, "lists no tensor"]),
    "a tensor that the index names and its file lacks": (
        edit_index("model.layers.0.ghost", SHARD),
        [SHARD, "model.layers.0.ghost"],
    ),
    "a tensor that the index puts into another file": (edit_index(Q_PROJ, SHARD), [Q_PROJ, "safetensors"]),
    "a tensor that its file has and the index lacks": (edit_index(Q_PROJ, None), [Q_PROJ, "safetensors"]),
    "a file outside the folder": (edit_index(Q_PROJ, "../x.safetensors"), [INDEX, "../x.safetensors"]),
    "a missing tensor": (rewrite(**{Q_PROJ: None}), ["1 tensors of the model are not in the files", Q_PROJ]),
    "an unused tensor": (rewrite(extra=np.ones(3, np.float32)), ["1 tensors of the files have no place", "extra"]),
    "a bias that the config does not have": (
        rewrite(**{"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
        ["no place", "q_proj.bias"],
    ),
    "both spellings of the experts": (
        rewrite(**{n: t for n, t in FUSED.items() if n not in TENSORS}),
        ["no place in the model", "mlp.experts.0.gate_proj.weight", "and 28 more"],
    ),
    "one of the two fused tensors": (
        rewrite(**{"model.layers.0.mlp.experts.down_proj": np.ones((8, 40, 24), np.float32)}),
        ["no place in the model", "model.layers.0.mlp.experts.down_proj"],
    ),
    "a tensor of another shape": (
        rewrite(**{Q_PROJ: np.ones((40, 64), np.float32)}),
        [f"{Q_PROJ} is [40, 64] and by config.json [64, 40]"],
    ),
    "a tensor of integers": (rewrite(**{Q_PROJ: np.ones((64, 40), np.int32)}), [Q_PROJ, "int32", "safetensors"]),
    "a config of more layers": (edit_config(num_hidden_layers=4), ["tensors of the model", "layers.3.input_layernorm"]),
    "a config of fewer layers": (edit_config(num_hidden_layers=2), ["no place in the model", "layers.2"]),
    "a config of fewer experts": (edit_config(num_experts=4), ["no place in the model", "experts.4.gate_proj"]),
    "a config of another head_dim": (edit_config(head_dim=8), ["another shape", Q_PROJ]),
    "a quantised checkpoint": (edit_config(quantization_config={"quant_method": "gptq"}), ["quantised", "gptq"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_fails_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mend, named = BROKEN[name]
    folder = write_checkpoint(tmp_path, RAW, TENSORS, 3)
    mend(folder)

    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsFile, "read", read)
    with pytest.raises((CheckpointError, ConfigError)) as error:
        load(folder)
    for word in [*named, str(folder)]:
        assert word in str(error.value)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, planned = write_checkpoint(tmp_path, RAW, TENSORS), load_module.plan

    def plan(*arguments: Any) -> Any:
        os.truncate(folder / "model.safetensors", 20_000)
        return planned(*arguments)

    monkeypatch.setattr(load_module, "plan", plan)
    with pytest.raises(CheckpointError, match="changed while open") as error:
        load(folder)
    assert str(folder / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("content", [b"no safetensors at all", None], ids=["broken", "whole"])
def test_a_stray_file_beside_an_index_is_not_read(tmp_path: Path, content: bytes | None) -> None:
    folder = write_checkpoint(tmp_path / "model", RAW, TENSORS, 3)
    if content is None:
        other = write_checkpoint(tmp_path / "other", RAW, {n: t + 1 for n, t in TENSORS.items()})
        content = (other / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "consolidated.safetensors", "model-00004-of-00003.safetensors"):
        (folder / name).write_bytes(content)
    assert_same_parameters(load(folder), model_from_tensors(RAW, make_mesh(), TENSORS))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of tensors."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        sizes.append(preadv(*arguments))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 2)], ids=str)
def test_a_tensor_is_read_once_however_many_devices_want_it(
    tmp_path: Path, bytes_read: list[int], shape: tuple[int, int]
) -> None:
    folder = write_checkpoint(tmp_path, RAW, TENSORS)
    bytes_read.clear()
    load(folder, shape)
    # Short runs of columns are cut from whole rows, once for each model rank.
    cut = sum(t.nbytes for name, t in TENSORS.items() if "o_proj" in name or "1.mlp.down_proj" in name)
    assert sum(bytes_read) == sum(t.nbytes for t in TENSORS.values()) + (shape[1] - 1) * cut


RANK = """
    import json, os, sys
    import jax
    jax.config.update("jax_num_cpu_devices", 1)
    folder, coordinator, rank = sys.argv[1:]
    jax.distributed.initialize(coordinator, 2, int(rank))
    from qwenjax.checkpoint.load import load_model
    from qwenjax.mesh import make_mesh
    count, preadv = [0], os.preadv
    def counted(*arguments):
        size = preadv(*arguments)
        count[0] += size
        return size
    os.preadv = counted
    model = load_model(folder, make_mesh(1, 2), progress=False)
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(model.state))
    print(json.dumps([len(jax.devices()), local, count[0]]))
"""


def test_each_rank_of_two_processes_reads_just_its_slice(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, RAW, TENSORS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [run(RANK, str(folder), coordinator, str(rank)) for rank in range(2)]
    total = sum(t.nbytes for t in TENSORS.values())
    cut = sum(t.nbytes for name, t in TENSORS.items() if "o_proj" in name or "1.mlp.down_proj" in name)
    for devices, local, read in map(result, ranks):
        assert devices == 2
        assert local < 0.6 * total
        assert read == local + cut // 2  # whole rows of the matrices that are split by column


MEMORY = """
    import gc, json, sys, threading, time
    import jax
    import jax.numpy as jnp
    from qwenjax.checkpoint.load import load_model
    from qwenjax.mesh import make_mesh

    def resident():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def above_result(folder, dtype):
        gc.collect()
        before, peak, done = resident(), [0], threading.Event()
        def watch():
            while not done.is_set():
                peak[0] = max(peak[0], resident())
                time.sleep(0.001)
        watcher = threading.Thread(target=watch)
        watcher.start()
        model = load_model(folder, make_mesh(), dtype, progress=False)
        done.set()
        watcher.join()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.state))
        return [size, peak[0] - before - size]

    big, small = sys.argv[1:]
    above_result(small, jnp.bfloat16)  # what the first use of JAX takes is not the loader's
    print(json.dumps([above_result(big, jnp.bfloat16), above_result(big, jnp.float32)]))
"""


def test_host_memory_above_the_result_stays_under_twice_the_largest_tensor(tmp_path: Path) -> None:
    raw = tiny(
        vocab_size=32_768, hidden_size=512, num_hidden_layers=5, num_experts=16, moe_intermediate_size=512,
        tie_word_embeddings=True, torch_dtype="bfloat16",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    block = rng.normal(size=1 << 20).astype(ml_dtypes.bfloat16)
    tensors = {
        name: np.resize(block, tensor.shape)
        for name, tensor in random_tensors({**raw, "num_experts": 1}, dtype=ml_dtypes.bfloat16).items()
        if ".experts." not in name
    }
    for layer in range(5):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = np.resize(block, (16, 512))
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.resize(block, (16, 1024, 512))
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = np.resize(block, (16, 512, 512))
    big = write_checkpoint(tmp_path / "big", raw, tensors)
    small = write_checkpoint(tmp_path / "small", RAW, TENSORS)
    largest = max(t.nbytes for t in tensors.values())
    assert largest == 32 << 20
    for size, above in result(run(MEMORY, str(big), str(small), XLA_FLAGS="")):
        assert size >= 150 << 20
        assert above < 2 * largest, f"{above / largest:.2f} times the largest tensor"


def test_a_progress_bar_counts_the_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, RAW, TENSORS)
    load_model(folder, make_mesh())
    shown = capfd.readouterr().err
    assert "Loading weights: 100%" in shown
    assert f"{sum(t.nbytes for t in TENSORS.values()) / 1000:.0f}k" in shown
    load_model(folder, make_mesh(), progress=False)
    assert capfd.readouterr().err == ""


OFFLINE = """
    import json, sys
    from qwenjax.checkpoint.load import load_model
    from qwenjax.checkpoint.safetensors import CheckpointError
    from qwenjax.mesh import make_mesh

    def attempt(name, revision=None):
        try:
            return load_model(name, make_mesh(), revision=revision, progress=False).num_parameters
        except CheckpointError as error:
            return str(error)

    print(json.dumps([attempt("someone/tiny"), attempt("someone/tiny", "v1"), attempt("someone/tiny", "v2"),
                      attempt("someone/else"), attempt("no//id")]))
"""


def test_a_repo_id_is_resolved_in_the_hugging_face_cache_offline(tmp_path: Path) -> None:
    repo, commit = tmp_path / "hub" / "models--someone--tiny", "0123456789abcdef0123456789abcdef01234567"
    write_checkpoint(repo / "snapshots" / commit, RAW, TENSORS)
    (repo / "refs").mkdir()
    for name in ("main", "v1"):
        (repo / "refs" / name).write_text(commit)
    main, tag, no_tag, no_repo, no_id = result(run(OFFLINE, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"))
    assert main == tag == sum(t.size for t in TENSORS.values())
    assert "someone/tiny: no such folder, and the Hugging Face cache has no snapshot" in no_tag
    assert "someone/else: no such folder, and the Hugging Face cache has no snapshot" in no_repo
    assert "no//id: no such folder" in no_id


def test_a_path_that_is_no_folder_is_an_error_and_not_a_repo_id(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    for path in (tmp_path / "nothing", "./nothing", "~/no/such/folder", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder") as error:
            resolve(path)
        assert str(path) in str(error.value)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a file; a checkpoint is a folder"):
        resolve(file)
    with pytest.raises(CheckpointError, match=r"revision is 'v1', and .* is a folder"):
        resolve(tmp_path, "v1")
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
