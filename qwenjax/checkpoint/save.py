"""Writing a model as a Hugging Face checkpoint: config.json and safetensors shards with their index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwenjax.checkpoint.mapping import Piece, all_pieces
from qwenjax.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME, CheckpointError, TensorInfo
from qwenjax.checkpoint.writer import SafetensorsWriter
from qwenjax.sharded_model import ShardedModel, by_name
from qwenjax.tokenizer import CHAT_TEMPLATES

MAX_SHARD_BYTES = 5 << 30
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json; no part of the model's shape


def save_pretrained(
    model: ShardedModel,
    folder: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_from: str | Path | None = None,
) -> None:
    """Writes `model`, its multi-token-prediction head included, so that load_model and transformers read it again.

    The parameters are stored in their own dtype, tensor by tensor; a shard holds at most `max_shard_bytes` of tensors,
    or one tensor that is larger. tokenizer_from: a folder whose tokenizer, chat templates, generation config and token
    ids (those that it has) go along. Runs in one process, which must hold the whole mesh. Raises CheckpointError where
    the folder holds a checkpoint already, or a parameter is of a type that such files do not have plainly (quantised).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for present in (*folder.glob("*.safetensors"), *folder.glob(INDEX_NAME)):
        raise CheckpointError(f"{present}: is there already; save to a folder without a checkpoint")
    arrays = by_name(model.state)
    pieces = all_pieces(model.config)
    for piece in pieces:
        if not isinstance(arrays.get(piece.parameter), jax.Array):
            raise CheckpointError(f"parameter {piece.parameter} is not a plain array; only such are saved here")
    infos = {piece.source: TensorInfo(np.dtype(arrays[piece.parameter].dtype), piece.shape) for piece in pieces}
    shards = list(_shards(pieces, infos, max_shard_bytes))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        writer = SafetensorsWriter(folder / name, {p.source: infos[p.source] for p in shard}, {"format": "pt"})
        try:
            for piece in shard:
                box = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.box, strict=True))
                writer.write(piece.source, np.asarray(arrays[piece.parameter][box]).reshape(piece.shape))
                weight_map[piece.source] = name
            writer.close()
        except BaseException:  # a full disk, Ctrl-C: no half file is left
            writer.abandon()
            raise
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(i.nbytes for i in infos.values())}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", "utf-8")
    # How the files were quantised that the model came from says nothing about these.
    config = replace(model.config, dtype=str(model.dtype), quantization=None).to_dict()
    if tokenizer_from is not None:
        config |= _copy_tokenizer(Path(tokenizer_from), folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, Any]:
    """Copies the files that turn text into ids and back; returns the token ids that config.json has."""
    templates = sorted((source / CHAT_TEMPLATES).glob("*.jinja"))
    if templates:
        (folder / CHAT_TEMPLATES).mkdir(exist_ok=True)
    for path in [*(source / name for name in _TOKENIZER_FILES if (source / name).is_file()), *templates]:
        shutil.copyfile(path, folder / path.relative_to(source))
    config = json.loads((source / "config.json").read_text("utf-8"))
    return {name: config[name] for name in TOKEN_IDS if name in config}


def _shards(pieces: list[Piece], infos: dict[str, TensorInfo], limit: int) -> Iterator[list[Piece]]:
    shard: list[Piece] = []
    size = 0
    for piece in pieces:
        nbytes = infos[piece.source].nbytes
        if shard and size + nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += nbytes
    yield shard
