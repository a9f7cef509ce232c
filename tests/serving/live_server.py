"""The front end on a real socket of this process, for clients that speak HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from qwenjax_serving.api.server import bind, serve, url_of


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Yields the server's URL."""
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    url, started = url_of(bound), list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]]()

    async def run() -> None:
        task = asyncio.create_task(serve(app, bound, max_concurrent_requests=64, grace=1, on_ready=ready.set))
        started.append((asyncio.get_running_loop(), task))
        await asyncio.gather(task, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(10)
        yield url
    finally:
        [(loop, task)] = started
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        bound.close()
