"""The front end as an ASGI application: routes, access, limits, and errors in one shape."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwenjax_serving.api.choices import ChatWriter, Choices, CompletionWriter
from qwenjax_serving.api.errors import ApiError, api_error, internal_error
from qwenjax_serving.api.generation import Generation
from qwenjax_serving.api.prompts import Prompt, chat_prompt, completion_prompts
from qwenjax_serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from qwenjax_serving.api.respond import GenerationResponse, Shape
from qwenjax_serving.api.responses import encode
from qwenjax_serving.api.sampling import chat_params, check_context, completion_params, fill_context, prompt_alone
from qwenjax_serving.backend import Backend, BackendError, Overloaded
from qwenjax_serving.metrics import RequestMetrics, make_registry
from qwenjax_serving.version import installed_version

logger = logging.getLogger(__name__)

_OPEN_PATHS = {"/health", "/metrics", "/version"}  # need no key: probes and scrapers have none
_BODY_SECONDS = 60.0  # in which a request's body must have come


@dataclass(frozen=True, kw_only=True)
class Settings:
    """api_key: that requests must bear, None for none. max_body_bytes: of a request. max_concurrent_requests: that the
    front end works on at once, waiting ones included; what comes beyond is answered 503."""

    api_key: str | None = None
    max_body_bytes: int = 4 << 20
    max_concurrent_requests: int = 1024


def create_app(backend: Backend, settings: Settings | None = None, collectors: Iterable[Collector] = ()) -> Starlette:
    """collectors: metrics of the backend's own, shown at /metrics beside those of requests and engines."""
    settings = settings or Settings()
    name = backend.model.names[0]
    metrics = RequestMetrics(name)
    registry = make_registry(metrics, backend.stats, name, collectors)
    endpoints = Endpoints(backend, metrics, settings)

    async def show_metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    posts = {
        "/v1/completions": endpoints.complete,
        "/v1/chat/completions": endpoints.chat,
        "/tokenize": endpoints.tokenize,
        "/detokenize": endpoints.detokenize,
    }
    gets = {
        "/v1/models": endpoints.models,
        "/v1/models/{name:path}": endpoints.one_model,
        "/health": endpoints.health,
        "/version": endpoints.version,
        "/metrics": show_metrics,
    }
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        ],
        middleware=[Middleware(Gate, settings=settings, metrics=metrics, paths=[*posts, *gets])],
        exception_handlers={
            ApiError: _known_error,
            Overloaded: _known_error,
            BackendError: _known_error,
            ClientDisconnect: _client_left,
            HTTPException: _http_error,
        },
    )


class Endpoints:
    """What each path does."""

    def __init__(self, backend: Backend, metrics: RequestMetrics, settings: Settings) -> None:
        self._backend, self._metrics, self._settings = backend, metrics, settings

    async def complete(self, http: Request) -> Response:
        arrival = time.monotonic()
        request = parse(await self._body(http), CompletionRequest)
        model = self._backend.model
        self._check_model(request.model)
        params = completion_params(request, model.default_sampling_params)
        # Off the loop, where other streams go on meanwhile: a megabyte of text takes a fraction of a second.
        prompts = await asyncio.to_thread(completion_prompts, model.tokenizer, request.prompt)
        check_context(prompts, params, model.max_model_len)
        choices = Choices(params.n, lambda index: CompletionWriter(model.tokenizer, request, index))
        shape = Shape(
            f"cmpl-{uuid.uuid4().hex}",
            model.names[0],
            int(time.time()),
            "text_completion",
            "text_completion",
            none_drawn=prompt_alone(request),
        )
        return self._generate(request, prompts, params, choices, shape, arrival)

    async def chat(self, http: Request) -> Response:
        arrival = time.monotonic()
        request = parse(await self._body(http), ChatRequest)
        model = self._backend.model
        self._check_model(request.model)
        params = chat_params(request, model.default_sampling_params)
        prompt = await asyncio.to_thread(
            chat_prompt,
            model.tokenizer,
            request.messages,
            request.add_generation_prompt,
            request.chat_template_kwargs,
        )
        params = fill_context(prompt, params, model.max_model_len)
        choices = Choices(params.n, lambda index: ChatWriter(model.tokenizer, request, index))
        shape = Shape(
            f"chatcmpl-{uuid.uuid4().hex}", model.names[0], int(time.time()), "chat.completion", "chat.completion.chunk"
        )
        return self._generate(request, [prompt], params, choices, shape, arrival)

    def _generate(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        params: Any,
        choices: Choices,
        shape: Shape,
        arrival: float,
    ) -> Response:
        generation = Generation(
            self._backend,
            self._metrics,
            shape.id,
            prompts,
            params,
            request.cache_salt,
            request.__struct_fields__,
            arrival,
        )
        return GenerationResponse(generation, choices, shape, request.stream is True, request.stream_options)

    async def tokenize(self, http: Request) -> Response:
        request = parse(await self._body(http), TokenizeRequest)
        self._check_model(request.model)
        tokenizer = self._backend.model.tokenizer
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "give one of prompt and messages", param="prompt")
        if request.messages is not None:
            if request.add_special_tokens is not None:
                raise ApiError(400, "add_special_tokens goes with prompt", param="add_special_tokens")
            prompt = await asyncio.to_thread(
                chat_prompt, tokenizer, request.messages, request.add_generation_prompt, request.chat_template_kwargs
            )
            ids = prompt.ids
        else:
            for field in ("add_generation_prompt", "chat_template_kwargs"):
                if getattr(request, field) is not None:
                    raise ApiError(400, f"{field} goes with messages", param=field)
            special = request.add_special_tokens is not False
            ids = await asyncio.to_thread(tokenizer.encode, request.prompt or "", special)
        return _json({"count": len(ids), "max_model_len": self._backend.model.max_model_len, "tokens": ids})

    async def detokenize(self, http: Request) -> Response:
        request = parse(await self._body(http), DetokenizeRequest)
        self._check_model(request.model)
        text = await asyncio.to_thread(self._backend.model.tokenizer.decode, request.tokens, skip_special_tokens=False)
        return _json({"prompt": text})

    async def models(self, http: Request) -> Response:
        return _json({"object": "list", "data": [self._card(name) for name in self._backend.model.names]})

    async def one_model(self, http: Request) -> Response:
        name = http.path_params["name"]
        self._check_model(name)
        return _json(self._card(name))

    async def health(self, http: Request) -> Response:
        if not self._backend.healthy():
            raise ApiError(503, "the model is not being served", code="unhealthy", headers={"retry-after": "1"})
        return _json({"status": "ok"})

    async def version(self, http: Request) -> Response:
        return _json({"version": installed_version()})

    def _card(self, name: str) -> dict[str, Any]:
        model = self._backend.model
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "qwenjax",
            "max_model_len": model.max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        names = self._backend.model.names
        if name is not None and name not in names:
            served = ", ".join(map(repr, names))
            raise ApiError(404, f"model {name!r} is not served; {served} is", param="model", code="model_not_found")

    async def _body(self, http: Request) -> bytes:
        """Raises ApiError 413 for a body beyond the limit, as soon as that is known, and 408 for one that is slow."""
        limit = self._settings.max_body_bytes
        length = http.headers.get("content-length", "")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                if not (length.isdigit() and int(length) > limit):
                    async for chunk in http.stream():
                        body += chunk
                        if len(body) > limit:
                            break
                    else:
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {_BODY_SECONDS:.0f} seconds") from None
        headers = {"connection": "close"}  # what is left of the body is not read
        raise ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large", headers=headers)


class Gate:
    """Counts answers, asks for the key, and turns requests away when too many are being worked on."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: RequestMetrics, paths: list[str]) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._known = {path for path in paths if "{" not in path}
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, begun = scope["path"], False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._metrics.answered(path if path in self._known else "other", message["status"])
            await send(message)

        if (refusal := self._refusal(scope)) is not None:
            await _response(refusal)(scope, receive, counted)
            return
        counts = scope["method"] == "POST"
        self._running += counts
        try:
            await self._app(scope, receive, counted)
        except Exception:
            if begun:
                raise  # the server logs it and closes the connection
            logger.exception("%s %s failed", scope["method"], path)
            await _response(internal_error())(scope, receive, counted)
        finally:
            self._running -= counts

    def _refusal(self, scope: Scope) -> ApiError | None:
        key = self._settings.api_key
        if key is not None and scope["path"] not in _OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, b"Bearer " + key.encode()):
                headers = {"www-authenticate": "Bearer"}
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
        if scope["method"] == "POST" and self._running >= self._settings.max_concurrent_requests:
            return api_error(Overloaded(f"{self._running} requests are being worked on; try again later"))
        return None


def _json(content: Any) -> Response:
    return Response(encode(content), media_type="application/json")


def _response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _known_error(request: Request, error: Exception) -> Response:
    return _response(api_error(error) or internal_error())


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; nginx's number, for the count


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _response(ApiError(error.status_code, message, headers=dict(error.headers or {})))
