"""The front end's backend that runs requests through a router's workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from qwenjax.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput, SpeculationStats
from qwenjax.sampling import new_seed
from qwenjax.sampling_params import SamplingParams, validate_for
from qwenjax_serving.backend import BackendError, Overloaded, ServedModel
from qwenjax_serving.protocol.messages import Grown, Prefilled, Work
from qwenjax_serving.protocol.sockets import RouterSocket
from qwenjax_serving.router.router import Output, Router, RouterSettings

logger = logging.getLogger(__name__)

_TICK = 0.25  # seconds
_RETRY_AFTER = 5.0  # seconds after which a worker that is missing may be back


class RouterBackend:
    """A Backend (see there) on workers that join by themselves. Made on an asyncio loop.

    `model` may be set once there are workers: how long its requests may be depends on them.
    """

    model: ServedModel

    def __init__(self, address: str, secret: bytes, vocab_size: int, settings: RouterSettings | None = None) -> None:
        """address: to listen on for workers, as "tcp://127.0.0.1:0"."""
        self.settings = settings or RouterSettings()
        self._vocab_size = vocab_size
        self._socket = RouterSocket(address, secret)
        self.router = Router(self._socket.send, self.settings)
        self._requests: dict[str, _Request] = {}
        loop = asyncio.get_running_loop()
        self._failure: BaseException | None = None
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._tick())]
        for task in self._tasks:
            self.fail_with(task)

    @property
    def address(self) -> str:
        """That workers connect to."""
        return self._socket.address

    def knows(self, name: str) -> bool:
        """Whether a worker of this name has joined."""
        return any(worker.hello.name == name for worker in self.router.workers.values())

    async def wait_for(self, names: Sequence[str] = ()) -> int:
        """Waits for these workers, and one of either role. The tokens of the longest sequence that all of them take.
        Raises BackendError where the router fails."""
        while not (self.router.ready and all(self.knows(name) for name in names)):
            if self._failure is not None:
                raise BackendError(f"the router failed: {self._failure}")
            await asyncio.sleep(0.05)
        return min(worker.hello.max_model_len for worker in self.router.workers.values())

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def fail_with(self, task: asyncio.Task[None]) -> None:
        """Lets the error of a task without which no request can go on, or no worker be started again, be the backend's:
        all requests end with it."""
        task.add_done_callback(self._task_done)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prompt: str | None,
        params: SamplingParams,
        cache_salt: str | None,
    ) -> AsyncIterator[RequestOutput]:
        if self._failure is not None:
            raise BackendError(f"the router failed: {self._failure}")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        tokenizer, longest = self.model.tokenizer, self.model.max_model_len
        validate_for(
            params,
            prompt_token_ids=prompt_token_ids,
            vocab_size=self._vocab_size,
            max_model_len=longest,
            eos_ids=tokenizer.eos_ids,
        )
        if params.n > self.settings.max_waiting:
            raise ValueError(f"n is {params.n}; at most {self.settings.max_waiting} outputs wait at a time")
        if not self.router.ready:
            raise Overloaded("workers are missing; they are expected back", retry_after=_RETRY_AFTER)
        if len(self.router.waiting) + params.n > self.settings.max_waiting:
            raise Overloaded(f"{len(self.router.waiting)} outputs wait, of at most {self.settings.max_waiting}")
        ids = tuple(int(token) for token in prompt_token_ids)
        # What a worker would settle is settled here: another try elsewhere is to draw the same.
        settled = replace(
            params,
            n=1,
            seed=new_seed(params),
            max_tokens=params.resolve_max_tokens(len(ids), longest),
        )
        request = self._requests[request_id] = _Request(request_id, prompt, list(ids))
        for index in range(params.n):
            own = settled if index == 0 else replace(settled, prompt_logprobs=None)
            output = request.output(Work(ids, own, index, cache_salt))
            self.router.submit(output, time.monotonic())
        return self._outputs(request)

    async def _outputs(self, request: _Request) -> AsyncIterator[RequestOutput]:
        try:
            while True:
                await request.changed.wait()
                request.changed.clear()
                if request.error is not None:
                    if any(output.again for output in request.outputs):
                        raise Overloaded(f"{request.error}; it is expected back", retry_after=_RETRY_AFTER)
                    raise BackendError(request.error)
                result = request.result()
                yield result
                if result.finished:
                    return
        finally:
            self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        for output in request.outputs if request is not None else ():
            self.router.cancel(output, time.monotonic())

    def stats(self) -> Mapping[str, EngineStats]:
        workers = self.router.workers.values()
        return {worker.hello.name: worker.status.stats for worker in workers if worker.status is not None}

    def healthy(self) -> bool:
        return self.router.ready and self._failure is None

    async def aclose(self) -> None:
        """Ends what runs."""
        for request in list(self._requests.values()):
            request.fail("the server stops")
            self.abort(request.request_id)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the router failed: %s", error, exc_info=error)
        self._failure = error
        for request in self._requests.values():
            request.fail(f"the router failed: {error}")

    async def _listen(self) -> None:
        while True:
            sender, message = await self._socket.receive()
            self.router.receive(sender, message, time.monotonic())

    async def _tick(self) -> None:
        while True:
            self.router.tick(time.monotonic())
            await asyncio.sleep(_TICK)


@dataclass(eq=False)
class _Request:
    """A request's outputs as they come, put together again."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    arrival: float = field(default_factory=time.monotonic)
    outputs: list[Output] = field(default_factory=list)
    parts: list[CompletionOutput] = field(default_factory=list)
    speculation: list[SpeculationStats | None] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    first: Prefilled | None = None
    first_token: float | None = None
    latest_token: float | None = None
    finished_at: float | None = None
    error: str | None = None

    def output(self, work: Work) -> Output:
        """One more of its outputs, for the router."""
        place = len(self.outputs)
        self.parts.append(CompletionOutput(work.index, logprobs=None if work.params.logprobs is None else []))
        self.speculation.append(None)
        output = Output(work, lambda grown: self.grow(place, grown), lambda first: self.begin(place, first), self.fail)
        self.outputs.append(output)
        return output

    def begin(self, place: int, first: Prefilled) -> None:
        if place == 0:
            self.first = first

    def grow(self, place: int, grown: Grown) -> None:
        part = self.parts[place]
        part.token_ids += grown.token_ids
        part.text += grown.text
        if part.logprobs is not None and grown.logprobs is not None:
            part.logprobs += grown.logprobs
            part.cumulative_logprob = grown.cumulative_logprob
        part.finish_reason, part.stop_reason = grown.finish_reason, grown.stop_reason
        self.speculation[place] = grown.speculation
        self.latest_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.latest_token
        if all(part.finished for part in self.parts):
            self.finished_at = self.latest_token
        self.changed.set()

    def fail(self, why: str) -> None:
        self.error = self.error or why
        self.changed.set()

    def result(self) -> RequestOutput:
        """What there is, as a value of its own but for the prompt, which stays as it is."""
        parts = [
            CompletionOutput(
                part.index,
                part.text,
                list(part.token_ids),
                None if part.logprobs is None else list(part.logprobs),
                part.cumulative_logprob,
                part.finish_reason,
                part.stop_reason,
            )
            for part in self.parts
        ]
        scheduled = [output.scheduled for output in self.outputs if output.scheduled is not None]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            parts,
            list(self.first.prompt_logprobs) if self.first and self.first.prompt_logprobs is not None else None,
            self.finished_at is not None,
            RequestMetrics(
                self.arrival,
                min(scheduled, default=None),
                self.first_token,
                self.finished_at,
                self.latest_token,
                sum(len(part.token_ids) for part in parts),
            ),
            _sum(self.speculation),
            0 if self.first is None else self.first.num_cached_tokens,
        )


def _sum(found: Sequence[SpeculationStats | None]) -> SpeculationStats | None:
    stats = [each for each in found if each is not None]
    if not stats:
        return None
    return SpeculationStats(
        sum(each.steps for each in stats),
        sum(each.tokens for each in stats),
        # Of unequal length where decode workers speculate by unequal numbers of tokens.
        [sum(counts) for counts in zip_longest(*(each.drafted for each in stats), fillvalue=0)],
        [sum(counts) for counts in zip_longest(*(each.accepted for each in stats), fillvalue=0)],
    )
