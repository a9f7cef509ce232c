"""What engines that share a process share: devices, weights, and the memory for their caches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from qwenjax.config import ModelConfig
from qwenjax.engine import build
from qwenjax.engine.build import build_engine, pages_that_fit
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.engine import Engine
from qwenjax.mesh import MeshError, make_mesh
from tests.generation import write_folder
from tests.helpers import tiny


def test_weights_of_another_mesh_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    model: Any = SimpleNamespace(mesh=make_mesh())
    with pytest.raises(ValueError, match=r"the weights are on .* and the engine's mesh is"):
        build_engine(folder, Engine, devices=jax.devices()[1:], loaded=model)


def test_a_mesh_takes_the_first_of_the_devices_that_it_may_have(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="needs 2 devices; 1 are here"):
        build_engine(write_folder(tmp_path), Engine, devices=jax.devices()[:1], model_parallel=2)


def test_pages_on_their_way_to_a_cache_are_taken_off_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        pass

    def make(model: Any, tokenizer: Any, config: EngineConfig) -> Any:
        raise Made(config.num_pages)

    folder, loaded = write_folder(tmp_path), SimpleNamespace(mesh=make_mesh())
    monkeypatch.setattr(build, "pages_that_fit", lambda *_: 50)
    kind: Any = make

    def pages(landing: int) -> int:
        with pytest.raises(Made) as found:
            build_engine(folder, kind, loaded=cast(Any, loaded), landing_pages=lambda _: landing)
        return int(found.value.args[0])

    assert (pages(0), pages(30)) == (50, 20)
    with pytest.raises(ValueError, match=r"50 pages fit beside the weights, and up to 50 .*lower staging_pages"):
        build_engine(folder, kind, loaded=cast(Any, loaded), landing_pages=lambda _: 50)


def test_caches_that_share_a_device_have_shares_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict(tiny())
    model: Any = SimpleNamespace(config=config, mesh=make_mesh(), dtype=np.dtype(np.float32))
    page = 2 * config.num_hidden_layers * config.num_key_value_heads * 16 * config.head_dim * 4
    monkeypatch.setattr(build, "_cache_bytes", lambda device: 40 * page)
    assert pages_that_fit(model, 16, with_head=False) == 40
    assert pages_that_fit(model, 16, with_head=False, share=0.25) == 10
