"""The optimiser and the compiled training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwenjax.train.losses import Loss, Metrics, Parameters


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) under a cosine schedule.

    learning_rate: the peak, reached after `warmup` steps; it falls to `final_fraction` of it at the last of `steps`.
    weight_decay: of matrices, not of norms. clip: the gradient's global norm.
    """

    steps: int
    learning_rate: float = 3e-3
    warmup: int = 100
    final_fraction: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95

    def schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0,
            self.learning_rate,
            min(self.warmup, self.steps // 2),
            self.steps,
            self.learning_rate * self.final_fraction,
        )

    def transformation(self) -> optax.GradientTransformation:
        def decayed(parameters: Parameters) -> dict[str, bool]:
            return {name: "norm" not in name for name in parameters}

        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule(), self.beta1, self.beta2, weight_decay=self.weight_decay, mask=decayed),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """parameters: the trained ones, float32 masters by name. moments: the optimiser's state. step: int32."""

    parameters: Parameters
    moments: Any
    step: jax.Array


def init_state(parameters: Parameters, optimizer: OptimizerSettings, mesh: Mesh) -> TrainState:
    """Step 0, with moments that are sharded as their parameters are and all else on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(path: tuple[Any, ...], _: jax.Array) -> jax.sharding.Sharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in parameters]
        return parameters[names[-1]].sharding if names else everywhere

    init = optimizer.transformation().init
    shardings = jax.tree_util.tree_map_with_path(placed, jax.eval_shape(init, parameters))
    moments = jax.jit(init, out_shardings=shardings)(parameters)
    return TrainState(parameters, moments, jax.device_put(jnp.int32(0), everywhere))


def make_steps(
    loss: Loss, optimizer: OptimizerSettings, state: TrainState
) -> Callable[[TrainState, Parameters, jax.Array], tuple[TrainState, Metrics]]:
    """Several steps in one program: (state, frozen, tokens int32 [steps, batch, length]) -> (state, metrics).

    The state is donated, and comes back sharded as `state` is. Each metric is float32 [steps], "gradient_norm" among
    them.
    """
    transformation = optimizer.transformation()

    def step(state: TrainState, frozen: Parameters, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.parameters, frozen, tokens)
        updates, moments = transformation.update(gradients, state.moments, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        metrics = {**metrics, "gradient_norm": _norm(gradients)}
        return TrainState(parameters, moments, state.step + 1), metrics

    def steps(state: TrainState, frozen: Parameters, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        return jax.lax.scan(lambda carry, batch: step(carry, frozen, batch), state, tokens)

    # Without out_shardings the first call's result may be laid out otherwise than its argument, and compile again.
    return jax.jit(steps, donate_argnums=0, out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), None))


def _norm(gradients: Parameters) -> jax.Array:
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in gradients.values()), jnp.float32(0)))


class DivergedError(RuntimeError):
    """Training that left the rails; the message names the step and the loss, and what to try."""


class SpikeWatch:
    """Stops training at a loss that is not finite or far above the recent ones."""

    def __init__(self, tolerance: float = 1.5, memory: float = 0.98) -> None:
        """tolerance: how far a loss may be above its running mean (a factor); memory: of that mean, per step."""
        self.tolerance, self.memory = tolerance, memory
        self.mean: float | None = None

    def see(self, step: int, loss: float, gradient_norm: float) -> None:
        """Raises DivergedError; otherwise takes the loss into the mean."""
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise DivergedError(
                f"step {step}: loss {loss}, gradient norm {gradient_norm}; resume from the last checkpoint with "
                "a lower learning rate"
            )
        if self.mean is not None and loss > self.tolerance * self.mean + 0.1:
            raise DivergedError(
                f"step {step}: loss {loss:.4f} is more than {self.tolerance} times the recent {self.mean:.4f}; resume "
                "from the last checkpoint with a lower learning rate"
            )
        self.mean = loss if self.mean is None else self.memory * self.mean + (1 - self.memory) * loss
