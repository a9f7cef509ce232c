"""`qwenjax serve MODEL`: a router with its workers, and with --config FILE the router alone, or one of the workers."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from qwenjax.checkpoint.resolve import resolve
from qwenjax.config import ModelConfig
from qwenjax.engine.build import check_max_model_len
from qwenjax.llm import default_sampling_params
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.api.server import bind
from qwenjax_serving.backend import ServedModel
from qwenjax_serving.commands import serve
from qwenjax_serving.default_deployment import count_gpus, default_deployment
from qwenjax_serving.deployment import Deployment, read_deployment
from qwenjax_serving.protocol.secret import SECRET_VARIABLE, read_secret
from qwenjax_serving.router.backend import RouterBackend
from qwenjax_serving.router.metrics import RouterCollector
from qwenjax_serving.supervisor import Supervisor
from qwenjax_serving.workers.process import run_worker

logger = logging.getLogger(__name__)

_WORKERS = ("prefill", "decode", "both")  # roles


def run_deployment(arguments: argparse.Namespace) -> int:
    """Runs the role that the arguments name, by default all. Raises ValueError for bad input, OSError for an
    address, ChildProcessError among them for a worker that does not start."""
    if arguments.role in _WORKERS:
        return _run(arguments)
    # Before it serves, as then: SIGTERM ends the workers and removes the file. While a loop runs that has handlers.
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        if arguments.config is not None:
            return _run(arguments)
        text = _default_deployment(arguments)
        with tempfile.TemporaryDirectory(prefix="qwenjax-") as folder:
            arguments.config = Path(folder, "deployment.toml")  # workers read it too
            arguments.config.write_text(text, encoding="utf-8")
            return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(*_: object) -> None:
    print("qwenjax: stopped", file=sys.stderr)
    raise SystemExit(0)


def _default_deployment(arguments: argparse.Namespace) -> str:
    if arguments.max_queue < 1:
        raise ValueError(f"--max-queue is {arguments.max_queue}; a router's is at least 1 (0 is for --colocated)")
    config = ModelConfig.from_folder(resolve(arguments.model, arguments.revision))
    options = serve.engine_options(arguments)
    check_max_model_len(arguments.max_model_len, config)
    meshes = arguments.model_parallel, arguments.data_parallel
    text = default_deployment(config, count_gpus(), options, *meshes, max_waiting=arguments.max_queue)
    logger.info("no --config: this deployment\n%s", text)
    return text


def _run(arguments: argparse.Namespace) -> int:
    deployment, role = read_deployment(arguments.config), arguments.role or "all"
    if role in _WORKERS:
        plan = deployment.worker(arguments.name or f"{role}-0")
        if plan.role != role:
            raise ValueError(f"--name {plan.name}: {arguments.config} makes it a {plan.role} worker, not --role {role}")
        for variable, value in plan.env.items():
            if os.environ.get(variable) != value:
                raise ValueError(
                    f"{plan.name}: {arguments.config} says {variable}={value}; export it before you start it"
                )
        process, secret = arguments.process or 0, read_secret()
        _check_address(arguments.config, deployment)
        try:
            where = deployment.address, secret, arguments.revision
            run_worker(arguments.model, plan, *where, process, arguments.grace)
        except RuntimeError as error:  # of GPU memory, transfers or other processes: as workers.process ends
            print(f"qwenjax serve: error: {plan.name}: {error}", file=sys.stderr)
            return 2
        return 0
    for option in ("name", "process"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} is for --role prefill, decode and both; this is --role {role}")
    if role == "router":
        _check_address(arguments.config, deployment)
    if role == "all" and any(plan.role != "both" for plan in deployment.workers) and find_spec("nixl") is None:
        raise ValueError(
            "prefill and decode in processes of their own need NIXL: pip install 'qwenjax[disagg]'; --colocated serves "
            "with one engine that does both, without it"
        )
    given = os.environ.get(SECRET_VARIABLE)
    secret = read_secret() if role == "router" or given else secrets.token_urlsafe(32).encode()
    with bind(arguments.host, arguments.port) as bound:
        asyncio.run(_serve(arguments, deployment, secret, bound, with_workers=role == "all"))
    return 0


def _check_address(path: Path, deployment: Deployment) -> None:
    """Raises ValueError where router and workers that are started one by one would not find each other."""
    if deployment.address.endswith(":0"):
        raise ValueError(f"{path}: [router] needs an address that workers can be told, tcp://HOST:PORT")


async def _serve(
    arguments: argparse.Namespace, deployment: Deployment, secret: bytes, bound: socket.socket, with_workers: bool
) -> None:
    folder = resolve(arguments.model, arguments.revision)
    config = ModelConfig.from_folder(folder)
    # What the front end reads of the checkpoint, before workers take minutes to read the rest.
    tokenizer, defaults = Tokenizer.from_folder(folder), default_sampling_params(folder)
    try:
        backend = RouterBackend(deployment.address, secret, config.vocab_size, deployment.settings)
    except OSError as error:
        raise OSError(f"{arguments.config}: [router] address: {error}") from error
    path = Path(arguments.config)
    supervisor = Supervisor(arguments.model, path, deployment, backend.address, secret, arguments.revision)
    watch = asyncio.create_task(supervisor.run(backend.knows)) if with_workers else None
    ready = asyncio.create_task(backend.wait_for(deployment.names if with_workers else []))
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    stopped = asyncio.create_task(told.wait())
    try:
        awaited = [ready, stopped] if watch is None else [ready, stopped, watch]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if told.is_set():
            print("qwenjax: stopped", file=sys.stderr)
            return
        if watch is not None and watch.done():
            watch.result()
        if watch is not None:
            backend.fail_with(watch)
        backend.model = ServedModel(
            tuple(arguments.served_model_name or [arguments.model]),
            tokenizer,
            ready.result(),
            defaults,
            int(time.time()),
        )
        await serve.serve_backend(arguments, backend, bound, [RouterCollector(backend.router)])
    finally:
        ready.cancel()
        stopped.cancel()
        await backend.aclose()  # a second time where it has served
        if watch is not None:
            await supervisor.stop()
            watch.cancel()
