"""The decode worker: reads pages that it is offered into its staging buffer, puts them into its cache, and decodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import numpy as np

from qwenjax.engine.decode_engine import Arrived, DecodeEngine
from qwenjax.engine.handover import ranks_by_process
from qwenjax_serving.protocol.messages import (
    Admit,
    Full,
    Grown,
    LetGo,
    Offer,
    Release,
    Reserve,
    Reserved,
    Role,
    Source,
    Taken,
    Tokens,
    ToWorker,
    Work,
)
from qwenjax_serving.transfer.nixl_transport import TransferError, until_done
from qwenjax_serving.transfer.reading import Reader
from qwenjax_serving.workers.batch_limit import BatchLimit
from qwenjax_serving.workers.growth import Growth
from qwenjax_serving.workers.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Place:
    """What is held for an output. request_id: the engine's, which stays when this worker joins anew. slots: of the
    staging buffer, for positions from `first` on."""

    work: Work
    request_id: str
    slots: list[int] = field(default_factory=list)
    first: int = 0
    data_rank: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class DecodeWorker(Worker):
    role: ClassVar[Role] = "decode"

    def __init__(
        self, name: str, engine: DecodeEngine, *arguments: Any, min_tokens_per_second: float | None = None
    ) -> None:
        """min_tokens_per_second: of each sequence; see BatchLimit. None takes as many as there are slots."""
        super().__init__(name, engine, *arguments)
        self._decode_engine = engine
        self._limit: BatchLimit | None = None
        if min_tokens_per_second is not None:
            self._limit = BatchLimit(engine.config.max_num_seqs, min_tokens_per_second)
            engine.on_decoded = self._limit.observe
        self._places: dict[int, Place] = {}
        self._dropping: set[int] = set()
        self._grown: list[tuple[int, Grown]] = []  # not sent yet

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.transport, self.staging)

    @property
    def num_slots(self) -> int:
        if self._limit is None:
            return super().num_slots
        return self._engine.ranks * self._limit.at(time.monotonic())

    @property
    def num_held(self) -> int:
        return len(self._places) + len(self._dropping)

    @property
    def tickets(self) -> Collection[int]:
        return self._places.keys()

    async def handle(self, message: ToWorker) -> None:
        match message:
            case Source():
                await self._learn(message)
            case Reserve() if message.ticket in self._places:
                logger.warning("worker %s: ticket %d is reserved a second time: passed over", self.name, message.ticket)
            case Reserve():
                # Tickets of another router may be the same.
                new = self._places[message.ticket] = Place(message.work, f"{self._number}-{message.ticket}")
                self._do(new, self._reserve(message.ticket, new))
            case Offer():
                if (place := self._places.get(message.ticket)) is not None:
                    self._do(place, self._read(message, place))
            case Admit():
                if (place := self._places.get(message.ticket)) is not None:
                    self._do(place, self._decode(message, place))
            case Release():
                if not self._drop(message.ticket) and message.ticket not in self._dropping:
                    self.send(LetGo(message.ticket))

    async def drop_all(self) -> None:
        for ticket in list(self._places):
            self._drop(ticket)
        while self._dropping:
            await asyncio.sleep(0.01)
        for source in self.reader.sources:
            await self._learn(msgspec.structs.replace(source, gone=True))

    async def _learn(self, source: Source) -> None:
        if self.peers is not None:
            self.peers.tell(source)
        await self.reader.learn(source)

    def _do(self, place: Place, work: Any) -> None:
        task = self.background(work)
        place.tasks.add(task)
        task.add_done_callback(place.tasks.discard)

    async def _reserve(self, ticket: int, place: Place) -> None:
        engine, work, size = self._decode_engine, place.work, self._engine.config.page_size

        def reserve() -> int | None:
            if self._limit is not None:
                engine.scheduler.max_running = self._limit.at(time.monotonic())
            found = engine.reserve(place.request_id, work.prompt_token_ids, work.params, work.index, work.cache_salt)
            place.data_rank = 0 if found is None else engine.data_rank(place.request_id)
            return found

        try:
            num_cached = await self.engine.call(reserve)
        except ValueError as error:
            self.fail(ticket, str(error), refused=True)
            self._drop(ticket)
            return
        slots = None
        if num_cached is not None:
            place.first = num_cached
            slots = self.staging.take(-(-(len(work.prompt_token_ids) - num_cached) // size))
        if num_cached is None or slots is None:
            self.send(Full(ticket))
            self._drop(ticket)
            return
        place.slots = slots
        self.send(Reserved(ticket, num_cached))

    async def _read(self, offer: Offer, place: Place) -> None:
        began, reads = time.monotonic(), list[Coroutine[Any, Any, int]]()
        where = place.slots, place.first
        for process, ranks in ranks_by_process(self._engine, place.data_rank).items():
            if self.peers is None or process == 0:
                reads.append(self.reader.read(offer, *where, ranks, self.transfer_timeout))
            else:
                reads.append(self.peers.read(process, offer, *where, ranks, self.transfer_timeout))
        found = await asyncio.gather(*reads, return_exceptions=True)  # all of them, whatever comes of one
        for error in found:
            if isinstance(error, TransferError | ValueError):
                self.fail(offer.ticket, str(error))
                self._drop(offer.ticket)
                return
            if isinstance(error, BaseException):
                raise error
        num_bytes = sum(count for count in found if isinstance(count, int))
        self.has_read(num_bytes, time.monotonic() - began)
        self.send(Taken(offer.ticket, offer.part, num_bytes))

    async def _decode(self, admit: Admit, place: Place) -> None:
        ticket, engine = admit.ticket, self._decode_engine
        handover, grown = admit.handover, admit.grown
        # To its end, even where the output is let go of meanwhile: who frees slots, or the buffer, waits for this task.
        taking = asyncio.to_thread(self.staging.take_out, place.slots, place.data_rank)
        pages = await until_done(asyncio.create_task(taking))
        growth = Growth(grown)
        request_id = place.request_id
        try:
            hidden = np.frombuffer(handover.hidden, engine.model.dtype) if handover.hidden else None
            logprobs = grown.logprobs[0] if grown.logprobs else None
            arrived = Arrived(handover.token, logprobs, hidden, pages, tuple(place.slots))
            async for output in self.engine.stream(request_id, lambda: engine.admit(request_id, arrived)):
                self.staging.give_back(place.slots)  # what decodes has been taken out of them, by every process
                place.slots = []
                self._tell(ticket, growth.of(output.outputs[0], output.speculation))
        except (ValueError, KeyError) as error:  # the engine has not taken it, and others go on
            self.fail(ticket, str(error))
            self._drop(ticket)
            return
        self._places.pop(ticket, None)

    def _tell(self, ticket: int, grown: Grown) -> None:
        """Says that an output has grown, together with all that grow in this round of the loop: those of one decode
        call wake up together."""
        if not self._grown:
            asyncio.get_running_loop().call_soon(self._tell_all)
        self._grown.append((ticket, grown))

    def _tell_all(self) -> None:
        outputs, self._grown = tuple(self._grown), []
        self.send(Tokens(outputs))

    def _drop(self, ticket: int) -> bool:
        """Lets go of an output, wherever it stands: of its pages in the cache at once, of its slots once nothing
        touches them, which a read that hangs may do for as long as `Reader.read` gives it. False where it holds
        nothing for that."""
        place = self._places.pop(ticket, None)
        if place is None:
            return False
        self._dropping.add(ticket)
        self.background(self._free(ticket, place))
        return True

    async def _free(self, ticket: int, place: Place) -> None:
        try:
            for task in (tasks := list(place.tasks)):
                task.cancel()  # none of them asks anything of the engine any more
            with suppress(RuntimeError):  # an engine that has failed holds nothing
                await self.engine.call(lambda: self._decode_engine.cancel(place.request_id))
            if tasks:
                await asyncio.wait(tasks)
            # Where the worker is to end, a read may still write to them.
            if not self._ended.done() and self.transport.failure is None:
                self.staging.give_back(place.slots)  # after an admission that may have been under way
                self.send(LetGo(ticket))
        finally:
            self._dropping.discard(ticket)
