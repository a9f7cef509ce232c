"""A worker as a process: `python -m qwenjax_serving.workers.process MODEL --config FILE --name NAME`.

`qwenjax serve --role` comes here too. The secret, and the router's address where the file's is not it, are in the
environment: command lines can be read by all.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from ipaddress import ip_address
from pathlib import Path

from qwenjax.checkpoint.fingerprint import checkpoint_fingerprint
from qwenjax.checkpoint.resolve import resolve
from qwenjax.engine.build import build_engine
from qwenjax.engine.handover import DecodeEngine, PrefillEngine
from qwenjax_serving.deployment import WorkerPlan, read_deployment, read_secret
from qwenjax_serving.workers.decode import DecodeWorker
from qwenjax_serving.workers.prefill import PrefillWorker

ADDRESS_VARIABLE = "QWENJAX_ROUTER"
PARENT_VARIABLE = "QWENJAX_PARENT"  # process id of who started the worker, where it is to end with that
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_worker(model: str, plan: WorkerPlan, address: str, secret: bytes, revision: str | None = None) -> None:
    """Loads and compiles, and works until it is told to end. Raises ValueError for what cannot be built."""
    if parent := os.environ.get(PARENT_VARIABLE):
        _end_with(int(parent))
    keep_pages_local(address)
    folder = resolve(model, revision)
    fingerprint = checkpoint_fingerprint(folder)
    if plan.role == "prefill":
        prefill = build_engine(folder, PrefillEngine, **plan.options)
        asyncio.run(_run(PrefillWorker, plan, prefill, fingerprint, address, secret))
    else:
        decode = build_engine(folder, DecodeEngine, **plan.options)
        asyncio.run(_run(DecodeWorker, plan, decode, fingerprint, address, secret))


def keep_pages_local(address: str) -> None:
    """Lets UCX, which NIXL moves pages with, use the loopback interface alone where the router's address says that all
    workers are on one machine; by itself it listens on every interface. To be called before NIXL is imported. Who has
    set UCX_NET_DEVICES, in the environment or in the worker's `env`, is not overruled."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost" or (_is_number(host) and ip_address(host).is_loopback):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _end_with(parent: int) -> None:
    """Lets this process end when its parent does. Raises RuntimeError where that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl, which says nothing of that
        raise RuntimeError(f"process {parent}, which started this worker, has ended")


async def _run(
    kind: type[PrefillWorker] | type[DecodeWorker],
    plan: WorkerPlan,
    engine: PrefillEngine | DecodeEngine,
    fingerprint: str,
    address: str,
    secret: bytes,
) -> None:
    await kind(plan.name, engine, fingerprint, address, secret, plan.staging_pages).run()  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description="A prefill or decode worker.")
    parser.add_argument("model")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--revision")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"{arguments.name}: %(levelname)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        deployment = read_deployment(arguments.config)
        address = os.environ.get(ADDRESS_VARIABLE, deployment.address)
        run_worker(arguments.model, deployment.worker(arguments.name), address, read_secret(), arguments.revision)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"{arguments.name}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
