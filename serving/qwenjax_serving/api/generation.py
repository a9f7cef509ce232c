"""The prompts of one HTTP request as they run on the backend, ended with it whatever the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from types import TracebackType

from qwenjax.outputs import RequestOutput
from qwenjax.sampling_params import SamplingParams
from qwenjax_serving.api.errors import bad_value
from qwenjax_serving.api.prompts import Prompt
from qwenjax_serving.backend import Backend
from qwenjax_serving.metrics import RequestMetrics


class Generation:
    """`async with Generation(...) as generation` queues every prompt, or none where one is refused; leaving it aborts
    those that are not finished. `async for place, result in generation` yields a prompt's place and its output so far.

    Entering raises ApiError for what the backend refuses as a request, and else what `Backend.generate` raises.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: RequestMetrics,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        cache_salt: str | None,
        fields: Collection[str],
        arrival: float,
    ) -> None:
        """fields: of the request, for errors to name. arrival: of time.monotonic()."""
        self._arrival = arrival
        self._fields = fields
        self._backend, self._metrics, self._params, self._cache_salt = backend, metrics, params, cache_salt
        self._prompts = {f"{request_id}-{place}": prompt for place, prompt in enumerate(prompts)}
        self._streams: dict[str, AsyncIterator[RequestOutput]] = {}
        self._unfinished: set[str] = set()
        self._pumps: list[asyncio.Task[None]] = []
        self.results: list[RequestOutput | None] = [None] * len(prompts)

    async def __aenter__(self) -> Generation:
        for request_id, prompt in self._prompts.items():
            try:
                self._streams[request_id] = await self._backend.generate(
                    request_id, prompt.ids, prompt.text, self._params, self._cache_salt
                )
            except BaseException as error:
                self._backend.abort(request_id)  # a cancelled call may have come to pass
                self._abort()
                if isinstance(error, ValueError):
                    raise bad_value(error, self._fields) from None
                raise
            self._unfinished.add(request_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _abort(self) -> None:
        for request_id in self._unfinished:
            self._backend.abort(request_id)
            self._metrics.aborted()
        self._unfinished.clear()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        [*streams] = self._streams.items()
        if len(streams) == 1:
            async for result in self._outputs(*streams[0]):
                yield self._keep(0, result)
            return
        # One place: a reader that is slow slows the pumps, and the backend joins what it may not hand over.
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

        async def pump(place: int, request_id: str, stream: AsyncIterator[RequestOutput]) -> None:
            last: BaseException | None = None
            try:
                async for result in self._outputs(request_id, stream):
                    await queue.put((place, result))
            except Exception as error:
                last = error
            await queue.put((place, last))

        self._pumps = [asyncio.create_task(pump(place, *stream)) for place, stream in enumerate(streams)]
        running = len(streams)
        while running:
            place, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield self._keep(place, item)

    async def _outputs(self, request_id: str, stream: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        watch = self._metrics.watch(self._arrival)
        async for result in stream:
            watch.saw(result)
            if result.finished:
                self._unfinished.discard(request_id)
            yield result

    def _keep(self, place: int, result: RequestOutput) -> tuple[int, RequestOutput]:
        self.results[place] = result
        return place, result
