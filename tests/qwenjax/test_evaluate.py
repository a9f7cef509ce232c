"""`qwenjax eval`: its metrics against a model written out in numpy, and its command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenjax.checkpoint.load import load_model
from qwenjax.config import ModelConfig
from qwenjax.evaluate import Evaluation, Variant, all_variants, evaluate
from qwenjax.evaluate.fake_quantise import linear_parameters
from qwenjax.evaluate.windows import windows
from qwenjax.mesh import make_mesh
from qwenjax.model import abstract_model
from qwenjax.quant import FORMATS
from qwenjax.sharded_model import ShardedModel, by_name
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.cli import main
from tests.generation import VOCABULARY, add_tokenizer
from tests.helpers import model_from_tensors, random_tensors, tiny, write_checkpoint

RAW = tiny(
    hidden_size=64, moe_intermediate_size=32, intermediate_size=64, num_hidden_layers=2, mlp_only_layers=[1],
    num_experts=4, num_experts_per_tok=2,
    num_key_value_heads=4,  # so that more matrices share a shape and with it a program
)  # fmt: skip
TENSORS = random_tensors(RAW)
IDS = np.random.default_rng(0).integers(0, RAW["vocab_size"], 70).tolist()
CONTEXT, STRIDE = 32, 20
# Jane Austen, Persuasion, chapter 1.
TEXT = """Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who, for his own amusement, never took up any
book but the Baronetage; there he found occupation for an idle hour, and consolation in a distressed one."""


def kept(name: str, array: np.ndarray) -> np.ndarray:
    return FORMATS[name].dequantise(*FORMATS[name].quantise(array))


def rows_kept(name: str, x: np.ndarray) -> np.ndarray:
    """Each row of activations [tokens, features] by itself, to the nearest also where weights are rounded at random."""
    return np.concatenate([kept(name.removesuffix("_stochastic"), row[None]) for row in x])


def softmax(x: np.ndarray) -> np.ndarray:
    grown = np.exp(x - x.max(-1, keepdims=True))
    return grown / grown.sum(-1, keepdims=True)


def forward(tensors: Mapping[str, np.ndarray], ids: list[int], keep: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Logits [tokens, vocab] of RAW's model; `keep` rounds what its linear layers multiply."""
    head_dim, heads, kv_heads = RAW["head_dim"], RAW["num_attention_heads"], RAW["num_key_value_heads"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6)) * tensors[name + ".weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(ids))[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
        cos, sin = (np.float32(f(angles))[:, None] for f in (np.cos, np.sin))
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def swiglu(x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (x @ tensors[f"{name}.{kind}_proj.weight"].T for kind in ("gate", "up"))
        return keep(gate / (1 + np.exp(-gate)) * up) @ tensors[f"{name}.down_proj.weight"].T

    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(RAW["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        y = keep(norm(x, f"{block}.input_layernorm"))
        q, k, v = (
            (y @ tensors[f"{block}.self_attn.{kind}_proj.weight"].T).reshape(len(ids), -1, head_dim) for kind in "qkv"
        )
        q, k = (rotated(norm(part, f"{block}.self_attn.{kind}_norm")) for part, kind in ((q, "q"), (k, "k")))
        k, v = (part.repeat(heads // kv_heads, 1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(math.sqrt(head_dim))
        scores[:, ~np.tri(len(ids), dtype=bool)] = -np.inf
        out = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(ids), -1)
        x = x + keep(out) @ tensors[f"{block}.self_attn.o_proj.weight"].T
        y = norm(x, f"{block}.post_attention_layernorm")
        if layer in RAW["mlp_only_layers"]:
            x = x + swiglu(keep(y), f"{block}.mlp")
            continue
        chances = softmax(y @ tensors[f"{block}.mlp.gate.weight"].T)  # the router's own input stays as it is
        outs = np.stack([swiglu(keep(y), f"{block}.mlp.experts.{expert}") for expert in range(RAW["num_experts"])], 1)
        chosen = np.argsort(-chances, -1)[:, : RAW["num_experts_per_tok"]]
        weights = np.take_along_axis(chances, chosen, -1)
        weights /= weights.sum(-1, keepdims=True)
        x = x + (np.take_along_axis(outs, chosen[..., None], 1) * weights[..., None]).sum(1)
    return norm(x, "model.norm") @ tensors["lm_head.weight"].T


def log_probabilities(variant: Variant | None) -> np.ndarray:
    """float64 [scored tokens, vocab] over windows that are cut here by hand."""
    tensors: Mapping[str, np.ndarray] = TENSORS
    if variant:
        tensors = {n: kept(variant.format, t) if "_proj." in n else t for n, t in TENSORS.items()}
    activations = variant.format if variant and variant.activations else None
    keep = (lambda x: rows_kept(activations, x)) if activations else (lambda x: x)
    cut = [forward(tensors, IDS[start : start + CONTEXT], keep) for start in (0, 20, 40)]
    logits = np.concatenate([cut[0][:31], cut[1][11:31], cut[2][11:29]]).astype(np.float64)
    return np.log(softmax(logits))


@pytest.fixture(scope="module")
def model() -> ShardedModel:
    return model_from_tensors(RAW, make_mesh(), TENSORS)


@pytest.fixture(scope="module")
def evaluation(model: ShardedModel) -> Evaluation:
    return evaluate(model, IDS, context=CONTEXT, stride=STRIDE, batch=2, num_bytes=123)


def test_every_metric_of_every_variant_equals_numpy(evaluation: Evaluation) -> None:
    base, targets = log_probabilities(None), np.array(IDS[1:])
    assert (evaluation.tokens, evaluation.windows) == (69, 3)
    variants = [None, *all_variants()]
    assert len(evaluation.results) == len(variants) == 11
    for result, variant in zip(evaluation.results, variants, strict=True):
        other = log_probabilities(variant)
        nats = -other[np.arange(len(targets)), targets].mean()
        kl = (np.exp(base) * (base - other)).sum(-1).mean()
        agree = (base.argmax(-1) == other.argmax(-1)).mean()
        assert result.nats == pytest.approx(nats, rel=2e-3), variant
        assert result.perplexity == pytest.approx(math.exp(result.nats))
        assert result.bits_per_byte == pytest.approx(result.nats * 69 / math.log(2) / 123)
        # Where two computations of an activation fall on either side of a tie they part by a step of the format.
        assert result.kl == pytest.approx(kl, rel=0.03, abs=1e-6), variant
        assert abs(result.top1 - agree) <= 2 / 69, variant
        if variant:
            assert (result.format, result.activations) == (variant.format, variant.activations)
            assert result.kl > 1e-4


def test_the_base_model_against_itself_costs_nothing(evaluation: Evaluation) -> None:
    base = evaluation.results[0]
    assert (base.format, base.activations, base.kl, base.top1) == ("base", False, 0.0, 1.0)


def test_formats_of_more_bits_cost_less(evaluation: Evaluation) -> None:
    kl = {(result.format, result.activations): result.kl for result in evaluation.results}
    for activations in (False, True):
        assert kl["mxfp8", activations] < 0.3 * min(kl["mxfp4", activations], kl["nvfp4", activations])
    # On 69 tokens the 8-bit formats are too close to the base for activations to show above chance.
    assert all(kl[name, False] < kl[name, True] for name in ("mxfp4", "nvfp4"))


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)], ids=str)
def test_a_mesh_gives_the_same_results(evaluation: Evaluation, shape: tuple[int, int]) -> None:
    variants = [Variant("mxfp8"), Variant("mxfp8", True)]
    spread = model_from_tensors(RAW, make_mesh(*shape), TENSORS)
    found = evaluate(spread, IDS, variants, context=CONTEXT, stride=STRIDE)
    chosen = [r for r in evaluation.results if r.format in ("base", "mxfp8")]
    for ours, expected in zip(found.results, chosen, strict=True):
        assert ours.nats == pytest.approx(expected.nats, rel=1e-3)
        assert ours.kl == pytest.approx(expected.kl, rel=0.03)


def test_an_mxfp8_checkpoint_is_its_own_base(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, RAW, TENSORS)
    quantised = load_model(folder, make_mesh(), quantization="mxfp8", progress=False)
    base, again = evaluate(quantised, IDS, [Variant("mxfp8")], context=CONTEXT).results
    assert again.kl == 0.0  # its values are MXFP8's already
    assert base.nats == again.nats


def test_what_is_quantised_is_what_convert_quantises() -> None:
    raw = tiny(num_hidden_layers=2, mlp_only_layers=[1], mtp_num_hidden_layers=1)
    attention = {f"attention.{x}_proj" for x in "qkvo"} | {"experts.w13", "experts.w2"}
    dense = {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    found = linear_parameters(ModelConfig.from_dict(raw))
    assert set(found) == attention | dense | {f"mtp.{name}" for name in attention}
    assert {name for name, stacked in found.items() if stacked == 2} == {"experts.w13", "mtp.experts.w13"}


def test_the_activation_format_is_part_of_the_structure_and_off_by_default(model: ShardedModel) -> None:
    default, state = abstract_model(model.config, model.mesh)
    assert default == model.graphdef
    other, _ = abstract_model(model.config, model.mesh, activation_format="mxfp8")
    assert other != default
    assert by_name(state).keys() == by_name(replace(model, graphdef=other).state).keys()


@pytest.mark.parametrize(
    ("tokens", "context", "stride"), [(2, 2, 1), (70, 32, 20), (64, 32, 16), (33, 32, 31), (9, 64, 3)]
)
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(tokens: int, context: int, stride: int) -> None:
    scored = []
    for window in windows(tokens, context, stride):
        assert 0 < window.stop - window.start <= context
        assert window.start < window.first < window.stop <= tokens
        assert window.first - window.start >= min(context - stride, window.first)
        scored += range(window.first, window.stop)
    assert scored == list(range(1, tokens))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 129}, "context is 129.*max_position_embeddings, 128"),
        ({"context": 32, "stride": 32}, "stride is 32.*below the context of 32"),
        ({"batch": 0}, "batch is 0"),
        ({"variants": [Variant("fp6")]}, "'fp6' is unknown; choose of mxfp8, fp8_block"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error(model: ShardedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(model, IDS, **options)
    with pytest.raises(ValueError, match="has 1 tokens; at least 2"):
        evaluate(model, IDS[:1])


def test_blocks_that_do_not_divide_are_an_error_that_names_the_parameter() -> None:
    raw = tiny(hidden_size=80)
    model = model_from_tensors(raw, make_mesh(), random_tensors(raw))
    with pytest.raises(ValueError, match=r"attention\.k_proj: mxfp8 needs a contraction axis that 32 divides"):
        evaluate(model, IDS, [Variant("mxfp8")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = {**RAW, "vocab_size": VOCABULARY, "num_hidden_layers": 1, "mlp_only_layers": []}
    made = add_tokenizer(write_checkpoint(tmp_path_factory.mktemp("model") / "model", raw, random_tensors(raw)))
    (made.parent / "text.txt").write_text(TEXT)
    return made


def test_the_command_prints_a_table_and_writes_json_and_a_plot(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    arguments = [
        "eval",
        str(folder),
        "--text",
        str(folder.parent / "text.txt"),
        "--formats",
        "mxfp8",
        "--context",
        "64",
    ]
    assert main([*arguments, *files]) == 0
    out, err = capsys.readouterr()
    assert "Evaluating: 100%" in err
    found = json.loads((tmp_path / "r.json").read_text())
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(TEXT)
    assert found["tokens"] == len(ids) - 1
    assert (found["context"], found["stride"], found["dtype"]) == (64, 32, "float32")
    assert [(r["format"], r["activations"]) for r in found["results"]] == [
        ("base", False), ("mxfp8", False), ("mxfp8", True),
    ]  # fmt: skip
    base = found["results"][0]
    first = len(tokenizer.decode(ids[:1]).encode())
    bits = base["nats"] * found["tokens"] / math.log(2)
    assert base["bits_per_byte"] == pytest.approx(bits / (len(TEXT.encode()) - first))
    assert f"{found['tokens']:,} tokens in {found['windows']} windows of 64, stride 32" in out
    assert out.count(f" {base['perplexity']:.4f} |") == 1
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")][2:] == [
        "float32", "MXFP8", "MXFP8",
    ]  # fmt: skip
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = ["--text", str(folder.parent / "text.txt")]
    assert main(["eval", str(folder), *text, "--plot", str(tmp_path / "r.png")]) == 2
    out, err = capsys.readouterr()
    assert "pip install 'qwenjax[plot]'" in err
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "129"], "context is 129"),
        (["--stride", "0"], "stride is 0"),
        (["--batch", "0"], "batch is 0"),
        (["--formats", ""], "format '' is unknown"),
        (["--json", "/nowhere/r.json"], "--json is /nowhere/r.json, and there is no folder /nowhere"),
        (["--plot", "r.tex"], "--plot is r.tex; a picture's name ends in one of "),
    ],
)
def test_what_cannot_be_done_is_said_before_the_weights_are_read(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("qwenjax_serving.commands.eval.load_model", None)
    assert main(["eval", str(folder), "--text", str(folder.parent / "text.txt"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_text_that_is_not_utf8_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    assert main(["eval", str(folder), "--text", str(tmp_path / "text.txt")]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_too_few_tokens_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(folder), "--text", str(tmp_path / "none.txt"), "--max-tokens", "-3"]) == 2
    assert "--max-tokens is -3; it is at least 2" in capsys.readouterr().err
