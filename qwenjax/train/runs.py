"""Training a base from scratch, and a head on a frozen base: models in, checkpoint folders out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from qwenjax.config import DTYPES, ModelConfig
from qwenjax.model import abstract_model
from qwenjax.sharded_model import ShardedModel, by_name, from_names, random_model, random_parameters
from qwenjax.train.evaluate import held_out_metrics
from qwenjax.train.loop import LoopSettings, fit
from qwenjax.train.losses import HEAD, Loss, LossSettings, Parameters, base_loss, head_loss
from qwenjax.train.step import OptimizerSettings
from qwenjax.train.tokens import TokenFiles

Files = Sequence[str | Path]

_LOSSES, _LOOP = LossSettings(), LoopSettings()


def train_base(
    config: ModelConfig,
    mesh: Mesh,
    data: TokenFiles,
    held_out: Files,
    folder: str | Path,
    optimizer: OptimizerSettings,
    losses: LossSettings = _LOSSES,
    loop: LoopSettings = _LOOP,
    seed: int = 0,
) -> ShardedModel:
    """A model of `config`, without a head, trained from random weights on next tokens; float32.

    held_out: token files whose loss is measured with the same program; none where empty. `folder`: see loop.fit.
    """
    config = replace(config, mtp_num_hidden_layers=0)
    model = random_model(config, mesh, seed, jnp.float32)
    loss = base_loss(config, mesh, losses)
    settings = {"kind": "base", "model": config.to_dict(), "losses": asdict(losses), "model_seed": seed}
    parameters = by_name(model.state)
    trained = _fit(loss, parameters, {}, data, held_out, folder, optimizer, loop, mesh, settings)
    return replace(model, state=from_names(model.state, trained))


def train_head(
    model: ShardedModel,
    data: TokenFiles,
    held_out: Files,
    folder: str | Path,
    optimizer: OptimizerSettings,
    losses: LossSettings = _LOSSES,
    loop: LoopSettings = _LOOP,
    seed: int = 0,
) -> ShardedModel:
    """`model` with its multi-token-prediction head trained (a new one where it has none) and all else as it was.

    The base stays in its own dtype and needs no gradient; the head is trained in float32 and returned in the base's.
    """
    model = model if model.config.mtp_num_hidden_layers else add_head(model, seed)
    loss = head_loss(model.config, model.mesh, losses)
    named = by_name(model.state)
    head = {name: jnp.asarray(value, jnp.float32) for name, value in named.items() if name.startswith(HEAD)}
    base = {name: value for name, value in named.items() if not name.startswith(HEAD)}
    settings = {"kind": "mtp", "model": model.config.to_dict(), "losses": asdict(losses), "model_seed": seed}
    head = _fit(loss, head, base, data, held_out, folder, optimizer, loop, model.mesh, settings)
    return replace(model, state=from_names(model.state, {**base, **_cast(head, model.dtype)}))


def add_head(model: ShardedModel, seed: int = 0) -> ShardedModel:
    """`model` with a head of random weights."""
    config = replace(model.config, mtp_num_hidden_layers=1)
    graphdef, abstract = abstract_model(config, model.mesh, model.dtype)
    named = random_parameters(config, model.mesh, seed, model.dtype, only=HEAD) | by_name(model.state)
    return replace(model, config=config, graphdef=graphdef, state=from_names(abstract, named))


def cast_model(model: ShardedModel, dtype: str) -> ShardedModel:
    """`model` with parameters of `dtype`, by config.json's names."""
    config = replace(model.config, dtype=dtype)
    graphdef, abstract = abstract_model(config, model.mesh)
    arrays = _cast(by_name(model.state), DTYPES[dtype])
    return ShardedModel(config, model.mesh, graphdef, from_names(abstract, arrays))


def _cast(arrays: Parameters, dtype: Any) -> Parameters:
    return {name: jnp.asarray(array, dtype) for name, array in arrays.items()}


def _fit(
    loss: Loss,
    parameters: Parameters,
    frozen: Parameters,
    data: TokenFiles,
    held_out: Files,
    folder: str | Path,
    optimizer: OptimizerSettings,
    loop: LoopSettings,
    mesh: Mesh,
    settings: dict[str, Any],
) -> Parameters:
    evaluate = held_out_metrics(loss, frozen, held_out, data, mesh) if held_out else None
    return fit(loss, parameters, frozen, data, optimizer, loop, mesh, folder, evaluate, settings)
