"""Quantised checkpoints, and quantising while loading: an oracle with decoded weights gives the same numbers."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qwenjax.checkpoint.load import check_blocks_divide, load_model, with_mxfp8
from qwenjax.checkpoint.safetensors import CheckpointError
from qwenjax.checkpoint.save import save_pretrained
from qwenjax.config import ModelConfig
from qwenjax.convert import convert
from qwenjax.logits import sequence_logits
from qwenjax.mesh import MeshError, make_mesh
from qwenjax.model import abstract_model
from qwenjax.quant import NonFiniteError
from qwenjax.sharded_model import ShardedModel, by_name, random_model, shardings
from qwenjax_ffi.weights import MXFP8Weight
from tests.generation import VOCABULARY, add_tokenizer, greedy, random_ids, small_llm
from tests.helpers import assert_same_parameters, fuse_experts, random_tensors, tiny, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"F8_E4M3": FP8, "U8": np.uint8, "F32": np.float32, "BF16": ml_dtypes.bfloat16}
# 128 does not divide hidden_size, and 32 divides every contraction axis.
SIZES = {"hidden_size": 192, "moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 16}
RAW = tiny(num_hidden_layers=3, mlp_only_layers=[1], num_experts_per_tok=2, **SIZES)
TENSORS = random_tensors(RAW)
IDS = [np.random.default_rng(n).integers(0, RAW["vocab_size"], n).tolist() for n in (17, 40)]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path, shape: tuple[int, int] = (1, 1), **options: Any) -> ShardedModel:
    return load_model(folder, make_mesh(*shape), progress=False, **options)


def logits(model: ShardedModel) -> np.ndarray:
    return np.concatenate(sequence_logits(model, IDS))


def quantised_parameters(model: ShardedModel) -> set[str]:
    return {name for name, weight in by_name(model.state).items() if isinstance(weight, MXFP8Weight)}


def assert_same_bits(first: ShardedModel, second: ShardedModel) -> None:
    assert jax.tree.structure(first.state) == jax.tree.structure(second.state)
    for here, there in zip(jax.tree.leaves(first.state), jax.tree.leaves(second.state), strict=True):
        assert here.dtype == there.dtype
        np.testing.assert_array_equal(np.asarray(here).view(np.uint8), np.asarray(there).view(np.uint8))


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by hand."""
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                part = np.frombuffer(raw[start + first : start + last], DTYPES[entry["dtype"]])
                found[name] = part.reshape(entry["shape"])
    return found


def decoded_tensors(folder: Path, block: tuple[int, int] = (1, 32)) -> dict[str, np.ndarray]:
    """A quantised folder's weights as float32, by plain numpy."""
    found, values = stored_tensors(folder), {}
    for name in [name for name in found if not name.endswith(("_scale", "_scale_inv"))]:
        values[name] = found[name].astype(np.float32)
        if found[name].dtype == FP8:
            if name + "_scale" in found:
                scale = 2.0 ** (found[name + "_scale"].astype(np.float64) - 127)
            else:
                scale = found[name + "_scale_inv"].astype(np.float64)
            rows, columns = values[name].shape
            each = scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
            values[name] = (values[name] * each).astype(np.float32)
    return values


def oracle(raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray], folder: Path) -> np.ndarray:
    """Logits of transformers' model with these float32 weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    write_checkpoint(folder, raw, tensors)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.concatenate([model(torch.tensor([ids])).logits[0].numpy() for ids in IDS])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), RAW, TENSORS)


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "mxfp8"
    convert(source, folder)
    return folder


@pytest.fixture(scope="module")
def expected(converted: Path) -> np.ndarray:
    return logits(load(converted))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def copy(folder: Path, target: Path, change: Callable[[dict[str, np.ndarray]], object] = lambda found: None) -> Path:
    """The checkpoint in one file, its tensors changed by `change`."""
    found = stored_tensors(folder)
    change(found)
    target.mkdir()
    save_file(found, target / "model.safetensors")
    for name in ("config.json", "hf_quant_config.json"):
        if (folder / name).is_file():
            (target / name).write_text((folder / name).read_text())
    return target


def test_a_converted_checkpoint_equals_quantising_while_loading_and_the_oracle(
    source: Path, converted: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    from_disk, on_the_fly = load(converted), load(source, quantization="mxfp8")
    assert_same_bits(from_disk, on_the_fly)
    linear = {f"attention.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert quantised_parameters(from_disk) == linear | {"experts.w13", "experts.w2"}
    np.testing.assert_array_equal(expected, logits(on_the_fly))
    theirs = oracle(RAW, decoded_tensors(converted), tmp_path / "decoded")
    assert np.abs(theirs - expected).max() < 1e-4
    assert np.abs(theirs - logits(load(source))).max() > 0.01  # the rounding is there to be seen


def test_bfloat16_checkpoints_quantise_to_the_same_bits_either_way(tmp_path: Path) -> None:
    raw = {**RAW, "torch_dtype": "bfloat16"}
    tensors = fuse_experts({n: t.astype(ml_dtypes.bfloat16) for n, t in TENSORS.items()}, RAW["num_experts"])
    folder = write_checkpoint(tmp_path / "src", raw, tensors)
    convert(folder, tmp_path / "dst")
    from_disk = load(tmp_path / "dst")
    assert_same_bits(from_disk, load(folder, quantization="mxfp8"))
    assert from_disk.dtype == "bfloat16"


def compressed_tensors(config: dict[str, Any]) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


@pytest.mark.parametrize("layout", ["compressed-tensors", "ModelOpt's hf_quant_config.json alone"])
def test_other_mxfp8_layouts_are_read_alike(converted: Path, expected: np.ndarray, tmp_path: Path, layout: str) -> None:
    folder = copy(converted, tmp_path / "other")
    if layout == "compressed-tensors":
        (folder / "hf_quant_config.json").unlink()
        change_config(folder, compressed_tensors)
    else:
        change_config(folder, lambda config: config.pop("quantization_config"))
    model = load(folder)
    assert_same_bits(model, load(converted))
    np.testing.assert_array_equal(logits(model), expected)


def to_fp8_blocks(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements and scales [ceil(out / 128), ceil(in / 128)] of Qwen's FP8 checkpoints, in plain numpy."""
    rows, columns = (-(-size // 128) for size in tensor.shape)
    scale = np.empty((rows, columns), np.float32)
    elements = np.empty(tensor.shape, FP8)
    for row in range(rows):
        for column in range(columns):
            part = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scale[row, column] = np.abs(tensor[part]).max() / 448
            elements[part] = (tensor[part] / scale[row, column]).astype(FP8)
    return elements, scale


@pytest.fixture(scope="module")
def fp8_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in TENSORS.items():
        if "_proj." in name:
            tensors[name], tensors[name + "_scale_inv"] = to_fp8_blocks(tensor)
        else:
            tensors[name] = tensor
    kept = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return write_checkpoint(tmp_path_factory.mktemp("fp8"), {**RAW, "quantization_config": kept}, tensors)


def test_an_fp8_block_checkpoint_equals_the_oracle_with_decoded_weights(
    fp8_blocks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoded = decoded_tensors(fp8_blocks, (128, 128))
    with caplog.at_level(logging.WARNING):
        model = load(fp8_blocks)
    assert not quantised_parameters(model)
    assert "attention.q_proj is stored in FP8 and decoded" in caplog.text
    assert np.abs(oracle(RAW, decoded, tmp_path / "decoded") - logits(model)).max() < 1e-4
    split = load(fp8_blocks, (1, 2))  # the 128 input features of down_proj, and with them their block, cut in two
    np.testing.assert_allclose(logits(split), logits(model), atol=1e-4)


def test_a_model_that_came_from_fp8_blocks_is_saved_as_the_floats_it_holds(fp8_blocks: Path, tmp_path: Path) -> None:
    model = load_model(fp8_blocks, make_mesh(), progress=False)
    save_pretrained(model, tmp_path / "saved")
    assert ModelConfig.from_folder(tmp_path / "saved").quantization is None
    assert_same_parameters(load_model(tmp_path / "saved", make_mesh(), progress=False), model)


def test_an_fp8_block_checkpoint_becomes_mxfp8_while_loading(fp8_blocks: Path, tmp_path: Path) -> None:
    convert(fp8_blocks, tmp_path / "dst")
    model = load(fp8_blocks, quantization="mxfp8")
    assert_same_bits(load(tmp_path / "dst"), model)
    theirs = oracle(RAW, decoded_tensors(tmp_path / "dst"), tmp_path / "decoded")
    assert np.abs(theirs - logits(model)).max() < 1e-4


def test_only_experts_are_quantised_where_only_they_were_converted(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", only="experts")
    model = load(tmp_path / "dst")
    assert quantised_parameters(model) == {"experts.w13", "experts.w2"}
    theirs = oracle(RAW, decoded_tensors(tmp_path / "dst"), tmp_path / "decoded")
    assert np.abs(theirs - logits(model)).max() < 1e-4


def test_stacks_that_are_quantised_in_some_layers_are_decoded_with_a_warning(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(source, tmp_path / "dst", exclude=["model.layers.0.*"])
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path / "dst")
    assert quantised_parameters(model) == {f"mlp.{x}_proj" for x in ("gate", "up", "down")}  # layer 1 alone has those
    assert "experts.w13 is quantised in some layers and not in others; all are decoded" in caplog.text
    theirs = oracle(RAW, decoded_tensors(tmp_path / "dst"), tmp_path / "decoded")
    assert np.abs(theirs - logits(model)).max() < 1e-4
    whole = load(tmp_path / "dst", quantization="mxfp8")
    assert len(quantised_parameters(whole)) == 9
    assert_same_bits(whole, load(source, quantization="mxfp8"))


@pytest.mark.parametrize(
    "shape", [(2, 2), *[pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 2), (2, 1))]], ids=str
)
def test_every_mesh_gives_the_same_logits(
    source: Path, converted: Path, expected: np.ndarray, shape: tuple[int, int]
) -> None:
    model = load(converted, shape)
    assert_same_bits(model, load(source, shape, quantization="mxfp8"))
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)


def test_a_mesh_that_cuts_blocks_is_an_error_with_the_sizes_that_do_not(source: Path, converted: Path) -> None:
    message = re.escape(
        "4 ranks split the 64 input features of attention.o_proj into 16, which blocks of 32 do not divide; "
        "numbers of ranks that do: [1, 2]"
    )
    for folder, options in ((converted, {}), (source, {"quantization": "mxfp8"})):
        with pytest.raises(MeshError, match=message):
            load(folder, (1, 4), **options)


@pytest.mark.parametrize(
    ("sizes", "shapes"),
    [
        ({"hidden_size": 2048, "num_attention_heads": 32, "moe_intermediate_size": 768}, [(1, 4), (8, 1), (2, 4)]),
        ({"hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536}, [(1, 8), (8, 1), (4, 2)]),
    ],
    ids=["30B-A3B", "235B-A22B"],
)
def test_the_published_shapes_fit_their_meshes(sizes: dict[str, int], shapes: list[tuple[int, int]]) -> None:
    raw = tiny(num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, **sizes)
    for shape in shapes:
        mesh = make_mesh(*shape)
        _, abstract = abstract_model(ModelConfig.from_dict(raw), mesh)
        names = {f"attention.{x}_proj" for x in "qkvo"} | {"experts.w13", "experts.w2"}
        quantised = with_mxfp8(abstract, names)
        check_blocks_divide(by_name(shardings(quantised, mesh)), by_name(quantised))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, r"is quantised by 'awq'; qwenjax reads ModelOpt's MXFP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"'modelopt' \(NVFP4\)"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, r"\(nvfp4-pack-quantized\)"),
        ({"quant_method": "fp8"}, r"'fp8' \(weight_block_size None\)"),
    ],
)
def test_an_unknown_quantisation_is_refused_by_name(
    converted: Path, tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    folder = copy(converted, tmp_path / "copy")
    change_config(folder, lambda config: config.update(quantization_config=quantization))
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value)


def test_a_quantisation_that_loading_cannot_do_is_refused_by_name(source: Path) -> None:
    with pytest.raises(ValueError, match=r"quantization is 'nvfp4'.*'mxfp8'"):
        load(source, quantization="nvfp4")


def remove_scale(found: dict[str, np.ndarray]) -> None:
    del found[Q_PROJ + "_scale"]


def cut_scale(found: dict[str, np.ndarray]) -> None:
    found[Q_PROJ + "_scale"] = np.ascontiguousarray(found[Q_PROJ + "_scale"][:, :-1])


def widen_scale(found: dict[str, np.ndarray]) -> None:
    found[Q_PROJ + "_scale"] = found[Q_PROJ + "_scale"].astype(np.float32)


def flatten(found: dict[str, np.ndarray]) -> None:
    found[Q_PROJ] = found[Q_PROJ].reshape(-1)


def remove_weight(found: dict[str, np.ndarray]) -> None:
    found[Q_PROJ] = found[Q_PROJ].astype(np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_scale, rf"{Q_PROJ} is float8, and {Q_PROJ}_scale is missing"),
        (cut_scale, rf"{Q_PROJ}_scale is uint8 \[64, 5\]; \[64, 192\] in blocks of \[1, 32\] needs \[64, 6\]"),
        (widen_scale, rf"{Q_PROJ}_scale is float32 \[64, 6\]"),
        (flatten, rf"{Q_PROJ} is float8 \[12288\]; weights in blocks have two axes"),
        (remove_weight, rf"{Q_PROJ}_scale scales no float8 tensor"),
    ],
)
def test_scales_that_do_not_fit_are_an_error_that_names_file_and_tensor(
    converted: Path, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], message: str
) -> None:
    folder = copy(converted, tmp_path / "copy", change)
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert str(folder / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_stop_quantising_while_loading_with_tensor_and_index(tmp_path: Path, value: float) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    bad = TENSORS[name].copy()
    bad[63, 190] = value
    folder = write_checkpoint(tmp_path / "one by one", RAW, {**TENSORS, name: bad})
    with pytest.raises(NonFiniteError, match=re.escape(f"{name} holds {value} at index [63, 190]")):
        load(folder, quantization="mxfp8")
    fused = write_checkpoint(tmp_path / "fused", RAW, fuse_experts({**TENSORS, name: bad}, RAW["num_experts"]))
    place = re.escape(f"model.layers.2.mlp.experts.gate_up_proj holds {value} at index [5, {64 + 63}, 190]")
    with pytest.raises(NonFiniteError, match=place):
        load(fused, quantization="mxfp8")


MEMORY = """
    import gc, json, sys, threading, time
    import jax
    from qwenjax.checkpoint.load import load_model
    from qwenjax.mesh import make_mesh

    def resident():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def load(folder):
        gc.collect()
        before, peak, done = resident(), [0], threading.Event()
        def watch():
            while not done.is_set():
                peak[0] = max(peak[0], resident())
                time.sleep(0.001)
        watcher = threading.Thread(target=watch)
        watcher.start()
        model = load_model(folder, make_mesh(), quantization="mxfp8", progress=False)
        done.set()
        watcher.join()
        return [sum(leaf.nbytes for leaf in jax.tree.leaves(model.state)), peak[0] - before]

    big, small = sys.argv[1:]
    load(small)  # what the first use of JAX takes is not the loader's
    print(json.dumps(load(big)))
"""


def test_quantising_while_loading_never_holds_the_whole_model_as_it_is_stored(source: Path, tmp_path: Path) -> None:
    width = 512
    raw = tiny(
        hidden_size=width, num_hidden_layers=4, num_experts=32, moe_intermediate_size=width, torch_dtype="bfloat16"
    )
    block = np.random.default_rng(0).normal(size=(width, width)).astype(ml_dtypes.bfloat16)
    tensors = random_tensors({**raw, "num_experts": 1}, dtype=ml_dtypes.bfloat16)
    names = [f"model.layers.{layer}.mlp." for layer in range(4)]
    tensors |= {f"{name}gate.weight": block[:32] for name in names}
    tensors |= {
        f"{name}experts.{expert}.{kind}_proj.weight": block
        for name in names
        for expert in range(32)
        for kind in ("gate", "up", "down")
    }
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored > 200e6
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "ffi", "kernels", "serving"))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), write_checkpoint(tmp_path / "big", raw, tensors), source],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size, peak = json.loads(done.stdout.splitlines()[-1])
    assert size < 0.53 * stored
    assert peak < size + 0.25 * stored, f"{peak / 1e6:.0f} MB for {size / 1e6:.0f} MB"


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny(**{**SIZES, "vocab_size": VOCABULARY, "hidden_size": 64}, mtp_num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("mtp")
    save_pretrained(random_model(ModelConfig.from_dict(raw), make_mesh(), seed=1), folder / "source")
    add_tokenizer(folder / "source")
    convert(folder / "source", folder / "mxfp8")
    return folder


def test_the_multi_token_prediction_head_is_quantised_too(with_head: Path) -> None:
    model = load(with_head / "mxfp8")
    of_head = {f"mtp.attention.{x}_proj" for x in "qkvo"} | {"mtp.experts.w13", "mtp.experts.w2"}
    assert {name for name in quantised_parameters(model) if name.startswith("mtp.")} == of_head
    assert_same_bits(model, load(with_head / "source", quantization="mxfp8"))
    stored = decoded_tensors(with_head / "mxfp8")
    w13 = by_name(model.state)["mtp.experts.w13"]
    ours = np.asarray(w13.elements).astype(np.float32) * 2.0 ** (np.asarray(w13.scales) - 127.0).repeat(32, -1)
    for expert in range(8):
        base = f"mtp.layers.0.mlp.experts.{expert}"
        parts = [stored[f"{base}.{kind}_proj.weight"] for kind in ("gate", "up")]
        np.testing.assert_array_equal(ours[0, expert], np.concatenate(parts))


def test_an_mxfp8_model_generates_what_its_logits_say(with_head: Path) -> None:
    prompts = [random_ids(9), random_ids(21)]
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "num_steps": 2}
    llm = small_llm(with_head / "mxfp8", num_speculative_tokens=1, **sizes)  # the quantised head drafts
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(10)), strict=True):
        token_ids = list(output.outputs[0].token_ids)
        of_text = llm.logits(prompt + token_ids)[len(prompt) - 1 : -1]
        assert token_ids == of_text.argmax(-1).tolist()
