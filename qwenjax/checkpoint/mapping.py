"""Which tensor of a Hugging Face checkpoint goes to which part of which parameter."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from qwenjax.checkpoint.safetensors import CheckpointError, TensorInfo
from qwenjax.config import ModelConfig, head_config

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
MTP_PREFIX = "mtp."
_NAMES_SHOWN = 20  # of a list of names in an error; a wrong config can make it thousands long


@dataclass(frozen=True)
class Piece:
    """Tensor `source`, of `shape`, fills the box of parameter `parameter` that begins at `start`.

    `start` has an entry for every axis of the parameter; the axes that the tensor lacks lead, and the box is 1 there.
    """

    source: str
    shape: tuple[int, ...]
    parameter: str
    start: tuple[int, ...]

    @property
    def box(self) -> tuple[int, ...]:
        """The shape of the box, with the parameter's number of axes."""
        return (1,) * (len(self.start) - len(self.shape)) + self.shape


def pieces_of_layer(config: ModelConfig, layer: int, fused: bool) -> Iterator[Piece]:
    """The tensors of one decoder layer; `fused` where its experts are two tensors rather than three for each."""
    prefix, hidden, head_dim = f"model.layers.{layer}.", config.hidden_size, config.head_dim
    q_width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

    def piece(source: str, shape: tuple[int, ...], parameter: str, *leading: int, row: int = 0) -> Piece:
        return Piece(prefix + source, shape, parameter, (*leading, row, *[0] * (len(shape) - 1)))

    yield piece("input_layernorm.weight", (hidden,), "input_norm", layer)
    yield piece("post_attention_layernorm.weight", (hidden,), "post_attention_norm", layer)
    shapes = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "o": (hidden, q_width)}
    for name, shape in shapes.items():
        yield piece(f"self_attn.{name}_proj.weight", shape, f"attention.{name}_proj", layer)
        if config.attention_bias:
            yield piece(f"self_attn.{name}_proj.bias", shape[:1], f"attention.{name}_bias", layer)
    for name in ("q_norm", "k_norm"):
        yield piece(f"self_attn.{name}.weight", (head_dim,), f"attention.{name}", layer)
    if layer in config.dense_layers:
        index, width = config.dense_layers.index(layer), config.intermediate_size
        for name in ("gate_proj", "up_proj"):
            yield piece(f"mlp.{name}.weight", (width, hidden), f"mlp.{name}", index)
        yield piece("mlp.down_proj.weight", (hidden, width), "mlp.down_proj", index)
        return
    index, width, experts = config.sparse_layers.index(layer), config.moe_intermediate_size, config.num_experts
    yield piece("mlp.gate.weight", (experts, hidden), "experts.router", index)
    if fused:
        yield piece("mlp.experts.gate_up_proj", (experts, 2 * width, hidden), "experts.w13", index)
        yield piece("mlp.experts.down_proj", (experts, hidden, width), "experts.w2", index)
        return
    for expert in range(experts):
        name = f"mlp.experts.{expert}."
        yield piece(name + "gate_proj.weight", (width, hidden), "experts.w13", index, expert)
        yield piece(name + "up_proj.weight", (width, hidden), "experts.w13", index, expert, row=width)
        yield piece(name + "down_proj.weight", (hidden, width), "experts.w2", index, expert)


def pieces_of_head(config: ModelConfig, fused: bool) -> Iterator[Piece]:
    """The tensors of the multi-token-prediction head, under the names that SGLang and vLLM read for Qwen's heads."""
    hidden = config.hidden_size
    yield Piece("mtp.fc.weight", (hidden, 2 * hidden), "mtp.fc", (0, 0))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield Piece(f"mtp.{name}.weight", (hidden,), f"mtp.{name}", (0,))
    for piece in pieces_of_layer(head_config(config), 0, fused):
        source = MTP_PREFIX + piece.source.removeprefix("model.")
        yield replace(piece, source=source, parameter=MTP_PREFIX + piece.parameter)


def all_pieces(config: ModelConfig, tensors: Container[str] = ()) -> list[Piece]:
    """Every piece of the model by the config alone; `tensors`, the names in the files, tell where experts are fused."""
    vocabulary = (config.vocab_size, config.hidden_size)
    pieces = [
        Piece(EMBEDDING, vocabulary, "embed_tokens", (0, 0)),
        Piece("model.norm.weight", (config.hidden_size,), "norm", (0,)),
    ]
    if not config.tie_word_embeddings:
        pieces.append(Piece(TIED_HEAD, vocabulary, "lm_head", (0, 0)))
    for layer in range(config.num_hidden_layers):
        fused = f"model.layers.{layer}.mlp.experts.gate_up_proj" in tensors
        pieces += pieces_of_layer(config, layer, fused)
    if config.mtp_num_hidden_layers:
        pieces += pieces_of_head(config, "mtp.layers.0.mlp.experts.gate_up_proj" in tensors)
    return pieces


def plan(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> list[Piece]:
    """Every piece of the model, one for each tensor of the files.

    A tied checkpoint may hold lm_head.weight too; the caller checks that it equals the embedding. Raises
    CheckpointError, naming them, for tensors that the model needs and the files lack, for those that the files have
    and the model has no place for, and for shapes that differ from the config's.
    """
    pieces = all_pieces(config, tensors)
    known = {piece.source for piece in pieces} | ({TIED_HEAD} if config.tie_word_embeddings else set())
    missing = [piece.source for piece in pieces if piece.source not in tensors]
    unused = [name for name in tensors if name not in known]
    wrong = [
        f"{piece.source} is {list(tensors[piece.source].shape)} and by config.json {list(piece.shape)}"
        for piece in pieces
        if piece.source in tensors and tensors[piece.source].shape != piece.shape
    ]
    complaints = []
    if missing:
        hint = "; config.json says tie_word_embeddings false" if TIED_HEAD in missing else ""
        complaints.append(f"{len(missing)} tensors of the model are not in the files: {listing(missing)}{hint}")
    if unused:
        complaints.append(f"{len(unused)} tensors of the files have no place in the model: {listing(unused)}")
    if wrong:
        complaints.append(f"{len(wrong)} tensors have another shape: {listing(wrong)}")
    if complaints:
        raise CheckpointError("; ".join(complaints))
    return pieces


def listing(names: Iterable[str]) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + rest
