"""The sockets between router and workers: ZeroMQ with CURVE (encrypted and authenticated), keys from one secret.

Who does not know the secret gets no message through; what is no message of ours is logged and dropped.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from operator import or_
from typing import Any, Generic, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from qwenjax_serving.protocol.messages import (
    Message,
    MessageError,
    ToRouter,
    ToWorker,
    decode_to_router,
    decode_to_worker,
    encode,
)
from qwenjax_serving.protocol.secret import SECRET_VARIABLE, Keys

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_MESSAGE = 64 << 20  # bytes; 20 log-probabilities of each prompt token are about 1,100
_LINGER = 500  # ms that what was sent has to leave when a socket closes
_QUEUE = 10_000  # messages to a peer that does not take them; more are dropped, and it is given up for its silence
_AT_ONCE = 100  # messages that are read before others of the loop have their turn
_DONTWAIT, _POLLIN = int(zmq.DONTWAIT), int(zmq.POLLIN)  # as enums they cost more than what they are for
_REFUSED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_AUTH
_EVENTS = functools.reduce(
    or_, (zmq.Event.ACCEPTED, zmq.Event.CONNECTED, zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED, *_REFUSED)
)
_LINE_EVERY = 60.0  # seconds between two lines about connections that fail alike: who is refused tries on and on


class _AllowWorkers:
    """Says yes to the workers' one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class BoundSocket(Generic[T]):
    """The end that listens. Made on an asyncio loop; `address` is what it is bound to."""

    def __init__(self, address: str, secret: bytes, decode: Callable[[bytes], T]) -> None:
        """address: "tcp://127.0.0.1:0" for any free port. decode: of what may come. Raises OSError, with the
        address."""
        keys, self._decode = Keys.of(secret), decode
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_AllowWorkers(keys.worker_public))
        self._socket = _socket(self._context, zmq.ROUTER, address)
        self._inbox = _Inbox(self._socket)
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = keys.router_secret, keys.router_public
        # A worker that comes back takes over the name of the connection that it lost.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._watch = _Refusals(self._socket, "refused a connection at")
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._watch.cancel()
            self._authenticator.stop()
            self._context.destroy(linger=0)
            raise OSError(f"cannot listen at {address}: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, T]:
        """The next message and who sent it."""
        while True:
            sender, *frames = await self._inbox.get()
            try:
                if len(frames) != 1:
                    raise MessageError(f"{len(frames)} frames")
                return sender, self._decode(frames[0])
            except MessageError as error:
                logger.warning("refused a message from %r: %s", sender, error)

    def send(self, to: bytes, message: Message) -> None:
        """Sends, or drops where the worker is gone: its silence is noticed elsewhere."""
        with suppress(zmq.Again):
            self._socket.send_multipart([to, encode(message)], flags=_DONTWAIT)
        self._inbox.look()

    async def close(self) -> None:
        self._watch.cancel()
        self._inbox.close()
        self._authenticator.stop()
        self._context.destroy(linger=_LINGER)


class ConnectedSocket(Generic[T]):
    """The end that connects. identity: of this process alone; decode: of what may come."""

    def __init__(self, address: str, secret: bytes, identity: str, decode: Callable[[bytes], T]) -> None:
        keys, self._decode = Keys.of(secret), decode
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.DEALER, address)
        self._inbox = _Inbox(self._socket)
        self._socket.curve_serverkey = keys.router_public
        self._socket.curve_secretkey, self._socket.curve_publickey = keys.worker_secret, keys.worker_public
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        # Nothing is kept for a router that is not there: it would be void for the next one.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._watch = _Refusals(self._socket, "no connection to")
        self._socket.connect(address)

    async def receive(self) -> T:
        """The next message."""
        while True:
            frames = await self._inbox.get()
            try:
                if len(frames) != 1:
                    raise MessageError(f"{len(frames)} frames")
                return self._decode(frames[0])
            except MessageError as error:
                logger.warning("refused a message: %s", error)

    def send(self, message: Message) -> bool:
        """Whether there was a router to send to. Raises MessageError for what no router would take."""
        data = encode(message)
        if len(data) > MAX_MESSAGE:  # the router would close the connection
            raise MessageError(f"a {type(message).__name__} of {len(data):,} bytes; there is room for {MAX_MESSAGE:,}")
        try:
            self._socket.send(data, flags=_DONTWAIT)
        except zmq.Again:
            return False
        finally:
            self._inbox.look()
        return True

    async def close(self) -> None:
        self._watch.cancel()
        self._inbox.close()
        self._context.destroy(linger=_LINGER)


class RouterSocket(BoundSocket[ToRouter]):
    """The router's end, for workers."""

    def __init__(self, address: str, secret: bytes) -> None:
        super().__init__(address, secret, decode_to_router)


class WorkerSocket(ConnectedSocket[ToWorker]):
    """A worker's end, to the router."""

    def __init__(self, address: str, secret: bytes, identity: str) -> None:
        super().__init__(address, secret, identity, decode_to_worker)


class _Inbox:
    """What comes in on a socket, for one reader on an asyncio loop. pyzmq's own asyncio sockets, which serve any number
    of readers and writers, take several times as long for a message."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._loop = socket, asyncio.get_running_loop()
        self._readable = asyncio.Event()
        self._descriptor = cast(int, socket.get(zmq.FD))
        self._taken = 0

    async def get(self) -> list[bytes]:
        """The frames of the next message."""
        self._taken += 1
        if self._taken % _AT_ONCE == 0:
            await asyncio.sleep(0)  # a flood of messages does not keep the loop to itself
        while True:
            self._readable.clear()
            with suppress(zmq.Again):
                return self._socket.recv_multipart(_DONTWAIT)
            self._loop.add_reader(self._descriptor, self._seen)
            await self._readable.wait()

    def _seen(self) -> None:
        # The descriptor stays readable until the message is taken: the loop would turn until then.
        self._loop.remove_reader(self._descriptor)
        self._readable.set()

    def look(self) -> None:
        """To be called after each send: ZeroMQ may then have seen what came in, and does not say so again."""
        if cast(int, self._socket.get(zmq.EVENTS)) & _POLLIN:
            self._readable.set()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)


def _socket(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = cast(Any, context).socket(kind, socket_class=zmq.Socket)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    return socket


class _Refusals:
    """Logs connections that do not get as far as messages: at most a line a minute for each way in which they fail."""

    def __init__(self, socket: zmq.Socket[bytes], what: str) -> None:
        """what: the line begins with, before the address."""
        self._what = what
        self._pending: set[int] = set()  # descriptors of connections that have surely had no handshake yet
        self._said: dict[str, tuple[float, int]] = {}  # when last, and how often since
        self._task = asyncio.get_running_loop().create_task(self._watch(socket.get_monitor_socket(_EVENTS)))

    def cancel(self) -> None:
        self._task.cancel()

    async def _watch(self, monitor: Any) -> None:
        while True:
            found: Any = await cast(Any, recv_monitor_message(monitor))
            event, value, endpoint = zmq.Event(found["event"]), found["value"], found["endpoint"].decode()
            if event in (zmq.Event.ACCEPTED, zmq.Event.CONNECTED):
                self._pending.add(value)
            elif event is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._pending.clear()  # the event has no descriptor: it may be any of them
            elif event in _REFUSED:
                self._pending.clear()
                self._log(endpoint, f"{event.name}; {SECRET_VARIABLE} may not be the same on both sides")
            elif value in self._pending:
                self._pending.remove(value)
                self._log(endpoint, "closed before a handshake; the other side may speak another protocol")

    def _log(self, endpoint: str, why: str) -> None:
        now = time.monotonic()
        last, count = self._said.get(why, (-math.inf, 0))
        if now - last < _LINE_EVERY:
            self._said[why] = last, count + 1
            return
        self._said[why] = now, 0
        logger.warning("%s %s: %s%s", self._what, endpoint, why, f" ({count} more before)" if count else "")
