"""`qwenjax bench serve`: what clients of an OpenAI-compatible server wait, under a load."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenjax_serving.bench.drive import Run, drive, served_model
from qwenjax_serving.bench.plot import plot_run
from qwenjax_serving.bench.report import Report
from qwenjax_serving.bench.sse_client import HttpError, Target
from qwenjax_serving.bench.workload import Prompt, Workload, file_prompts, random_prompts
from qwenjax_serving.commands.output_files import check_output_file, check_plot_file

_INPUT_LEN, _VOCAB_SIZE = 128, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    serve = parts.add_parser("serve", help="measure an OpenAI-compatible server under a load")
    add = serve.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, with /v1 or without (default %(default)s)")
    add("--model", help="name of the model (default: the first that the server lists)")
    add("--chat", action="store_true", help="use /v1/chat/completions, a user's message each (with --file)")
    add("--num-prompts", type=int, default=64, metavar="N", help="requests (default %(default)s)")
    add("--warmup", type=int, default=1, metavar="N", help="requests before that, not counted (default %(default)s)")
    load = serve.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="requests that run at any time (default 16)")
    load.add_argument("--rate", type=float, metavar="R", help="requests a second at random times, a Poisson process")
    add("--input-len", type=int, metavar="N", help=f"random ids of a prompt (default {_INPUT_LEN})")
    add("--vocab-size", type=int, metavar="N", help=f"random ids are below it (default {_VOCAB_SIZE})")
    add("--file", type=Path, help="prompts instead, one on every line")
    add("--output-len", type=int, default=128, metavar="N", help="max_tokens (default %(default)s)")
    add("--ignore-eos", action="store_true", help="outputs of that very length; not every server knows the field")
    add("--temperature", type=float, default=0.0, metavar="T", help="default %(default)s")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help='further fields: {"speculation": false}')
    add("--seed", type=int, default=0, help="of the prompts and times (default %(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds of one request (default %(default)s)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    add("--json", type=Path, metavar="FILE", help="write the figures and every request's times")
    add("--plot", type=Path, metavar="FILE.png", help="draw the spread of the times")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; status 1 where a request failed. Raises ValueError for bad input, OSError without a server."""
    check_output_file("--json", arguments.json)
    check_plot_file("--plot", arguments.plot)
    if not arguments.timeout > 0:
        raise ValueError(f"--timeout is {arguments.timeout:g}; it is above 0")
    concurrency = 16 if arguments.concurrency is None and arguments.rate is None else arguments.concurrency
    workload = Workload(
        num_prompts=arguments.num_prompts,
        max_tokens=arguments.output_len,
        concurrency=concurrency,
        rate=arguments.rate,
        temperature=arguments.temperature,
        seed=arguments.seed,
        extra={**({"ignore_eos": True} if arguments.ignore_eos else {}), **arguments.extra_body},
    )
    target = Target(arguments.url.rstrip("/").removesuffix("/v1"), arguments.api_key)
    prompts = _prompts(arguments)
    try:
        found = asyncio.run(_measure(arguments, target, prompts, workload))
    except HttpError as error:
        raise OSError(f"{target.url}: status {error.status}: {error}") from error
    report = Report.of(found)
    print(report.table())
    if arguments.json:
        content = {"options": _options(arguments), **report.as_json(), "requests": [vars(r) for r in found.records]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot_run(found, f"{arguments.num_prompts} requests, {_load(workload)}", arguments.plot)
    return 1 if report.failed else 0


async def _measure(arguments: argparse.Namespace, target: Target, prompts: list[Prompt], workload: Workload) -> Run:
    try:
        model = arguments.model or await served_model(target)
    except OSError as error:
        raise OSError(f"--url {target.url}: {error}") from error
    warmup = prompts[: arguments.warmup]
    if warmup:
        first = replace(workload, num_prompts=len(warmup), concurrency=len(warmup), rate=None)
        await drive(target, model, warmup, first, chat=arguments.chat, timeout=arguments.timeout)
    print(f"{target.url}, model {model}: {workload.num_prompts} requests, {_load(workload)}", file=sys.stderr)
    measured = prompts[arguments.warmup :]
    return await drive(target, model, measured, workload, chat=arguments.chat, timeout=arguments.timeout)


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    count = arguments.warmup + arguments.num_prompts
    if arguments.warmup < 0:
        raise ValueError(f"--warmup is {arguments.warmup}; it is at least 0")
    if arguments.file is not None:
        for name in ("input_len", "vocab_size"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no effect with --file: its lines are the prompts")
        return file_prompts(count, arguments.file)
    if arguments.chat:
        raise ValueError("--chat needs text: give --file")
    length = _INPUT_LEN if arguments.input_len is None else arguments.input_len
    vocab_size = _VOCAB_SIZE if arguments.vocab_size is None else arguments.vocab_size
    return random_prompts(count, length, vocab_size, arguments.seed)


def _load(workload: Workload) -> str:
    return f"{workload.concurrency} at a time" if workload.concurrency else f"{workload.rate:g} a second (Poisson)"


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    secret = {"run", "api_key", "command", "part"}
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if k not in secret}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found
