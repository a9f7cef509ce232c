"""The multi-token-prediction head: its arithmetic against NumPy, its cache, its way into checkpoints and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from qwenjax.cache import CACHE_SPEC, AttentionContext, KVCache, PagedContext, SelfContext, create_cache
from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.orbax import restore_model, save_model
from qwenjax.checkpoint.safetensors import Checkpoint, CheckpointError
from qwenjax.checkpoint.save import save_pretrained
from qwenjax.config import ConfigError, ModelConfig, head_config
from qwenjax.mesh import make_mesh
from qwenjax.model import Qwen3Moe
from qwenjax.sharded_model import EPOCHS_SPEC, ShardedModel, by_name, from_names, on_ranks, random_model
from tests.helpers import assert_same_parameters, random_tensors, tiny, write_checkpoint

RAW = tiny(mtp_num_hidden_layers=1)
CONFIG = ModelConfig.from_dict(RAW)
BATCH, TOKENS = 2, 7


def large(model: ShardedModel) -> ShardedModel:
    """Weights that spread hidden states over several units, and norms away from 1, so that no step is near identity."""
    rng = np.random.default_rng(5)
    arrays = {
        name: jnp.asarray(rng.uniform(0.5, 1.5, x.shape) if "norm" in name else rng.normal(0, 0.3, x.shape), x.dtype)
        for name, x in by_name(model.state).items()
    }
    placed = {name: jax.device_put(x, by_name(model.state)[name].sharding) for name, x in arrays.items()}
    return replace(model, state=from_names(model.state, placed))


def run_head(
    model: ShardedModel, tokens: np.ndarray, hidden: np.ndarray, context: AttentionContext, spec: Any
) -> tuple[np.ndarray, Any]:
    def per_rank(qwen: Qwen3Moe, *arguments: Any) -> Any:
        tokens, hidden, context, epochs = arguments
        assert qwen.mtp is not None
        out, context, _ = qwen.mtp(qwen.embed(tokens), hidden, context, epochs)
        return out, context

    batch = PartitionSpec("data")
    program = on_ranks(model.graphdef, model.mesh, per_rank, (batch, batch, spec, EPOCHS_SPEC), (batch, spec))
    out, context = jax.jit(program)(model.state, tokens, hidden, context, model.epochs())
    return np.asarray(out), context


def numpy_head(model: ShardedModel, tokens: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """The head in float64, token by token and expert by expert, written from the issue's words alone."""
    w = {name: np.asarray(value, np.float64) for name, value in by_name(model.state).items()}
    config, half = CONFIG, CONFIG.head_dim // 2

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * weight

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        angle = position * config.rope.theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    out = np.zeros_like(hidden, np.float64)
    for row in range(len(tokens)):
        both = np.concatenate(
            [
                norm(w["embed_tokens"][tokens[row]], w["mtp.pre_fc_norm_embedding"]),
                norm(hidden[row].astype(np.float64), w["mtp.pre_fc_norm_hidden"]),
            ],
            axis=-1,
        )
        x = both @ w["mtp.fc"].T
        normed = norm(x, w["mtp.input_norm"][0])
        heads = {
            name: (normed @ w[f"mtp.attention.{name}_proj"][0].T).reshape(len(x), -1, config.head_dim) for name in "qkv"
        }
        for name in "qk":
            scaled = norm(heads[name], w[f"mtp.attention.{name}_norm"][0])
            heads[name] = np.stack([rotate(scaled[t], t) for t in range(len(x))])
        group = config.num_attention_heads // config.num_key_value_heads
        attended = np.zeros_like(heads["q"])
        for t in range(len(x)):
            for head in range(config.num_attention_heads):
                keys, values = heads["k"][: t + 1, head // group], heads["v"][: t + 1, head // group]
                scores = np.exp(keys @ heads["q"][t, head] / np.sqrt(config.head_dim))
                attended[t, head] = scores / scores.sum() @ values
        x = x + attended.reshape(len(x), -1) @ w["mtp.attention.o_proj"][0].T
        normed = norm(x, w["mtp.post_attention_norm"][0])
        for t in range(len(x)):
            chances = np.exp(w["mtp.experts.router"][0] @ normed[t])
            chosen = np.argsort(-chances)[: config.num_experts_per_tok]
            for expert in chosen:
                gate, up = np.split(w["mtp.experts.w13"][0, expert] @ normed[t], 2)
                made = w["mtp.experts.w2"][0, expert] @ (gate / (1 + np.exp(-gate)) * up)
                x[t] += chances[expert] / chances[chosen].sum() * made
        out[row] = norm(x, w["mtp.norm"])
    return out


@pytest.fixture(scope="module")
def model() -> ShardedModel:
    return large(random_model(CONFIG, make_mesh()))


@pytest.fixture(scope="module")
def entries() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, CONFIG.vocab_size, (BATCH, TOKENS)).astype(np.int32)
    return tokens, rng.normal(size=(BATCH, TOKENS, CONFIG.hidden_size)).astype(np.float32)


POSITIONS = np.tile(np.arange(TOKENS, dtype=np.int32), (BATCH, 1))
WHOLE = SelfContext(PartitionSpec("data"))  # type: ignore[arg-type]


def test_head_computes_what_numpy_computes(model: ShardedModel, entries: tuple[np.ndarray, np.ndarray]) -> None:
    found, _ = run_head(model, *entries, SelfContext(POSITIONS), WHOLE)
    np.testing.assert_allclose(found, numpy_head(model, *entries), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("shape", [pytest.param((2, 1), marks=pytest.mark.slow), (1, 2)])
def test_head_is_the_same_on_every_mesh(
    model: ShardedModel, entries: tuple[np.ndarray, np.ndarray], shape: tuple[int, int]
) -> None:
    mesh: Mesh = make_mesh(*shape)
    other = random_model(CONFIG, mesh)
    placed = {
        name: jax.device_put(np.asarray(value), by_name(other.state)[name].sharding)
        for name, value in by_name(model.state).items()
    }
    other = replace(other, state=from_names(other.state, placed))
    one, _ = run_head(model, *entries, SelfContext(POSITIONS), WHOLE)
    many, _ = run_head(other, *entries, SelfContext(POSITIONS), WHOLE)
    np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-4)


def test_head_with_a_paged_cache_equals_the_head_over_the_whole_text(
    model: ShardedModel, entries: tuple[np.ndarray, np.ndarray]
) -> None:
    whole, _ = run_head(model, *entries, SelfContext(POSITIONS), WHOLE)
    cache = create_cache(head_config(CONFIG), model.mesh, BATCH, jnp.float32)
    assert cache.keys.shape[0] == 1
    spec = PagedContext(KVCache(CACHE_SPEC, CACHE_SPEC), PartitionSpec("data"), PartitionSpec("data"))  # type: ignore[arg-type]
    table = np.arange(BATCH, dtype=np.int32)[:, None]
    parts = []
    for part in (slice(0, 4), slice(4, TOKENS)):
        context = PagedContext(cache, table, POSITIONS[:, part])
        tokens, hidden = entries
        out, context = run_head(model, tokens[:, part], hidden[:, part], context, spec)
        cache = context.cache
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [1 << 40, 20_000])
def test_saved_model_loads_as_it_was_on_every_mesh(model: ShardedModel, tmp_path: Path, limit: int) -> None:
    save_pretrained(model, tmp_path, max_shard_bytes=limit)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (len(shards) > 5) == (limit == 20_000)
    assert all((tmp_path / name).stat().st_size < limit + 4096 for name in shards)
    for shape in ((1, 1), (2, 1), (1, 2)):
        assert_same_parameters(load_model(tmp_path, make_mesh(*shape), progress=False), model)


def test_saved_names_are_those_of_qwens_heads(model: ShardedModel, tmp_path: Path) -> None:
    save_pretrained(model, tmp_path)
    names = {name for name in Checkpoint(tmp_path).tensors if name.startswith("mtp.")}
    attention = {f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    experts = {f"mlp.experts.{e}.{n}_proj.weight" for e in range(CONFIG.num_experts) for n in ("gate", "up", "down")}
    layer = {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight", *attention, *experts}
    rest = {"fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"}
    assert names == {f"mtp.layers.0.{n}" for n in layer} | {f"mtp.{n}" for n in rest}


def test_head_is_found_by_its_tensors_where_config_json_is_silent(model: ShardedModel, tmp_path: Path) -> None:
    save_pretrained(model, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    assert raw.pop("mtp_num_hidden_layers") == 1
    path.write_text(json.dumps(raw))
    assert_same_parameters(load_model(tmp_path, make_mesh(), progress=False), model)


def test_checkpoint_without_a_head_has_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny(), random_tensors(tiny()))
    loaded = load_model(tmp_path, make_mesh(), progress=False)
    assert loaded.config.mtp_num_hidden_layers == 0
    assert not [name for name in by_name(loaded.state) if "mtp" in name]


def test_promised_head_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, RAW, random_tensors(tiny()))
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        load_model(tmp_path, make_mesh(), progress=False)


def test_orbax_keeps_the_head(model: ShardedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path / "saved")
    assert_same_parameters(restore_model(tmp_path / "saved", make_mesh(1, 2)), model)


@pytest.mark.parametrize("changes", [{"mtp_num_hidden_layers": 2}, {"num_experts": 0, "mtp_num_hidden_layers": 1}])
def test_heads_that_are_not_ours_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers"):
        ModelConfig.from_dict(tiny(**changes))


def test_saving_over_a_checkpoint_is_refused(model: ShardedModel, tmp_path: Path) -> None:
    save_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        save_pretrained(model, tmp_path)
