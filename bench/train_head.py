"""Training a multi-token-prediction head at a large model's shapes: time of a step, and memory beside the arithmetic.

    python bench/train_head.py [--config configs/qwen3-30b-a3b] [--batch 8] [--length 1024] [--depths 3] [--steps 4]
        [--record NAME]

The base has random weights in bf16 and is frozen; the tokens are random. What `qwenjax train mtp --memory` predicts is
the limit that the measured peak is held against.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import header, recorded
from random_weights import random_weights

from qwenjax.config import ModelConfig
from qwenjax.train.loop import LoopSettings, read_log
from qwenjax.train.losses import LossSettings
from qwenjax.train.memory import head_training_bytes
from qwenjax.train.runs import train_head
from qwenjax.train.step import OptimizerSettings
from qwenjax.train.tokens import TokenFiles

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "qwen3-30b-a3b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--depths", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--record", help="name of the file in bench/results, without ending")
    arguments = parser.parse_args()
    config = replace(ModelConfig.from_folder(arguments.config), mtp_num_hidden_layers=1)
    with recorded(arguments.record and f"{arguments.record}.txt"), tempfile.TemporaryDirectory() as folder:
        print(header("jax", "jaxlib", "flax", "optax"))
        print(
            f"{arguments.config.name}, bf16, {arguments.batch} x {arguments.length} tokens, {arguments.depths} depths\n"
        )
        ids = np.random.default_rng(0).integers(0, config.vocab_size, 4 * arguments.batch * arguments.length)
        np.save(Path(folder) / "tokens.npy", ids.astype(np.uint32))
        data = TokenFiles([Path(folder) / "tokens.npy"], arguments.length, arguments.batch, 0, config.vocab_size)
        model = random_weights(config, jnp.bfloat16)
        parts = head_training_bytes(config, model.mesh, arguments.batch, arguments.length, arguments.depths)
        train_head(
            model,
            data,
            [],
            Path(folder) / "run",
            OptimizerSettings(arguments.steps, warmup=1),
            LossSettings(depths=arguments.depths, dtype="bfloat16"),
            LoopSettings(steps_per_call=1, checkpoint_every=0),
        )
        rows = read_log(Path(folder) / "run")
        seconds = sorted(row["seconds"] for row in rows[1:])  # the first compiles
        print("loss        " + " ".join(f"{row['loss']:.3f}" for row in rows))
        print(f"step        {seconds[len(seconds) // 2]:.2f} s, {arguments.batch * arguments.length} tokens")
        for name, size in parts.items():
            print(f"{name:11} {size / 1e9:8.2f} GB by arithmetic")
        if stats := jax.devices()[0].memory_stats():
            peak = stats["peak_bytes_in_use"]
            print(f"measured    {peak / 1e9:8.2f} GB at the peak, {peak / parts['total']:.2f} of the arithmetic")


if __name__ == "__main__":
    main()
