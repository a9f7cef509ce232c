"""The prefill worker: runs prompts, stages their pages group by group, and offers them to whom they are for."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from qwenjax.engine.prefill_engine import PrefillEngine, StagedPages, StagedPart
from qwenjax.outputs import RequestOutput
from qwenjax_serving.protocol.messages import (
    Halt,
    Handover,
    MessageError,
    Offer,
    Prefill,
    Prefilled,
    Release,
    Role,
    Serve,
    ToWorker,
)
from qwenjax_serving.workers.growth import Growth
from qwenjax_serving.workers.worker import Worker


@dataclass(eq=False)
class Prompt:
    """A prompt from the moment that it is given to this worker until it is released. slots: of the staging buffer, for
    pages from `first_page` on, empty while it waits for them. halted: nothing of it is run or offered any more."""

    message: Prefill
    first_page: int
    num_pages: int
    slots: list[int] = field(default_factory=list)
    num_offered: int = 0
    offered: asyncio.Event = field(default_factory=asyncio.Event)
    serving: ExitStack = field(default_factory=ExitStack)
    task: asyncio.Task[None] | None = None
    halted: bool = False


class PrefillWorker(Worker):
    role: ClassVar[Role] = "prefill"

    def __init__(self, name: str, engine: PrefillEngine, *arguments: Any) -> None:
        super().__init__(name, engine, *arguments)
        self._prompts: dict[str, Prompt] = {}  # by the id that the engine knows them by
        self._waiting: deque[str] = deque()
        self._prefill_engine = engine
        self._staged: queue.SimpleQueue[StagedPages | None] = queue.SimpleQueue()
        self._num_staged = self._num_serving = 0
        engine.on_staged, engine.slots_of = self._begin_staging, self._slots_of

    @property
    def num_held(self) -> int:
        return len(self._prompts)

    @property
    def tickets(self) -> Collection[int]:
        return [prompt.message.ticket for prompt in self._prompts.values()]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        stager = threading.Thread(target=self._stage, args=(loop,), name="stager", daemon=True)
        stager.start()
        try:
            await super().run()
        finally:
            self._staged.put(None)

    async def handle(self, message: ToWorker) -> None:
        if isinstance(message, Prefill):
            self._take(message)
        elif isinstance(message, Halt):
            await self._halt(self._id(message.ticket))
        elif isinstance(message, Release):
            await self._drop(self._id(message.ticket))

    async def drop_all(self) -> None:
        # Those that wait go first, the last before the others: none of them begins in slots that become free.
        for request_id in [*reversed(self._waiting), *self._prompts]:
            await self._drop(request_id)

    def _id(self, ticket: int) -> str:
        return f"{self._number}-{ticket}"  # tickets of another router may be the same

    def _take(self, message: Prefill) -> None:
        work, size = message.work, self._engine.config.page_size
        request_id = self._id(message.ticket)
        try:
            if request_id in self._prompts:
                raise ValueError("it is there already")
            if message.num_cached > len(work.prompt_token_ids):
                raise ValueError(f"{message.num_cached} tokens are cached, of {len(work.prompt_token_ids)}")
            self._engine.check(work.prompt_token_ids, work.params)
        except ValueError as error:
            self.fail(message.ticket, str(error), refused=True)
            return
        first_page = message.num_cached // size
        num_pages = -(-len(work.prompt_token_ids) // size) - first_page
        self._prompts[request_id] = Prompt(message, first_page, num_pages)
        self._waiting.append(request_id)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Runs prompts in order, as far as there is staging for their pages."""
        while self._waiting:
            prompt = self._prompts[self._waiting[0]]
            slots = self.staging.take(prompt.num_pages)
            if slots is None:
                return
            prompt.slots = slots
            prompt.task = self.background(self._run_prompt(self._waiting.popleft(), prompt))

    async def _run_prompt(self, request_id: str, prompt: Prompt) -> None:
        message, engine = prompt.message, self._prefill_engine
        work = message.work

        def enter() -> None:
            engine.add_prompt(
                request_id,
                work.prompt_token_ids,
                work.params,
                work.index,
                message.num_cached,
                work.cache_salt,
            )

        output: RequestOutput | None = None
        try:
            async for each in self.engine.stream(request_id, enter):
                output = each
        except (ValueError, KeyError) as error:  # the engine has not taken it, and others go on
            self.fail(message.ticket, str(error), refused=True)
            self.background(self._drop(request_id))
            return
        assert output is not None
        hidden, num_parts = engine.take_handover(request_id)
        while prompt.num_offered < num_parts:
            prompt.offered.clear()
            await prompt.offered.wait()
        (first,) = output.outputs
        state = np.asarray(hidden).tobytes() if engine.config.num_speculative_tokens else b""
        handover = None if first.finished else Handover(first.token_ids[0], state)
        prompt_logprobs = None if output.prompt_logprobs is None else tuple(output.prompt_logprobs)
        grown = Growth().of(first, output.speculation)
        try:
            self.send(Prefilled(message.ticket, grown, num_parts, handover, prompt_logprobs, output.num_cached_tokens))
        except MessageError as error:  # its slots may still be read: the router says when they are free
            self.fail(message.ticket, f"{error}: ask for fewer prompt_logprobs, or of fewer tokens", refused=True)

    async def _halt(self, request_id: str) -> None:
        """Runs no more of a prompt; its slots stay as they are."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        if prompt.task is None:  # nobody reads what has not begun
            await self._drop(request_id)
            return
        prompt.halted = True
        prompt.task.cancel()  # which drops its stream: the engine aborts the request
        await asyncio.wait([prompt.task])

    async def _drop(self, request_id: str) -> None:
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        if prompt.task is None:
            self._waiting.remove(request_id)
        else:
            prompt.task.cancel()
            await asyncio.wait([prompt.task])
        prompt.serving.close()
        self._prefill_engine.handovers.pop(request_id, None)
        self.staging.give_back(prompt.slots)
        self._begin_waiting()

    def _slots_of(self, part: StagedPart) -> list[int]:
        """Of a part's pages; -1 where nobody waits for them any more. From any thread."""
        size = self._engine.config.page_size
        count = -(-part.stop // size) - part.first_page
        prompt = self._prompts.get(part.request_id)
        if prompt is None:
            return [-1] * count
        place = part.first_page - prompt.first_page
        return prompt.slots[place : place + count]

    @contextmanager
    def _being_read(self) -> Iterator[None]:
        """While others may read from this worker's processes."""
        with self.transport.serving():
            self._num_serving += 1
            self._say_served()
            try:
                yield
            finally:
                self._num_serving -= 1
                self._say_served()

    def _say_served(self) -> None:
        if self.peers is not None:
            self.peers.tell(Serve(self._num_serving > 0))

    def _begin_staging(self, staged: StagedPages) -> None:
        """In the engine's thread."""
        self.staging.begin(staged)
        self._staged.put(staged)

    def _stage(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: waits for the device, and hands its pages to the loop. An error ends the worker."""
        while (staged := self._staged.get()) is not None:
            try:
                pages = self.staging.fetch(staged)
                self._num_staged += 1
                self._prefill_engine.wait_for_others(self._num_staged)
                then = partial(self._offer_or_end, staged, pages)
            except Exception as error:
                then = partial(self.end_with, error)
            try:
                loop.call_soon_threadsafe(then)
            except RuntimeError:  # the loop has ended
                return

    def _offer_or_end(self, staged: StagedPages, pages: Any) -> None:
        try:
            self._offer(staged, pages)
        except Exception as error:
            self.end_with(error)

    def _offer(self, staged: StagedPages, pages: Any) -> None:
        """Copies pages, of `StagingBuffer.fetch`, to their slots and tells the router."""
        planes = (staged.first_plane, staged.first_plane + staged.num_planes)
        size = self._engine.config.page_size
        for part in staged.parts:
            prompt = self._prompts.get(part.request_id)
            if prompt is None or prompt.halted:
                continue
            slots = self._slots_of(part)
            # A page that is partly there already is written again: what it held before stays the same.
            self.staging.put(pages, part.first, slots, planes)
            offer = Offer(
                prompt.message.ticket,
                self.instance,
                prompt.num_offered,
                part.start,
                part.stop,
                *planes,
                tuple(slots),
                part.first_page * size,
            )
            if not prompt.num_offered:
                prompt.serving.enter_context(self._being_read())
            prompt.num_offered += 1
            prompt.offered.set()
            self.send(offer)
