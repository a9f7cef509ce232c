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


def test_given_pages_that_do_not_fit_with_those_on_their_way_are_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(Exception):
        pass

    def make(model: Any, tokenizer: Any, config: EngineConfig) -> Any:
        raise Made

    folder, kind = write_folder(tmp_path), cast(Any, make)
    config = ModelConfig.from_folder(folder)
    loaded: Any = SimpleNamespace(config=config, mesh=make_mesh(), dtype=np.dtype(np.float32))
    page = 2 * config.num_hidden_layers * config.num_key_value_heads * 64 * config.head_dim * 4

    def ask(num_pages: int, landing: int | None) -> None:
        given: dict[str, Any] = {} if landing is None else {"landing_pages": lambda _: landing}
        build_engine(folder, kind, loaded=loaded, num_pages=num_pages, **given)

    with pytest.raises(Made):
        ask(1000, 1000)  # a CPU does not say what it has
    monkeypatch.setattr(build, "_free_bytes", lambda device: 50 * page)
    for num_pages, landing in ((50, None), (20, 30)):
        with pytest.raises(Made):
            ask(num_pages, landing)
    with pytest.raises(
        ValueError,
        match=rf"num_pages is 20, and up to 31 more .*: {51 * page:,} bytes, {page:,} a page, .* {50 * page:,} beside "
        "the weights; lower num_pages, staging_pages or max_model_len",
    ):
        ask(20, 31)
    with pytest.raises(ValueError, match=r"num_pages is 51: .* lower num_pages$"):
        ask(51, None)


def test_caches_that_share_a_device_have_shares_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict(tiny())
    model: Any = SimpleNamespace(config=config, mesh=make_mesh(), dtype=np.dtype(np.float32))
    page = 2 * config.num_hidden_layers * config.num_key_value_heads * 16 * config.head_dim * 4
    monkeypatch.setattr(build, "_cache_bytes", lambda device: 40 * page)
    assert pages_that_fit(model, 16, with_head=False) == 40
    assert pages_that_fit(model, 16, with_head=False, share=0.25) == 10
