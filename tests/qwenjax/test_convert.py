"""`qwenjax convert`: what it writes, read by an independent reader; and what it refuses."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qwenjax.checkpoint.safetensors import Checkpoint, CheckpointError, TensorInfo
from qwenjax.checkpoint.writer import SafetensorsWriter
from qwenjax.convert import ConvertError, convert, format_table
from qwenjax.convert.destination import Destination
from qwenjax.convert.plan import make_plan
from qwenjax.convert.source import open_source
from qwenjax.quant import MXFP8, NonFiniteError
from qwenjax_serving.commands import convert as command
from tests.qwenjax.conversions import (
    CONFIG,
    EXTRAS,
    HIDDEN,
    WIDTH,
    contents,
    fuse,
    run_python,
    save,
    tensors,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("source") / "model", tensors())


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert(source, folder)
    return folder


def independent(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a converted folder as float64 by the safetensors package, none of our code: MXFP8 decoded."""
    found: dict[str, torch.Tensor] = {}
    for file in set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()):
        with safe_open(folder / file, framework="pt") as reader:
            found |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - not a dict
    values = {}
    for name in [name for name in found if not name.endswith("_scale")]:
        if found[name].dtype == torch.float8_e4m3fn:
            scale = 2.0 ** (found[name + "_scale"].numpy().astype(np.float64) - 127)
            values[name] = found[name].to(torch.float64).numpy() * scale.repeat(32, -1)
        else:
            values[name] = found[name].to(torch.float64).numpy()
    return values


def is_linear(name: str) -> bool:
    return "_proj" in name


def test_an_independent_reader_finds_every_weight(source: Path, converted: Path) -> None:
    got, original = independent(converted), tensors()
    assert got.keys() == original.keys()
    for name, tensor in original.items():
        exact = tensor.to(torch.float64).numpy()
        if is_linear(name):
            rounded = MXFP8().dequantise(*MXFP8().quantise(tensor.to(torch.float32).numpy()))
            np.testing.assert_array_equal(got[name], rounded)
            assert 0.01 < np.linalg.norm(got[name] - exact) / np.linalg.norm(exact) < 0.03
        else:
            np.testing.assert_array_equal(got[name], exact)


def test_the_layout_is_the_one_that_vllm_and_sglang_read(converted: Path) -> None:
    infos = Checkpoint(converted).tensors
    for name, info in infos.items():
        if name.endswith("_scale"):
            weight = infos[name.removesuffix("_scale")]
            assert info == TensorInfo(np.dtype(np.uint8), (weight.shape[0], weight.shape[1] // 32))
            assert weight.dtype == ml_dtypes.float8_e4m3fn
        elif not is_linear(name):
            assert info.dtype == ml_dtypes.bfloat16
    assert {name.removesuffix("_scale") for name in infos if name.endswith("_scale")} == set(
        filter(is_linear, tensors())
    )
    with safe_open(next(converted.glob("*.safetensors")), framework="pt") as reader:
        assert reader.metadata() == {"format": "pt"}
    config = json.loads((converted / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG
    assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "MXFP8")
    assert quantization["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]
    legacy = json.loads((converted / "hf_quant_config.json").read_text())
    assert legacy["producer"]["name"] == "modelopt"
    assert legacy["quantization"] == {
        "quant_algo": "MXFP8",
        "kv_cache_quant_algo": None,
        "group_size": 32,
        "exclude_modules": ["lm_head", "model.layers.0.mlp.gate"],
    }


def test_tokenizer_template_and_generation_config_go_along_and_nothing_else(converted: Path) -> None:
    assert {name: (converted / name).read_text() for name in EXTRAS} == EXTRAS
    ours = {"config.json", "hf_quant_config.json", "model.safetensors.index.json", "conversion_report.json"}
    assert set(contents(converted)) == EXTRAS.keys() | ours | {"model-00001-of-00001.safetensors"}


def test_the_source_is_not_touched(tmp_path: Path) -> None:
    folder = save(tmp_path / "src", tensors())
    before = contents(folder), {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    convert(folder, tmp_path / "dst")
    assert before == (contents(folder), {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]})


def test_fused_experts_give_the_same_bytes_as_single_ones(converted: Path, tmp_path: Path) -> None:
    convert(save(tmp_path / "src" / "model", fuse(tensors())), tmp_path / "dst")
    one, other = Checkpoint(converted), Checkpoint(tmp_path / "dst")
    assert one.tensors == other.tensors
    assert all(one.read(name).tobytes() == other.read(name).tobytes() for name in one.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_single_and_half_precision_sources(dtype: torch.dtype, tmp_path: Path) -> None:
    state = tensors(dtype)
    convert(save(tmp_path / "src", state), tmp_path / "dst")
    got = independent(tmp_path / "dst")
    for name, tensor in state.items():
        x = tensor.to(torch.float32).numpy()
        np.testing.assert_array_equal(got[name], MXFP8().dequantise(*MXFP8().quantise(x)) if is_linear(name) else x)


def fp8_source(folder: Path, powers_of_two: bool, scale_dtype: torch.dtype) -> tuple[Path, dict[str, np.ndarray]]:
    """A Qwen FP8 checkpoint with sides of 192 (which 128 does not divide), and its exact float32 values."""
    make = torch.Generator().manual_seed(3)
    state: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(192, dtype=torch.bfloat16)}
    exact: dict[str, np.ndarray] = {}
    for projection, shape in {"q": (320, 192), "k": (192, 192), "v": (192, 192), "o": (192, 320)}.items():
        codes = torch.randint(0, 256, shape, generator=make, dtype=torch.int32).to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        weight, blocks = codes.view(torch.float8_e4m3fn), (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
        scale = torch.randn(blocks, generator=make).abs() * 1e-3 + 1e-4
        scale = (2.0 ** torch.round(torch.log2(scale)) if powers_of_two else scale).to(scale_dtype)
        name = f"model.layers.0.self_attn.{projection}_proj.weight"
        state |= {name: weight, name + "_scale_inv": scale}
        each = scale.float().numpy().repeat(128, 0)[: shape[0]].repeat(128, 1)[:, : shape[1]]
        exact[name] = weight.float().numpy() * each
    config = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    return save(folder, state, config), exact


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_become_mxfp8_of_their_values(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    folder, exact = fp8_source(tmp_path / "src", False, scale_dtype)
    report = convert(folder, tmp_path / "dst")
    got = independent(tmp_path / "dst")
    for name, x in exact.items():
        np.testing.assert_array_equal(got[name], MXFP8().dequantise(*MXFP8().quantise(x)))
    assert report["source_format"] == "fp8_block"
    assert 0.01 < report["kinds"]["attention"]["worst_relative_error"] < 0.03
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]["quant_algo"] == "MXFP8"


def test_fp8_blocks_whose_scales_are_powers_of_two_convert_without_loss(tmp_path: Path) -> None:
    folder, exact = fp8_source(tmp_path / "src", True, torch.float32)
    report = convert(folder, tmp_path / "dst")
    got = independent(tmp_path / "dst")
    for name, x in exact.items():
        np.testing.assert_array_equal(got[name], x)
    assert report["kinds"]["attention"]["worst_relative_error"] == 0.0


def test_fp8_layers_that_are_kept_become_bfloat16(tmp_path: Path) -> None:
    folder, exact = fp8_source(tmp_path / "src", False, torch.float32)
    convert(folder, tmp_path / "dst", exclude=["*.o_proj"])
    checkpoint = Checkpoint(tmp_path / "dst")
    kept = {name: x for name, x in exact.items() if ".o_proj." in name}
    assert kept
    for name, x in kept.items():
        np.testing.assert_array_equal(checkpoint.read(name), x.astype(ml_dtypes.bfloat16))


def test_an_fp8_weight_without_its_scale_is_refused(tmp_path: Path) -> None:
    folder, _ = fp8_source(tmp_path / "src", False, torch.float32)
    scale = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    file = Checkpoint(folder).file_of(scale)
    with safe_open(file, framework="pt") as reader:
        state = {name: reader.get_tensor(name) for name in reader.keys() if name != scale}  # noqa: SIM118
    save_file(state, file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"][scale]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale_inv is missing"):
        convert(folder, tmp_path / "dst")


def quantised(folder: Path) -> set[str]:
    return {name.removesuffix("_scale") for name in Checkpoint(folder).tensors if name.endswith("_scale")}


def test_only_experts_leaves_attention_as_it_is(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", only="experts")
    assert quantised(tmp_path / "dst") == {name for name in tensors() if ".experts." in name}
    ignored = json.loads((tmp_path / "dst" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert "model.layers.1.self_attn.k_proj" in ignored
    assert "model.layers.1.mlp.down_proj" in ignored
    assert not any("experts" in module for module in ignored)


def test_exclude_keeps_what_its_globs_match(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", exclude=["model.layers.0.*", "*.1.mlp.down_proj.weight"])
    kept = {"model.layers.1.mlp.down_proj.weight"}
    assert quantised(tmp_path / "dst") == {n for n in tensors() if ".1." in n and is_linear(n)} - kept - {
        name for name in tensors() if name.startswith("model.layers.0.")
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["*typo*"]}, r"'\*typo\*' matches no layer"),
        ({"exclude": ["*.norm"]}, "matches no layer"),
        ({"exclude": ["*.k_proj"]}, r"self_attn\.k_proj and quantises .*q_proj.*both or neither"),
        ({"exclude": ["*.1.mlp.up_proj"]}, r"mlp\.up_proj and quantises .*gate_proj"),
        ({"exclude": ["*.experts.3.*"]}, r"experts\.3\..* and quantises .*experts\.0"),
        ({"exclude": ["*"]}, "nothing is left to quantise"),
        ({"only": "norms"}, "norms.*experts, attention, mlp"),
        ({"format": "nvfp4"}, "nvfp4.*mxfp8"),
        ({"output": "gguf"}, "gguf.*safetensors"),
        ({"workers": 0}, "--workers is 0; it is at least 1"),
    ],
)
def test_choices_that_cannot_be_meant_are_refused(
    source: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError, match=message):
        convert(source, tmp_path / "dst", **options)
    assert not (tmp_path / "dst").exists()


def test_an_axis_that_32_does_not_divide_is_refused_with_the_way_out(tmp_path: Path) -> None:
    state = tensors()
    state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(HIDDEN, 48, dtype=torch.bfloat16)
    folder = save(tmp_path / "src", state)
    with pytest.raises(ConvertError, match=r"down_proj.*\[64, 48\].*--exclude 'model\.layers\.1\.mlp\.down_proj'"):
        convert(folder, tmp_path / "dst")
    convert(folder, tmp_path / "dst", exclude=["model.layers.1.mlp.down_proj"])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.0.mlp.experts.2.up_proj.weight", (95, 63)),
        ("model.layers.1.self_attn.o_proj.weight", (0, 1)),
        ("model.layers.0.mlp.gate.weight", (3, 7)),
        ("model.norm.weight", (5,)),
    ],
)
def test_nan_and_infinity_stop_the_conversion_with_tensor_and_index(
    name: str, index: tuple[int, ...], value: float, tmp_path: Path
) -> None:
    state = tensors()
    state[name][index] = value
    with pytest.raises(NonFiniteError, match=re.escape(f"{name} holds {value} at index {list(index)}")):
        convert(save(tmp_path / "src", state), tmp_path / "dst")
    if ".experts." in name:
        fused = "model.layers.0.mlp.experts.gate_up_proj"
        with pytest.raises(NonFiniteError, match=re.escape(f"{fused} holds {value} at index [2, {95 + WIDTH}, 63]")):
            convert(save(tmp_path / "fused", fuse(state)), tmp_path / "other")


def test_an_fp8_nan_stops_the_conversion_too(tmp_path: Path) -> None:
    folder, _ = fp8_source(tmp_path / "src", False, torch.float32)
    name = "model.layers.0.self_attn.k_proj.weight"
    file = Checkpoint(folder).file_of(name)
    with safe_open(file, framework="pt") as reader:
        state = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    state[name].view(torch.uint8)[150, 9] = 0x7F
    save_file(state, file)
    with pytest.raises(NonFiniteError, match=re.escape(f"{name} holds nan at index [150, 9]")):
        convert(folder, tmp_path / "dst")


def test_shards_hold_a_weight_with_its_scale_and_stay_under_the_limit(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", shard_bytes=30_000)
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "dst").glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        assert index["weight_map"].get(name + "_scale", file) == file
    checkpoint = Checkpoint(tmp_path / "dst")
    for file in checkpoint.files.values():
        assert sum(info.nbytes for info in file.tensors.values()) <= 30_000
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in checkpoint.tensors.values())


def test_the_number_of_threads_does_not_change_a_byte(source: Path, converted: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", workers=5)
    assert contents(tmp_path / "dst") == contents(converted)


# Safety.


def test_a_folder_that_is_not_ours_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConvertError, match="not empty"):
        convert(source, tmp_path)
    assert contents(tmp_path) == {"notes.txt": hashlib.sha256(b"mine").hexdigest()}


def test_source_and_destination_may_not_overlap(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    before = contents(source)
    for destination in (source, source / "mxfp8", source.parent, tmp_path / "link"):
        with pytest.raises(ConvertError, match="overlap"):
            convert(source, destination)
    assert contents(source) == before


def test_a_disk_that_is_too_small_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(ConvertError, match=r"0\.0 GB free, 0\.1 GB needed"):
        convert(source, tmp_path / "dst")
    assert not list((tmp_path / "dst").glob("*.safetensors"))


def test_a_file_as_destination_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConvertError, match="is a file"):
        convert(source, tmp_path / "file")


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"config\.json: cannot be read"):
        convert(tmp_path, tmp_path / "dst")
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(tmp_path / "nowhere", tmp_path / "dst")
    folder = save(tmp_path / "src", tensors())
    (folder / "parameters").mkdir()
    with pytest.raises(ConvertError, match="is an Orbax folder; convert reads safetensors"):
        convert(folder, tmp_path / "dst")
    (folder / "parameters").rmdir()
    os.truncate(folder / "model-2.safetensors", 3000)
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors.*truncated"):
        convert(folder, tmp_path / "dst")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConvertError, match="not JSON"):
        convert(folder, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("quantization", "named"),
    [({"quant_method": "modelopt", "quant_algo": "MXFP8"}, r"already \(MXFP8\)"), ({"quant_method": "awq"}, "awq")],
)
def test_a_quantisation_that_cannot_be_read_is_named(quantization: dict[str, str], named: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "src", tensors(), {"quantization_config": quantization})
    with pytest.raises(ValueError, match=named):
        convert(folder, tmp_path / "dst")


def test_two_conversions_into_one_folder_exclude_each_other(source: Path, tmp_path: Path) -> None:
    opened = open_source(source)
    with Destination(tmp_path / "dst", opened, "identity"), pytest.raises(ConvertError, match="another process"):
        Destination(tmp_path / "dst", opened, "identity")
    assert not Destination(tmp_path / "dst", opened, "identity").finished


def test_a_finished_conversion_is_left_alone(source: Path, converted: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    report = convert(source, converted)
    written = json.loads((converted / "conversion_report.json").read_text())
    assert report == {key: value for key, value in written.items() if key != "identity"}
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == times
    with pytest.raises(ConvertError, match="finished conversion of something else"):
        convert(source, converted, only="experts")


# Report, command, memory.


def test_the_report_counts_tensors_bytes_and_errors(source: Path, converted: Path) -> None:
    report = json.loads((converted / "conversion_report.json").read_text())
    state, got = tensors(), independent(converted)
    errors: dict[str, float] = {}
    for name in filter(is_linear, state):
        x = state[name].to(torch.float64).numpy()
        errors[name] = float(np.linalg.norm(got[name] - x) / np.linalg.norm(x))
    experts = {name: error for name, error in errors.items() if ".experts." in name}
    entry = report["kinds"]["experts"]
    assert (entry["tensors"], entry["converted"]) == (12, 12)
    assert entry["mean_relative_error"] == pytest.approx(np.mean(list(experts.values())), rel=2e-3)
    assert entry["worst_relative_error"] == pytest.approx(max(experts.values()), rel=2e-3)
    assert entry["worst_tensor"] == max(experts, key=experts.__getitem__)
    assert entry["bytes_before"] == 12 * HIDDEN * WIDTH * 2
    assert entry["bytes_after"] == 12 * HIDDEN * WIDTH * 33 // 32
    assert report["converted"] == len(errors)
    assert report["tensors"] == len(state)
    assert report["bytes_before"] == sum(tensor.nbytes for tensor in state.values())
    assert report["bytes_after"] == sum(info.nbytes for info in Checkpoint(converted).tensors.values())
    table = format_table(report)
    for kind in ("experts", "attention", "mlp", "router", "norm", "embedding", "lm_head", "all"):
        assert re.search(rf"^{kind} ", table, re.MULTILINE)
    assert f"{entry['worst_relative_error']:.5f}" in table


def test_clamped_scales_are_reported(tmp_path: Path) -> None:
    state = tensors()
    state["model.layers.1.mlp.up_proj.weight"][:2] = 1e-36
    report = convert(save(tmp_path / "src", state), tmp_path / "dst")
    assert report["kinds"]["mlp"]["scales_clamped"] == 2 * HIDDEN // 32
    assert report["scales_clamped"] == 2 * HIDDEN // 32


def test_the_command_prints_the_table_and_a_bar_in_bytes_with_the_time_left(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(source), str(tmp_path / "dst"), "--only", "experts"])) == 0
    out, err = capsys.readouterr()
    assert out.startswith("kind")
    assert re.search(r"experts +12 +12 ", out)
    assert re.search(r"100%.*\d+k/\d+k \[\d\d:\d\d<\d\d:\d\d, .*B/s\]", err)
    with pytest.raises(ConvertError, match="overlap"):
        command.run(parser.parse_args([str(source), str(source)]))


MEMORY = """
import resource, sys
from qwenjax.convert import convert
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2])
print(base, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def sparse_source(folder: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> Path:
    """A checkpoint of zeros that takes no disk: the file's data is a hole."""
    folder.mkdir(parents=True)
    bf16 = np.dtype(ml_dtypes.bfloat16)
    writer = SafetensorsWriter(folder / "model.safetensors", {k: TensorInfo(bf16, v) for k, v in shapes.items()})
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")
    assert writer.nbytes == sum(2 * math.prod(shape) for shape in shapes.values())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def peak_megabytes(source: Path, destination: Path) -> tuple[float, float]:
    run = run_python(MEMORY, str(source), str(destination))
    assert run.returncode == 0, run.stderr
    base, peak = map(int, run.stdout.split())
    return base / 1024, peak / 1024


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path) -> None:
    """A fused tensor of 302 MB, an embedding of 199 MB: what comes on top of the imports stays under 150 MB."""
    base = "model.layers.0.mlp.experts."
    shapes = {base + "gate_up_proj": (12, 3072, 4096), "model.embed_tokens.weight": (24320, 4096)}
    config = {"hidden_size": 4096, "moe_intermediate_size": 1536}
    before, peak = peak_megabytes(sparse_source(tmp_path / "src", shapes, config), tmp_path / "dst")
    assert peak - before < 150
    assert peak < 4000


def shapes_235b(layers: int, fused: bool) -> dict[str, tuple[int, ...]]:
    """Qwen3-235B-A22B: hidden 4096, 64 heads of 128, 4 kv heads, 128 experts of 1536, vocabulary 151936."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (151936, 4096))
    for layer in range(layers):
        base = f"model.layers.{layer}."
        shapes |= {
            f"{base}self_attn.{x}_proj.weight": (rows, 4096) for x, rows in (("q", 8192), ("k", 512), ("v", 512))
        }
        shapes |= {f"{base}self_attn.o_proj.weight": (4096, 8192), f"{base}mlp.gate.weight": (128, 4096)}
        experts = f"{base}mlp.experts."
        if fused:
            shapes |= {experts + "gate_up_proj": (128, 3072, 4096), experts + "down_proj": (128, 4096, 1536)}
        for expert in range(0 if fused else 128):
            shapes |= {f"{experts}{expert}.{x}_proj.weight": (1536, 4096) for x in ("gate", "up")}
            shapes[f"{experts}{expert}.down_proj.weight"] = (4096, 1536)
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_the_235b_shapes_convert_in_under_4_gb(fused: bool, tmp_path: Path) -> None:
    """One layer of 94 and both vocabulary matrices, 7.4 GB: nothing that is held depends on the number of layers."""
    config = {"hidden_size": 4096, "moe_intermediate_size": 1536}
    source = sparse_source(tmp_path / "src", shapes_235b(1, fused), config)
    _, peak = peak_megabytes(source, tmp_path / "dst")
    print(f"peak {peak:.0f} MB")
    assert peak < 4000


@pytest.mark.slow
def test_the_whole_235b_model_is_planned_in_shards_of_5_gb(tmp_path: Path) -> None:
    config = {"hidden_size": 4096, "moe_intermediate_size": 1536}
    source = open_source(sparse_source(tmp_path / "src", shapes_235b(94, False), config))
    plan = make_plan(source)
    assert len(plan.parts) == 94 * (128 * 3 + 5) + 2
    assert sum(shard.nbytes for shard in plan.shards) == pytest.approx(2 * 1.245e9 + 94 * 128 * 3 * 6.49e6, rel=0.05)
    assert max(shard.nbytes for shard in plan.shards) < 4.99e9


def test_the_ignore_list_names_every_linear_layer_that_is_kept(tmp_path: Path) -> None:
    tiny = Path(__file__).parents[2] / "configs" / "tiny"
    convert(tiny, tmp_path / "dst")
    tensors_there = Checkpoint(tmp_path / "dst").tensors
    kept = {
        name.removesuffix(".weight")
        for name, info in tensors_there.items()
        if len(info.shape) == 2 and name.endswith(".weight") and f"{name}_scale" not in tensors_there
    }
    ignored = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == kept - {"model.embed_tokens"}
    assert "mtp.fc" in ignored


def test_a_finished_conversion_that_lost_a_shard_is_not_called_finished(tmp_path: Path) -> None:
    folder = save(tmp_path / "src", tensors())
    convert(folder, tmp_path / "dst")
    shard = sorted((tmp_path / "dst").glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ConvertError, match=f"has lost {shard.name}"):
        convert(folder, tmp_path / "dst")


def test_named_chat_templates_go_along(tmp_path: Path) -> None:
    folder = save(tmp_path / "src", tensors())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    convert(folder, tmp_path / "dst")
    assert (tmp_path / "dst" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
