"""Trains the small model, on one GPU or, slowly, a CPU: `python train.py base WORK OUT`, then `... head WORK OUT`.

Both read WORK/train.npy, `base` measures on WORK/held_out.npy, and the shape is that of ../config.json. `base` writes
OUT/base, `head` reads it and writes OUT/model, the base with its multi-token-prediction head. OUT/*-run hold logs and
checkpoints, from which the same command goes on when it was interrupted. The settings are those of the model that is
shipped: its base was trained on an H200 in bf16 and its head on two cores of a CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.save import save_pretrained
from qwenjax.config import ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.train.loop import LoopSettings, read_log
from qwenjax.train.losses import LossSettings
from qwenjax.train.plot import plot_run
from qwenjax.train.runs import cast_model, train_base, train_head
from qwenjax.train.step import OptimizerSettings
from qwenjax.train.tokens import TokenFiles
from qwenjax.train.warm_start import warm_head

CONFIG = Path(__file__).parents[1] / "config.json"
MAX_SHARD_BYTES = 12_000_000
BASE_SEED, HEAD_SEED, WARM_SEED = 17, 18, 5


def base(args: argparse.Namespace, config: ModelConfig) -> None:
    """6,000 steps of 16 x 2,048 tokens, 12.8 epochs."""
    data = TokenFiles([args.work / "train.npy"], 2049, 16, BASE_SEED, config.vocab_size)
    loop = LoopSettings(steps_per_call=20, checkpoint_every=0, evaluate_every=2000, progress=not args.no_progress)
    run = args.out / "base-run"
    trained = train_base(
        config,
        make_mesh(),
        data,
        [args.work / "held_out.npy"],
        run,
        OptimizerSettings(6000),
        LossSettings(),
        loop,
        BASE_SEED,
    )
    save_pretrained(cast_model(trained, config.dtype), args.out / "base", MAX_SHARD_BYTES)


def head(args: argparse.Namespace, config: ModelConfig) -> None:
    """From a warm start: 900 steps at depth 1, then 150 at depths 1 to 3, of 4 x 512 tokens each."""
    model = load_model(args.out / "base", make_mesh(), jnp.float32, progress=False)
    model = warm_head(model, TokenFiles([args.work / "train.npy"], 256, 128, WARM_SEED, config.vocab_size).windows(0))
    loop = LoopSettings(steps_per_call=5, checkpoint_every=100, progress=not args.no_progress)
    for number, (steps, rate, depths) in enumerate(((900, 1e-3, 1), (150, 3e-4, 3))):
        data = TokenFiles([args.work / "train.npy"], 512, 4, HEAD_SEED + number, config.vocab_size)
        optimizer = OptimizerSettings(steps, learning_rate=rate, warmup=20, weight_decay=0.01)
        losses = LossSettings(dtype="float32", depths=depths)
        model = train_head(model, data, [], args.out / f"head{number}-run", optimizer, losses, loop)
    model = cast_model(model, config.dtype)
    save_pretrained(model, args.out / "model", MAX_SHARD_BYTES)
    shutil.copy(CONFIG, args.out / "model" / "config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["base", "head"])
    parser.add_argument("work", type=Path, help="folder that tokenizer.py filled")
    parser.add_argument("out", type=Path)
    parser.add_argument("--no-progress", action="store_true")
    args = parser.parse_args()
    config = ModelConfig.from_dict(json.loads(CONFIG.read_text("utf-8")))
    started = time.perf_counter()
    (base if args.part == "base" else head)(args, replace(config, mtp_num_hidden_layers=0))
    for run in sorted(args.out.glob(f"{args.part}*-run")):
        rows = [row for row in read_log(run) if "loss" in row]
        print(f"{run.name}: {len(rows)} steps, loss {rows[-1]['loss']:.4f}, {rows[-1]['seconds']:.4f} s a step")
        plot_run(run, args.out / f"{run.name}.png")
    print(f"{time.perf_counter() - started:.0f} s on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
