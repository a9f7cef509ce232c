"""`qwenjax generate`: text from a checkpoint, streaming to the terminal, or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from qwenjax import LLM, RequestOutput, SamplingParams
from qwenjax.checkpoint.resolve import resolve
from qwenjax.config import ModelConfig
from qwenjax.engine.build import check_max_model_len
from qwenjax.llm import default_sampling_params, prompt_index
from qwenjax.outputs import SpeculationStats
from qwenjax.sampling_params import validate_for
from qwenjax.text_files import read_text
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.commands.model_arguments import add_model_arguments

# Command-line name, type and help of the sampling parameters; the names are SamplingParams'.
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 for the most likely token every time"),
    ("top_p", float, "keep the fewest most likely tokens with this share of the probability"),
    ("top_k", int, "keep this many most likely tokens; 0 for all"),
    ("min_p", float, "leave out tokens less likely than this times the most likely"),
    ("repetition_penalty", float, "above 1: less of what prompt and output hold"),
    ("presence_penalty", float, "above 0: less of what the output holds"),
    ("frequency_penalty", float, "above 0: less of what the output holds often"),
    ("seed", int, "the same seed gives the same text"),
    ("n", int, "outputs for each prompt"),
    ("max_tokens", int, "longest output (default 128, or what the context holds)"),
    ("min_tokens", int, "shortest output"),
    ("logprobs", int, "report this many most likely tokens at every place (with --json)"),
    ("prompt_logprobs", int, "the same for the prompt (with --json)"),
)

_TIMES = ("queue_time", "time_to_first_token", "inter_token_time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    for name, default, metavar, text in (
        ("max_model_len", None, "N", "tokens of a prompt and its output together (default: what the model allows)"),
        ("max_num_seqs", 32, "N", "sequences that decode together on a data rank (default 32)"),
        ("num_speculative_tokens", None, "K", "drafts of a step (default: 1 on a GPU with a head, else 0)"),
    ):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, metavar=metavar, help=text)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", action="append", help="text to go on from; may be given several times")
    what.add_argument("--chat", action="append", help="a user's message, put into the chat template; likewise")
    what.add_argument("--file", type=Path, help="a text file with a prompt on every line")
    parser.add_argument("--system", help="a system message before every --chat")
    parser.add_argument("--no-thinking", action="store_true", help="render the chat with enable_thinking=False")
    sampling = parser.add_argument_group("sampling", "Defaults are the checkpoint's generation_config.json's.")
    for name, kind, text in _SAMPLING:
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    sampling.add_argument("--stop", action="append", help="a string that ends the output; may be given several times")
    sampling.add_argument("--stop-token-ids", type=int, nargs="+", metavar="ID", help="ids that end the output")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt, on a line of its own")


def run(arguments: argparse.Namespace) -> int:
    """Streams the outputs to standard output and the figures to standard error.

    Raises ValueError for bad input, before the weights are read.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(arguments, name) is not None and not arguments.json:
            raise ValueError(f"--{name.replace('_', '-')} shows in the output of --json alone; add that")
    folder = resolve(arguments.model, arguments.revision)
    config, tokenizer = ModelConfig.from_folder(folder), Tokenizer.from_folder(folder)
    params = sampling_params(default_sampling_params(folder), arguments)
    texts = prompts(tokenizer, arguments)
    ids = [tokenizer.encode(text, add_special_tokens=arguments.chat is None) for text in texts]
    check_max_model_len(arguments.max_model_len, config)
    context = arguments.max_model_len or config.max_position_embeddings
    if arguments.max_tokens is None:
        params = replace(params, max_tokens=max(1, min(params.max_tokens or context, context - max(map(len, ids)))))
    for prompt in ids:
        validate_for(
            params,
            prompt_token_ids=prompt,
            vocab_size=config.vocab_size,
            max_model_len=context,
            eos_ids=tokenizer.eos_ids,
        )
    llm = LLM(
        folder,
        data_parallel=arguments.data_parallel,
        model_parallel=arguments.model_parallel,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        activation_format=arguments.activation_format,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        num_speculative_tokens=arguments.num_speculative_tokens,
        progress=arguments.progress,
    )
    start = time.monotonic()
    results = show(llm, ids if arguments.chat else texts, params, sys.stdout, as_json=arguments.json)
    line = figures(results, time.monotonic() - start, llm.speculation)
    if arguments.num_speculative_tokens is None and llm.speculation is None:
        line += "; no drafts, as by default on a CPU and without a multi-token-prediction head"
    print(line, file=sys.stderr)
    return 0


def prompts(tokenizer: Tokenizer, arguments: argparse.Namespace) -> list[str]:
    """The texts that the arguments ask for, chats as the template renders them."""
    if arguments.chat is None and (arguments.system is not None or arguments.no_thinking):
        raise ValueError("--system and --no-thinking are parts of a chat; use them with --chat")
    if arguments.prompt is not None:
        return list(arguments.prompt)
    if arguments.file is not None:
        kept = [line for line in read_text(arguments.file).split("\n") if line.strip()]
        if not kept:
            raise ValueError(f"--file {arguments.file}: holds no prompt; it has one on every line")
        return kept
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    kwargs: dict[str, Any] = {"enable_thinking": False} if arguments.no_thinking else {}
    return [
        tokenizer.apply_chat_template([*system, {"role": "user", "content": text}], **kwargs) for text in arguments.chat
    ]


def sampling_params(defaults: SamplingParams, arguments: argparse.Namespace) -> SamplingParams:
    """The checkpoint's defaults with what the arguments say instead."""
    given = {name: getattr(arguments, name) for name, _, _ in _SAMPLING if getattr(arguments, name) is not None}
    given |= {"stop": arguments.stop} if arguments.stop else {}
    given |= {"stop_token_ids": arguments.stop_token_ids} if arguments.stop_token_ids else {}
    longest = max(128, arguments.min_tokens or 0)
    return replace(defaults, **{"max_tokens": longest, "ignore_eos": arguments.ignore_eos} | given)


def show(
    llm: LLM,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams,
    stream: TextIO,
    *,
    as_json: bool = False,
) -> list[RequestOutput]:
    """Writes every output to `stream`, in the prompts' order, and returns them.

    The first prompt that is not finished is shown as it grows, and those after it wait for their turn. A request of
    several outputs is shown when it is finished, as everything is in JSON.
    """
    latest: dict[int, RequestOutput] = {}
    results: list[RequestOutput] = []
    live = params.n == 1 and not as_json
    shown = 0
    for output in llm.stream(prompts, params):
        latest[prompt_index(output)] = output
        while (head := latest.get(len(results))) is not None:
            if live:
                stream.write(head.outputs[0].text[shown:])
                shown = len(head.outputs[0].text)
            if not head.finished:
                break
            if not live:
                stream.write(json.dumps(_plain(head), ensure_ascii=False) if as_json else _several(head))
            stream.write("\n")
            results.append(head)
            shown = 0
        stream.flush()
    return results


def _plain(output: RequestOutput) -> dict[str, Any]:
    """All that an output says, its times as the seconds that passed: those of a clock mean nothing elsewhere."""
    metrics, speculation = output.metrics, output.speculation
    found = asdict(output)
    if metrics is not None:
        found["metrics"] = {name: getattr(metrics, name) for name in _TIMES} | {"num_tokens": metrics.num_tokens}
    if speculation is not None and speculation.steps:
        found["speculation"]["mean_length"] = speculation.mean_length
    return found


def _several(output: RequestOutput) -> str:
    return "\n".join(f"[{part.index}] {part.text}" for part in output.outputs)


def figures(results: Sequence[RequestOutput], seconds: float, speculation: SpeculationStats | None) -> str:
    """The last line: tokens, median time to first token, tokens a second, and how drafts fared where there were any."""
    first = sorted(r.metrics.time_to_first_token or 0.0 for r in results if r.metrics)
    drawn = sum(len(part.token_ids) for result in results for part in result.outputs)
    read = sum(len(result.prompt_token_ids) for result in results)
    waited = f"{first[len(first) // 2] * 1e3:.0f} ms" if first else "none"
    line = f"{read} prompt tokens, {drawn} new; time to first token {waited}; {drawn / seconds:.1f} tokens/s"
    if speculation is None or not speculation.steps:
        return line
    shares = " ".join(f"{share:.0%}" for share in speculation.acceptance)
    return f"{line}; drafts accepted {shares}, {speculation.mean_length:.2f} tokens a step"
