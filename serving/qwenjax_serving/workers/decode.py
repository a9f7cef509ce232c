"""The decode worker: reads pages that it is offered into its staging buffer, puts them into its cache, and decodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from qwenjax.engine.handover import Arrived, DecodeEngine
from qwenjax.kv_transfer import Pages, plan_transfer
from qwenjax_serving.protocol.messages import (
    Admit,
    Full,
    Grown,
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
from qwenjax_serving.transfer.nixl_transport import TransferError
from qwenjax_serving.transfer.staging import byte_ranges
from qwenjax_serving.workers.growth import Growth
from qwenjax_serving.workers.worker import Worker

_READ_TIMEOUT = 5.0  # seconds of one read; the router gives a whole prompt longer


@dataclass(eq=False)
class Place:
    """What is held for an output. request_id: the engine's, which stays when this worker joins anew. slots: of the
    staging buffer, for positions from `first` on."""

    work: Work
    request_id: str
    slots: list[int] = field(default_factory=list)
    first: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class DecodeWorker(Worker):
    role: ClassVar[Role] = "decode"

    def __init__(self, name: str, engine: DecodeEngine, *arguments: Any) -> None:
        super().__init__(name, engine, *arguments)
        self._decode_engine = engine
        self._places: dict[int, Place] = {}
        self._sources: dict[str, Source] = {}
        self._dropping: set[int] = set()
        self._grown: list[tuple[int, Grown]] = []  # not sent yet

    @property
    def num_held(self) -> int:
        return len(self._places) + len(self._dropping)

    @property
    def tickets(self) -> Collection[int]:
        return self._places.keys()

    async def handle(self, message: ToWorker) -> None:
        match message:
            case Source(gone=False):
                self._sources[message.worker] = message
            case Source():
                if self._sources.pop(message.worker, None) is not None:
                    await self.transport.disconnect(message.worker)
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
                self._drop(message.ticket)

    async def drop_all(self) -> None:
        for ticket in list(self._places):
            self._drop(ticket)
        while self._dropping:
            await asyncio.sleep(0.01)
        for worker in list(self._sources):
            await self.transport.disconnect(worker)
        self._sources.clear()

    def _do(self, place: Place, work: Any) -> None:
        task = self.background(work)
        place.tasks.add(task)
        task.add_done_callback(place.tasks.discard)

    async def _reserve(self, ticket: int, place: Place) -> None:
        engine, work, size = self._decode_engine, place.work, self._engine.config.page_size
        try:
            num_cached = await self.engine.call(
                lambda: engine.reserve(
                    place.request_id, work.prompt_token_ids, work.params, work.index, work.cache_salt
                )
            )
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
        source = self._sources.get(offer.source)
        if source is None:
            return  # it is gone, and the router knows
        own = self.staging.layout
        pages = Pages(offer.slots, place.slots, offer.start, offer.stop, offer.first, place.first)
        try:
            plan = plan_transfer(source.staging.kv, own.kv, pages)
            ranges = byte_ranges(plan.copies, source.staging, own, (offer.first_plane, offer.end_plane))
            began = time.monotonic()
            await self.transport.read(await self.transport.connect(source.metadata), ranges, _READ_TIMEOUT)
        except (TransferError, ValueError) as error:
            self.fail(offer.ticket, str(error))
            self._drop(offer.ticket)
            return
        num_bytes = plan.num_bytes(offer.end_plane - offer.first_plane, own.row_bytes)
        self.bytes_read += num_bytes
        self.read_seconds += time.monotonic() - began
        self.send(Taken(offer.ticket, offer.part, num_bytes))

    async def _decode(self, admit: Admit, place: Place) -> None:
        ticket, engine = admit.ticket, self._decode_engine
        handover, grown = admit.handover, admit.grown
        hidden = np.frombuffer(handover.hidden, engine.model.dtype) if handover.hidden else None
        pages = self.staging.pages[:, place.slots]  # a copy: the slots are free for the next
        self.staging.give_back(place.slots)
        place.slots = []
        arrived = Arrived(handover.token, grown.logprobs[0] if grown.logprobs else None, hidden, pages)
        growth = Growth(grown)
        request_id = place.request_id
        try:
            async for output in self.engine.stream(request_id, lambda: engine.admit(request_id, arrived)):
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

    def _drop(self, ticket: int) -> None:
        """Lets go of an output, wherever it stands; what it held is free once nothing touches it."""
        place = self._places.pop(ticket, None)
        if place is not None:
            self._dropping.add(ticket)
            self.background(self._free(ticket, place))

    async def _free(self, ticket: int, place: Place) -> None:
        try:
            for task in (tasks := list(place.tasks)):
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            self.staging.give_back(place.slots)
            with suppress(RuntimeError):  # an engine that has failed holds nothing
                await self.engine.call(lambda: self._decode_engine.cancel(place.request_id))
        finally:
            self._dropping.discard(ticket)
