"""A router in this process, and its workers as processes that tests may kill, stop and start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from qwenjax import RequestOutput, SamplingParams
from qwenjax.config import ModelConfig
from qwenjax.tokenizer import Tokenizer
from qwenjax_serving.api.app import create_app
from qwenjax_serving.api.server import bind, serve, url_of
from qwenjax_serving.backend import ServedModel
from qwenjax_serving.deployment import Deployment, read_deployment
from qwenjax_serving.protocol.secret import SECRET_VARIABLE
from qwenjax_serving.router.backend import RouterBackend
from qwenjax_serving.router.fleet import Worker
from qwenjax_serving.router.metrics import RouterCollector
from qwenjax_serving.workers.process import ADDRESS_VARIABLE, COORDINATOR_VARIABLE, PARENT_VARIABLE
from tests.conftest import FAKE_CPU_DEVICES

T = TypeVar("T")

SECRET = "a secret of the tests alone"
START = 300.0  # seconds that workers may take to load and compile on a busy machine


class Cluster:
    """Everything that a test does to the router happens on the loop of a thread, by `run`."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config = folder, config
        self.deployment: Deployment = read_deployment(config)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.backend = self.run(self._make("tcp://127.0.0.1:0"))

    async def _make(self, address: str) -> RouterBackend:
        size = ModelConfig.from_folder(self.folder).vocab_size
        return RouterBackend(address, SECRET.encode(), size, self.deployment.settings)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def restart_router(self) -> None:
        address = self.backend.address
        self.run(self.backend.aclose())
        self.backend = self.run(self._make(address))
        self.wait_for_workers()

    def start(self, names: Iterable[str] | None = None) -> None:
        for plan in self.deployment.workers:
            if names is not None and plan.name not in names:
                continue
            command = [sys.executable, "-m", "qwenjax_serving.workers.process", str(self.folder)]
            command += ["--config", str(self.config), "--name", plan.name]
            environment = os.environ | {
                ADDRESS_VARIABLE: self.backend.address,
                SECRET_VARIABLE: SECRET,
                PARENT_VARIABLE: str(os.getpid()),
                # As many as the tests have: compiled programs are kept by the number of devices.
                "JAX_NUM_CPU_DEVICES": str(FAKE_CPU_DEVICES),
            }
            if plan.processes > 1:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    environment[COORDINATOR_VARIABLE] = f"127.0.0.1:{free.getsockname()[1]}"
                environment["JAX_NUM_CPU_DEVICES"] = str(plan.num_devices // plan.processes)
            environment |= plan.env
            for process in range(plan.processes):
                started = subprocess.Popen([*command, "--process", str(process)], env=environment)
                self.processes[f"{plan.name}/{process}" if process else plan.name] = started

    def wait_for_workers(self) -> None:
        alive = (plan for plan in self.deployment.workers if self.processes[plan.name].poll() is None)
        names = {name for plan in alive for name in plan.names}
        self.wait_until(lambda: {worker.hello.name for worker in self.workers} >= names, START)
        tokenizer = Tokenizer.from_folder(self.folder)
        longest = self.run(self.backend.wait_for())
        self.backend.model = ServedModel(("model",), tokenizer, longest, SamplingParams(), 0)

    @property
    def workers(self) -> list[Worker]:
        return list(self.backend.router.workers.values())

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.hello.name == name)

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            for name, process in self.processes.items():
                assert process.poll() in (None, -signal.SIGKILL, 0), f"{name} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"not within {timeout} s"
            time.sleep(0.02)

    def wait_until_idle(self, timeout: float) -> None:
        """Until no worker holds anything, by what it says itself from now on."""
        before = [worker.status for worker in self.workers]

        def idle() -> bool:
            router = self.backend.router
            if router.num_running or router.waiting or self.backend._requests:
                return False
            return all(
                not any(worker.status is old for old in before) and self.is_idle(worker) for worker in self.workers
            )

        self.wait_until(idle, timeout)

    def is_idle(self, worker: Worker) -> bool:
        status = worker.status
        return (
            worker.load == 0
            and status is not None
            and status.held == 0
            and status.staging_free == worker.hello.staging.num_slots
            and status.stats.num_running == 0
            and set(status.stats.free_pages) == {status.stats.num_pages}
        )

    async def generate(
        self, request_id: str, prompt: list[int], params: SamplingParams, salt: str | None = None
    ) -> RequestOutput:
        return [output async for output in await self.stream(request_id, prompt, params, salt)][-1]

    async def stream(
        self, request_id: str, prompt: list[int], params: SamplingParams, salt: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        return await self.backend.generate(request_id, prompt, None, params, salt)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serves HTTP, with all metrics, on the router's loop; its URL."""
        app = create_app(self.backend, collectors=[RouterCollector(self.backend.router)])
        with bind("127.0.0.1", 0) as bound:
            ready = threading.Event()
            work = serve(app, bound, max_concurrent_requests=64, grace=1, on_ready=ready.set)
            serving = asyncio.run_coroutine_threadsafe(work, self._loop)
            assert ready.wait(10)
            yield url_of(bound)
            serving.cancel()

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        self.run(self.backend.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextmanager
def cluster(folder: Path, config: Path) -> Iterator[Cluster]:
    made = Cluster(folder, config)
    try:
        made.start()
        made.wait_for_workers()
        yield made
    finally:
        made.close()


@contextmanager
def clusters_at_once(model: Path, folder: Path, deployments: Mapping[str, str]) -> Iterator[dict[str, Cluster]]:
    """Clusters of one model by the names of these deployment files' texts, which are written to a folder: all are
    started before any is waited for, so that they compile at the same time."""
    found = dict[str, Cluster]()
    try:
        for name, text in deployments.items():
            path = folder / f"{len(found)}.toml"
            path.write_text(text)
            found[name] = Cluster(model, path)
            found[name].start()
        yield found
    finally:
        for made in found.values():
            made.close()
