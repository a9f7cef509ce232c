"""The router between workers that are played: whatever order messages come in and whoever dies, every output ends once,
and no worker is left holding anything."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.outputs import EngineStats, SpeculationStats
from qwenjax.sampling_params import SamplingParams
from qwenjax_serving.metrics import EngineCollector
from qwenjax_serving.protocol.messages import (
    READ_TIMES,
    Admit,
    Failed,
    Full,
    Goodbye,
    Grown,
    Halt,
    Handover,
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
    Source,
    Status,
    Taken,
    Tokens,
    ToRouter,
    Unwelcome,
    Welcome,
    Work,
)
from qwenjax_serving.router.fleet import choose, prefix_keys
from qwenjax_serving.router.metrics import RouterCollector
from qwenjax_serving.router.router import Output, Router, RouterSettings
from qwenjax_serving.transfer.staging import StagingLayout
from tests.serving.any_message import messages

STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, (8,), 8, (0,), SpeculationStats.of(0))
STATUS = Status(STATS, 2, 0, 0.0, (0,) * (len(READ_TIMES) + 1), 8, 0, 0, 0)
LENGTH = 3  # tokens of an output


def work(*prompt: int) -> Work:
    return Work(prompt, SamplingParams(temperature=0, max_tokens=LENGTH), 0, None)


def grown(start: int, *tokens: int, end: bool = False) -> Grown:
    return Grown(start, tokens, "", None, None, "length" if end else None, None)


class Played:
    """A worker: it answers what it is told, one message at a time, and remembers what it holds."""

    def __init__(self, role: str, name: str, slots: int = 2, model: str = "model") -> None:
        layout = StagingLayout(1, 4, (0, 2), 8, 8, (0,), (0,), (0,))
        self.hello = Hello(name, name, 0, role, {"dtype": model}, slots, 100, layout, (b"metadata",))  # type: ignore[arg-type]
        self.inbox = deque[Message]()
        self.held: dict[int, Work | None] = {}
        self.sources: set[str] = set()
        self.halted: set[int] = set()
        self.alive, self.welcome = True, False

    def say_hello(self) -> Hello:
        self.held.clear()
        self.sources.clear()
        self.welcome, self.hello = False, msgspec.structs.replace(self.hello, number=self.hello.number + 1)
        return self.hello

    def step(self) -> list[ToRouter]:
        """What it says to the next message."""
        message = self.inbox.popleft()
        if not self.welcome:
            self.welcome = isinstance(message, Welcome) and message.number == self.hello.number
            return []
        match message:
            case Rejoin():
                return [self.say_hello()]
            case Source(worker=worker, gone=gone):
                (self.sources.discard if gone else self.sources.add)(worker)
            case Reserve(ticket=ticket):
                if len(self.held) == self.hello.num_slots:
                    return [Full(ticket)]
                self.held[ticket] = message.work
                return [Reserved(ticket, 0)]
            case Prefill(ticket=ticket, work=work):
                self.held[ticket] = work
                first = work.prompt_token_ids[0]
                offers = [Offer(ticket, self.hello.instance, part, 0, 1, 0, 2, (0,), 0) for part in range(2)]
                return [*offers, Prefilled(ticket, grown(0, first), 2, Handover(first, b""), None, 0)]
            case Offer(ticket=ticket, part=part, source=source):
                if ticket in self.held and source in self.sources:
                    return [Taken(ticket, part, 1)]
            case Admit(ticket=ticket):
                if ticket in self.held:
                    del self.held[ticket]
                    return [Tokens(((ticket, grown(1, 7)),)), Tokens(((ticket, grown(2, 8, end=True)),))]
            case Halt(ticket=ticket):
                self.halted.add(ticket)
            case Release(ticket=ticket):
                self.held.pop(ticket, None)
                if self.hello.role == "decode":
                    return [LetGo(ticket)]
            case Ping(tickets=tickets):
                self.held = {ticket: work for ticket, work in self.held.items() if ticket in tickets}
        return []


class World:
    """A router, its workers, and what became of each output. Time stands still but for `tick`."""

    def __init__(self, **changes: float) -> None:
        self.workers: dict[bytes, Played] = {}
        self.now = 0.0
        self.sent: list[tuple[bytes, Message]] = []
        self.loses: Callable[[Message], bool] = lambda message: False
        self.router = Router(self.send, RouterSettings(**changes))  # type: ignore[arg-type]
        self.results: list[list[object]] = []
        self.outputs: list[Output] = []

    def send(self, identity: bytes, message: Message) -> None:
        self.sent.append((identity, message))
        worker = self.workers.get(identity)
        if worker is not None and worker.alive and not self.loses(message):
            worker.inbox.append(message)

    def join(self, *workers: Played) -> None:
        for worker in workers:
            self.workers[worker.hello.name.encode()] = worker
            self.say(worker, worker.say_hello())

    def say(self, worker: Played, message: ToRouter) -> None:
        self.router.receive(worker.hello.instance.encode(), message, self.now)

    def submit(self, *prompt: int) -> Output:
        result: list[object] = []
        output = Output(work(*prompt), result.append, lambda _: None, result.append)
        self.results.append(result)
        self.outputs.append(output)
        self.router.submit(output, self.now)
        return output

    def step(self, worker: Played) -> None:
        for answer in worker.step():
            self.say(worker, answer)

    def busy(self) -> list[Played]:
        return [worker for worker in self.workers.values() if worker.alive and worker.inbox]

    def settle(self) -> None:
        """Until there is nothing left to say."""
        while busy := self.busy():
            self.step(busy[0])

    def tick(self, seconds: float) -> None:
        """Time goes on; those that live say so."""
        self.now += seconds
        for worker in self.workers.values():
            if worker.alive:
                self.say(worker, STATUS)
        self.router.tick(self.now)

    def tokens(self, place: int) -> list[int]:
        return [token for event in self.results[place] if isinstance(event, Grown) for token in event.token_ids]


def two_of_each() -> tuple[World, list[Played], list[Played]]:
    world = World()
    prefill, decode = ([Played(role, f"{role}-{place}") for place in range(2)] for role in ("prefill", "decode"))
    world.join(*prefill, *decode)
    world.settle()
    return world, prefill, decode


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_outputs=st.integers(1, 12))
def test_every_output_ends_once_whatever_happens(seed: int, num_outputs: int) -> None:
    chance = random.Random(seed)
    world, _, _ = two_of_each()
    world.loses = lambda message: isinstance(message, Halt | Release) and chance.random() < 0.3
    left, cancelled = num_outputs, set[int]()
    while left or world.busy():
        event = chance.random()
        busy = world.busy()
        if left and (event < 0.2 or not busy):
            world.submit(10 + len(world.outputs), *range(chance.randrange(70)))
            left -= 1
        elif event < 0.24 and world.outputs:
            place = chance.randrange(len(world.outputs))
            cancelled.add(place)
            world.router.cancel(world.outputs[place], world.now)
        elif event < 0.27:  # a worker dies, and another comes in its place
            worker = chance.choice([each for each in world.workers.values() if each.alive])
            worker.alive = False
            world.tick(4)
            world.join(Played(worker.hello.role, f"{worker.hello.role}-{seed}-{len(world.workers)}"))
        elif event < 0.30 and (holding := [each for each in world.workers.values() if each.alive and each.held]):
            worker = chance.choice(holding)
            ticket = chance.choice(list(worker.held))
            del worker.held[ticket]
            world.say(worker, Failed(ticket, "of its own"))
        elif event < 0.33:  # one that was stopped, and comes back after it was given up
            worker = chance.choice([each for each in world.workers.values() if each.alive])
            worker.alive = False
            world.tick(4)
            worker.alive = True
            for _ in range(3):
                world.say(worker, STATUS if chance.random() < 0.8 else worker.say_hello())
        elif busy:
            world.step(chance.choice(busy))
    for _ in range(40):
        world.tick(1)
        world.settle()

    assert not world.router.waiting
    assert not world.router._tickets
    assert not world.router._read_on
    for worker in world.workers.values():
        if worker.alive:
            assert not worker.held
            assert world.router.workers[worker.hello.name.encode()].load == 0
    for place, (output, result) in enumerate(zip(world.outputs, world.results, strict=True)):
        assert output.state == "ended"
        ends = [each for each in result if isinstance(each, str) or (isinstance(each, Grown) and each.finish_reason)]
        assert len(ends) == 1 or (not ends and place in cancelled)
        assert not ends or ends[0] is result[-1]
        expected = [10 + place, 7, 8]
        assert world.tokens(place) == expected[: len(world.tokens(place))]
        if ends and not isinstance(ends[0], str):
            assert world.tokens(place) == expected


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_well_formed_messages_that_make_no_sense_hurt_no_more_than_the_outputs_they_are_about(
    data: st.DataObject,
) -> None:
    world, _, _ = two_of_each()
    collectors = RouterCollector(world.router), EngineCollector("model", lambda: stats_of(world.router))
    for place in range(3):
        world.submit(10 + place)
    for _ in range(data.draw(st.integers(1, 8))):
        for worker in world.busy()[: data.draw(st.integers(0, 3))]:
            world.step(worker)
        sender = data.draw(st.sampled_from(list(world.workers.values())))
        world.say(sender, data.draw(messages(ToRouter, tickets=(1, 2, 3, 4))))
        world.router.tick(world.now)
        for collector in collectors:
            list(collector.collect())
    for worker in world.workers.values():
        worker.alive = False
    world.tick(4)
    world.join(Played("prefill", "p"), Played("decode", "d", slots=4))
    world.submit(20)
    world.settle()
    assert world.tokens(3) == [20, 7, 8]
    for result in world.results:
        ends = [each for each in result if isinstance(each, str) or (isinstance(each, Grown) and each.finish_reason)]
        assert len(ends) == 1
        assert ends[0] is result[-1]


def stats_of(router: Router) -> dict[str, EngineStats]:
    workers = router.workers.values()
    return {worker.hello.name: worker.status.stats for worker in workers if worker.status is not None}


@pytest.mark.parametrize(
    ("role", "message", "why"),
    [
        ("prefill", Prefilled(1, grown(0, 5), 2, None, None, 0), "has offered 2 parts, of which 0 came"),
        ("prefill", Prefilled(1, grown(0, 5), 0, None, None, 0), "hands over what has ended, or does not where it"),
        ("prefill", Prefilled(1, grown(0, 5), 0, Handover(6, b""), None, 0), "hands over token 6 after it drew 5"),
        ("prefill", Prefilled(1, grown(0, 5, 6), 0, Handover(5, b""), None, 0), "has drawn 2 tokens from 0 on"),
        ("prefill", Offer(1, "p", 1, 0, 1, 0, 2, (0,), 0), "offers part 1 after 0 parts"),
        ("decode", Taken(1, 0, 1), "has read part 0, of 0 offered"),
        ("decode", Reserved(1, 0), "said Reserved while the output was prefilling"),
        ("decode", Prefilled(1, grown(0, 5), 0, Handover(5, b""), None, 0), "said Prefilled while the output was"),
    ],
)
def test_a_worker_that_says_what_cannot_be_does_not_keep_the_output(
    role: str, message: ToRouter, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, _, _ = two_of_each()
    output = world.submit(5)
    while output.state != "prefilling":
        world.step(world.busy()[0])
    worker = getattr(output, role)
    world.say(world.workers[worker.identity], message)
    assert why in caplog.text
    world.settle()
    assert world.tokens(0) == [5, 7, 8]
    assert world.router.num_retries == 1


def test_tokens_told_twice_end_their_output_with_an_error() -> None:
    world, _, _ = two_of_each()
    output = world.submit(5)
    while output.state != "decoding":
        world.step(world.busy()[0])
    assert output.decode is not None
    world.say(world.workers[output.decode.identity], Tokens(((output.ticket, grown(0, 5, 7)),)))
    assert world.tokens(0) == [5]
    assert "a second time" in str(world.results[0][-1])


def test_a_prefill_worker_that_dies_is_replaced_by_the_other() -> None:
    world, prefill, _ = two_of_each()
    output = world.submit(5)
    while output.state != "prefilling":
        world.step(world.busy()[0])
    first = next(each for each in prefill if each.inbox)
    world.step(first)  # the prompt is run, and its first token out; nobody has read the pages
    assert world.tokens(0) == [5]
    first.alive = False
    world.tick(2.9)
    assert output.prefill is not None
    world.tick(0.2)
    world.settle()
    assert world.tokens(0) == [5, 7, 8]
    assert world.router.num_retries == 1


@pytest.mark.parametrize("end", ["the reader says so", "it says so late", "the reader dies"])
def test_pages_of_an_output_that_is_given_up_stay_until_nothing_reads_them(end: str) -> None:
    world, _, _ = two_of_each()
    output = world.submit(5)
    while output.state != "moving":
        world.step(world.busy()[0])
    assert output.prefill is not None
    assert output.decode is not None
    prefill, decode = (world.workers[each.identity] for each in (output.prefill, output.decode))
    world.router.cancel(output, world.now)

    def run_prefill() -> None:
        while prefill.inbox:
            world.step(prefill)

    run_prefill()
    assert prefill.halted == set(prefill.held) == {output.ticket}
    if end == "the reader dies":
        world.say(decode, Goodbye())
        decode.alive = False
    else:
        if end == "it says so late":
            decode.inbox.clear()  # the Release is lost
            world.tick(0.5)
            run_prefill()
            assert prefill.held
        while decode.inbox:
            world.step(decode)
    run_prefill()
    assert not prefill.held


def test_streams_of_a_decode_worker_that_dies_end_with_an_error_and_others_go_on() -> None:
    world, _, decode = two_of_each()
    outputs = [world.submit(place) for place in (5, 6)]
    while any(output.state != "decoding" for output in outputs):
        world.step(next(worker for worker in world.busy() if not isinstance(worker.inbox[0], Admit)))
    assert {each.decode.hello.name for each in outputs if each.decode} == {"decode-0", "decode-1"}
    lost = next(place for place, each in enumerate(outputs) if each.decode and each.decode.hello.name == "decode-0")
    decode[0].alive = False
    world.tick(3.1)
    world.settle()
    assert "decode worker decode-0 has been silent for 3.1 s" in str(world.results[lost][-1])
    assert world.tokens(1 - lost)[1:] == [7, 8]


def test_pages_that_do_not_come_are_tried_again_and_then_given_up() -> None:
    world, _, decode = two_of_each()
    for worker in decode:
        worker.sources.clear()  # they read nothing
    output = world.submit(5)
    for _ in range(3):
        world.settle()
        assert output.state == "moving"
        world.tick(10.1)
    assert "moving took longer than 10 s; that was try 3" in str(world.results[0][-1])
    world.settle()
    assert not any(worker.held for worker in world.workers.values())


@pytest.mark.parametrize("state", ["prefilling", "decoding"])
def test_outputs_that_make_no_progress_start_again_or_end_with_an_error(state: str) -> None:
    world, _, _ = two_of_each()
    output = world.submit(5)
    while output.state != state:
        world.step(world.busy()[0])
    for worker in world.workers.values():  # its message is lost: it lives and knows nothing
        worker.inbox = deque(message for message in worker.inbox if not isinstance(message, Prefill | Admit))
    world.tick(119)
    assert output.state == state
    world.tick(2)
    world.settle()
    if state == "prefilling":
        assert world.tokens(0) == [5, 7, 8]
        assert world.router.num_retries == 1
    else:
        assert world.results[0][-1] == "decoding made no progress for 120 s"
    assert not any(worker.held for worker in world.workers.values())


def test_tokens_after_a_gap_end_their_output_with_an_error() -> None:
    world, _, _ = two_of_each()
    output = world.submit(5)
    while output.state != "decoding":
        world.step(world.busy()[0])
    assert output.decode is not None
    world.say(world.workers[output.decode.identity], Tokens(((output.ticket, grown(2, 8, end=True)),)))
    assert world.tokens(0) == [5]
    assert world.results[0][-1] == "tokens 1 to 2 were lost between worker and router"
    world.settle()
    assert not any(worker.held for worker in world.workers.values())


def test_another_first_token_on_another_try_is_an_error() -> None:
    world, _, decode = two_of_each()
    for worker in decode:
        worker.sources.clear()
    output = world.submit(5)
    world.settle()
    output.first_token = 6
    world.tick(10.1)
    world.settle()
    assert world.results[0][-1] == "another try drew another first token"


def test_outputs_wait_while_workers_are_full_and_keep_their_order() -> None:
    world = World()
    prefill, decode = Played("prefill", "p"), Played("decode", "d", slots=1)
    world.join(prefill, decode)
    outputs = [world.submit(place) for place in range(4)]
    assert [each.state for each in outputs] == ["reserving", "waiting", "waiting", "waiting"]
    ended = []
    while world.busy():
        world.step(world.busy()[0])
        ended += [each for each in outputs if each.state == "ended" and each not in ended]
    assert ended == outputs


def test_a_decode_worker_that_says_full_is_asked_again_once_something_ended() -> None:
    world = World()
    prefill, decode = Played("prefill", "p"), Played("decode", "d", slots=2)
    world.join(prefill, decode)
    decode.held[-1] = decode.held[-2] = None  # room that the router thinks is there
    output = world.submit(5)
    world.settle()
    assert output.state == "waiting"
    decode.held.clear()
    world.tick(0.5)
    world.settle()
    assert output.state == "ended"
    assert world.router.num_full == 1


def test_without_workers_outputs_wait_for_a_while() -> None:
    world = World(absence_timeout=5)
    output = world.submit(5)
    world.tick(1)
    world.tick(4)
    assert output.state == "waiting"
    world.tick(2)
    assert world.results[0] == ["there is no prefill worker"]


def test_a_worker_of_another_model_is_not_used_and_told_why(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.join(Played("prefill", "p"), other := Played("decode", "d", model="another"))
    assert not world.router.ready
    assert [worker.hello.name for worker in world.router.workers.values()] == ["p"]
    assert list(other.inbox) == [Unwelcome(1, "dtype is another, and model at p")]
    world.say(other, other.say_hello())
    assert caplog.text.count("worker d is not used: dtype is another, and model at p") == 1


def test_a_worker_whose_name_another_has_joins_once_that_is_gone() -> None:
    world = World()
    old, new = Played("decode", "d"), Played("decode", "d")
    world.join(Played("prefill", "p"), old)
    new.hello = msgspec.structs.replace(new.hello, instance="new")
    world.workers[b"new"] = new
    for _ in range(2):
        world.say(new, new.say_hello())
        assert len(world.router.of_role("decode")) == 1
        if old.alive:
            refused = new.inbox.popleft()
            assert isinstance(refused, Unwelcome)
            assert refused.reason.startswith("there is a worker d, process d;")
            old.alive = False
            world.tick(4)
    assert world.router.of_role("decode")[0].identity == b"new"


def test_outputs_go_to_workers_that_are_long_enough_and_wait_for_them_without_keeping_others() -> None:
    world = World(absence_timeout=5)
    short, long = (Played("decode", name) for name in ("short", "long"))
    short.hello = msgspec.structs.replace(short.hello, max_model_len=10)
    world.join(Played("prefill", "p"), short, long)
    first = world.submit(1, *range(20))
    assert first.decode is not None
    assert first.decode.hello.name == "long"
    world.settle()
    long.alive = False
    world.tick(4)
    waits, runs = world.submit(2, *range(20)), world.submit(3)
    world.settle()
    assert (waits.state, runs.state) == ("waiting", "ended")
    assert world.tokens(2) == [3, 7, 8]
    for _ in range(4):
        world.tick(2)
    assert world.results[1] == ["there is no decode worker for 24 tokens"]


def test_strangers_are_told_to_say_hello() -> None:
    world = World()
    stranger = Played("decode", "d")
    stranger.welcome, world.workers[b"d"] = True, stranger  # by the router before
    world.say(stranger, Tokens(((1, grown(0, 1)),)))
    world.settle()
    assert [type(message) for _, message in world.sent] == [Rejoin, Welcome]


def test_a_worker_that_leaves_ends_what_it_has_and_gets_no_more() -> None:
    world, _, decode = two_of_each()
    first = world.submit(5)
    while first.state != "decoding":
        world.step(next(worker for worker in world.busy() if not isinstance(worker.inbox[0], Admit)))
    assert first.decode is not None
    leaving = world.workers[first.decode.identity]
    world.say(leaving, Leaving())
    later = [world.submit(place) for place in range(6, 9)]
    assert {each.decode.identity for each in later if each.decode} == {
        worker.hello.name.encode() for worker in decode if worker is not leaving
    }
    world.settle()
    assert world.tokens(0) == [5, 7, 8]


def test_a_worker_that_ends_is_let_go_at_once() -> None:
    world, prefill, _ = two_of_each()
    prefill[0].alive = False
    world.say(prefill[0], Goodbye())
    assert len(world.router.of_role("prefill")) == 1


def test_a_worker_that_takes_fewer_outputs_than_it_has_slots_gets_no_more() -> None:
    world, _, decode = two_of_each()
    for worker in decode:
        world.say(worker, msgspec.structs.replace(STATUS, num_slots=1))
    for place in range(4):
        world.submit(place)
    assert sorted(worker.load for worker in world.router.of_role("decode")) == [1, 1]
    assert len(world.router.waiting) == 2
    world.say(decode[0], STATUS)  # as many as it has slots again
    assert len(world.router.waiting) == 1
    world.settle()
    assert [world.tokens(place) for place in range(4)] == [[place, 7, 8] for place in range(4)]


def test_prompt_tokens_at_the_router_and_its_workers_are_those_of_the_outputs_without_a_token() -> None:
    world = World(prefill_queue_tokens=40)
    world.join(Played("prefill", "p"), Played("prefill", "q"), Played("decode", "d", slots=3))
    lengths = [7, 30, 20, 11, 1, 50]
    for place, length in enumerate(lengths):
        world.submit(place, *range(length - 1))
    names = "qwenjax:router_waiting_prompt_tokens", "qwenjax:worker_prompt_tokens"
    seen = set()
    while world.busy():
        samples = [sample for family in RouterCollector(world.router).collect() for sample in family.samples]
        there = [sum(sample.value for sample in samples if sample.name == name) for name in names]
        assert sum(there) == sum(length for place, length in enumerate(lengths) if not world.tokens(place))
        seen.add(tuple(value > 0 for value in there))
        world.step(world.busy()[0])
    assert seen >= {(True, True), (False, True), (False, False)}


def test_the_choice_follows_prefixes_only_within_the_slack() -> None:
    world, _, _ = two_of_each()
    first, second = world.router.of_role("prefill")
    keys = prefix_keys(work(*range(200)))
    first.saw(keys)
    assert first.known(prefix_keys(work(*range(130), 7))) == 2
    first.load, second.load = 10, 4
    assert choose([first, second], keys, slack=6) is first
    assert choose([first, second], keys, slack=5) is second
    assert choose([], keys, slack=5) is None


@pytest.mark.parametrize("salts", [("a", "b"), (None, "a")])
def test_salted_prompts_share_no_prefix(salts: tuple[str | None, str | None]) -> None:
    params = SamplingParams(max_tokens=1)
    one, other = (prefix_keys(Work(tuple(range(128)), params, 0, salt)) for salt in salts)
    assert not set(one) & set(other)
