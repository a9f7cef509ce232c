"""An engine in a thread of its own, for callers on an asyncio loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from qwenjax.engine.engine import Engine
from qwenjax.outputs import EngineStats, RequestOutput
from qwenjax.sampling_params import SamplingParams

T = TypeVar("T")


class AsyncEngine:
    """Runs an engine's steps while it has requests. Requests may come from several loops and threads.

    The engine belongs to it from now on: only `check`, `stats`, `config`, `tokenizer` and `model` may be used from
    elsewhere.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], Iterable[RequestOutput]]] = deque()
        self._streams: dict[str, _Stream] = {}
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if anything did: nothing can run any more."""
        return self._failure

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Queues a request and returns its outputs, cumulative, the last with finished=True; call it on a loop.

        A reader that is slow misses outputs but not their contents. Closing or dropping the iterator aborts the
        request. Raises ValueError at once for what the engine cannot run and for an id in use, RuntimeError when the
        engine is closed or has failed; the iterator raises RuntimeError when it fails later.
        """
        self.engine.check(prompt_token_ids, params)

        def enter() -> None:
            self.engine.add_request(request_id, prompt_token_ids, params, prompt, cache_salt)

        return self.stream(request_id, enter)

    def stream(self, request_id: str, enter: Callable[[], None]) -> AsyncIterator[RequestOutput]:
        """The outputs of a request that `enter` gives to the engine, in its thread; as `add` otherwise.

        Where `enter` raises ValueError or KeyError and the engine does not have the request, the iterator raises that
        and others go on; what else it raises ends the engine.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failed()
            if self._closing:
                raise RuntimeError("the engine is closed")
            if request_id in self._streams:
                raise ValueError(f"request_id {request_id!r} is in use")
            stream = self._streams[request_id] = _Stream(asyncio.get_running_loop())

            def command() -> Iterable[RequestOutput]:
                try:
                    enter()
                except (ValueError, KeyError) as error:
                    if self.engine.has(request_id):
                        raise
                    with self._changed:
                        del self._streams[request_id]
                    stream.call(stream.fail, error)
                return ()

            self._commands.append(command)
            self._changed.notify()
        return _Outputs(stream, lambda: self.abort(request_id))

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, run in the engine's thread between two of its steps. Raises RuntimeError
        when the engine is closed or has failed."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command() -> Iterable[RequestOutput]:
            if not result.set_running_or_notify_cancel():  # its caller has let go
                return ()
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)
            return ()

        with self._changed:
            if self._failure is not None or self._closing:
                raise self._failed() if self._failure is not None else RuntimeError("the engine is closed")
            self._calls.add(result)
            self._commands.append(command)
            self._changed.notify()
        result.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(result)

    def abort(self, request_id: str) -> None:
        """Ends a request, whose last output then has finish_reason "abort". From any thread; unknown ids pass."""
        with self._changed:
            if request_id in self._streams:
                self._commands.append(lambda: self.engine.abort([request_id]))
                self._changed.notify()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def aclose(self, drain: bool = False) -> None:
        """Takes no more requests, ends those that run (drain: lets them run to their end) and stops the thread."""
        with self._changed:
            self._closing = True
            if not drain:
                self._commands.append(lambda: self.engine.abort(list(self._streams)))
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        self.engine.close()

    def _failed(self) -> RuntimeError:
        error = RuntimeError(f"the engine failed: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._commands or self.engine.has_unfinished or self._closing):
                        self._changed.wait()
                    commands = [self._commands.popleft() for _ in range(len(self._commands))]
                if not commands and not self.engine.has_unfinished:
                    return
                outputs = [output for command in commands for output in command()]
                self._deliver(outputs + self.engine.step())
        except BaseException as error:
            with self._changed:
                self._failure = error
                streams, calls = list(self._streams.values()), list(self._calls)
                self._streams.clear()
            for stream in streams:
                stream.call(stream.fail, self._failed())
            for result in calls:
                with suppress(concurrent.futures.InvalidStateError):  # it has ended, or its caller has let go
                    result.set_exception(self._failed())

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        of_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            with self._changed:
                request_id = output.request_id
                stream = self._streams.pop(request_id) if output.finished else self._streams[request_id]
            of_loop.setdefault(stream.loop, []).append((stream, output))
        for pairs in of_loop.values():  # one wake-up of a loop a step, not one a request
            if not pairs[0][0].call(_put_all, pairs):
                for _, output in pairs:
                    self.abort(output.request_id)


def _put_all(pairs: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)


class _Stream:
    """The newest output that the reader of a request has not seen. Everything but `call` happens on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.newest: RequestOutput | None = None
        self.error: BaseException | None = None
        self.ended = False  # nothing will follow what is here
        self.arrived = asyncio.Event()

    def call(self, function: Callable[..., None], *args: Any) -> bool:
        """Runs a function on the loop; false where the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def put(self, output: RequestOutput) -> None:
        if self.ended:  # its reader has let go
            return
        self.newest, self.ended = output, output.finished
        self.arrived.set()

    def fail(self, error: BaseException) -> None:
        self.error, self.ended = error, True
        self.arrived.set()


class _Outputs(AsyncIterator[RequestOutput]):
    """What a reader holds: when it lets go, the request is aborted."""

    def __init__(self, stream: _Stream, abort: Callable[[], None]) -> None:
        self._stream, self._abort = stream, abort

    async def __anext__(self) -> RequestOutput:
        stream = self._stream
        while stream.newest is None:
            if stream.error is not None:
                raise stream.error
            if stream.ended:
                raise StopAsyncIteration
            stream.arrived.clear()
            await stream.arrived.wait()
        output, stream.newest = stream.newest, None
        return output

    async def aclose(self) -> None:
        """Aborts the request where it is not finished; nothing more comes."""
        self._close()
        self._stream.newest = None

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._stream.ended:
            self._stream.ended = True
            self._abort()
