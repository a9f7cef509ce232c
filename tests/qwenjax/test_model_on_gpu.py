"""The small model on a GPU: MXFP8 weights go through our kernels, with the reference's logits and without copies."""

from __future__ import annotations

import re
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


def load(dtype: jnp.dtype | None = None, pack: bool | None = None) -> ShardedModel:
    return load_model(FOLDER, make_mesh(), dtype, quantization="mxfp8", pack=pack, progress=False)


def compiled(tokens: int = 64) -> jax.stages.Compiled:
    """The forward pass of `tokens` tokens of one sequence."""
    model = load()
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


def test_the_program_calls_our_kernels_and_copies_no_weight() -> None:
    text = compiled().as_text()
    # q, k, v, o and the experts' two in the layers' loop: the head does not run here.
    assert len(OURS.findall(text)) == 6
    made = re.findall(r"= u8\[[\d,]*,8448\]\S* ([a-z-]+)\(", text)
    assert set(made) <= {"parameter", "get-tuple-element", "bitcast"}, made
