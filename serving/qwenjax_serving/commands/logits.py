"""`qwenjax logits`: the most likely next tokens after a prompt."""

from __future__ import annotations

import argparse
import json

import numpy as np

from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.resolve import resolve
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.logits import check_sequences, sequence_logits
from qwenjax.mesh import make_mesh
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.commands.model_arguments import add_model_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text")
    what.add_argument("--token-ids", help="ids instead of text, separated by commas")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="tokens to print (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints rank, id, token, logit and probability of the top tokens. Raises ValueError for bad input."""
    if arguments.top < 1:
        raise ValueError(f"--top is {arguments.top}; it is at least 1")
    folder = resolve(arguments.model, arguments.revision)
    ids = _parse_ids(arguments.token_ids) if arguments.prompt is None else None
    # Ids need no tokenizer, and a checkpoint without one can still be looked at.
    tokenizer = Tokenizer.from_folder(folder) if ids is None or (folder / "tokenizer.json").is_file() else None
    if ids is None:
        assert tokenizer is not None
        ids = tokenizer.encode(arguments.prompt)
        if not ids:
            raise ValueError("--prompt is empty; it has at least one token")
    check_sequences(ModelConfig.from_folder(folder), [ids])
    mesh = make_mesh(arguments.data_parallel, arguments.model_parallel)
    dtype = None if arguments.dtype == "auto" else DTYPES[arguments.dtype]
    model = load_model(
        folder,
        mesh,
        dtype,
        quantization=arguments.quantization,
        progress=arguments.progress,
        activation_format=arguments.activation_format,
    )
    logits = sequence_logits(model, [ids])[0][-1]
    # Ties to the lowest id, as greedy decoding breaks them.
    top = np.argsort(-logits, kind="stable")[: arguments.top].tolist()
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = shifted / shifted.sum()
    rows = [
        {
            "id": token,
            "token": tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None,
            "logit": float(logits[token]),
            "probability": float(probabilities[token]),
        }
        for token in top
    ]
    if arguments.json:
        print(json.dumps({"prompt_token_ids": ids, "top": rows}, ensure_ascii=False))
        return 0
    print(f"{'rank':>4} {'id':>7} {'logit':>10} {'probability':>11}  token")
    for rank, row in enumerate(rows, 1):
        print(f"{rank:>4} {row['id']:>7} {row['logit']:>10.4f} {row['probability']:>11.4%}  {row['token']!r}")
    return 0


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--token-ids is {text!r}; it is numbers separated by commas") from None
