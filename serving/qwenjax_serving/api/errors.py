"""Errors in OpenAI's shape: {"error": {message, type, param, code}} and an HTTP status."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import msgspec

from qwenjax_serving.backend import BackendError, Overloaded

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 503: "overloaded_error"}


class ApiError(Exception):
    """What a client is told. param: the field of the request at fault. code: for programs to tell errors apart."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON of a response, or of an event in the middle of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def api_error(error: Exception) -> ApiError | None:
    """What a backend's exception tells the client; None for a fault of the server's own."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        seconds = max(1, math.ceil(error.retry_after))
        return ApiError(503, str(error), code="overloaded", headers={"retry-after": str(seconds)})
    return ApiError(500, str(error), code="backend_error") if isinstance(error, BackendError) else None


def bad_value(error: ValueError, fields: Collection[str]) -> ApiError:
    """A value that the library refuses; its message begins with the field's name, one of the request's `fields`."""
    first = re.match(r"\w+", str(error))
    return ApiError(400, str(error), param=first[0] if first and first[0] in fields else None)


def internal_error() -> ApiError:
    """For an exception that is in the server's log and is no business of the client's."""
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")
