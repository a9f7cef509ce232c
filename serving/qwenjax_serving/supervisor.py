"""The workers of a deployment as child processes of the router's: started, watched, and started again when they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from qwenjax_serving.deployment import Deployment, WorkerPlan
from qwenjax_serving.protocol.secret import SECRET_VARIABLE
from qwenjax_serving.workers.process import (
    ADDRESS_VARIABLE,
    COORDINATOR_VARIABLE,
    LOCAL_DEVICES_VARIABLE,
    PARENT_VARIABLE,
)

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before a worker that ended is started again
_STDERR = 2  # standard output is the router's own: a line that says where it serves
_LOOK = 0.5  # seconds between two looks at a worker
_STOP = 10.0  # seconds that workers have to end by themselves
# Seconds beyond `transfer_timeout` without the router, after which a worker that had joined it is started again: one
# that joins anew first waits for its reads, of several processes 40 s beyond their deadline.
_GONE = 60.0


class Supervisor:
    """`run` starts the workers and returns only with an error: where one ends before it has ever joined."""

    def __init__(
        self, model: str, path: Path, deployment: Deployment, address: str, secret: bytes, revision: str | None = None
    ) -> None:
        """path: of the deployment's file, which workers read too; address: that the router listens on."""
        self._command = [sys.executable, "-m", "qwenjax_serving.workers.process", model, "--config", str(path)]
        self._command += ["--revision", revision] if revision else []
        self._environment = os.environ | {
            ADDRESS_VARIABLE: address,
            SECRET_VARIABLE: secret.decode(),
            PARENT_VARIABLE: str(os.getpid()),
        }
        self._deployment = deployment
        self._stopping = False
        self.processes: dict[str, list[asyncio.subprocess.Process]] = {}

    async def run(self, joined: Callable[[str], bool]) -> None:
        """joined: whether the worker of a name is known to the router. Raises ChildProcessError."""
        tasks = [asyncio.create_task(self._keep(plan, joined)) for plan in self._deployment.workers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Ends the workers, those that do not by themselves with SIGKILL."""
        self._stopping = True
        await _end([process for processes in self.processes.values() for process in processes])

    async def _keep(self, plan: WorkerPlan, joined: Callable[[str], bool]) -> None:
        pause, ever_joined, now = _FIRST_PAUSE, False, asyncio.get_running_loop().time
        gone = self._deployment.settings.transfer_timeout + _GONE
        while not self._stopping:
            seen: float | None = None  # when this process was last known to the router
            processes = self.processes[plan.name] = await self._start(plan)
            ended = [asyncio.create_task(process.wait()) for process in processes]
            while not any(one.done() for one in ended):
                await asyncio.wait(ended, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                if any(one.done() for one in ended):
                    break
                if all(map(joined, plan.names)):
                    pause, ever_joined, seen = _FIRST_PAUSE, True, now()
                elif seen is not None and now() - seen > gone:
                    logger.error("worker %s has been lost to the router for %g s: it is ended", plan.name, gone)
                    await _end(processes)
            if self._stopping:
                return
            status = next(one.result() for one in ended if one.done())
            await _end(processes)  # the others of a worker of several are of no use without it
            if not ever_joined:
                raise ChildProcessError(f"worker {plan.name} ended with status {status} before it was ready")
            logger.error("worker %s ended with status %s; it starts again in %.0f s", plan.name, status, pause)
            await asyncio.sleep(pause)
            # Else what the router still knows would count as the new one, which would then be lost while it loads.
            while any(map(joined, plan.names)) and not self._stopping:
                await asyncio.sleep(_LOOK)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _start(self, plan: WorkerPlan) -> list[asyncio.subprocess.Process]:
        # On a CPU the mesh is made of as many fake devices; elsewhere this says nothing.
        own = {"JAX_NUM_CPU_DEVICES": str(plan.num_devices // plan.processes)}
        if plan.processes > 1:
            own[COORDINATOR_VARIABLE] = plan.coordinator or f"127.0.0.1:{_free_port()}"
        return [await self._start_process(plan, process, own) for process in range(plan.processes)]

    async def _start_process(
        self, plan: WorkerPlan, process: int, own: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        environment = {**self._environment, **own}
        if plan.processes > 1:
            each = plan.num_devices // plan.processes
            environment[LOCAL_DEVICES_VARIABLE] = ",".join(map(str, range(process * each, (process + 1) * each)))
        # A session of its own: Ctrl-C reaches the router alone, which ends the workers in order.
        return await asyncio.create_subprocess_exec(
            *(*self._command, "--name", plan.name, "--process", str(process)),
            env={**environment, **plan.env},
            start_new_session=True,
            stdout=_STDERR,
        )


async def _end(processes: Iterable[asyncio.subprocess.Process]) -> None:
    """Tells processes to end; those that do not by themselves are killed."""
    alive = [process for process in processes if process.returncode is None]
    for process in alive:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # one that was stopped would not hear it
    waiting = [asyncio.create_task(process.wait()) for process in alive]
    if waiting:
        await asyncio.wait(waiting, timeout=_STOP)
    for process in alive:
        if process.returncode is None:
            logger.warning("process %d did not end within %.0f s: killed", process.pid, _STOP)
            process.kill()
    await asyncio.gather(*waiting)


def _free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
