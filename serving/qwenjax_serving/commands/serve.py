"""`qwenjax serve MODEL`: OpenAI's API over HTTP, with a router, prefill and decode workers as processes, or with
--colocated front end and engine in one."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from prometheus_client.registry import Collector

from qwenjax.checkpoint.resolve import resolve
from qwenjax.engine.build import DEFAULT_OPTIONS, EngineOptions, build_engine, check_options
from qwenjax.engine.engine import Engine
from qwenjax.llm import default_sampling_params
from qwenjax_serving.api.app import Settings, create_app
from qwenjax_serving.api.server import bind, serve, url_of
from qwenjax_serving.backend import DEFAULT_QUEUE, Backend, BackendError, ServedModel
from qwenjax_serving.commands.model_arguments import add_model_arguments
from qwenjax_serving.engine_backend import EngineBackend

_LOOK = 0.5  # seconds between two looks at whether the backend has failed
_HTTP_DEFAULTS = {
    "host": "127.0.0.1",
    "port": 8000,
    "max_queue": DEFAULT_QUEUE,
    "max_concurrent_requests": 1024,
    "max_body_mib": 4.0,
    "grace": 30,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_engine_options(parser)
    add_http_arguments(parser)
    add_deployment_arguments(parser)


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """Workers as processes of their own."""
    group = parser.add_argument_group(
        "prefill and decode apart",
        "By default a prefill and a decode worker share the devices at hand: --model-parallel is of the first, "
        "--data-parallel of the second, the other options of an engine are of both. Workers show no progress bars: "
        "--no-progress is for --colocated.",
    )
    add = group.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="deployment file: workers and meshes (see configs/deployments)",
    )
    add("--colocated", action="store_true", help="one engine that does both, in this process, on one mesh")
    add("--role", choices=("all", "router", "prefill", "decode", "both"), help="what to run of it (default: all)")
    add("--name", help="of the worker, with the role of one (default: the first)")
    add("--process", type=int, metavar="N", help="which of the worker's processes, where it has several (default: 0)")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """None stands for what is not given, so that what is given for no effect can be told from it."""
    add_model_arguments(parser, mesh="default: by the devices at hand, 1 with --colocated")
    add_engine_arguments(parser)
    parser.set_defaults(**dict.fromkeys(_engine_names()))


def _engine_names() -> set[str]:
    return set(EngineOptions.__annotations__) - {"revision", "progress"}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of an engine; their names are LLM's."""
    group = parser.add_argument_group("engine")
    by_default = DEFAULT_OPTIONS

    def add(name: str, text: str, metavar: str = "N") -> None:
        group.add_argument(name, type=int, metavar=metavar, help=text)

    add("--max-model-len", "tokens of a prompt and its output together (default: what the model allows)")
    add("--max-num-seqs", f"sequences that decode together on a data rank (default {by_default['max_num_seqs']})")
    add("--max-num-batched-tokens", "tokens of one prefill call and data rank (default: 256 on a CPU, 2048 on a GPU)")
    add("--num-steps", f"tokens a sequence draws in one call (default {by_default['num_steps']})")
    add("--num-pages", "pages of the KV cache on a data rank (default: what fits)")
    add("--page-size", f"tokens of a page (default {by_default['page_size']})")
    keep = argparse.BooleanOptionalAction
    text = "keep prompts' pages for prompts that begin alike (default: they are kept)"
    group.add_argument("--enable-prefix-caching", action=keep, help=text)
    add("--num-speculative-tokens", "drafts of a step (default: 1 on a GPU with a head, else 0)", "K")
    most = by_default["speculation_max_batch"]
    add("--speculation-max-batch", f"sequences of a data rank beyond which steps draft nothing (default {most})")


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Where and how the front end serves. What is not given is None until fill_http_arguments."""
    group = parser.add_argument_group("HTTP")
    add, by_default = group.add_argument, _HTTP_DEFAULTS
    add("--host", help=f"address to listen on; 0.0.0.0 for all (default {by_default['host']})")
    add("--port", type=int, metavar="N", help=f"0 for any that is free (default {by_default['port']})")
    add("--served-model-name", nargs="+", metavar="NAME", help="what requests call the model (default: MODEL)")
    add("--api-key", metavar="KEY", help="that requests must bear (default: $QWENJAX_API_KEY)")
    for name, kind, metavar, text in (
        ("max_queue", int, "N", "sequences that may wait before 503"),
        ("max_concurrent_requests", int, "N", "likewise for requests"),
        ("max_body_mib", float, "N", "largest body of a request"),
        ("grace", int, "S", "seconds that SIGTERM leaves what runs"),
    ):
        text += f" (default {by_default[name]:g})"
        add("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)


def fill_http_arguments(arguments: argparse.Namespace) -> None:
    """The defaults of add_http_arguments' options, where they were not given. Raises ValueError, naming the option and
    its limit, for those that were."""
    for name, value in {**_HTTP_DEFAULTS, "api_key": os.environ.get("QWENJAX_API_KEY")}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.api_key == "":  # a variable that was to hold a secret and does not is no word for none
        raise ValueError("--api-key or QWENJAX_API_KEY is empty; leave it out for none")
    for name, least in (("max_queue", 0), ("max_concurrent_requests", 1), ("grace", 0)):
        if getattr(arguments, name) < least:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(arguments, name)}; it is at least {least}")
    if not 0 <= arguments.port < 2**16:
        raise ValueError(f"--port is {arguments.port}; it is 0 to 65535")
    if not 0 < arguments.max_body_mib < math.inf:
        raise ValueError(f"--max-body-mib is {arguments.max_body_mib}; it is above 0")
    if "" in (arguments.served_model_name or ()):
        raise ValueError("--served-model-name has an empty name; leave it out for MODEL")


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; status 1 where engine or router fail. Raises ValueError for bad input and OSError
    for an address, before it loads."""
    check_deployment_arguments(arguments)
    fill_http_arguments(arguments)
    try:
        return _run(arguments)
    except BackendError as error:
        print(f"qwenjax serve: error: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="qwenjax: %(levelname)s: %(message)s")
    logging.getLogger("qwenjax").setLevel(logging.INFO)  # a line every ten seconds while the engine is busy
    if not arguments.colocated:
        logging.getLogger("qwenjax_serving").setLevel(logging.INFO)  # workers that join and leave
        from qwenjax_serving.launch import run_deployment  # ZeroMQ is not needed otherwise

        return run_deployment(arguments)
    with bind(arguments.host, arguments.port) as bound:
        folder = resolve(arguments.model, arguments.revision)
        defaults = default_sampling_params(folder)  # first: weights take minutes to read
        engine = _engine(arguments, folder)
        model = ServedModel(
            tuple(arguments.served_model_name or [arguments.model]),
            engine.tokenizer,
            min(engine.config.max_model_len, engine.config.num_pages * engine.config.page_size),
            defaults,
            int(time.time()),
        )
        asyncio.run(_serve(arguments, engine, model, bound))
    return 0


async def _serve(arguments: argparse.Namespace, engine: Engine, model: ServedModel, bound: socket.socket) -> None:
    await serve_backend(arguments, EngineBackend(engine, model, arguments.max_queue), bound)


async def serve_backend(
    arguments: argparse.Namespace, backend: Backend, bound: socket.socket, collectors: Iterable[Collector] = ()
) -> None:
    """Serves `backend` as add_http_arguments' options, filled, say, until SIGTERM or SIGINT, and closes it. Raises
    BackendError where the backend fails: who started the server is to start another."""
    settings = Settings(
        api_key=arguments.api_key,
        max_body_bytes=int(arguments.max_body_mib * 2**20),
        max_concurrent_requests=arguments.max_concurrent_requests,
    )

    def ready() -> None:
        print(f"qwenjax: serving {backend.model.names[0]} on {url_of(bound)}/v1", flush=True)

    async def failure() -> None:
        while backend.failure is None:
            await asyncio.sleep(_LOOK)

    try:
        await serve(
            create_app(backend, settings, collectors),
            bound,
            max_concurrent_requests=settings.max_concurrent_requests,
            grace=arguments.grace,
            on_ready=ready,
            until=failure(),
        )
    finally:
        await backend.aclose()
    if backend.failure is not None:
        raise BackendError(f"nothing can run any more: {backend.failure}") from backend.failure
    print("qwenjax: stopped", file=sys.stderr)


def check_deployment_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError for meshes without ranks and for options that would have no effect."""
    for name in ("model_parallel", "data_parallel"):
        if (ranks := getattr(arguments, name)) is not None and ranks < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {ranks}; it is at least 1")
    if arguments.config is None:
        for name in ("role", "name", "process"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} needs --config, a deployment file")
        check_options(engine_options(arguments))
        return
    if arguments.colocated:
        raise ValueError("--colocated has no effect with --config: the file says which workers there are")
    given = [*engine_options(arguments), "max_queue"]
    for name in [*given, "data_parallel", "model_parallel"]:
        if getattr(arguments, name) is not None:
            option, table = "--" + name.replace("_", "-"), "[router]" if name == "max_queue" else "[engine]"
            raise ValueError(f"{option} has no effect with --config: the file's {table} says it")
    if arguments.role in ("prefill", "decode", "both"):
        parser = argparse.ArgumentParser()
        add_http_arguments(parser)
        for name in vars(parser.parse_args([])):
            if name != "grace" and getattr(arguments, name) is not None:  # a worker has that too
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} has no effect with --role {arguments.role}: the router serves HTTP")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of an engine that were given, but for those of its mesh."""
    names = [name for name in EngineOptions.__annotations__ if name in _engine_names()]
    given = {name: getattr(arguments, name) for name in names if name not in ("data_parallel", "model_parallel")}
    return {name: value for name, value in given.items() if value is not None}


def _engine(arguments: argparse.Namespace, folder: Path) -> Engine:
    # `folder` is what `revision` named. Every option has a flag of its name; a new one without is an error here.
    given = {name: value for name in _engine_names() if (value := getattr(arguments, name)) is not None}
    return build_engine(folder, **cast(EngineOptions, {**given, "progress": arguments.progress}))
