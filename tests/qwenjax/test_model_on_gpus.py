"""The model on two GPUs (TP=2, DP-EP=2): logits of one GPU, and no collective of XLA's left in it."""

from __future__ import annotations

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.cache import SelfContext
from qwenjax.logits import _forward, sequence_logits
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel
from qwenjax_ffi import all_reduce_choice
from tests.helpers import model_from_tensors, random_tensors, tiny

pytestmark = pytest.mark.gpu

# 63 ids do not divide over two ranks: the vocabulary is whole on both, and no sum of embeddings is in the program.
RAW = tiny(hidden_size=64, vocab_size=63, mlp_only_layers=[1], num_hidden_layers=3, torch_dtype="bfloat16")
IDS = [np.random.default_rng(n).integers(0, 63, n).tolist() for n in (70, 5, 12)]


PREFILL, DECODE = (1, 2), (2, 1)  # data, model
COLLECTIVE = re.compile(r" (?:all-reduce|all-to-all|all-gather|reduce-scatter|collective-permute)(?:-start)?\(")


@cache
def model(data: int, ranks: int) -> ShardedModel:
    if len(jax.devices()) < data * ranks:
        pytest.skip("needs two GPUs")
    return model_from_tensors(RAW, make_mesh(data, ranks), random_tensors(RAW))


@pytest.mark.parametrize("mesh", [PREFILL, DECODE])
def test_logits_on_two_gpus_are_those_of_one(mesh: tuple[int, int]) -> None:
    check_logits(*(np.concatenate(sequence_logits(model(*shape), IDS)) for shape in ((1, 1), mesh)))


def test_logits_are_those_of_one_gpu_where_all_sums_are_two_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of long prompts are: the experts' rows are added up as they are sent."""
    alone = np.concatenate(sequence_logits(model(1, 1), IDS))
    _forward.clear_cache()
    monkeypatch.setattr(all_reduce_choice, "ONE_SHOT_LIMITS", {16: 0})
    found = np.concatenate(sequence_logits(model(*PREFILL), IDS))
    _forward.clear_cache()
    check_logits(alone, found)


def check_logits(alone: np.ndarray, spread: np.ndarray) -> None:
    """Holds logits [tokens, vocab] against those of one GPU, in bfloat16."""
    error = np.abs(spread - alone).max(-1)  # of each token
    assert (error < 0.1).mean() > 0.95  # as tests/qwenjax/test_mesh.py asks of references on a CPU
    assert error.max() < 1.5
    second, first = np.sort(alone, axis=-1)[:, -2:].T
    clear = first - second > 2 * error
    assert clear.mean() > 0.5, "most tokens must have a greedy id that the error cannot move"
    np.testing.assert_array_equal(spread.argmax(-1)[clear], alone.argmax(-1)[clear])


def compiled_text(data: int, ranks: int) -> str:
    spread = model(data, ranks)
    tokens = jnp.zeros((data, 64), jnp.int32)
    positions = jnp.tile(jnp.arange(64, dtype=jnp.int32), (data, 1))
    arguments = (spread.state, tokens, SelfContext(positions), spread.epochs())
    return _forward.lower(*arguments, graphdef=spread.graphdef, mesh=spread.mesh).compile().as_text()


# Of three layers in one turn of their loop, the second dense. With model=2: attention's with its norm, and that of the
# experts or the MLP. With data=2: dispatch and combine.
@pytest.mark.parametrize(("mesh", "kernels"), [(PREFILL, 6), (DECODE, 4)])
def test_no_collective_of_xla_is_left(mesh: tuple[int, int], kernels: int) -> None:
    spread, text = model(*mesh), compiled_text(*mesh)
    assert not COLLECTIVE.findall(text)
    # Collectives are the kernels that give the epoch array back in place; they are known by its length.
    of_collectives = ('custom_call_target="CuteDSL', "output_to_operand_aliasing", f"s32[{spread.epochs().size // 2}]")
    ours = [line for line in text.splitlines() if all(word in line for word in of_collectives)]
    assert len(ours) == kernels
