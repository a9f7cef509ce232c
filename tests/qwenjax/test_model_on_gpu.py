"""The small model on a GPU: it goes through our kernels, with the reference's logits and without copies of weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.cache import SelfContext
from qwenjax.checkpoint.load import load_model
from qwenjax.logits import _forward, sequence_logits
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel, by_name
from qwenjax_ffi.packing import PackedMXFP8Weight

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "tiny"
IDS = [np.random.default_rng(n).integers(0, 4096, n).tolist() for n in (3, 70, 200)]
OURS = re.compile(r'custom_call_target="CuteDSL')


def load(dtype: jnp.dtype | None = None, pack: bool | None = None, quantization: str | None = "mxfp8") -> ShardedModel:
    return load_model(FOLDER, make_mesh(), dtype, quantization=quantization, pack=pack, progress=False)


def compiled(tokens: int = 64, quantization: str | None = "mxfp8") -> jax.stages.Compiled:
    """The forward pass of `tokens` tokens of one sequence."""
    model = load(quantization=quantization)
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    arguments = (model.state, jnp.zeros((1, tokens), jnp.int32), SelfContext(positions), model.epochs())
    return _forward.lower(*arguments, graphdef=model.graphdef, mesh=model.mesh).compile()


def test_mxfp8_parameters_are_packed_by_default() -> None:
    packed = {name for name, w in by_name(load().state).items() if isinstance(w, PackedMXFP8Weight)}
    assert {"experts.w13", "experts.w2", "attention.q_proj", "attention.o_proj", "mtp.experts.w13"} <= packed
    assert not any(isinstance(w, PackedMXFP8Weight) for w in by_name(load(jnp.float32).state).values())


def test_the_kernels_logits_are_as_near_to_float32_as_the_references() -> None:
    exact, reference, ours = (
        np.concatenate(sequence_logits(model, IDS)).astype(np.float64)
        for model in (load(jnp.float32, pack=False), load(pack=False), load())
    )
    size = np.linalg.norm(exact)
    assert np.linalg.norm(ours - reference) <= 0.02 * size
    # Both round to bf16 at the same places; another order of sums sends a few tokens to other experts.
    assert np.linalg.norm(ours - exact) <= 1.5 * np.linalg.norm(reference - exact)


def test_bf16_logits_are_near_to_float32() -> None:
    exact, ours = (
        np.concatenate(sequence_logits(load(dtype, quantization=None), IDS)).astype(np.float64)
        for dtype in (jnp.float32, None)
    )
    assert np.linalg.norm(ours - exact) <= 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("quantization", "calls", "weight"),
    # In each of two layers: q, k and v; norms of heads; o; the sum and its norm; the experts from the router on.
    # In bf16 XLA multiplies for attention. The head does not run here.
    [("mxfp8", 10, r"u8\[[\d,]*,8448\]"), (None, 6, r"bf16\[(?:2,)?16,256,(?:256|128)\]")],
)
def test_the_program_calls_our_kernels_and_copies_no_weight(quantization: str | None, calls: int, weight: str) -> None:
    text = compiled(quantization=quantization).as_text()
    assert len(OURS.findall(text)) == calls
    made = re.findall(rf"= {weight}\S* ([a-z-]+)\(", text)
    assert set(made) <= {"parameter", "get-tuple-element", "bitcast"}, made


def test_the_calls_are_captured_in_command_buffers(tmp_path: Path) -> None:
    code = (
        "import importlib.util;"
        f"spec = importlib.util.spec_from_file_location('again', {__file__!r});"
        "again = importlib.util.module_from_spec(spec); spec.loader.exec_module(again); again.compiled()"
    )
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*forward.*",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    (dump,) = tmp_path.glob("*thunk_sequence*after*")
    # A line a thunk, indented below the thunk that holds it.
    captured, buffer = 0, None
    for line in dump.read_text().splitlines():
        depth = len(line) - len(line.lstrip())
        if buffer is not None and depth <= buffer:
            buffer = None
        if "kCommandBuffer" in line:
            buffer = depth
        if "kCustomCall" in line:
            assert buffer is not None, line
            captured += 1
    assert captured >= 10
