"""How good a model and its head are on text that was kept from training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from qwenjax.cache import CACHE_SPEC, PAGE_SIZE, KVCache, PagedContext, SelfContext, create_cache
from qwenjax.mesh import DATA
from qwenjax.model import Qwen3Moe
from qwenjax.sharded_model import EPOCHS_SPEC, ShardedModel, on_ranks
from qwenjax.train.contexts import DraftContext
from qwenjax.train.losses import Loss, Parameters
from qwenjax.train.tokens import TokenFiles, held_out_windows

_BATCH = PartitionSpec(DATA)


def held_out_metrics(
    loss: Loss, frozen: Parameters, files: Sequence[str | Path], data: TokenFiles, mesh: Mesh
) -> Callable[[Parameters], dict[str, float]]:
    """A function from trained parameters to the loss's metrics over all held-out windows that fill a batch."""
    windows = held_out_windows(files, data.length, data.vocab_size)
    batch = min(data.batch, len(windows) // mesh.shape[DATA] * mesh.shape[DATA])
    if batch < 1:
        raise ValueError(f"{len(windows)} held-out windows of {data.length} for {mesh.shape[DATA]} data ranks: too few")
    batches = windows[: len(windows) // batch * batch].reshape(-1, batch, data.length)
    program = jax.jit(lambda trained, tokens: loss(trained, frozen, tokens)[1])

    def evaluate(trained: Parameters) -> dict[str, float]:
        rows = [program(trained, tokens) for tokens in batches]
        return {name: float(np.mean([float(row[name]) for row in rows])) for name in rows[0]}

    return evaluate


def text_nats(model: ShardedModel, ids: np.ndarray, length: int, batch: int = 8) -> float:
    """The negative log-likelihood of one long text, int [tokens], in nats: each token once, the first as 1 of vocab.

    Windows of `length` tokens overlap by half, so that every token but the first has at least length / 2 before it (or
    all there are).
    """
    if len(ids) < length:
        raise ValueError(f"{len(ids)} tokens do not fill one window of {length}")
    starts = [*range(0, len(ids) - length, length // 2), len(ids) - length]
    total, counted = float(np.log(model.config.vocab_size)), 1
    for first in range(0, len(starts), batch):
        part = starts[first : first + batch]
        rows = np.stack([ids[start : start + length] for start in part + part[-1:] * (batch - len(part))])
        nats = np.asarray(model.run(_token_nats, rows.astype(np.int32)))
        for start, row in zip(part, nats, strict=False):
            # row[i] is the cost of token start + i + 1
            total += float(row[counted - start - 1 :].sum(dtype=np.float64))
            counted = start + length
    return total


def greedy_continuations(model: ShardedModel, prompts: np.ndarray, new_tokens: int) -> np.ndarray:
    """int32 [prompts, prompt length + new_tokens]: each prompt, int32 [prompts, length], and what the model goes on
    with when it always takes the likeliest token. The number of prompts must divide over the data ranks."""
    rows, length = prompts.shape
    pages = -(-(length + new_tokens) // PAGE_SIZE)
    local_rows = rows // model.mesh.shape[DATA]
    table = np.tile(np.arange(local_rows * pages, dtype=np.int32).reshape(local_rows, pages), (rows // local_rows, 1))
    cache = create_cache(model.config, model.mesh, local_rows * pages, model.dtype)
    generated = model.run(_generate, prompts.astype(np.int32), table, cache, new_tokens=new_tokens)
    return np.concatenate([prompts, np.asarray(generated)], axis=1).astype(np.int32)


def draft_acceptance(model: ShardedModel, sequences: np.ndarray, start: int, depths: int) -> list[float]:
    """The share of positions from `start` on at which the drafts of depths 1, 1 to 2, ... all equal `sequences`.

    sequences: int32 [rows, tokens], of which those from `start` on are the model's own greedy choices: then greedy
    verification accepts exactly these drafts, since as long as drafts are right they are the text itself.
    """
    if not model.config.mtp_num_hidden_layers:
        raise ValueError("the model has no multi-token-prediction head")
    drafts = np.asarray(model.run(_drafts, sequences.astype(np.int32), depths=depths))
    shares, accepted = [], np.ones((len(sequences), sequences.shape[1] - start - depths), bool)
    for depth in range(1, depths + 1):
        # The draft of depth d at anchor i is for token i + d + 1; the token before the first draft is a greedy one.
        anchors = slice(start - 1, start - 1 + accepted.shape[1])
        wanted = sequences[:, start + depth : start + depth + accepted.shape[1]]
        accepted &= drafts[depth - 1][:, anchors] == wanted
        shares.append(float(accepted.mean()))
    return shares


@partial(jax.jit, static_argnames=("graphdef", "mesh"))
def _token_nats(state: nnx.State, tokens: jax.Array, epochs: jax.Array, graphdef: nnx.GraphDef, mesh: Mesh) -> Any:
    def per_rank(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> jax.Array:
        hidden, _, _ = qwen(tokens, SelfContext(_positions(tokens)), epochs)

        def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            logits = jax.nn.log_softmax(qwen.logits(row[0][:-1]), axis=-1)
            return -jnp.take_along_axis(logits, row[1][1:, None], axis=-1)[:, 0]

        return jax.lax.map(of_row, (hidden, tokens))

    return on_ranks(graphdef, mesh, per_rank, (_BATCH, EPOCHS_SPEC), _BATCH)(state, tokens, epochs)


@partial(jax.jit, static_argnames=("graphdef", "mesh", "new_tokens"))
def _generate(
    state: nnx.State,
    prompts: jax.Array,
    table: jax.Array,
    cache: KVCache,
    epochs: jax.Array,
    graphdef: nnx.GraphDef,
    mesh: Mesh,
    new_tokens: int,
) -> jax.Array:
    def per_rank(qwen: Qwen3Moe, prompts: jax.Array, table: jax.Array, cache: KVCache, epochs: jax.Array) -> jax.Array:
        hidden, context, epochs = qwen(prompts, PagedContext(cache, table, _positions(prompts)), epochs)
        first = jnp.argmax(qwen.logits(hidden[:, -1]), axis=-1).astype(jnp.int32)

        def step(carry: tuple[jax.Array, KVCache, jax.Array], position: jax.Array) -> tuple[Any, jax.Array]:
            token, cache, epochs = carry
            positions = jnp.broadcast_to(position, (token.shape[0], 1))
            hidden, context, epochs = qwen(token[:, None], PagedContext(cache, table, positions), epochs)
            following = jnp.argmax(qwen.logits(hidden[:, 0]), axis=-1).astype(jnp.int32)
            return (following, context.cache, epochs), token

        positions = prompts.shape[1] + jnp.arange(new_tokens, dtype=jnp.int32)
        _, tokens = jax.lax.scan(step, (first, context.cache, epochs), positions)
        return tokens.swapaxes(0, 1)

    specs = (_BATCH, _BATCH, KVCache(CACHE_SPEC, CACHE_SPEC), EPOCHS_SPEC)  # type: ignore[arg-type]
    return on_ranks(graphdef, mesh, per_rank, specs, _BATCH)(state, prompts, table, cache, epochs)


@partial(jax.jit, static_argnames=("graphdef", "mesh", "depths"))
def _drafts(
    state: nnx.State, tokens: jax.Array, epochs: jax.Array, graphdef: nnx.GraphDef, mesh: Mesh, depths: int
) -> list[jax.Array]:
    """The greedy draft of each depth at each anchor, int32 [rows, tokens]; the tail of a depth means nothing."""

    def per_rank(qwen: Qwen3Moe, tokens: jax.Array, epochs: jax.Array) -> list[jax.Array]:
        assert qwen.mtp is not None
        positions = _positions(tokens)
        hidden, _, epochs = qwen(tokens, SelfContext(positions), epochs)
        context, drafts = DraftContext(positions), []
        for depth in range(1, depths + 1):
            embedding = qwen.embed(jnp.roll(tokens, -depth, axis=1))
            hidden, context, epochs = qwen.mtp(embedding, hidden, context, epochs)
            context = context.deeper()
            drafts.append(jnp.argmax(qwen.logits(hidden), axis=-1).astype(jnp.int32))
        return drafts

    return on_ranks(graphdef, mesh, per_rank, (_BATCH, EPOCHS_SPEC), _BATCH)(state, tokens, epochs)


def _positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
