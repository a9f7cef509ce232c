"""`qwenjax eval MODEL --text FILE`: what each number format costs the model on a text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.resolve import resolve
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.evaluate import all_variants, evaluate, format_table, to_json
from qwenjax.evaluate.plot import plot
from qwenjax.evaluate.run import cut
from qwenjax.mesh import make_mesh
from qwenjax.quant import FORMATS
from qwenjax.text_files import read_text
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.commands.model_arguments import add_model_arguments
from qwenjax_serving.commands.output_files import check_output_file, check_plot_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # float32 so that what is measured is the formats and no other rounding; bfloat16 halves the memory, which is two
    # models'.
    add_model_arguments(parser, quantization=False, dtype="float32")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="UTF-8 text to read")
    parser.add_argument(
        "--formats", default=",".join(FORMATS), metavar="NAMES", help="separated by commas (default %(default)s)"
    )
    parser.add_argument("--weights-only", action="store_true", help="leave activations as they are throughout")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a window (default: the model's, to 2048)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens between windows (default: half the context)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="windows a call (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read no more of the text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them to FILE (.png, .svg); needs qwenjax[plot]")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, after a progress bar on standard error. Raises ValueError for what cannot be evaluated."""
    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        raise ValueError(f"--max-tokens is {arguments.max_tokens}; it is at least 2, of which one is predicted")
    names = list(dict.fromkeys(name.strip() for name in arguments.formats.split(",")))
    variants = [v for v in all_variants(names) if not (v.activations and arguments.weights_only)]
    check_output_file("--json", arguments.json)
    check_plot_file("--plot", arguments.plot)
    folder = resolve(arguments.model, arguments.revision)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(read_text(arguments.text))[: arguments.max_tokens]
    cut(ModelConfig.from_folder(folder), ids, arguments.context, arguments.stride, arguments.batch)
    mesh = make_mesh(arguments.data_parallel, arguments.model_parallel)
    dtype = None if arguments.dtype == "auto" else DTYPES[arguments.dtype]
    evaluation = evaluate(
        load_model(folder, mesh, dtype, progress=arguments.progress, activation_format="model"),
        ids,
        variants,
        context=arguments.context,
        stride=arguments.stride,
        batch=arguments.batch,
        num_bytes=sum(len(tokenizer.token_bytes(token, skip_special_tokens=False)) for token in ids[1:]),
        progress=arguments.progress,
    )
    print(
        f"{arguments.model} on {arguments.text.name}: {evaluation.tokens:,} tokens in {evaluation.windows} windows of "
        f"{evaluation.context}, stride {evaluation.stride}\n"
    )
    print(format_table(evaluation))
    if arguments.json:
        arguments.json.write_text(json.dumps(to_json(evaluation), indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(evaluation, arguments.plot)
    return 0
