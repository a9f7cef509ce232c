"""`qwenjax train`: token files from text, a small base from scratch, and the head of any model."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from qwenjax.checkpoint.load import has_mtp_head, load_model
from qwenjax.checkpoint.resolve import resolve
from qwenjax.checkpoint.save import save_pretrained
from qwenjax.checkpoint.stored import parse_quantization
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel
from qwenjax.text_files import read_text
from qwenjax.tokenizer import Tokenizer
from qwenjax.train.loop import LoopSettings
from qwenjax.train.losses import LossSettings
from qwenjax.train.memory import head_training_bytes
from qwenjax.train.plot import plot_run
from qwenjax.train.runs import add_head, cast_model, train_base, train_head
from qwenjax.train.step import DivergedError, OptimizerSettings
from qwenjax.train.tokens import TokenFiles, held_out_windows, write_tokens
from qwenjax.train.warm_start import warm_head

_SEPARATOR = "<|endoftext|>"
_WARM_TOKENS = 32_768  # that the head's first projection is fitted to


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    tokens = parts.add_parser("tokens", help="turn text into a token file")
    tokens.add_argument("model", metavar="MODEL", help="whose tokenizer: a folder, or a Hugging Face repo id")
    tokens.add_argument(
        "--text", nargs="+", type=Path, required=True, metavar="FILE", help=".txt, or .jsonl with 'text'"
    )
    tokens.add_argument("--out", type=Path, required=True, metavar="FILE.npy", help="the token file to write")
    base = parts.add_parser("base", help="train a small model from scratch")
    base.add_argument("model", metavar="CONFIG", help="a config.json, or a folder with one")
    _add_training(base, steps=6000, learning_rate=3e-3, batch=16, length=2048)
    head = parts.add_parser("mtp", help="train the multi-token-prediction head of a model")
    head.add_argument("model", metavar="MODEL", help="a checkpoint folder, or a Hugging Face repo id")
    head.add_argument("--depths", type=int, default=3, help="drafts in a row to train for (default %(default)s)")
    head.add_argument(
        "--random", action="store_true", help="begin a new head at random, not as a copy of the last layer"
    )
    head.add_argument("--memory", action="store_true", help="print what training takes on each rank, and stop")
    _add_training(head, steps=2000, learning_rate=1e-3, batch=32, length=1024)


def _add_training(parser: argparse.ArgumentParser, steps: int, learning_rate: float, batch: int, length: int) -> None:
    add = parser.add_argument
    add("--data", nargs="+", type=Path, default=[], metavar="FILE", help="token files, from `qwenjax train tokens`")
    add("--held-out", nargs="*", type=Path, default=[], metavar="FILE", help="token files to measure on")
    add("--out", type=Path, metavar="FOLDER", help="receives model/, run/ (checkpoints, log) and loss.png")
    add("--steps", type=int, default=steps, help="default %(default)s")
    add("--batch", type=int, default=batch, help="windows a step (default %(default)s)")
    add("--length", type=int, default=length, help="tokens a window (default %(default)s)")
    add("--learning-rate", type=float, default=learning_rate, help="at its peak (default %(default)s)")
    add("--warmup", type=int, default=100, metavar="STEPS", help="at most half of the steps (default %(default)s)")
    add("--weight-decay", type=float, default=0.1, help="default %(default)s")
    add("--balance", type=float, default=0.01, help="weight of the routers' balance loss (default %(default)s)")
    add("--seed", type=int, default=0, help="of what is drawn at random (default %(default)s)")
    add("--dtype", default="bfloat16", choices=tuple(DTYPES), help="of the activations (default %(default)s)")
    add("--checkpoint-every", type=int, default=500, metavar="STEPS", help="default %(default)s; 0: only at the end")
    add("--evaluate-every", type=int, default=500, metavar="STEPS", help="default %(default)s; 0: only at the end")
    add("--data-parallel", type=int, default=1, metavar="N", help="ranks that share the batch (default %(default)s)")
    add("--model-parallel", type=int, default=1, metavar="N", help="ranks that share each layer (default %(default)s)")
    add("--no-progress", dest="progress", action="store_false", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    """Trains, and writes the model where --out says; the same command goes on with a run that was interrupted.

    Raises ValueError for what cannot be trained, naming it, and for a loss that left the rails.
    """
    try:
        return {"tokens": _tokens, "base": _base, "mtp": _head}[arguments.part](arguments)
    except DivergedError as error:
        raise ValueError(str(error)) from error


def _tokens(arguments: argparse.Namespace) -> int:
    tokenizer = Tokenizer.from_folder(resolve(arguments.model))
    (separator, *more) = tokenizer.encode(_SEPARATOR)
    if more:
        raise ValueError(f"{arguments.model}: its tokenizer has no {_SEPARATOR}, which separates documents")
    documents = (tokenizer.encode(text) for path in arguments.text for text in _texts(path))
    count = write_tokens(arguments.out, documents, separator, tokenizer.vocab_size)
    print(f"{arguments.out}: {count:,} tokens")
    return 0


def _texts(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield read_text(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line.decode())["text"]
            except (ValueError, KeyError, TypeError) as error:  # neither UTF-8 nor JSON among them
                raise ValueError(f"{path}, line {number}: not a JSON object with 'text' ({error!r})") from error


def _base(arguments: argparse.Namespace) -> int:
    path = Path(arguments.model)
    if path.is_file() and path.name != "config.json":
        raise ValueError(f"CONFIG is {path}; a file is called config.json")
    folder = path.parent if path.is_file() else path
    config = ModelConfig.from_folder(folder)
    _check_numbers(arguments)
    _check_files(arguments, config, arguments.length + 1)
    mesh = make_mesh(arguments.data_parallel, arguments.model_parallel)
    data = TokenFiles(arguments.data, arguments.length + 1, arguments.batch, arguments.seed, config.vocab_size)
    losses = LossSettings(balance=arguments.balance, dtype=arguments.dtype)
    trained = train_base(
        config,
        mesh,
        data,
        arguments.held_out,
        arguments.out / "run",
        _optimizer(arguments),
        losses,
        _loop(arguments),
        arguments.seed,
    )
    return _write(arguments, cast_model(trained, config.dtype), folder)


def _head(arguments: argparse.Namespace) -> int:
    _check_numbers(arguments)
    folder = resolve(arguments.model)
    config = ModelConfig.from_folder(folder)
    mesh = make_mesh(arguments.data_parallel, arguments.model_parallel)
    if arguments.memory:
        with_head = replace(config, mtp_num_hidden_layers=1)
        parts = head_training_bytes(with_head, mesh, arguments.batch, arguments.length, arguments.depths)
        for name, size in parts.items():
            print(f"{name:12} {size / 1e9:9.2f} GB")
        return 0
    _check_files(arguments, config, arguments.length)
    data = TokenFiles(arguments.data, arguments.length, arguments.batch, arguments.seed, config.vocab_size)
    if parse_quantization(folder, config.quantization)[0] == "mxfp8":
        raise ValueError(f"{folder}: its weights are MXFP8; train the head on the checkpoint that they were made from")
    if arguments.random and has_mtp_head(folder, config):
        raise ValueError(f"--random has no effect: {folder} has a head, which training goes on with")
    model = load_model(folder, mesh, progress=arguments.progress)
    if not model.config.mtp_num_hidden_layers:
        batches = min(-(-_WARM_TOKENS // (arguments.batch * arguments.length)), data.steps_per_epoch)
        windows = np.concatenate([data.windows(step) for step in range(batches)])
        model = add_head(model, arguments.seed) if arguments.random else warm_head(model, windows)
    losses = LossSettings(balance=arguments.balance, depths=arguments.depths, dtype=arguments.dtype)
    trained = train_head(
        model,
        data,
        arguments.held_out,
        arguments.out / "run",
        _optimizer(arguments),
        losses,
        _loop(arguments),
        arguments.seed,
    )
    return _write(arguments, trained, folder)


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raises ValueError, naming the option and its limit."""
    least = {"steps": 1, "batch": 1, "length": 2, "depths": 1, "warmup": 0, "seed": 0}
    least |= {"checkpoint_every": 0, "evaluate_every": 0, "weight_decay": 0, "balance": 0}
    for name, limit in least.items():
        value = getattr(arguments, name, limit)  # depths are of heads alone
        if not limit <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it is at least {limit}")
    if arguments.length <= (depths := getattr(arguments, "depths", 0)):
        raise ValueError(f"--length is {arguments.length}; it is above --depths, {depths}, or no draft can be scored")
    if not 0 < arguments.learning_rate < math.inf:
        raise ValueError(f"--learning-rate is {arguments.learning_rate}; it is above 0")


def _check_files(arguments: argparse.Namespace, config: ModelConfig, length: int) -> None:
    """Raises ValueError for what is missing or in the way, before weights are read and --out is made. length: tokens of
    a window, with those that are only predicted."""
    for name in ("data", "out"):
        if not getattr(arguments, name):
            raise ValueError(f"--{name} is missing")
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"--out is {arguments.out}, a file; it is a folder")
    if (arguments.out / "model").exists():
        raise ValueError(f"{arguments.out / 'model'}: is there already; give another --out")
    if arguments.held_out:
        held_out_windows(arguments.held_out, length, config.vocab_size)


def _optimizer(arguments: argparse.Namespace) -> OptimizerSettings:
    return OptimizerSettings(
        arguments.steps, arguments.learning_rate, arguments.warmup, weight_decay=arguments.weight_decay
    )


def _loop(arguments: argparse.Namespace) -> LoopSettings:
    return LoopSettings(
        checkpoint_every=arguments.checkpoint_every,
        evaluate_every=arguments.evaluate_every,
        progress=arguments.progress,
    )


def _write(arguments: argparse.Namespace, model: ShardedModel, source: Path) -> int:
    save_pretrained(model, arguments.out / "model", tokenizer_from=source)
    try:
        plot_run(arguments.out / "run", arguments.out / "loss.png")
    except ImportError as error:  # the training is done: it shall not fail for want of a picture
        print(f"no plot: {error}")
    print(f"{arguments.out / 'model'}: {model.num_parameters:,} parameters")
    return 0
