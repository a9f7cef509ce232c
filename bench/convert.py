"""How fast `qwenjax convert` reads bf16, beside a plain copy of the same file on the same machine.

    python bench/convert.py [--gigabytes 2.5] [--repeats 5] [--folder DIR]

The source has the shapes of Qwen3-30B-A3B and lies in the page cache. Copy and conversion alternate, so that other
load on the machine meets both; each line gives the best run, the median, and the CPU time that a gigabyte takes,
which such load changes least. The last part compares the ways to run the quantiser's integer code on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from measure import header

from qwenjax.checkpoint.safetensors import TensorInfo
from qwenjax.checkpoint.writer import SafetensorsWriter
from qwenjax.convert import convert
from qwenjax.convert.encode import STEP, encode
from qwenjax.quant import MXFP8

BF16 = np.dtype(ml_dtypes.bfloat16)
BAR = 400  # MB/s of bf16 input on two cores: what the conversion has to reach


def make_source(folder: Path, nbytes: int) -> int:
    """Layers of 128 experts (768 x 2048) until `nbytes` are reached; returns the bytes written."""
    shapes: dict[str, tuple[int, ...]] = {}
    layer = 0
    while sum(2 * int(np.prod(shape)) for shape in shapes.values()) < nbytes:
        base = f"model.layers.{layer}."
        heads = (("q", (4096, 2048)), ("k", (512, 2048)), ("v", (512, 2048)), ("o", (2048, 4096)))
        shapes |= {f"{base}self_attn.{x}_proj.weight": shape for x, shape in heads}
        for expert in range(128):
            shapes |= {f"{base}mlp.experts.{expert}.{x}_proj.weight": (768, 2048) for x in ("gate", "up")}
            shapes[f"{base}mlp.experts.{expert}.down_proj.weight"] = (2048, 768)
        layer += 1
    writer = SafetensorsWriter(folder / "model.safetensors", {k: TensorInfo(BF16, v) for k, v in shapes.items()})
    pool = weights(1 << 23)
    for name, shape in shapes.items():
        writer.write(name, pool[: int(np.prod(shape))].reshape(shape))
    writer.close()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 2048, "moe_intermediate_size": 768}))
    return writer.nbytes


def weights(count: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(count, np.float32) * 0.02).astype(BF16)


def copy(source: Path, target: Path) -> None:
    shutil.copyfile(source / "model.safetensors", target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def on_one_core(action: Callable[[], object], nbytes: int, repeats: int) -> float:
    """Best MB per CPU second."""
    action()
    return max(nbytes / timed(action)[1] / 1e6 for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    print(header("jax", "numpy"))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source, target = Path(name) / "source", Path(name) / "target"
        source.mkdir()
        nbytes = make_source(source, int(arguments.gigabytes * 1e9))
        runs: dict[str, list[tuple[float, float]]] = {"convert": [], "plain copy": []}
        for _ in range(arguments.repeats):
            runs["plain copy"].append(timed(lambda: copy(source, target)))
            target.unlink()
            runs["convert"].append(timed(lambda: convert(source, target)))
            shutil.rmtree(target)
    print(f"\n{nbytes / 1e9:.2f} GB of bf16, {arguments.repeats} runs of each in turn, written through to the disk")
    print(f"{'':12}{'best':>12}{'median':>12}{'CPU':>14}")
    best, median = {}, {}
    for what, pairs in runs.items():
        walls = [wall for wall, _ in pairs]
        best[what], median[what] = nbytes / min(walls) / 1e6, nbytes / statistics.median(walls) / 1e6
        cpu = min(cpu for _, cpu in pairs) / nbytes * 1e9
        print(f"{what:12}{best[what]:>7.0f} MB/s{median[what]:>7.0f} MB/s{cpu:>9.2f} s/GB")
    print(
        f"convert, best: measured {best['convert']:.0f} MB/s / limit (plain copy) {best['plain copy']:.0f} MB/s / "
        f"bar {BAR} MB/s; of the copy {best['convert'] / best['plain copy']:.2f} best, "
        f"{median['convert'] / median['plain copy']:.2f} median"
    )
    values = weights(16 * STEP)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jitted = jax.jit(MXFP8().quantise)
    print("\nthe quantiser alone, MB of bf16 a CPU second on one core")
    for what, action in {
        "XLA, elements and scales": lambda: [jax.block_until_ready(jitted(part)) for part in values.reshape(16, -1)],
        "XLA, with the report's errors": lambda: encode(values),
        "numpy, the same integer code": lambda: [MXFP8().quantise(part) for part in values.reshape(16, -1)],
    }.items():
        print(f"{what:32}{on_one_core(action, values.nbytes, 3):>7.0f}")
    print("load average after: {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()))


if __name__ == "__main__":
    main()
