"""`qwenjax serve MODEL`: OpenAI's API over HTTP, with a router, prefill and decode workers as processes, or with
--colocated front end and engine in one."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from prometheus_client.registry import Collector

from qwenjax.checkpoint.resolve import resolve
from qwenjax.engine.build import EngineOptions, build_engine
from qwenjax.engine.config import MEASURED_SPECULATION_BATCH
from qwenjax.engine.engine import Engine
from qwenjax.llm import default_sampling_params
from qwenjax_serving.api.app import Settings, create_app
from qwenjax_serving.api.server import bind, serve, url_of
from qwenjax_serving.backend import DEFAULT_QUEUE, Backend, BackendError, ServedModel
from qwenjax_serving.commands.model_arguments import add_model_arguments
from qwenjax_serving.engine_backend import EngineBackend

_LOOK = 0.5  # seconds between two looks at whether the backend has failed


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
    add_model_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(data_parallel=None, model_parallel=None)  # what is not given depends on the devices


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of an engine; their names are LLM's."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--max-model-len", type=int, metavar="N", help="tokens of a prompt and its output together")
    add("--max-num-seqs", type=int, default=32, metavar="N", help="sequences that decode together on a data rank")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one prefill call and data rank")
    add("--num-steps", type=int, default=8, metavar="N", help="tokens a sequence draws in one call (default 8)")
    add("--num-pages", type=int, metavar="N", help="pages of the KV cache on a data rank (default: what fits)")
    add("--page-size", type=int, default=64, metavar="N", help="tokens of a page (default %(default)s)")
    keep = argparse.BooleanOptionalAction
    add("--enable-prefix-caching", action=keep, default=True, help="keep prompts' pages for prompts that begin alike")
    add("--num-speculative-tokens", type=int, metavar="K", help="drafts of a step; default 1 on a GPU with a head")
    add(
        "--speculation-max-batch",
        type=int,
        default=MEASURED_SPECULATION_BATCH,
        metavar="N",
        help="sequences beyond which steps draft nothing (default %(default)s)",
    )


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Where and how the front end serves."""
    group = parser.add_argument_group("HTTP")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default %(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="0 for any that is free (default %(default)s)")
    add("--served-model-name", nargs="+", metavar="NAME", help="what requests call the model (default: MODEL)")
    add("--api-key", default=os.environ.get("QWENJAX_API_KEY"), help="that requests must bear (or $QWENJAX_API_KEY)")
    add("--max-queue", type=int, default=DEFAULT_QUEUE, metavar="N", help="sequences that may wait before 503")
    add("--max-concurrent-requests", type=int, default=1024, metavar="N", help="likewise for requests (default 1024)")
    add("--max-body-mib", type=float, default=4.0, metavar="N", help="largest body of a request (default %(default)s)")
    add("--grace", type=int, default=30, metavar="S", help="seconds that SIGTERM leaves what runs (default 30)")


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; status 1 where engine or router fail. Raises ValueError for bad input and OSError
    for an address, before it loads."""
    check_http_arguments(arguments)
    check_deployment_arguments(arguments)
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
        engine = _engine(arguments, folder)
        model = ServedModel(
            tuple(arguments.served_model_name or [arguments.model]),
            engine.tokenizer,
            min(engine.config.max_model_len, engine.config.num_pages * engine.config.page_size),
            default_sampling_params(folder),
            int(time.time()),
        )
        asyncio.run(_serve(arguments, engine, model, bound))
    return 0


async def _serve(arguments: argparse.Namespace, engine: Engine, model: ServedModel, bound: socket.socket) -> None:
    await serve_backend(arguments, EngineBackend(engine, model, arguments.max_queue), bound)


async def serve_backend(
    arguments: argparse.Namespace, backend: Backend, bound: socket.socket, collectors: Iterable[Collector] = ()
) -> None:
    """Serves `backend` as add_http_arguments' options say, until SIGTERM or SIGINT, and closes it. Raises BackendError
    where the backend fails: who started the server is to start another."""
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


def check_http_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError, naming the option and its limit."""
    for name, least in (("max_queue", 0), ("max_concurrent_requests", 1), ("grace", 0)):
        if getattr(arguments, name) < least:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(arguments, name)}; it is at least {least}")
    if not 0 <= arguments.port < 2**16:
        raise ValueError(f"--port is {arguments.port}; it is 0 to 65535")
    if not arguments.max_body_mib > 0:
        raise ValueError(f"--max-body-mib is {arguments.max_body_mib}; it is above 0")
    if arguments.api_key == "":
        raise ValueError("--api-key is empty; leave it out for none")


def check_deployment_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError for meshes without ranks and for options that would have no effect."""
    for name in ("model_parallel", "data_parallel"):
        if (ranks := getattr(arguments, name)) is not None and ranks < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {ranks}; it is at least 1")
    if arguments.config is None:
        for name in ("role", "name", "process"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} needs --config, a deployment file")
        return
    if arguments.colocated:
        raise ValueError("--colocated has no effect with --config: the file says which workers there are")
    given = engine_options(arguments)
    given |= {name: 0 for name in ("data_parallel", "model_parallel") if getattr(arguments, name) is not None}
    given |= {"max_queue": 0} if arguments.max_queue != DEFAULT_QUEUE else {}
    for name in given:
        option, table = "--" + name.replace("_", "-"), "[router]" if name == "max_queue" else "[engine]"
        raise ValueError(f"{option} has no effect with --config: the file's {table} says it")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of an engine that were given, but for those of its mesh."""
    parser = argparse.ArgumentParser()
    _add_engine_options(parser)
    elsewhere = ("model", "revision", "progress", "data_parallel", "model_parallel")
    return {
        name: getattr(arguments, name)
        for name, default in vars(parser.parse_args([arguments.model])).items()
        if name not in elsewhere and getattr(arguments, name) != default
    }


def check_no_http_arguments(arguments: argparse.Namespace, role: str) -> None:
    """Raises ValueError for options of the front end, which a worker does not have, but for the grace."""
    parser = argparse.ArgumentParser()
    add_http_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name != "grace" and getattr(arguments, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --role {role}: the router serves HTTP")


def _engine(arguments: argparse.Namespace, folder: Path) -> Engine:
    # `folder` is what `revision` named. Every option has a flag of its name; a new one without is an error here.
    names = set(EngineOptions.__annotations__) - {"revision"}
    options = cast(EngineOptions, {name: getattr(arguments, name) for name in names})
    for axis in ("data_parallel", "model_parallel"):
        options[axis] = 1 if options[axis] is None else options[axis]
    return build_engine(folder, **options)
