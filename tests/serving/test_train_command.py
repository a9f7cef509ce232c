"""`qwenjax train`, from text to a model with a head, by its command line alone."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from qwenjax.config import ModelConfig
from qwenjax_serving.commands import train
from tests.helpers import tiny

TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny"
TRAINING = ["--steps", "2", "--batch", "2", "--length", "16", "--dtype", "float32", "--no-progress"]


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.run(parser.parse_args([str(word) for word in words]))


def test_text_becomes_a_model_with_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("The king sat upon his throne. " * 40)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "All his servants stood before him. " * 40}) + "\n")
    start = tmp_path / "start"
    shutil.copytree(TOKENIZER, start, ignore=shutil.ignore_patterns("*.safetensors*", "reproduce"))
    (start / "config.json").write_text(json.dumps({**tiny(vocab_size=4096), "eos_token_id": [2, 7]}))
    tokens = tmp_path / "tokens.npy"
    assert run("tokens", TOKENIZER, "--text", tmp_path / "a.txt", tmp_path / "b.jsonl", "--out", tokens) == 0
    base, head = tmp_path / "base", tmp_path / "head"
    assert run("base", start / "config.json", "--data", tokens, "--out", base, *TRAINING) == 0
    assert not ModelConfig.from_folder(base / "model").mtp_num_hidden_layers
    assert run("mtp", base / "model", "--data", tokens, "--out", head, "--depths", "1", *TRAINING) == 0
    assert ModelConfig.from_folder(head / "model").mtp_num_hidden_layers == 1
    assert (head / "loss.png").is_file()
    # It generates as it is: tokenizer, chat template, defaults and token ids are there.
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (head / "model" / name).read_bytes() == (TOKENIZER / name).read_bytes()
    assert json.loads((head / "model" / "config.json").read_text())["eos_token_id"] == [2, 7]
    assert f"{head / 'model'}: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="is there already"):
        run("mtp", base / "model", "--data", tokens, "--out", head, *TRAINING)


def test_memory_is_told_without_loading_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    assert run("mtp", tmp_path, "--memory") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "base", "head", "activations", "logits", "total",
    ]  # fmt: skip


def test_quantised_weights_are_refused_before_they_are_read(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}
    (tmp_path / "config.json").write_text(json.dumps({**tiny(), **quantised}))
    np.save(tmp_path / "tokens.npy", np.ones(400, np.uint16))
    with pytest.raises(ValueError, match="its weights are MXFP8; train the head on the checkpoint"):
        run("mtp", tmp_path, "--data", tmp_path / "tokens.npy", "--out", tmp_path / "out", *TRAINING)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    (tmp_path / "other.json").write_text(json.dumps(tiny()))
    with pytest.raises(ValueError, match=r"other\.json; a file is called config\.json"):
        run("base", tmp_path / "other.json", "--data", tmp_path / "t.npy", "--out", tmp_path / "out")
    with pytest.raises(ValueError, match="--data is missing"):
        run("base", tmp_path, "--out", tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"words": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        run("tokens", TOKENIZER, "--text", tmp_path / "bad.jsonl", "--out", tmp_path / "t.npy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps is 0; it is at least 1"),
        (["--batch", "0"], "--batch is 0; it is at least 1"),
        (["--length", "1"], "--length is 1; it is at least 2"),
        (["--depths", "0"], "--depths is 0; it is at least 1"),
        (["--depths", "16"], "--length is 16; it is above --depths, 16"),
        (["--warmup", "-1"], "--warmup is -1; it is at least 0"),
        (["--balance", "nan"], "--balance is nan; it is at least 0"),
        (["--learning-rate", "inf"], "--learning-rate is inf; it is above 0"),
        (["--held-out", "nowhere.npy"], r"nowhere\.npy: no such token file"),
        (["--out", "FILE"], "--out is .*, a file; it is a folder"),
        (["--random"], "--random has no effect: .* has a head"),
    ],
)
def test_bad_input_is_refused_before_weights_are_read_or_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(train, "load_model", None)
    (tmp_path / "config.json").write_text(json.dumps({**tiny(), "mtp_num_hidden_layers": 1}))
    np.save(tmp_path / "tokens.npy", np.ones(400, np.uint16))
    (tmp_path / "FILE").touch()
    own = [tmp_path / word if word == "FILE" else word for word in words]
    with pytest.raises(ValueError, match=message):
        run("mtp", tmp_path, "--data", tmp_path / "tokens.npy", "--out", tmp_path / "out", *TRAINING, *own)
    assert not (tmp_path / "out").exists()
