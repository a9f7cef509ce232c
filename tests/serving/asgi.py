"""Calls an ASGI application as a server does, without sockets; the client can leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

LIMIT = 10.0  # seconds that a call may take


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        return found["error"]

    @property
    def events(self) -> list[Any]:
        """A stream's events as JSON. Its frame is checked on the way."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: {") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes | Mapping[str, Any] = b"",
    *,
    headers: Mapping[str, str] | None = None,
    leave: asyncio.Event | None = None,
    body_ends: bool = True,
) -> Reply:
    """leave: when set, the client is gone. body_ends: False for a client that does not send all that it promised."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
    }
    reply, gone, sent = Reply(), leave or asyncio.Event(), False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": data, "more_body": not body_ends}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    await asyncio.wait_for(app(scope, receive, send), LIMIT)
    return reply


def post(app: ASGIApp, path: str, body: bytes | Mapping[str, Any], **options: Any) -> Reply:
    return asyncio.run(call(app, "POST", path, body, **options))


def get(app: ASGIApp, path: str, **options: Any) -> Reply:
    return asyncio.run(call(app, "GET", path, **options))
