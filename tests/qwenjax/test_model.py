"""The shape of the model's program, and the conveniences around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.cache import SelfContext
from qwenjax.config import ModelConfig
from qwenjax.logits import _forward, sequence_logits
from qwenjax.mesh import make_mesh
from qwenjax.model import abstract_model
from qwenjax.sharded_model import ShardedModel, by_name, random_model
from tests.helpers import model_from_tensors, random_tensors, tiny


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of its loops and branches included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


def program(raw: dict[str, Any], shape: tuple[int, int] = (1, 1)) -> list[Any]:
    """The equations of the forward program."""
    mesh = make_mesh(*shape)
    graphdef, state = abstract_model(ModelConfig.from_dict(raw), mesh)
    ids = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    epochs = jax.ShapeDtypeStruct((mesh.size,), jnp.int32)
    context = SelfContext(ids)  # type: ignore[arg-type]
    traced = _forward.trace(state, ids, context, epochs, graphdef=graphdef, mesh=mesh)
    return list(equations(traced.jaxpr.jaxpr))


def names(program: list[Any]) -> list[str]:
    return [equation.primitive.name for equation in program]


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 2)], ids=str)
def test_everything_is_under_one_shard_map(shape: tuple[int, int]) -> None:
    whole = program(tiny(), shape)
    (shard_map,) = [equation for equation in whole if equation.primitive.name == "shard_map"]
    inside = names(list(equations(shard_map.params["jaxpr"])))
    assert names(whole).count("dot_general") == inside.count("dot_general") > 5
    collectives = {"psum", "psum_invariant", "all_to_all", "all_gather"} & set(inside)
    assert {"all_to_all"} <= collectives if shape == (4, 1) else "all_to_all" not in collectives


@pytest.mark.parametrize("kind", ["sparse", "mixed", "dense"])
def test_a_deeper_model_is_no_larger_a_program(kind: str) -> None:
    dense = {"sparse": [], "mixed": [0], "dense": list(range(7))}[kind]
    shallow, deep = (
        names(program(tiny(num_hidden_layers=layers, mlp_only_layers=[layer for layer in dense if layer < layers])))
        for layers in (2, 7)
    )
    assert shallow == deep


def test_layers_four_at_a_time_and_the_rest_are_the_layers_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tiny(num_hidden_layers=6, mlp_only_layers=[1])
    model = model_from_tensors(raw, make_mesh(), random_tensors(raw))
    one = sequence_logits(model, [[3, 1, 4, 1, 5]])
    monkeypatch.setattr("qwenjax.model._layers_together", lambda: 4)
    jax.clear_caches()
    four = sequence_logits(model, [[3, 1, 4, 1, 5]])
    np.testing.assert_allclose(four[0], one[0], rtol=1e-5, atol=1e-5)
    assert 4 in [equation.params["unroll"] for equation in program(raw) if equation.primitive.name == "scan"]


def test_bfloat16_models_route_normalise_and_attend_in_float32() -> None:
    seen = set()
    for equation in program(tiny(torch_dtype="bfloat16")):
        if equation.primitive.name in {"top_k", "rsqrt", "exp", "logistic", "reduce_max", "cos", "sin"}:
            seen.add(equation.primitive.name)
            assert equation.invars[0].aval.dtype == jnp.float32, equation
    assert {"top_k", "rsqrt", "exp", "logistic"} <= seen


def test_random_models_are_the_same_on_every_mesh_and_differ_by_seed() -> None:
    config = ModelConfig.from_dict(tiny(num_hidden_layers=1))
    one, four, other = random_model(config, make_mesh()), random_model(config, make_mesh(1, 4)), None
    for name, leaf in by_name(one.state).items():
        np.testing.assert_array_equal(leaf, by_name(four.state)[name], err_msg=name)
    other = random_model(config, make_mesh(), seed=1, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in by_name(other.state).values()} == {jnp.dtype(jnp.bfloat16)}
    difference = np.abs(
        np.asarray(by_name(one.state)["embed_tokens"]) - np.asarray(by_name(other.state)["embed_tokens"])
    )
    assert difference.max() > 0.01


@pytest.fixture(scope="module")
def model() -> ShardedModel:
    raw = tiny(num_hidden_layers=1, max_position_embeddings=40)
    return model_from_tensors(raw, make_mesh(), random_tensors(raw))


def test_logits_do_not_depend_on_the_other_sequences_or_on_later_tokens(model: ShardedModel) -> None:
    first, second = [1, 2, 3, 4, 5, 6, 7], [9] * 40
    together = sequence_logits(model, [first, second, first[:4]])
    # Two batch sizes are two programs: sums may be in another order.
    np.testing.assert_allclose(sequence_logits(model, [first])[0], together[0], atol=1e-5)
    np.testing.assert_allclose(together[0][:4], together[2], atol=1e-5)
    assert [logits.shape for logits in together] == [(7, 64), (40, 64), (4, 64)]
    assert together[0].dtype == np.float32


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no sequences"),
        ([[1], []], "sequence 1 is empty"),
        ([[1, 64]], "sequence 0 has token id 64; the vocabulary is 0 to 63"),
        ([[-1]], "sequence 0 has token id -1"),
        ([[0] * 41], "sequence 0 has 41 tokens; max_position_embeddings is 40"),
    ],
)
def test_sequences_that_the_model_cannot_read_are_an_error(
    model: ShardedModel, sequences: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sequence_logits(model, sequences)
