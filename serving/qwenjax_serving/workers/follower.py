"""What the processes of a worker after the first do: they run what that plans, and read and are read from when it says
so."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import jax
import numpy as np

from qwenjax.engine.decode_engine import DecodeEngine, DevicePages
from qwenjax.engine.prefill_engine import PrefillEngine, StagedPages
from qwenjax.engine.processes import look_up
from qwenjax_serving.protocol.messages import Alive, Done, Joined, Read, Serve, Source, Stop, decode_to_follower
from qwenjax_serving.protocol.sockets import ConnectedSocket
from qwenjax_serving.transfer.nixl_transport import NixlTransport, TransferError
from qwenjax_serving.transfer.reading import Reader
from qwenjax_serving.workers.peers import ADDRESS_KEY, BEAT
from qwenjax_serving.workers.worker import GRACE, make_staging

logger = logging.getLogger(__name__)

_JOIN = 5.0  # seconds that threads have to end, which one copy or admission takes less than
_LEAVE_LATER = 10.0  # seconds beyond those that the first process has to end


class Follower:
    """`run` ends when the first process does, or with an error."""

    def __init__(
        self, name: str, engine: PrefillEngine | DecodeEngine, secret: bytes, staging_pages: int | None
    ) -> None:
        self._engine, self._secret, self._process = engine, secret, jax.process_index()
        self._name = f"{name}-process-{self._process}"
        self._staging = make_staging(engine, staging_pages)
        self._orders: dict[int, asyncio.Task[int]] = {}
        self._serving = ExitStack()
        self._staged: queue.SimpleQueue[StagedPages | None] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if isinstance(engine, PrefillEngine):
            engine.on_staged = self._begin_staging
        else:
            engine.take_staged = self._take_staged

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport = NixlTransport(self._name)
        await self._transport.start(self._staging)
        self._reader = Reader(self._transport, self._staging)
        address = await asyncio.to_thread(look_up, ADDRESS_KEY)
        self._socket = ConnectedSocket(address, self._secret, self._name, decode_to_follower)
        threads = [
            threading.Thread(target=self._work, args=(loop, work), name=work.__name__, daemon=True)
            for work in (self._engine.follow, self._stage)
        ]
        for thread in threads:
            thread.start()
        tasks = [loop.create_task(self._listen()), loop.create_task(self._watch())]
        try:
            await asyncio.wait([*tasks, self._ended], return_when=asyncio.FIRST_COMPLETED)
            for done in (*tasks, self._ended):
                if done.done():
                    done.result()
        finally:
            ended = self._ended.done() and self._ended.exception() is None
            self._staged.put(None)
            for task in tasks:
                task.cancel()
            for order in (orders := list(self._orders.values())):
                order.cancel()
            await asyncio.gather(*orders, return_exceptions=True)
            self._serving.close()
            await self._socket.close()
            await self._transport.aclose()
            # After an error threads may wait for the first process for ever: the memory goes with this one.
            if ended and self._transport.failure is None and await asyncio.to_thread(_all_end, threads):
                self._staging.close()

    def _work(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        """In a thread of its own: the end of either, and any error, ends the process."""
        error: Exception | None = None
        try:
            work()
        except Exception as found:
            error = found
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def leave(self, grace: float = GRACE) -> None:
        """Ends with an error, unless the first process, which is told to end too, ends this one meanwhile. grace: see
        Worker."""
        error = TimeoutError(f"told to end {grace + _LEAVE_LATER:g} s ago, and process 0 has not ended")
        asyncio.get_running_loop().call_later(grace + _LEAVE_LATER, self._end, error)

    async def _watch(self) -> None:
        """Says that the process lives, and ends it where its transport has failed, which may be while nothing is
        read."""
        while self._transport.failure is None:
            self._socket.send(Alive())
            await asyncio.sleep(BEAT)
        self._end(self._transport.failure)

    async def _listen(self) -> None:
        while not self._socket.send(Joined(self._process, self._staging.layout, self._transport.metadata)):
            await asyncio.sleep(0.05)  # not connected yet
        while True:
            message = await self._socket.receive()
            match message:
                case Source():
                    await self._reader.learn(message)
                case Read():
                    where = message.slots, message.first, message.ranks
                    reading = self._reader.read(message.offer, *where, message.timeout)
                    task = self._orders[message.order] = asyncio.get_running_loop().create_task(reading)
                    task.add_done_callback(partial(self._answer, message.order))
                case Stop():
                    if (order := self._orders.get(message.order)) is not None:
                        order.cancel()
                case Serve():
                    self._serving.close()
                    if message.on:
                        self._serving.enter_context(self._transport.serving())

    def _answer(self, order: int, task: asyncio.Task[int]) -> None:
        del self._orders[order]
        error = None if task.cancelled() else task.exception()
        if self._transport.failure is not None:  # the slots may still be written to: nothing is done
            self._end(self._transport.failure)
            return
        if task.cancelled():
            done = Done(order, 0, "given up")
        elif error is None:
            done = Done(order, task.result(), None)
        else:
            done = Done(order, 0, str(error))
        sent = self._socket.send(done)
        if error is not None and not isinstance(error, TransferError | ValueError):
            self._end(error)
        elif not sent:
            self._end(ConnectionError(f"process 0 cannot be told that order {order} is done"))

    def _take_staged(self, slots: Sequence[int], data_rank: int) -> np.ndarray | DevicePages:
        return self._staging.take_out(slots, data_rank)

    def _begin_staging(self, staged: StagedPages) -> None:
        self._staging.begin(staged)
        self._staged.put(staged)

    def _stage(self) -> None:
        """Puts pages into their slots as they are computed; -1 for those that nobody waits for any more."""
        while (staged := self._staged.get()) is not None:
            planes = staged.first_plane, staged.first_plane + staged.num_planes
            self._staging.put(self._staging.fetch(staged), 0, staged.slots, planes)
            self._engine.acknowledge()


def _all_end(threads: Sequence[threading.Thread]) -> bool:
    """Whether threads that have been told to end do so soon."""
    for thread in threads:
        thread.join(_JOIN)
    return not any(thread.is_alive() for thread in threads)
