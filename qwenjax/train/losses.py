"""What is minimised: the base's next-token cross-entropy, and the head's distance from the base's own predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from qwenjax.config import DTYPES, ModelConfig
from qwenjax.mesh import DATA
from qwenjax.model import Qwen3Moe, abstract_model
from qwenjax.sharded_model import EPOCHS_SPEC, from_names, on_ranks
from qwenjax.train.contexts import DraftContext, WindowContext
from qwenjax.train.forward import head_forward, layers_forward, model_forward
from qwenjax_ffi.experts_training import EVERY_EXPERT_UP_TO

Parameters = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# (trained parameters, frozen parameters, tokens int32 [batch, length]) -> loss, metrics: float32 scalars.
Loss = Callable[[Parameters, Parameters, jax.Array], tuple[jax.Array, Metrics]]

HEAD = "mtp."  # how the names of the head's parameters begin
_DEPTH_DECAY = 0.8  # of one depth's weight to the one before it: a draft counts only if those before it were right
# Of float32 logits that exist at once: those of all 32,768 tokens of a step would be 0.5 GB at a vocabulary of 4,096,
# several times over, and 20 GB at Qwen3's 151,936.
_CHUNK_BYTES = 1 << 27


@dataclass(frozen=True)
class LossSettings:
    """balance: weight of the routers' load-balancing loss. depths: drafts in a row that the head is trained for.
    dtype: of the activations, by config.json's names."""

    balance: float = 0.01
    depths: int = 3
    dtype: str = "bfloat16"


def base_loss(config: ModelConfig, mesh: Mesh, settings: LossSettings) -> Loss:
    """Mean cross-entropy (nats) of each token but the window's first, plus the balance loss. Metric "loss" is the
    cross-entropy alone."""
    graphdef, abstract = abstract_model(config, mesh)

    def per_rank(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> tuple[jax.Array, Metrics]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden, _, balance, _ = model_forward(
            qwen, inputs, WindowContext(_positions(inputs)), epochs, DTYPES[settings.dtype]
        )

        def of_chunk(hidden: jax.Array, targets: jax.Array) -> jax.Array:
            logits = qwen.logits(hidden)
            chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
            return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen)

        total = _sum_over_chunks(of_chunk, (_flat(hidden), targets.reshape(-1)), chunk_tokens(config.vocab_size))
        loss = jax.lax.pmean(total / targets.size, DATA)
        return loss + settings.balance * balance, {"loss": loss, "balance": balance}

    return _on_mesh(graphdef, abstract, mesh, per_rank)


def head_loss(config: ModelConfig, mesh: Mesh, settings: LossSettings) -> Loss:
    """The head's cross-entropy with the base's own distribution at each depth, weighted 1, 0.8, 0.64, ...

    The target is the base's prediction rather than the text's next token: that is what verification compares drafts
    with. Metrics: "loss" (weighted mean over depths, nats), "balance", and "agree_d", the share of positions where the
    drafts of depths 1 to d all are the base's most likely tokens, given the text up to each.
    """
    if not config.mtp_num_hidden_layers:
        raise ValueError("mtp_num_hidden_layers is 0: the model has no head to train; add_head gives it one")
    graphdef, abstract = abstract_model(config, mesh)
    dtype = DTYPES[settings.dtype]

    def per_rank(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> tuple[jax.Array, Metrics]:
        assert qwen.mtp is not None
        positions = _positions(tokens)

        base, epochs = _frozen_forward(qwen, tokens, WindowContext(positions), epochs, dtype)
        hidden, context = base, DraftContext(positions)
        losses, balances, agreed = [], [], jnp.ones(tokens.size, bool)
        metrics: Metrics = {}

        def of_chunk(
            drafted: jax.Array, base: jax.Array, inside: jax.Array, agreed: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            logits, wanted = qwen.logits(drafted), jax.lax.stop_gradient(qwen.logits(base))
            distance = -jnp.sum(jax.nn.softmax(wanted, axis=-1) * jax.nn.log_softmax(logits, axis=-1), axis=-1)
            agreed &= jnp.argmax(logits, axis=-1) == jnp.argmax(wanted, axis=-1)
            return jnp.sum(distance * inside), jnp.sum(agreed & inside), agreed

        for depth in range(1, settings.depths + 1):
            # Anchor i drafts token i + depth + 1, from token i + depth; the last anchors lack one and do not count.
            embedding = qwen.embed(jnp.roll(tokens, -depth, axis=1)).astype(dtype)
            hidden, context, balance, epochs = head_forward(qwen.mtp, embedding, hidden, context, epochs)
            context = context.deeper()
            inside = (jnp.arange(tokens.shape[1]) < tokens.shape[1] - depth) & jnp.ones(tokens.shape, bool)
            arrays = (_flat(hidden), _flat(jnp.roll(base, -depth, axis=1)), inside.reshape(-1), agreed)
            total, hits, agreed = _sum_over_chunks(of_chunk, arrays, chunk_tokens(config.vocab_size), kept=1)
            count = jnp.sum(inside)
            losses.append(jax.lax.pmean(total / count, DATA))
            balances.append(balance)
            metrics[f"agree_{depth}"] = jax.lax.pmean(hits / count, DATA)
        weights = jnp.asarray([_DEPTH_DECAY**depth for depth in range(settings.depths)])
        loss = jnp.sum(jnp.stack(losses) * weights) / jnp.sum(weights)
        balance = jnp.mean(jnp.stack(balances))
        return loss + settings.balance * balance, {"loss": loss, "balance": balance, **metrics}

    return _on_mesh(graphdef, abstract, mesh, per_rank)


def _frozen_forward(
    qwen: Qwen3Moe, tokens: jax.Array, context: WindowContext, epochs: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """The base's hidden states, without a gradient, and the epochs."""
    experts = qwen.experts
    if jax.default_backend() != "gpu" or experts is None or experts.w13.shape[1] > EVERY_EXPERT_UP_TO * experts.top_k:
        base, _, _, epochs = model_forward(qwen, tokens, context, epochs, dtype)
        return jax.lax.stop_gradient(base), epochs

    # A function under jax.vjp takes the experts' training form, even where the pullback is thrown away as here. On a
    # GPU and with few experts it is the faster one: inference's reference runs blocks of 128 rows one after another,
    # which on an H200 took more than 0.4 s for the 32,768 tokens of a step of the small model.
    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, _, _, after = layers_forward(qwen, x, context, epochs)
        return hidden, after

    base, _, epochs = jax.vjp(forward, qwen.embed(tokens).astype(dtype), has_aux=True)
    return jax.lax.stop_gradient(base), epochs


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits are computed at a time."""
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


def _on_mesh(graphdef: nnx.GraphDef, abstract: nnx.State, mesh: Mesh, per_rank: Callable[..., Any]) -> Loss:
    ranks = on_ranks(graphdef, mesh, per_rank, (PartitionSpec(DATA), EPOCHS_SPEC), PartitionSpec())

    def loss(trained: Parameters, frozen: Parameters, tokens: jax.Array) -> tuple[jax.Array, Metrics]:
        state = from_names(abstract, {**frozen, **trained})
        return ranks(state, tokens, jnp.zeros(mesh.size, jnp.int32))

    return loss


def _positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _sum_over_chunks(function: Callable[..., Any], arrays: tuple[jax.Array, ...], most: int, kept: int = 0) -> Any:
    """The sums of function's results over chunks of at most `most` rows, of like size; its last `kept` results are per
    row and come back whole.

    What a chunk computed is computed again for its gradient, so that the logits of one chunk alone exist at a time.
    """
    rows = arrays[0].shape[0]
    chunks = -(-rows // most)
    while rows % chunks:
        chunks += 1
    stacked = [array.reshape(chunks, rows // chunks, *array.shape[1:]) for array in arrays]

    def step(_: None, chunk: list[jax.Array]) -> tuple[None, Any]:
        return None, jax.checkpoint(function)(*chunk)

    _, results = jax.lax.scan(step, None, stacked)
    if not isinstance(results, tuple):
        return jnp.sum(results)
    split = len(results) - kept
    return (*(jnp.sum(part) for part in results[:split]), *(part.reshape(rows) for part in results[split:]))
