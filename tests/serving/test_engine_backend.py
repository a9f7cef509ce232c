"""The backend of one process: its bound, and what clients see when its engine fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from qwenjax_serving.api.app import create_app
from qwenjax_serving.backend import Overloaded
from qwenjax_serving.engine_backend import EngineBackend
from tests.serving.asgi import call
from tests.serving.fake_backend import DEFAULTS, STATS, FakeBackend

SLOTS, QUEUE = 2, 1


class Engine:
    """As much of an engine as AsyncEngine runs: it holds its requests until it is told to fail."""

    ranks, config = 1, SimpleNamespace(max_num_seqs=SLOTS)

    def __init__(self, failure: str | None = None) -> None:
        self.failure, self.held = failure, list[str]()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.held) and self.failure is not None

    def check(self, *_: Any) -> None: ...

    def close(self) -> None: ...

    def add_request(self, request_id: str, *_: Any) -> None:
        self.held.append(request_id)

    def abort(self, request_ids: list[str]) -> list[Any]:
        self.held = [held for held in self.held if held not in request_ids]
        return []

    def step(self) -> list[Any]:
        if self.failure is not None and self.held:
            raise RuntimeError(self.failure)
        return []

    def stats(self) -> Any:
        return STATS


def backend_of(engine: Engine) -> EngineBackend:
    return EngineBackend(engine, FakeBackend().model, QUEUE)  # type: ignore[arg-type]


def test_no_more_sequences_are_held_than_slots_and_queue() -> None:
    async def run() -> None:
        backend = backend_of(Engine())

        async def add(name: str, n: int = 1) -> None:
            params = DEFAULTS if n == 1 else SimpleNamespace(n=n)
            await backend.generate(name, [5], None, params, None)  # type: ignore[arg-type]

        await add("a", n=2)
        await add("b")
        with pytest.raises(Overloaded, match="3 sequences run or wait, of at most 3"):
            await add("c")
        with pytest.raises(ValueError, match="n is 4; this server holds 3 sequences"):
            await add("c", n=4)
        backend.abort("a")
        await add("c", n=2)
        with pytest.raises(Overloaded):
            await add("d")
        await backend.aclose()

    asyncio.run(run())


def test_an_engine_that_fails_ends_its_requests_and_is_unhealthy() -> None:
    async def run() -> None:
        engine = Engine("out of memory")
        backend = backend_of(engine)
        app = create_app(backend)
        assert (await call(app, "GET", "/health")).status == 200
        for _ in range(2):  # the one that it fails on, and one that comes later
            reply = await call(app, "POST", "/v1/completions", {"prompt": "a"})
            assert (reply.status, reply.error["code"]) == (500, "backend_error")
            assert reply.error["message"] == "the engine failed: out of memory"
        assert (await call(app, "GET", "/health")).status == 503
        await backend.aclose()

    asyncio.run(run())
