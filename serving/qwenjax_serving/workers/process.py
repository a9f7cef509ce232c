"""A worker as a process: `python -m qwenjax_serving.workers.process MODEL --config FILE --name NAME [--process N]`.

`qwenjax serve --role` comes here too. The secret, and the router's address where the file's is not it, are in the
environment: command lines can be read by all. So is the address where the processes of a worker of several meet, where
whoever starts them all chose it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import jax

from qwenjax.checkpoint.fingerprint import checkpoint_fingerprint
from qwenjax.checkpoint.resolve import resolve
from qwenjax.engine.build import build_engine
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.decode_engine import DecodeEngine
from qwenjax.engine.prefill_engine import PrefillEngine
from qwenjax.mesh import MeshError
from qwenjax_serving.deployment import WorkerPlan, read_deployment
from qwenjax_serving.protocol.secret import read_secret
from qwenjax_serving.transfer.local_transport import LocalTransport
from qwenjax_serving.workers.decode import DecodeWorker
from qwenjax_serving.workers.follower import Follower
from qwenjax_serving.workers.prefill import PrefillWorker
from qwenjax_serving.workers.worker import GRACE, Worker, staging_slots

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "QWENJAX_ROUTER"
COORDINATOR_VARIABLE = "QWENJAX_COORDINATOR"
PARENT_VARIABLE = "QWENJAX_PARENT"  # process id of who started the worker, where it is to end with that
LOCAL_DEVICES_VARIABLE = "QWENJAX_LOCAL_DEVICES"  # of a worker's process that shares a host with the others: its GPUs
# Of the caches' memory where prefill and decode share a device: prompts leave prefill's cache when they are run.
_PREFILL_SHARE = 0.25
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_worker(
    model: str,
    plan: WorkerPlan,
    address: str,
    secret: bytes,
    revision: str | None = None,
    process: int = 0,
    grace: float = GRACE,
) -> None:
    """Loads and compiles, and works until it is told to end. process: which of the worker's this is; those after the
    first end with it. grace: seconds that what runs has when it is told to end. Raises ValueError for what cannot be
    built."""
    if parent := os.environ.get(PARENT_VARIABLE):
        _end_with(int(parent))
    if not 0 <= process < plan.processes:
        raise ValueError(f"--process is {process}; {plan.name} has processes 0 to {plan.processes - 1}")
    coordinator = None
    if plan.processes > 1:
        coordinator = _coordinator(plan)
        _join(plan, process, coordinator)
    keep_pages_local(address, coordinator)
    try:
        folder = resolve(model, revision)
        fingerprint = "" if process else checkpoint_fingerprint(folder)
        if plan.role == "both":
            asyncio.run(_work(_both_workers(plan, folder, fingerprint, address, secret), grace))
            return
        kind: type[PrefillEngine] | type[DecodeEngine] = PrefillEngine if plan.role == "prefill" else DecodeEngine
        landing = _landing_pages(plan) if kind is DecodeEngine else None
        engine = build_engine(folder, kind, landing_pages=landing, **plan.options)
        if process:
            asyncio.run(_follow(plan, engine, secret, grace))
        else:
            asyncio.run(_work([partial(_worker, plan, engine, fingerprint, address, secret)], grace))
    except Exception as error:
        if plan.processes == 1:
            raise
        logger.error("%s: process %d ends: %s", plan.name, process, error, exc_info=error)
        logging.shutdown()
        os._exit(2)  # JAX would wait minutes for processes that may be gone


def _coordinator(plan: WorkerPlan) -> str:
    coordinator = os.environ.get(COORDINATOR_VARIABLE, plan.coordinator)
    if coordinator is None:
        raise ValueError(f"{plan.name} has {plan.processes} processes: it needs a coordinator, HOST:PORT, in the file")
    return coordinator


def _join(plan: WorkerPlan, process: int, coordinator: str) -> None:
    """Makes this process one of those of the worker's mesh."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    local = os.environ.get(LOCAL_DEVICES_VARIABLE)
    jax.distributed.initialize(
        coordinator,
        plan.processes,
        process,
        None if local is None else [int(device) for device in local.split(",")],
        # Slurm and MPI would have a process use one GPU alone: all else is said here.
        cluster_detection_method="deactivate",
        # By itself on every interface. The address that a name stands for need not be one of this host's.
        coordinator_bind_address=coordinator if _is_loopback(coordinator) or _is_ip(coordinator) else None,
    )


def keep_pages_local(address: str, coordinator: str | None = None) -> None:
    """Lets UCX, which NIXL moves pages with, use the loopback interface alone where the router's address, and that of
    the worker's coordinator where it has one, say that all is on one machine; by itself it listens on every interface.
    To be called before NIXL is imported. Who has set UCX_NET_DEVICES, in the environment or in the worker's `env`, is
    not overruled."""
    if _is_loopback(address.removeprefix("tcp://")) and (coordinator is None or _is_loopback(coordinator)):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _is_loopback(address: str) -> bool:
    """Of HOST:PORT."""
    host = _host(address)
    return host == "localhost" or (_is_ip(address) and ip_address(host).is_loopback)


def _is_ip(address: str) -> bool:
    """Of HOST:PORT, whether the host is no name."""
    try:
        ip_address(_host(address))
    except ValueError:
        return False
    return True


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _end_with(parent: int) -> None:
    """Lets this process end when its parent does. Raises RuntimeError where that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl, which says nothing of that
        raise RuntimeError(f"process {parent}, which started this worker, has ended")


def _both_workers(
    plan: WorkerPlan, folder: Path, fingerprint: str, address: str, secret: bytes
) -> list[Callable[[], Worker]]:
    """Loads both engines of a plan of role "both". Raises MeshError where their meshes cannot be in one process."""
    first, second = plan.parts
    found = jax.devices()
    if len(found) < plan.num_devices:
        raise MeshError(f"{plan.name}: its meshes have {plan.num_devices} devices; {len(found)} are here")
    if found[0].platform == "cpu" and max(part.num_devices for part in plan.parts) > 1:
        raise MeshError(
            f"{plan.name}: on a CPU meshes of several devices need a process each, [[prefill]] and [[decode]]: queued "
            "programs of two can wait for each other for ever"
        )
    share = _PREFILL_SHARE if plan.share_device else 1.0
    prefill = build_engine(folder, PrefillEngine, devices=found, cache_share=share, **first.options)
    others = found if plan.share_device else found[first.num_devices :]
    loaded = prefill.model if plan.share_device else None
    landing = _landing_pages(second)
    decode = build_engine(folder, DecodeEngine, devices=others, loaded=loaded, landing_pages=landing, **second.options)
    transport = partial(LocalTransport, peers={})
    return [
        partial(_worker, part, engine, fingerprint, address, secret, transport)
        for part, engine in ((first, prefill), (second, decode))
    ]


def _landing_pages(plan: WorkerPlan) -> Callable[[EngineConfig], int] | None:
    """Of a decode worker on GPUs: pages leave its staging buffer for arrays in XLA's pool, all at once at most."""
    if jax.devices()[0].platform == "cpu":
        return None
    return partial(staging_slots, asked=plan.staging_pages, on_gpus=True)


def _worker(plan: WorkerPlan, engine: PrefillEngine | DecodeEngine, *arguments: Any) -> Worker:
    """arguments: fingerprint, address, secret, and how a transport is made where that is not NIXL's."""
    fingerprint, address, secret, *transport = arguments
    common = fingerprint, address, secret, plan.staging_pages, *transport
    if isinstance(engine, PrefillEngine):
        return PrefillWorker(plan.name, engine, *common)
    return DecodeWorker(plan.name, engine, *common, min_tokens_per_second=plan.min_tokens_per_second)


async def _work(make: Iterable[Callable[[], Worker]], grace: float) -> None:
    """Until all workers end, or one with an error."""
    workers = [one() for one in make]

    def leave() -> None:
        for worker in workers:
            worker.leave(grace)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _follow(plan: WorkerPlan, engine: PrefillEngine | DecodeEngine, secret: bytes, grace: float) -> None:
    follower = Follower(plan.name, engine, secret, plan.staging_pages)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, follower.leave, grace)
    await follower.run()


def main() -> int:
    parser = argparse.ArgumentParser(description="A prefill or decode worker.")
    parser.add_argument("model")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--revision")
    parser.add_argument("--process", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"{arguments.name}: %(levelname)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        deployment = read_deployment(arguments.config)
        address = os.environ.get(ADDRESS_VARIABLE, deployment.address)
        plan = deployment.worker(arguments.name)
        run_worker(arguments.model, plan, address, read_secret(), arguments.revision, arguments.process)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"{arguments.name}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
