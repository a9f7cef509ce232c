"""The workers of a deployment as child processes of the router's: started, watched, and started again when they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from qwenjax_serving.deployment import SECRET_VARIABLE, Deployment, WorkerPlan
from qwenjax_serving.workers.process import ADDRESS_VARIABLE, PARENT_VARIABLE

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before a worker that ended is started again
_STDERR = 2  # standard output is the router's own: a line that says where it serves
_STOP = 10.0  # seconds that workers have to end by themselves


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
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self, joined: Callable[[str], bool]) -> None:
        """joined: whether the worker of a name is known to the router. Raises RuntimeError."""
        tasks = [asyncio.create_task(self._keep(plan, joined)) for plan in self._deployment.workers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Ends the workers, those that do not by themselves with SIGKILL."""
        self._stopping = True
        alive = [process for process in self.processes.values() if process.returncode is None]
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

    async def _keep(self, plan: WorkerPlan, joined: Callable[[str], bool]) -> None:
        pause, ever_joined = _FIRST_PAUSE, False
        while not self._stopping:
            process = self.processes[plan.name] = await self._start(plan)
            ended = asyncio.create_task(process.wait())
            while not ended.done():
                await asyncio.wait([ended], timeout=0.5)
                if not ended.done() and joined(plan.name):
                    pause, ever_joined = _FIRST_PAUSE, True
            if self._stopping:
                return
            if not ever_joined:
                raise RuntimeError(f"worker {plan.name} ended with status {process.returncode} before it was ready")
            logger.error(
                "worker %s ended with status %s; it starts again in %.0f s", plan.name, process.returncode, pause
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _start(self, plan: WorkerPlan) -> asyncio.subprocess.Process:
        # On a CPU the mesh is made of as many fake devices; elsewhere this says nothing.
        environment: Mapping[str, str] = {
            **self._environment,
            "JAX_NUM_CPU_DEVICES": str(plan.num_devices),
            **plan.env,
        }
        # A session of its own: Ctrl-C reaches the router alone, which ends the workers in order.
        return await asyncio.create_subprocess_exec(
            *self._command, "--name", plan.name, env=environment, start_new_session=True, stdout=_STDERR
        )
