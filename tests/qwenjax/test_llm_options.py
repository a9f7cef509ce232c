"""What an LLM and its parameters refuse by name, and the cache of its programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from qwenjax import LLM, SamplingParams
from qwenjax.engine.build import enable_compilation_cache
from tests.generation import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", float("nan")), ("temperature", -1), ("max_tokens", 0), ("top_p", 0), ("min_p", -0.1), ("n", -1)],
)
def test_bad_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("dtype", "int8", "dtype is 'int8'"),
        ("max_model_len", 129, "max_model_len is 129; it is 2 to 128, the model's max_position_embeddings"),
        ("max_model_len", "100", "max_model_len is '100'; it is an integer or None"),
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("max_num_seqs", 4.0, "max_num_seqs is 4.0; it is an integer"),
        ("page_size", True, "page_size is True; it is an integer"),
        ("num_steps", None, "num_steps is None; it is an integer"),
        ("enable_prefix_caching", "no", "enable_prefix_caching is 'no'; it is True or False"),
        ("quantization", "fp8", "quantization is 'fp8'; it may be None, 'mxfp8'"),
        ("activation_format", "fp6", "activation_format is 'fp6'; it is 'model', 'mxfp8'"),
        ("revision", "main", "revision is 'main', and .* is a folder"),
        ("page_size", 0, "page_size is 0"),
        ("num_pages", 0, "num_pages is 0"),
        ("num_steps", 0, "num_steps is 0"),
        ("max_num_batched_tokens", 8, "max_num_batched_tokens is 8"),
        ("data_parallel", 9, "needs 9 devices"),
        ("model_parallel", 0, "model_parallel is 0"),
    ],
)
def test_an_llm_refuses_bad_sizes_by_name_before_it_reads_weights(
    folder: Path, tmp_path: Path, argument: str, value: Any, message: str
) -> None:
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, progress=False, **{argument: value})


def test_an_llm_refuses_a_bad_generation_config_before_it_reads_weights(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature is 'hot'"):
        LLM(tmp_path, progress=False)


@pytest.mark.parametrize("model", [None, 3, ""])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ValueError, match=f"model is {model!r}; it is a checkpoint folder"):
        LLM(model)


def test_an_llm_refuses_a_mesh_that_the_model_does_not_divide_over(folder: Path) -> None:
    with pytest.raises(ValueError, match="3 x model=1 ranks do not divide 8 experts"):
        LLM(folder, data_parallel=3, progress=False)


def test_the_compilation_cache_is_on_unless_named_elsewhere(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    try:
        enable_compilation_cache(tmp_path)
        assert jax.config.jax_compilation_cache_dir == before
        jax.config.update("jax_compilation_cache_dir", None)
        enable_compilation_cache(tmp_path)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
