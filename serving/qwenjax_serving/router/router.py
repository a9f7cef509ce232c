"""Where every output stands between the workers. No sockets and no clock of its own: messages and times come in, and
messages go out through a function, so that all of it can be tested without either.

An output waits, is reserved a place at a decode worker, prefills, moves (its prompt is run, and pages are still under
way) and decodes. Where a worker dies or fails before a token came from decoding, the output starts again, with a new
ticket; after that it ends with an error.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from qwenjax_serving.backend import DEFAULT_QUEUE
from qwenjax_serving.protocol.messages import (
    Admit,
    Failed,
    Full,
    Goodbye,
    Grown,
    Halt,
    Hello,
    Leaving,
    LetGo,
    Message,
    Offer,
    Ping,
    Prefill,
    Prefilled,
    Rejoin,
    Release,
    Reserve,
    Reserved,
    Role,
    Source,
    Status,
    Taken,
    Tokens,
    ToRouter,
    Unwelcome,
    Welcome,
    Work,
)
from qwenjax_serving.router.fleet import Worker, choose, prefix_keys

logger = logging.getLogger(__name__)

State = Literal["waiting", "reserving", "prefilling", "moving", "decoding", "ended"]


@dataclass(frozen=True)
class RouterSettings:
    """worker_timeout: seconds of silence after which a worker is given up. transfer_timeout: seconds that a reservation
    may take, that a read of pages may, and that pages may be under way once the prompt is run. progress_timeout: those
    that a worker may say nothing of an output that it prefills or decodes. absence_timeout: seconds that outputs wait
    for a role without workers. max_waiting: outputs that wait; more are refused. prefill_queue_tokens: prompt tokens
    that a prefill worker is given at once, beyond its first prompt; the rest wait here, where the choice is still open.
    max_attempts: of an output.
    """

    worker_timeout: float = 3.0
    transfer_timeout: float = 10.0
    progress_timeout: float = 120.0
    absence_timeout: float = 30.0
    max_waiting: int = DEFAULT_QUEUE
    prefill_queue_tokens: int = 8192
    max_attempts: int = 3


@dataclass(eq=False)
class Output:
    """One output of a request. `prefilled` (once, first), `grown` and `failed` are called as it goes; none of
    them after `failed`, nor once grown brought a finish_reason or the output was cancelled."""

    work: Work
    grown: Callable[[Grown], None]
    prefilled: Callable[[Prefilled], None]
    failed: Callable[[str], None]
    order: int = 0
    keys: tuple[int, ...] = ()
    state: State = "waiting"
    ticket: int = 0
    attempts: int = 0
    prefill: Worker | None = None
    decode: Worker | None = None
    deadline: float | None = None
    first: Prefilled | None = None
    num_offered: int = 0  # parts of the prompt's pages
    taken: set[int] = field(default_factory=set)  # those that have been read
    num_tokens: int = 0  # given to `grown`
    first_token: int | None = None
    scheduled: float | None = None  # when it was first given to a prefill worker
    again: bool = False  # whether it failed for want of workers alone: another try later may succeed
    absent_since: float | None = None  # when there was no worker any more that could run it

    @property
    def length(self) -> int:
        """Tokens that it may come to have, with its prompt."""
        return len(self.work.prompt_token_ids) + (self.work.params.max_tokens or 0)


class Router:
    """All workers and outputs. `send(identity, message)` sends to a worker."""

    def __init__(self, send: Callable[[bytes, Message], None], settings: RouterSettings) -> None:
        self.settings = settings
        self._send = send
        self.workers: dict[bytes, Worker] = {}
        self.waiting: list[Output] = []  # by order
        self._tickets: dict[int, Output] = {}
        # Of attempts that are over: the prefill worker whose pages the decode worker may still be reading. Without a
        # deadline here: reads have one, and a decode worker whose read goes on beyond it ends. One whose engine hangs
        # keeps those slots for as long as it lives.
        self._read_on: dict[int, tuple[Worker, Worker]] = {}
        self._num_tickets = self._num_outputs = 0
        self._unwelcome: dict[str, str] = {}  # workers that are not used, and why
        self.num_retries = self.num_lost = self.num_full = 0

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.hello.role == role]

    @property
    def ready(self) -> bool:
        """Whether there is a worker of either role that takes work."""
        return bool(self._open("prefill") and self._open("decode"))

    @property
    def num_running(self) -> int:
        """Outputs that are with workers."""
        return len(self._tickets)

    def submit(self, output: Output, now: float) -> None:
        """Takes an output; its caller has seen to max_waiting."""
        output.order = self._num_outputs = self._num_outputs + 1
        output.keys = tuple(prefix_keys(output.work))
        self.waiting.append(output)
        self._dispatch(now)

    def cancel(self, output: Output, now: float) -> None:
        """Ends an output where it is; what workers hold for it is let go. One that has ended is passed over."""
        if output.state != "ended":
            self._let_go(output)
            output.state = "ended"
            self._dispatch(now)

    def receive(self, sender: bytes, message: ToRouter, now: float) -> None:
        if isinstance(message, Hello):
            self._join(sender, message, now)
            return
        worker = self.workers.get(sender)
        if worker is None:
            if not isinstance(message, Leaving | Goodbye):
                self._send(sender, Rejoin())
            return
        worker.heard = now
        if isinstance(message, Status):
            worker.status, worker.full = message, False
        elif isinstance(message, Leaving):
            worker.leaving = True
        elif isinstance(message, Goodbye):
            self._lose(worker, "has ended")
        elif isinstance(message, Tokens):
            for ticket, grown in message.outputs:
                output = self._tickets.get(ticket)
                if output is not None and output.decode is worker and output.state == "decoding":
                    output.deadline = now + self.settings.progress_timeout
                    self._grow(output, grown)
        elif isinstance(message, LetGo):
            if self._read_on.get(message.ticket, (None, None))[1] is worker:
                self._end_reading(message.ticket)
        else:
            output = self._tickets.get(message.ticket)
            if output is not None and worker in (output.prefill, output.decode):
                self._advance(worker, output, message, now)
        self._dispatch(now)

    def tick(self, now: float) -> None:
        """Several times a second: gives up the silent and the late, and tells workers that the router lives."""
        for worker in list(self.workers.values()):
            if now - worker.heard > self.settings.worker_timeout:
                self._lose(worker, f"has been silent for {now - worker.heard:.1f} s")
        held: dict[Worker, list[int]] = {worker: [] for worker in self.workers.values()}
        for output in self._tickets.values():
            for holder in self._holders(output):
                held[holder].append(output.ticket)
        for ticket, (prefill, decode) in self._read_on.items():
            held[prefill].append(ticket)
            self._send(decode.identity, Release(ticket))  # again: one of the two messages may have got lost
        for worker, tickets in held.items():
            self._send(worker.identity, Ping(tuple(tickets)))
        for output in list(self._tickets.values()):
            if output.deadline is not None and now > output.deadline:
                self._retry(output, self._late(output))
        for output in list(self.waiting):
            if (missing := self._missing(output)) is None:
                output.absent_since = None
            elif output.absent_since is None:
                output.absent_since = now
            elif now - output.absent_since > self.settings.absence_timeout:
                output.again = True
                self._fail(output, f"there is no {missing}")
        self._dispatch(now)

    def _late(self, output: Output) -> str:
        if output.state in ("prefilling", "decoding"):
            return f"{output.state} made no progress for {self.settings.progress_timeout:g} s"
        return f"{output.state} took longer than {self.settings.transfer_timeout:g} s"

    def _join(self, sender: bytes, hello: Hello, now: float) -> None:
        if known := self.workers.get(sender):
            self._lose(known, "has begun anew")
        if (reason := self._why_not(hello)) is not None:
            if self._unwelcome.get(hello.name) != reason:  # it asks again every few seconds
                logger.error("worker %s is not used: %s", hello.name, reason)
            self._unwelcome[hello.name] = reason
            self._send(sender, Unwelcome(hello.number, reason))
            return
        self._unwelcome.pop(hello.name, None)
        worker = self.workers[sender] = Worker(sender, hello, now)
        logger.info("%s worker %s has joined", hello.role, hello.name)
        self._send(sender, Welcome(hello.number, self.settings.transfer_timeout))
        if hello.role == "prefill":
            for other in self.of_role("decode"):
                self._introduce(worker, other)
        else:
            for other in self.of_role("prefill"):
                self._introduce(other, worker)
        self._dispatch(now)

    def _why_not(self, hello: Hello) -> str | None:
        """Why a worker cannot work with those that are there."""
        for other in self.workers.values():
            if other.hello.name == hello.name:
                return f"there is a worker {hello.name}, process {other.hello.instance}; another --name is free"
            for what in {**hello.model, **other.hello.model}:
                own, theirs = hello.model.get(what), other.hello.model.get(what)
                if own != theirs:
                    return f"{what} is {own}, and {theirs} at {other.hello.name}"
        return None

    def _introduce(self, source: Worker, reader: Worker, gone: bool = False) -> None:
        hello = source.hello
        self._send(reader.identity, Source(hello.instance, hello.staging, hello.metadata, gone))

    def _lose(self, worker: Worker, why: str) -> None:
        del self.workers[worker.identity]
        self.num_lost += 1
        logger.warning("%s worker %s %s", worker.hello.role, worker.hello.name, why)
        if worker.hello.role == "prefill":
            for reader in self.of_role("decode"):
                self._introduce(worker, reader, gone=True)
        for ticket in [ticket for ticket, both in self._read_on.items() if worker in both]:
            self._end_reading(ticket)
        for output in [each for each in self._tickets.values() if worker in (each.prefill, each.decode)]:
            self._retry(output, f"{worker.hello.role} worker {worker.hello.name} {why}")

    def _dispatch(self, now: float) -> None:
        """Gives those that wait to workers in their order, while there is room for the next. Outputs that none of the
        workers can take, now that others are gone, keep no others waiting."""
        place = 0
        while place < len(self.waiting):
            output = self.waiting[place]
            length = len(output.work.prompt_token_ids)
            limit = self.settings.prefill_queue_tokens
            able = self._open("prefill", output)
            prefill = choose((w for w in able if not w.load or w.load + length <= limit), output.keys, limit // 4)
            roomy = [w for w in self._open("decode", output) if not w.full and w.load < w.num_slots]
            decode = choose(roomy, output.keys, max((w.num_slots for w in roomy), default=0) // 8)
            if prefill is None or decode is None:
                if self._missing(output) is None:
                    return
                place += 1
                continue
            self.waiting.pop(place)
            self._num_tickets += 1
            output.ticket, output.prefill, output.decode = self._num_tickets, prefill, decode
            output.first, output.num_offered, output.taken = None, 0, set()
            self._tickets[output.ticket] = output
            prefill.load += length
            decode.load += 1
            self._enter(output, "reserving", now + self.settings.transfer_timeout)
            self._send(decode.identity, Reserve(output.ticket, output.work))

    def _open(self, role: str, output: Output | None = None) -> list[Worker]:
        """Workers that take work, of the length of an output's."""
        length = 0 if output is None else output.length
        return [worker for worker in self.of_role(role) if not worker.leaving and worker.hello.max_model_len >= length]

    def _missing(self, output: Output) -> str | None:
        """The worker that would have to be there for an output to run."""
        for role in "prefill", "decode":
            if not self._open(role):
                return f"{role} worker"
            if not self._open(role, output):
                return f"{role} worker for {output.length} tokens"
        return None

    def _enter(self, output: Output, state: State, deadline: float) -> None:
        output.state, output.deadline = state, deadline

    def _advance(self, worker: Worker, output: Output, message: ToRouter, now: float) -> None:
        """A worker says how its part of an output goes."""
        prefill, decode = output.prefill, output.decode
        assert decode is not None
        if isinstance(message, Failed):
            if message.refused:
                self._fail(output, message.reason)
            else:
                self._retry(output, f"{worker.hello.role} worker {worker.hello.name}: {message.reason}")
        elif (misfit := _misfit(worker, output, message)) is not None:
            self._retry(output, f"{worker.hello.role} worker {worker.hello.name} {misfit}")
        elif isinstance(message, Full):
            self.num_full += 1
            self._let_go(output)
            decode.full = True
            self._wait(output)
        elif isinstance(message, Reserved):
            assert prefill is not None
            prefill.saw(output.keys)
            decode.saw(output.keys)
            self._enter(output, "prefilling", now + self.settings.progress_timeout)
            if output.scheduled is None:
                output.scheduled = now
            self._send(prefill.identity, Prefill(output.ticket, output.work, message.num_cached))
        elif isinstance(message, Offer):
            output.num_offered += 1
            output.deadline = now + self.settings.progress_timeout
            self._send(decode.identity, message)
        elif isinstance(message, Prefilled):
            assert prefill is not None
            prefill.load -= len(output.work.prompt_token_ids)
            self._enter(output, "moving", now + self.settings.transfer_timeout)
            if output.first_token is None:
                output.prefilled(message)
            output.first = message
            self._grow(output, message.grown)
            self._admit_if_all_there(output, now)
        elif isinstance(message, Taken):
            output.taken.add(message.part)
            self._admit_if_all_there(output, now)

    def _admit_if_all_there(self, output: Output, now: float) -> None:
        first = output.first
        if output.state != "moving" or first is None or len(output.taken) < output.num_offered:
            return
        assert output.prefill is not None
        assert output.decode is not None
        assert first.handover is not None  # or the output has ended
        # Up to here the source kept the pages as they were: what was read is what was offered.
        self._send(output.prefill.identity, Release(output.ticket))
        output.prefill = None
        self._enter(output, "decoding", now + self.settings.progress_timeout)
        self._send(output.decode.identity, Admit(output.ticket, first.grown, first.handover))

    def _grow(self, output: Output, grown: Grown) -> None:
        if grown.start > output.num_tokens:
            self._fail(output, f"tokens {output.num_tokens} to {grown.start} were lost between worker and router")
            return
        if grown.start < output.num_tokens and output.state == "decoding":
            self._fail(output, f"a worker told tokens from {grown.start} on a second time, after {output.num_tokens}")
            return
        if output.work.params.logprobs is not None and len(grown.logprobs or ()) != len(grown.token_ids):
            self._fail(output, "a worker told tokens without their log-probabilities")
            return
        if output.first_token is None and grown.token_ids:
            output.first_token = grown.token_ids[0]
        elif grown.start == 0 and grown.token_ids and grown.token_ids[0] != output.first_token:
            self._fail(output, "another try drew another first token")
            return
        if grown.start + len(grown.token_ids) > output.num_tokens or grown.finish_reason is not None:
            output.num_tokens = grown.start + len(grown.token_ids)
            output.grown(grown)
        if grown.finish_reason is not None:
            if output.state == "decoding":
                assert output.decode is not None  # which has let go of it already
                output.decode.load -= 1
                output.decode.full = False
                output.decode = None
            self._let_go(output)
            output.state = "ended"

    def _retry(self, output: Output, why: str) -> None:
        """Starts an output again where nothing has been decoded yet, and ends it otherwise."""
        if output.state == "decoding":
            self._fail(output, why)
            return
        output.attempts += 1
        if output.attempts >= self.settings.max_attempts:
            self._fail(output, f"{why}; that was try {output.attempts}")
            return
        logger.warning("an output of %d prompt tokens starts again: %s", len(output.work.prompt_token_ids), why)
        self.num_retries += 1
        self._let_go(output)
        self._wait(output)

    def _wait(self, output: Output) -> None:
        output.state = "waiting"
        insort(self.waiting, output, key=lambda each: each.order)

    def _fail(self, output: Output, why: str) -> None:
        if output.state == "ended":
            return
        self._let_go(output)
        output.state = "ended"
        logger.warning("an output of %d prompt tokens failed: %s", len(output.work.prompt_token_ids), why)
        output.failed(why)

    def _let_go(self, output: Output) -> None:
        """Ends what runs of an output, here and at its workers; those that are gone hear nothing."""
        if output.state == "waiting":
            self.waiting.remove(output)
            return
        self._tickets.pop(output.ticket, None)
        if output.prefill is not None and output.state in ("reserving", "prefilling"):
            output.prefill.load -= len(output.work.prompt_token_ids)
        if output.decode is not None:
            output.decode.load -= 1
            output.decode.full = False
        holders = list(self._holders(output))
        if output.prefill in holders and output.decode in holders and output.state in ("prefilling", "moving"):
            prefill, decode = self._read_on[output.ticket] = output.prefill, output.decode
            self._send(prefill.identity, Halt(output.ticket))
            self._send(decode.identity, Release(output.ticket))
        else:
            for worker in holders:
                self._send(worker.identity, Release(output.ticket))
        output.prefill = output.decode = output.deadline = None

    def _end_reading(self, ticket: int) -> None:
        """Nothing reads the pages of an attempt that is over any more, or one of its workers is gone."""
        prefill, _ = self._read_on.pop(ticket)
        if prefill.identity in self.workers:
            self._send(prefill.identity, Release(ticket))

    def _holders(self, output: Output) -> Iterator[Worker]:
        for worker in (output.prefill, output.decode):
            if worker is not None and worker.identity in self.workers:
                yield worker


_TURNS: dict[type[Message], tuple[Role, tuple[State, ...]]] = {  # whose each message is, and when
    Reserved: ("decode", ("reserving",)),
    Full: ("decode", ("reserving",)),
    Offer: ("prefill", ("prefilling",)),
    Prefilled: ("prefill", ("prefilling",)),
    Taken: ("decode", ("prefilling", "moving")),
}


def _misfit(worker: Worker, output: Output, message: ToRouter) -> str | None:
    """What is wrong with a message of a worker that has the output, if anything: a worker that is at fault is not to
    take the router with it, nor to have pages decoded that are not there."""
    role, states = _TURNS[type(message)]
    if worker.hello.role != role or output.state not in states:
        return f"said {type(message).__name__} while the output was {output.state}"
    length = len(output.work.prompt_token_ids)
    match message:
        case Reserved(num_cached=cached) if cached > length:
            return f"has {cached} tokens of a prompt of {length}"
        case Offer(part=part) if part != output.num_offered:
            return f"offers part {part} after {output.num_offered} parts"
        case Taken(part=part) if part in output.taken or part >= output.num_offered:
            return f"has read part {part}, of {output.num_offered} offered, {len(output.taken)} read before"
        case Prefilled(grown=grown, num_parts=parts, handover=handover):
            if parts != output.num_offered:
                return f"has offered {parts} parts, of which {output.num_offered} came"
            if grown.start or len(grown.token_ids) != 1:
                return f"has drawn {len(grown.token_ids)} tokens from {grown.start} on, in place of the first"
            if (handover is None) != (grown.finish_reason is not None):
                return "hands over what has ended, or does not where it goes on"
            if handover is not None and handover.token != grown.token_ids[0]:
                return f"hands over token {handover.token} after it drew {grown.token_ids[0]}"
    return None
