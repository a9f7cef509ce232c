"""ModelConfig: what a Hugging Face config.json says about a Qwen3-MoE model, checked and typed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

logger = logging.getLogger(__name__)

MODEL_TYPE = "qwen3_moe"
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}

# Fields of config.json that say nothing about inference, or that other modules read (token ids, quantisation).
_NOT_THE_MODEL = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "name_or_path",
        "_name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "sliding_window",
        "transformers_version",
        "use_cache",
    }
)


class ConfigError(ValueError):
    """A config.json that cannot be served: the message names the field, its value and what would do."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: plain, or YaRN (Peng et al. 2023, arXiv:2309.00071).

    theta: base of the inverse frequencies. The other fields are YaRN's; `factor` is used as configured, never
    derived from the context length. attention_factor multiplies cos and sin.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen3-MoE model; names are config.json's. Sizes are in elements, layers counted from 0."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    # 1 where a multi-token-prediction head (qwenjax.mtp) comes with the model; Qwen3.5's and Qwen3-Next's name for it.
    mtp_num_hidden_layers: int = 0
    # How the files are stored, not what the model is: two models that differ in it alone are equal.
    quantization: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts (transformers' Qwen3MoeDecoderLayer has the rule)."""
        return tuple(
            layer
            for layer in range(self.num_hidden_layers)
            if layer not in self.mlp_only_layers
            and self.num_experts > 0
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with one plain SwiGLU MLP of intermediate_size."""
        sparse = set(self.sparse_layers)
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in sparse)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads FOLDER/config.json. Raises ConfigError, naming the file, where it is missing, not JSON, or not a
        model we serve."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
            if not isinstance(raw, dict):
                raise ConfigError(f"holds a JSON {type(raw).__name__}, not an object")
            return cls.from_dict(raw)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; a checkpoint folder holds its model's config.json") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From config.json's content, in the layout of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`).

        Raises ConfigError for a model, rope or activation we do not serve, for values that are out of range and
        for two that contradict each other. Fields we do not know are named in one warning.
        """
        fields = _Fields(raw)
        model_type = fields.take("model_type", str)
        if model_type != MODEL_TYPE:
            raise ConfigError(f"model_type is {model_type!r}; qwenjax serves {MODEL_TYPE!r}")
        hidden_act = fields.take("hidden_act", str, "silu")
        if hidden_act != "silu":
            raise ConfigError(f"hidden_act is {hidden_act!r}; Qwen3-MoE's experts are SwiGLU, 'silu'")
        if fields.take("use_sliding_window", bool, False):
            raise ConfigError("use_sliding_window is true; qwenjax attends to the whole context: set it to false")
        hidden_size = fields.take("hidden_size", int)
        heads = fields.take("num_attention_heads", int)
        max_positions = fields.take("max_position_embeddings", int)
        config = cls(
            vocab_size=fields.take("vocab_size", int),
            hidden_size=hidden_size,
            num_hidden_layers=fields.take("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=fields.take("num_key_value_heads", int, 4),
            head_dim=_head_dim(fields, hidden_size, heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=fields.take("rms_norm_eps", float, 1e-6),
            rope=_rope(fields, max_positions),
            intermediate_size=fields.take("intermediate_size", int, 0),
            moe_intermediate_size=fields.take("moe_intermediate_size", int, 0),
            num_experts=fields.take_either("num_experts", "num_local_experts", int, 0),
            num_experts_per_tok=fields.take("num_experts_per_tok", int, 0),
            norm_topk_prob=fields.take("norm_topk_prob", bool, False),
            decoder_sparse_step=fields.take("decoder_sparse_step", int, 1),
            mlp_only_layers=tuple(fields.take("mlp_only_layers", list, [])),
            tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
            attention_bias=fields.take("attention_bias", bool, False),
            mtp_num_hidden_layers=fields.take("mtp_num_hidden_layers", int, 0),
            dtype=fields.take_either("dtype", "torch_dtype", str, "bfloat16").removeprefix("torch."),
            quantization=fields.take("quantization_config", dict, None),
        )
        config.check()
        unknown = sorted(set(raw) - fields.taken - _NOT_THE_MODEL)
        if unknown:
            logger.warning("config.json has fields that qwenjax does not know and leaves out: %s", ", ".join(unknown))
        return config

    def to_dict(self) -> dict[str, Any]:
        """config.json's content, in the layout of transformers 5, from which from_dict makes this config again."""
        plain = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("rope", "quantization")
        }
        plain["mlp_only_layers"] = list(self.mlp_only_layers)
        rope: dict[str, Any] = {"rope_type": self.rope.rope_type, "rope_theta": self.rope.theta}
        if self.rope.rope_type == "yarn":
            rope |= {item.name: getattr(self.rope, item.name) for item in fields(self.rope)[2:]}
        stored = {} if self.quantization is None else {"quantization_config": dict(self.quantization)}
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": MODEL_TYPE, "hidden_act": "silu"}
        return {**kind, **plain, "rope_parameters": rope, **stored}

    def check(self) -> None:
        """Raises ConfigError for values that are out of range or contradict each other."""
        self._check_positive("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        self._check_positive("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
        self._check_positive("decoder_sparse_step")
        sparse = bool(self.sparse_layers)
        if sparse:
            self._check_positive("moe_intermediate_size", "num_experts_per_tok")
        if self.dense_layers:
            self._check_positive("intermediate_size")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        if sparse and self.num_experts_per_tok > self.num_experts:
            raise ConfigError(f"num_experts_per_tok {self.num_experts_per_tok} is above num_experts {self.num_experts}")
        for layer in self.mlp_only_layers:
            if type(layer) is not int or not 0 <= layer < self.num_hidden_layers:
                raise ConfigError(
                    f"mlp_only_layers names layer {layer!r}; the layers are 0 to {self.num_hidden_layers - 1}"
                )
        if self.mtp_num_hidden_layers not in (0, 1):
            raise ConfigError(f"mtp_num_hidden_layers is {self.mtp_num_hidden_layers}; qwenjax's heads have one layer")
        if self.mtp_num_hidden_layers and not sparse:
            raise ConfigError("mtp_num_hidden_layers is 1 in a model without experts; the head's layer is made of them")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it may be {', '.join(DTYPES)}")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be above 0")


def head_config(config: ModelConfig) -> ModelConfig:
    """The config of the head's one decoder layer, which has experts: for its modules, its cache and its tensors."""
    return replace(config, num_hidden_layers=1, mlp_only_layers=(), decoder_sparse_step=1, mtp_num_hidden_layers=0)


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    scaling, parameters = fields.take("rope_scaling", dict, {}), fields.take("rope_parameters", dict, {})
    for name in sorted(set(scaling) & set(parameters)):
        _agree(f"{name} of rope_scaling and rope_parameters", scaling[name], parameters[name], None)
    inner = _Fields({**scaling, **parameters}, "rope_parameters." if parameters else "rope_scaling.")
    rope_type = inner.take_either("rope_type", "type", str, "default")
    theta = _agree("rope_theta", fields.take("rope_theta", float, None), inner.take("rope_theta", float, None), 1e4)
    partial = _agree(
        "partial_rotary_factor",
        fields.take("partial_rotary_factor", float, None),
        inner.take("partial_rotary_factor", float, None),
        1.0,
    )
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor is {partial}; Qwen3-MoE rotates whole heads, 1.0")
    if not theta > 1:
        raise ConfigError(f"rope_theta is {theta}; it must be above 1, or frequencies do not fall")
    if rope_type == "default":
        rope = RopeConfig(theta)
    elif rope_type == "yarn":
        rope = _yarn(fields, inner, theta, max_positions)
    else:
        raise ConfigError(f"rope type is {rope_type!r}; qwenjax has 'default' and 'yarn'")
    if unknown := sorted(set(inner.raw) - inner.taken):
        raise ConfigError(f"{inner.where}{unknown[0]} is not a setting of rope type {rope_type!r}")
    return rope


def _yarn(fields: _Fields, inner: _Fields, theta: float, max_positions: int) -> RopeConfig:
    original = _agree(
        "original_max_position_embeddings",
        fields.take("original_max_position_embeddings", int, None),
        inner.take("original_max_position_embeddings", int, None),
        max_positions,
    )
    factor = inner.take("factor", float)
    rope = RopeConfig(
        theta,
        "yarn",
        factor=factor,
        attention_factor=_attention_factor(inner, factor),
        beta_fast=inner.take("beta_fast", float, 32.0),
        beta_slow=inner.take("beta_slow", float, 1.0),
        original_max_position_embeddings=original,
        truncate=inner.take("truncate", bool, True),
    )
    if not factor >= 1:
        raise ConfigError(f"{inner.where}factor is {factor}; YaRN stretches the context by a factor of 1 or more")
    for name in ("attention_factor", "beta_slow", "original_max_position_embeddings"):
        if not getattr(rope, name) > 0:
            raise ConfigError(f"{inner.where}{name} is {getattr(rope, name)}; it must be above 0")
    if rope.beta_fast < rope.beta_slow:
        raise ConfigError(f"{inner.where}beta_fast {rope.beta_fast} is below beta_slow {rope.beta_slow}")
    return rope


def _attention_factor(inner: _Fields, factor: float) -> float:
    given = inner.take("attention_factor", float, None)
    mscale, mscale_all = inner.take("mscale", float, None), inner.take("mscale_all_dim", float, None)
    if (mscale is None) != (mscale_all is None):
        raise ConfigError(f"{inner.where}mscale is {mscale} and mscale_all_dim {mscale_all}: one needs the other")
    # YaRN, equation 22: 0.1 ln(s) + 1; with both mscales the ratio of the two, as DeepSeek's configs mean it.
    derived = _mscale(factor, 1.0)
    if mscale and mscale_all:
        derived = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        if given is not None and not math.isclose(given, derived, rel_tol=1e-6):
            raise ConfigError(f"{inner.where}attention_factor is {given} and the two mscales make {derived}")
    return derived if given is None else given


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


def _head_dim(fields: _Fields, hidden_size: int, heads: int) -> int:
    head_dim = fields.take("head_dim", int, None)
    if head_dim is None and heads > 0 and hidden_size % heads:
        raise ConfigError(f"head_dim is missing, and hidden_size {hidden_size} is not a multiple of {heads} heads")
    return hidden_size // max(heads, 1) if head_dim is None else head_dim


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; Python's parser would keep the last of two values of one name."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content and content[name] != value:
            raise ConfigError(f"{name} is given twice, as {content[name]} and as {value}")
        content[name] = value
    return content


def _agree(name: str, first: Any, second: Any, default: Any) -> Any:
    """The value that two places give for one setting; the default where neither does."""
    if first is not None and second is not None and first != second:
        raise ConfigError(f"{name} is given twice, as {first} and as {second}")
    return first if first is not None else second if second is not None else default


_REQUIRED = object()


class _Fields:
    """Takes typed fields out of a JSON object and remembers which were taken."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw, self.where, self.taken = raw, where, set[str]()

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        self.taken.add(name)
        value = self.raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.where}{name} is missing")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if kind is int and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            finite = "finite and " if kind is float else ""
            raise ConfigError(f"{self.where}{name} is {value!r}; it must be {finite}of type {kind.__name__}")
        return value

    def take_either(self, name: str, other: str, kind: type, default: Any) -> Any:
        """One setting under either of two names; both may be there where they agree."""
        first, second = self.take(name, kind, None), self.take(other, kind, None)
        if first is not None and second is not None and first != second:
            raise ConfigError(f"{self.where}{name} is {first!r} and {self.where}{other} is {second!r}: which is it?")
        return first if first is not None else second if second is not None else default
