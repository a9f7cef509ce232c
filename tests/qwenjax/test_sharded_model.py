"""Programs of a model that are run outside the engine."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from qwenjax import sharded_model
from qwenjax.mesh import make_mesh
from qwenjax_kernels.heap_layout import RANK_WORD, num_words
from tests.helpers import TINY, model_from_tensors, random_tensors


def test_a_program_over_a_heap_is_loaded_with_idle_collectives_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_from_tensors(TINY, make_mesh(1, 2), random_tensors(TINY))
    of_heap = np.zeros((2, num_words(2, multicast=False)), np.int32)
    of_heap[:, RANK_WORD] = 0, 1
    monkeypatch.setattr(sharded_model, "mesh_epochs", lambda *_, tokens: jax.numpy.asarray(of_heap.reshape(-1)))
    ranks: list[list[int]] = []

    def program(state: Any, x: np.ndarray, epochs: jax.Array, *, graphdef: Any, mesh: Any, depth: int) -> int:
        assert state is model.state
        assert (graphdef, mesh) == (model.graphdef, model.mesh)
        ranks.append(np.asarray(epochs).reshape(2, -1)[:, RANK_WORD].tolist())
        return len(x) + depth

    idle, armed = [-(1 << 31)] * 2, [0, 1]
    x = np.zeros(3)
    assert model.run(program, x, depth=1) == 4
    assert ranks == [idle, armed]
    model.run(program, x + 1, depth=1)
    assert ranks == [idle, armed, armed]
    model.run(program, x, depth=2)
    model.run(program, np.zeros(4), depth=2)
    assert ranks[3:] == [idle, armed] * 2


def test_without_a_heap_a_program_runs_once() -> None:
    model = model_from_tensors(TINY, make_mesh(1, 2), random_tensors(TINY))
    calls: list[Any] = []
    model.run(lambda state, epochs, **static: calls.append(epochs.shape))
    assert calls == [(2,)]
