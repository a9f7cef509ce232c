"""A streaming HTTP client of few instructions, so that what it takes does not show in what it measures."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

_LINE_LIMIT = 1 << 20  # bytes of one event: those with prompts and logprobs are long


class HttpError(Exception):
    """An answer that is no stream. status: 0 where there was none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Target:
    """Where to send requests. key: for the Authorization header, or None."""

    url: str
    key: str | None = None

    @property
    def parts(self) -> SplitResult:
        """Raises ValueError where the URL is not http or https with a host."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url is {self.url!r}; it is like http://127.0.0.1:8000")
        return parts


async def events(target: Target, path: str, body: bytes) -> AsyncIterator[bytes]:
    """POSTs `body` to `path` under the target on a connection of its own, and yields each event's data up to [DONE].

    Raises HttpError where the answer is not a stream or ends too early, OSError where there is no connection.
    """
    async with _answer(target, "POST", path, body) as (status, headers, reader):
        if status != 200 or not headers.get("content-type", "").startswith("text/event-stream"):
            text = b"".join([piece async for piece in _pieces(headers, reader)])
            raise HttpError(status, text.decode(errors="replace")[:500])
        rest = b""
        async for piece in _pieces(headers, reader):
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield data
        raise HttpError(0, "the stream ended before [DONE]")


async def get(target: Target, path: str) -> bytes:
    """The body of a GET. Raises HttpError for any status but 200, OSError where there is no connection."""
    async with _answer(target, "GET", path, b"") as (status, headers, reader):
        body = b"".join([piece async for piece in _pieces(headers, reader)])
        if status != 200:
            raise HttpError(status, body.decode(errors="replace")[:500])
        return body


@asynccontextmanager
async def _answer(
    target: Target, method: str, path: str, body: bytes
) -> AsyncIterator[tuple[int, Mapping[str, str], asyncio.StreamReader]]:
    parts = target.parts
    context = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if context else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context, limit=_LINE_LIMIT)
    try:
        lines = [
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([f"authorization: Bearer {target.key}"] if target.key else []),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        status_line = await reader.readline()
        words = status_line.split()
        if len(words) < 2 or not words[1].isdigit():
            raise HttpError(0, f"no HTTP answer: {status_line[:80]!r}")
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        yield int(words[1]), headers, reader
    finally:
        writer.close()


async def _pieces(headers: Mapping[str, str], reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body's bytes as they come: chunked, of a known length, or up to the connection's end."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece
