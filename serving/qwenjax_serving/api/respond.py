"""Answers that generate: one JSON body, or server-sent events as the text grows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwenjax_serving.api.choices import Choices, usage_of
from qwenjax_serving.api.errors import api_error, internal_error
from qwenjax_serving.api.generation import Generation
from qwenjax_serving.api.requests import StreamOptions
from qwenjax_serving.api.responses import Answer, encode

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """What the answers of an endpoint look like. whole, part: the `object` of an answer and of an event.
    none_drawn: outputs are left out of the usage."""

    id: str
    model: str
    created: int
    whole: Literal["text_completion", "chat.completion"]
    part: Literal["text_completion", "chat.completion.chunk"]
    none_drawn: bool = False

    def answer(self, choices: list[Any], kind: Literal["whole", "part"]) -> Answer:
        return Answer(id=self.id, object=getattr(self, kind), created=self.created, model=self.model, choices=choices)


class GenerationResponse(Response):
    """Runs a generation while its client listens, and ends it with the answer.

    Errors before the first byte are raised; later ones are the last event of the stream, as vLLM sends them.
    """

    def __init__(
        self, generation: Generation, choices: Choices, shape: Shape, stream: bool, options: StreamOptions | None
    ) -> None:
        super().__init__()
        self._generation, self._choices, self._shape, self._stream = generation, choices, shape, stream
        self._usage_at_end = options is not None and options.include_usage is True
        self._usage_always = options is not None and options.continuous_usage_stats is True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            if self._stream:
                await self._send_events(send)
            else:
                body = await self._whole()
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _whole(self) -> bytes:
        async for _ in self._generation:
            pass
        results = self._generation.results
        written = [
            choice
            for place, result in enumerate(results)
            if result is not None
            for choice in self._choices.write(place, result, streaming=False)
        ]
        answer = self._shape.answer(written, "whole")
        answer.usage = usage_of(results, self._shape.none_drawn)
        return encode(answer)

    async def _send_events(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would keep events back
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for place, result in self._generation:
                for choice in self._choices.write(place, result, streaming=True):
                    answer = self._shape.answer([choice], "part")
                    if self._usage_always:
                        answer.usage = usage_of(self._generation.results, self._shape.none_drawn)
                    elif self._usage_at_end:
                        answer.usage = None
                    yield _event(encode(answer))
            if self._usage_at_end:
                last = self._shape.answer([], "part")
                last.usage = usage_of(self._generation.results, self._shape.none_drawn)
                yield _event(encode(last))
        except Exception as error:
            known = api_error(error)
            if known is None:
                logger.exception("request %s failed", self._shape.id)
            yield _event((known or internal_error()).body())


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, and cancels it as soon as the client is gone."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        else:
            task.result()
    finally:  # also where the server cancels this task: what has begun is ended
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
