"""Runs the front end on a socket, until it is told to stop; what is running then may finish."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qwenjax_serving.api.errors import api_error
from qwenjax_serving.backend import Overloaded

_KEEP_ALIVE = 15  # seconds that an idle connection is kept: clients of Python let go after 5, and must be first
_SPARE_CONNECTIONS = 256  # beside those of the requests that are worked on: probes, and clients told to come back


def bind(host: str, port: int) -> socket.socket:
    """A socket for `serve`, before the model is loaded: a port that is taken is known at once. Until `serve` listens on
    it, connections are refused. port: 0 for any that is free. Raises OSError, naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """http://host:port"""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: ASGIApp,
    bound: socket.socket,
    *,
    max_concurrent_requests: int,
    grace: int,
    on_ready: Callable[[], None],
    until: Coroutine[Any, Any, None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, or `until` returns. Then it accepts no more, gives what is running `grace`
    seconds to finish, cuts what is left, and returns; a second signal cuts at once. on_ready: called once it listens.
    """
    most = max_concurrent_requests + _SPARE_CONNECTIONS

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(server.server_state.connections) > most:
            refused = api_error(Overloaded(f"there are more than {most} connections; try again later"))
            assert refused is not None
            headers = {**refused.headers, "connection": "close"}
            await Response(refused.body(), refused.status, headers, "application/json")(scope, receive, send)
        else:
            await app(scope, receive, send)

    config = uvicorn.Config(
        limited,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=grace,
    )
    server = _Server(config, on_ready)

    async def watch() -> None:
        if until is not None:
            try:
                await until
            finally:
                server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[bound])
    finally:
        watching.cancel()
    if watching.done() and not watching.cancelled():
        watching.result()  # what it raised


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own raises the signal anew when all is done, and the process would end by it, not with status 0.
        self.force_exit = self.should_exit
        self.should_exit = True
