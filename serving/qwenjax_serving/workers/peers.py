"""The other processes of a worker over several, from the first one's side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from qwenjax.engine.processes import coordinator_host, publish
from qwenjax_serving.protocol.messages import Done, Joined, Message, Offer, Read, Stop, decode_to_leader
from qwenjax_serving.protocol.sockets import BoundSocket
from qwenjax_serving.transfer.nixl_transport import TransferError

ADDRESS_KEY = "peers"  # that the first process publishes where it is reached under
_MEET = 300.0  # seconds for all to have loaded and compiled
_SETTLE = 30.0  # seconds beyond its deadline in which an order that is given up is answered
BEAT = 0.5  # seconds between two words of a process that has nothing else to say
_SILENCE = 10  # beats without a word after which a process counts as lost


class PeerSilence(RuntimeError):
    """A process of the worker says nothing any more: it was stopped, has died, or is cut off. What the device runs may
    wait for it for ever."""


class Peers:
    """Each reads and is read from by itself, when the first says so."""

    def __init__(self, secret: bytes, on_failure: Callable[[BaseException], None]) -> None:
        """on_failure: told of what the worker cannot go on after."""
        host = coordinator_host()
        address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        self._socket, self._on_failure = BoundSocket(address, secret, decode_to_leader), on_failure
        self._joined: dict[int, tuple[bytes, Joined]] = {}
        self._orders: dict[int, asyncio.Future[Done]] = {}
        self._numbers = itertools.count()
        self._heard = set[bytes]()  # since the last beat
        self._tasks = list[asyncio.Task[None]]()
        publish(ADDRESS_KEY, self._socket.address)

    async def meet(self, count: int) -> list[Joined]:
        """Waits for `count` others; what they say of themselves, in order. Raises TimeoutError."""
        async with asyncio.timeout(_MEET):
            while len(self._joined) < count:
                sender, message = await self._socket.receive()
                if isinstance(message, Joined):
                    self._joined[message.process] = sender, message
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._task_done)
        return [self._joined[process][1] for process in sorted(self._joined)]

    def tell(self, message: Message) -> None:
        """All of them."""
        for sender, _ in self._joined.values():
            self._socket.send(sender, message)

    async def read(
        self, process: int, offer: Offer, slots: Sequence[int], first: int, ranks: Sequence[int], timeout: float
    ) -> int:
        """Lets a process read what `Reader.read` would here, and as that does: it raises TransferError, and is over
        only when nothing touches the slots. Raises RuntimeError, of which `on_failure` is told before, where the
        process does not answer or has fallen silent: its slots may still be written to."""
        order, sender = next(self._numbers), self._joined[process][0]
        answer = self._orders[order] = asyncio.get_running_loop().create_future()
        self._socket.send(sender, Read(order, offer, tuple(slots), first, tuple(ranks), timeout))
        try:
            done = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._socket.send(sender, Stop(order))
            await asyncio.wait([answer], timeout=timeout + _SETTLE)
            if not answer.done():
                late = f"{timeout + _SETTLE:g} s after it was told to stop"
                error = RuntimeError(f"process {process} does not answer, {late}")
                self._on_failure(error)
                raise error from None
            raise
        finally:
            del self._orders[order]
        if done.error is not None:
            raise TransferError(f"process {process}: {done.error}")
        return done.num_bytes

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._socket.close()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._on_failure(error)
        for answer in self._orders.values():
            if not answer.done():
                answer.set_exception(error)

    async def _watch(self) -> None:
        """Raises PeerSilence where a process falls silent."""
        silent = dict.fromkeys(self._joined, 0)
        while True:
            self._heard.clear()
            await asyncio.sleep(BEAT)  # counted by beats: a first process that was itself stopped has missed only one
            for process, (sender, _) in self._joined.items():
                silent[process] = 0 if sender in self._heard else silent[process] + 1
                if silent[process] == _SILENCE:
                    raise PeerSilence(f"process {process} has been silent for {_SILENCE * BEAT:g} s")

    async def _listen(self) -> None:
        while True:
            sender, message = await self._socket.receive()
            self._heard.add(sender)
            if isinstance(message, Done):
                answer = self._orders.get(message.order)
                if answer is not None and not answer.done():
                    answer.set_result(message)
