"""Training's forward pass against the model's own, and its gradients on every mesh."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from qwenjax.cache import SelfContext
from qwenjax.config import ModelConfig
from qwenjax.mesh import make_mesh
from qwenjax.model import Qwen3Moe
from qwenjax.sharded_model import EPOCHS_SPEC, ShardedModel, by_name, from_names, on_ranks, random_model
from qwenjax.train.contexts import DraftContext, WindowContext
from qwenjax.train.forward import head_forward, model_forward
from qwenjax.train.losses import HEAD, LossSettings, base_loss, head_loss
from tests.helpers import tiny

# One dense layer and one with experts.
CONFIG = ModelConfig.from_dict(tiny(mlp_only_layers=[0], mtp_num_hidden_layers=1))
SETTINGS = LossSettings(dtype="float32", depths=2)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 17)).astype(np.int32)
POSITIONS = np.tile(np.arange(17, dtype=np.int32), (4, 1))


def spread(parameters: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Weights ten times as large as at the start of training, so that predictions differ from token to token."""
    return {name: value if "norm" in name else value * 10 for name, value in parameters.items()}


@pytest.fixture(scope="module")
def model() -> ShardedModel:
    fresh = random_model(CONFIG, make_mesh())
    return ShardedModel(CONFIG, fresh.mesh, fresh.graphdef, from_names(fresh.state, spread(by_name(fresh.state))))


def on_one_rank(model: ShardedModel, per_rank: Any) -> Any:
    program = on_ranks(model.graphdef, model.mesh, per_rank, (PartitionSpec(), EPOCHS_SPEC), PartitionSpec())
    return jax.jit(program)(model.state, TOKENS, model.epochs())


def test_trainings_forward_pass_is_the_models(model: ShardedModel) -> None:
    def both(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> Any:
        assert qwen.mtp is not None
        hidden, _, _ = qwen(tokens, SelfContext(POSITIONS), epochs)
        trained, _, balance, _ = model_forward(qwen, tokens, WindowContext(POSITIONS), epochs, jnp.float32)
        embedding = qwen.embed(tokens)
        head, _, _ = qwen.mtp(embedding, hidden, SelfContext(POSITIONS), epochs)
        trained_head, _, _, _ = head_forward(qwen.mtp, embedding, hidden, WindowContext(POSITIONS), epochs)
        return hidden, trained, head, trained_head, balance

    hidden, trained, head, trained_head, balance = on_one_rank(model, both)
    assert np.std(hidden) > 0.5
    np.testing.assert_allclose(trained, hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(trained_head, head, rtol=1e-4, atol=1e-4)
    assert 1.0 < float(balance) < CONFIG.num_experts / CONFIG.num_experts_per_tok


def test_draft_of_any_depth_attends_as_a_cache_would_let_it(model: ShardedModel) -> None:
    """The drafts that set out from one position, one by one, against the same row of training's depths."""
    depths, anchor = 3, 9

    def both(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> Any:
        assert qwen.mtp is not None
        base, _, _ = qwen(tokens, SelfContext(POSITIONS), epochs)
        hidden, context, rows = base, DraftContext(POSITIONS), []
        for depth in range(1, depths + 1):
            embedding = qwen.embed(jnp.roll(tokens, -depth, axis=1))
            hidden, context, _ = qwen.mtp(embedding, hidden, context, epochs)
            context = context.deeper()
            rows.append(hidden[:, anchor])
        # The same by recomputing: entries of depth 1 up to the anchor, then each draft's, as one causal text.
        embeddings = qwen.embed(tokens[:, 1 : anchor + 1 + depths])
        inputs = base[:, : anchor + 1]
        again = []
        for depth in range(depths):
            length = anchor + 1 + depth
            out, _, _ = qwen.mtp(embeddings[:, :length], inputs, SelfContext(POSITIONS[:, :length]), epochs)
            again.append(out[:, -1])
            inputs = jnp.concatenate([inputs, out[:, -1:]], axis=1)
        return rows, again

    rows, again = on_one_rank(model, both)
    for row, wanted in zip(rows, again, strict=True):
        np.testing.assert_allclose(row, wanted, rtol=1e-4, atol=1e-4)


@cache
def value_and_gradients(kind: str, data: int, ranks: int) -> Any:
    mesh = make_mesh(data, ranks)
    parameters = spread(by_name(random_model(CONFIG, mesh).state))
    trained = {name: x for name, x in parameters.items() if name.startswith(HEAD) == (kind == "head")}
    frozen = {name: x for name, x in parameters.items() if name not in trained}
    loss = (base_loss if kind == "base" else head_loss)(CONFIG, mesh, SETTINGS)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(trained, frozen, TOKENS)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("base", (2, 2)), *[pytest.param("head", shape, marks=pytest.mark.slow) for shape in ((1, 2), (2, 1))]],
)
def test_loss_and_gradients_are_the_same_on_every_mesh(kind: str, shape: tuple[int, int]) -> None:
    (one, metrics), gradients = value_and_gradients(kind, 1, 1)
    (other, other_metrics), other_gradients = value_and_gradients(kind, *shape)
    np.testing.assert_allclose(other, one, rtol=1e-5)
    assert set(metrics) == set(other_metrics)
    for name, gradient in gradients.items():
        size = np.abs(gradient).max()
        np.testing.assert_allclose(other_gradients[name], gradient, rtol=1e-3, atol=1e-4 * size, err_msg=name)


def test_base_loss_is_the_mean_cross_entropy(model: ShardedModel) -> None:
    def logits(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> jax.Array:
        return qwen.logits(qwen(tokens, SelfContext(POSITIONS), epochs)[0])

    log_chances = jax.nn.log_softmax(on_one_rank(model, logits)[:, :-1])
    wanted = -np.mean(np.take_along_axis(np.asarray(log_chances), TOKENS[:, 1:, None], axis=-1))
    _, metrics = jax.jit(base_loss(CONFIG, model.mesh, SETTINGS))(by_name(model.state), {}, TOKENS)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


def test_head_whose_drafts_are_the_bases_own_agrees_everywhere(model: ShardedModel) -> None:
    """A base that always predicts one token, whatever it read, is drafted rightly by any head of the same lm_head."""
    arrays = dict(by_name(model.state))
    arrays["norm"] = jnp.zeros_like(arrays["norm"])
    arrays["mtp.norm"] = jnp.zeros_like(arrays["mtp.norm"])
    loss = jax.jit(head_loss(CONFIG, model.mesh, SETTINGS))
    _, metrics = loss(arrays, {}, TOKENS)
    assert [float(metrics[f"agree_{depth}"]) for depth in (1, 2)] == [1.0, 1.0]
    _, metrics = loss(dict(by_name(model.state)), {}, TOKENS)
    assert float(metrics["agree_1"]) < 0.3


def test_head_loss_needs_a_head() -> None:
    with pytest.raises(ValueError, match="no head to train"):
        head_loss(ModelConfig.from_dict(tiny()), make_mesh(), SETTINGS)
