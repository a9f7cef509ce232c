"""What prefill and decode workers share: an engine, a staging buffer, and the conversation with the router."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Coroutine
from typing import Any, ClassVar

import jax

from qwenjax.engine.async_engine import AsyncEngine
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.engine import Engine
from qwenjax.engine.handover import devices_for, kv_layout, num_planes, num_processes, plane_bounds, ranks_here
from qwenjax_ffi.symmetric_memory import bytes_outside_xla
from qwenjax_serving.protocol.messages import (
    READ_TIMES,
    Failed,
    Goodbye,
    Hello,
    Leaving,
    Message,
    Ping,
    Rejoin,
    Release,
    Role,
    Status,
    ToWorker,
    Unwelcome,
    Welcome,
)
from qwenjax_serving.protocol.sockets import WorkerSocket
from qwenjax_serving.transfer.device_staging import DeviceStagingBuffer
from qwenjax_serving.transfer.local_transport import LocalTransport
from qwenjax_serving.transfer.nixl_transport import NixlTransport
from qwenjax_serving.transfer.staging import StagingBuffer, joined
from qwenjax_serving.workers.peers import Peers, PeerSilence

logger = logging.getLogger(__name__)

_BEAT = 0.5  # seconds between two signs of life; routers wait for several
_HELLO_AGAIN = 2.0  # seconds without a Welcome after which a Hello is repeated
_ROUTER_SILENCE = 10.0  # seconds after which what runs for a router is let go
# An H200 prefills 61,467 of Qwen3-30B-A3B's in a second (bench/results/engine-h200.md), and prompts hold their slots
# until the decode worker has run with them: with fewer, where sequences are short, prefill would wait for slots.
_TOKENS_IN_FLIGHT = 32_768
GRACE = 30.0  # seconds that what runs has by default when a worker is asked to end


class Worker(ABC):
    """One worker. `run` ends after `leave`, once what runs has ended, or with an error."""

    role: ClassVar[Role]

    def __init__(
        self,
        name: str,
        engine: Engine,
        fingerprint: str,
        address: str,
        secret: bytes,
        staging_pages: int | None = None,
        transport: Callable[[str], NixlTransport | LocalTransport] = NixlTransport,
    ) -> None:
        """fingerprint: of the checkpoint. staging_pages: of the buffer that pages travel through, by default as
        make_staging says. transport: made with the worker's instance when it runs."""
        self.name, self.instance = name, f"{name}-{uuid.uuid4().hex[:12]}"
        self.staging = make_staging(engine, staging_pages)
        self.peers: Peers | None = None
        self._make_transport = transport
        self._address, self._secret, self._fingerprint = address, secret, fingerprint
        self._number = 0
        self._engine = engine
        self.transfer_timeout = 0.0  # the router's
        self._welcome, self._heard, self._said_hello = False, time.monotonic(), 0.0
        self._unwelcome = ""  # why the router does not use it
        self._rejoining: asyncio.Task[None] | None = None  # lets go of what runs: no Hello before that is done
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leave_by: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes_read, self._read_seconds = 0, 0.0
        self._read_times = [0] * (len(READ_TIMES) + 1)

    @property
    def num_slots(self) -> int:
        """Sequences that it now takes at most."""
        return self._engine.ranks * self._engine.config.max_num_seqs

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Tickets that something is held for."""

    @property
    @abstractmethod
    def tickets(self) -> Collection[int]:
        """Those that something is held for and that the router has not told it to let go of."""

    @abstractmethod
    async def handle(self, message: ToWorker) -> None:
        """Does what the router says; returns soon."""

    @abstractmethod
    async def drop_all(self) -> None:
        """Lets go of everything, and returns once that is done."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.engine = AsyncEngine(self._engine)
        self.transport = self._make_transport(self.instance)
        await self.transport.start(self.staging)
        self._layout, self._metadata = self.staging.layout, [self.transport.metadata]
        if (processes := num_processes(self._engine)) > 1:
            self.peers = Peers(self._secret, self.end_with)
            others = await self.peers.meet(processes - 1)
            self._layout = joined([self._layout, *(other.staging for other in others)])
            self._metadata += [other.metadata for other in others]
        self._socket = WorkerSocket(self._address, self._secret, self.instance)
        logger.info("worker %s is ready", self.name)
        conversation = [loop.create_task(self._listen()), loop.create_task(self._beat())]
        try:
            done, _ = await asyncio.wait([*conversation, self._ended], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in conversation:
                task.cancel()
            if self._rejoining is not None:
                self._rejoining.cancel()
            self._welcome = False
            # The engine may wait for a silent process for ever: what it holds goes when this process does, at once.
            silence = self._ended.done() and isinstance(self._ended.exception(), PeerSilence)
            if not silence:
                await self.drop_all()
            self._socket.send(Goodbye())
            await self._socket.close()
            if not silence:
                await self.transport.aclose()
                await self.engine.aclose()  # where the other processes end too
                if self.transport.failure is None:  # else reads may still arrive in it: it goes with the process
                    self.staging.close()
                if self.peers is not None:
                    await self.peers.close()

    def send(self, message: Message) -> None:
        """To the router, unless it has not heard this worker's latest Hello. Where a message cannot be sent the router
        knows less than it should, and the worker joins anew; the next Status makes up for one that is lost, and who
        leaves has nothing more to say."""
        if self._welcome and not self._socket.send(message) and not isinstance(message, Status | Leaving):
            logger.warning("worker %s: no connection for a %s: it joins anew", self.name, type(message).__name__)
            self._rejoin()

    def has_read(self, num_bytes: int, seconds: float) -> None:
        """Counts a transfer."""
        self._bytes_read += num_bytes
        self._read_seconds += seconds
        self._read_times[bisect_left(READ_TIMES, seconds)] += 1

    def fail(self, ticket: int, reason: str, refused: bool = False) -> None:
        logger.warning("worker %s: %s", self.name, reason)
        self.send(Failed(ticket, reason, refused))

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` beside the conversation; what it raises ends the worker."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end_with(error)

    def end_with(self, error: BaseException) -> None:
        """Ends the worker with an error; the first one counts."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _listen(self) -> None:
        while True:
            message = await self._socket.receive()
            self._heard = time.monotonic()
            if isinstance(message, Welcome):
                self._welcome = message.number == self._number and self._rejoining is None
                self.transfer_timeout = message.transfer_timeout
                if self._welcome:
                    logger.info("worker %s has joined", self.name)
                    self._unwelcome = ""
            elif isinstance(message, Unwelcome):
                # Said every few seconds; what answers an earlier Hello may be over.
                if message.number == self._number and message.reason != self._unwelcome:
                    logger.error("worker %s: the router does not use it: %s", self.name, message.reason)
                    self._unwelcome = message.reason
            elif not self._welcome:
                continue  # said to what this worker was before
            elif isinstance(message, Ping):
                for ticket in set(self.tickets) - set(message.tickets):
                    logger.warning("worker %s: a Release was lost: it lets go of ticket %d", self.name, ticket)
                    await self.handle(Release(ticket))
            elif isinstance(message, Rejoin):
                self._rejoin()
            else:
                await self.handle(message)

    def _rejoin(self) -> None:
        self._welcome = False
        if self._rejoining is None:
            self._rejoining = self.background(self._begin_anew())

    async def _begin_anew(self) -> None:
        await self.drop_all()
        self._rejoining = None
        self._hello()

    def _hello(self) -> None:
        self._number += 1
        self._said_hello = time.monotonic()
        config = self._engine.config
        hello = Hello(
            self.name,
            self.instance,
            self._number,
            self.role,
            _model(self._engine, self._fingerprint),
            self._engine.ranks * config.max_num_seqs,
            min(config.max_model_len, config.num_pages * config.page_size),
            self._layout,
            tuple(self._metadata),
        )
        self._socket.send(hello)

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            failures = {
                "engine": self.engine.failure,
                "transport": self.transport.failure,
                "worker's other processes": self._engine.failure,
            }
            for what, failure in failures.items():
                if failure is not None:
                    raise RuntimeError(f"the {what} failed: {failure}") from failure
            if self._welcome and now - self._heard > _ROUTER_SILENCE:
                logger.warning("worker %s: the router has been silent for %.0f s", self.name, now - self._heard)
                self._rejoin()
            elif not self._welcome and self._rejoining is None and now - self._said_hello > _HELLO_AGAIN:
                self._hello()
            self.send(self._status())
            if self._leave_by is not None and (not self.num_held or now > self._leave_by):
                return
            await asyncio.sleep(_BEAT)

    def _status(self) -> Status:
        return Status(
            self.engine.stats(),
            self.num_slots,
            self._bytes_read,
            self._read_seconds,
            tuple(self._read_times),
            self.staging.num_free,
            self.num_held,
            self._engine.num_prefill_calls,
            self._engine.num_decode_calls,
        )

    def leave(self, grace: float = GRACE) -> None:
        """Takes no more work, and ends once there is none, after `grace` seconds at the latest, and at once where it is
        told a second time."""
        self._leave_by = time.monotonic() + (grace if self._leave_by is None else 0.0)
        self.send(Leaving())


def staging_slots(config: EngineConfig, asked: int | None, on_gpus: bool) -> int:
    """Those that `make_staging` makes."""
    if asked is not None:
        return asked
    return max(2 * config.max_pages, config.pages_for(_TOKENS_IN_FLIGHT) if on_gpus else 0)


def make_staging(engine: Engine, num_slots: int | None) -> StagingBuffer:
    """A buffer for the parts of pages that this process has, in GPU memory where its devices are GPUs. num_slots: by
    default those of two longest sequences, and on GPUs of 32,768 tokens at least. Raises ValueError for fewer than
    those of one sequence, DeviceMemoryError where there is no room."""
    config, model = engine.config, engine.model
    on_gpus = model.mesh.devices.flat[0].platform != "cpu"
    slots = staging_slots(config, num_slots, on_gpus)
    if slots < config.max_pages:
        raise ValueError(
            f"staging_pages is {slots}; the longest sequence has {config.max_pages} pages of {config.page_size}"
        )
    sizes = kv_layout(engine), num_planes(engine), model.config.head_dim, model.dtype, slots
    where = ranks_here(engine), jax.process_index(), plane_bounds(engine)
    if not on_gpus:
        return StagingBuffer(*sizes, *where)
    made = DeviceStagingBuffer([devices_for(engine, rank) for rank in range(engine.ranks)], *sizes, *where)
    logger.info(
        "%s bytes of a GPU are in use beside XLA's pool, for staging and collectives", f"{bytes_outside_xla():,}"
    )
    return made


def _model(engine: Engine, fingerprint: str) -> dict[str, str]:
    """Equal for engines whose pages mean the same: of one checkpoint, read in one way."""
    model = engine.model
    return {
        "the checkpoint's weights": fingerprint,
        "the checkpoint's config": _digest(model.config),
        "dtype": str(model.dtype),
        "the set of quantised weights": _digest(model.quantised),
        "activation_format": str(model.activation_format),
        "the number of planes of a page": str(num_planes(engine)),  # of one more layer with drafts
        "the end-of-sequence ids": str(sorted(engine.tokenizer.eos_ids)),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
