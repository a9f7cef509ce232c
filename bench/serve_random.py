"""`qwenjax serve` of a large model's shapes with random weights, where there is no checkpoint.

    python bench/serve_random.py [--shapes configs/qwen3-30b-a3b] [options of qwenjax serve]

The vocabulary is that of configs/tiny, whose tokenizer it takes: ids beyond it would have no text, and clients wait for
text. Workers of any mesh, `--config FILE`, have the same weights.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from random_weights import random_weights

from qwenjax.config import ModelConfig
from qwenjax.engine import build
from qwenjax.sharded_model import ShardedModel
from qwenjax_serving import cli, supervisor
from qwenjax_serving.workers import process

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny"


def load_model(
    folder: Path, mesh: Mesh, dtype: Any = None, *, quantization: str | None = None, **_: Any
) -> ShardedModel:
    return random_weights(ModelConfig.from_folder(folder), dtype or jnp.bfloat16, quantization, mesh=mesh)


class Supervisor(supervisor.Supervisor):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._command[1:3] = [__file__, "--worker"]


def main() -> int:
    build.load_model = load_model
    build.has_mtp_head = lambda *_: False
    process.checkpoint_fingerprint = lambda folder: "random"
    arguments = sys.argv[1:]
    if arguments[:1] == ["--worker"]:
        sys.argv = arguments
        return process.main()
    shapes = ROOT / "configs" / "qwen3-30b-a3b"
    if arguments[:1] == ["--shapes"]:
        shapes, arguments = Path(arguments[1]), arguments[2:]
    config = json.loads((shapes / "config.json").read_text()) | {"mtp_num_hidden_layers": 0}
    ids = {name: json.loads((TINY / "config.json").read_text())[name] for name in ("vocab_size", "eos_token_id")}
    with tempfile.TemporaryDirectory() as name:
        for path in TINY.glob("*token*"):
            shutil.copy(path, name)
        Path(name, "config.json").write_text(json.dumps(config | ids))
        from qwenjax_serving import launch  # it imports the Supervisor by name

        launch.Supervisor = Supervisor
        return cli.main(["serve", name, "--served-model-name", shapes.name, *arguments])


if __name__ == "__main__":
    sys.exit(main())
