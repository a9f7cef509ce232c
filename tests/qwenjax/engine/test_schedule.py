"""The scheduler against a device that is a table of what lies in every page."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.engine.config import EngineConfig
from qwenjax.engine.schedule import Decode, Job, Lane, Plan, Prefill, Row, Scheduler

Call = Prefill | Decode


def config(**changes: Any) -> EngineConfig:
    sizes: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "num_pages": 24,
        "page_size": 8,
        "max_num_batched_tokens": 64,
        "num_steps": 4,
    }
    return EngineConfig(**{**sizes, **changes})


@dataclass
class Device:
    """Runs plans in their order: every page holds, at each of its places, a hash of the tokens up to that place,
    the one there included (in the head's cache, up to the next). What a sequence draws is given beforehand."""

    scheduler: Scheduler
    outputs: dict[int, list[int]]  # by order: prompt and everything that will be drawn
    hashes: dict[int, list[int]] = field(default_factory=dict)  # of the outputs' beginnings
    cache: dict[tuple[int, int, int], int] = field(default_factory=dict)
    head: dict[tuple[int, int, int], int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # tokens that the device knows, by order
    tables: dict[int, list[int]] = field(default_factory=dict)  # pages of sequences that decode, by order
    rng: random.Random = field(default_factory=random.Random)

    def up_to(self, job: Job, position: int) -> int:
        """The hash of a job's tokens up to and with a position."""
        if job.order not in self.hashes:
            self.hashes[job.order] = list(accumulate(self.outputs[job.order], lambda *pair: hash(pair), initial=0))
        return self.hashes[job.order][position + 1]

    def place(self, rank: int, pages: Sequence[int], position: int) -> tuple[int, int, int]:
        size = self.scheduler.config.page_size
        return rank, pages[position // size], position % size

    def run(self, call: Call) -> dict[int, list[int]]:
        """What each job draws, by order; checks what it reads."""
        drawn: dict[int, list[int]] = {}
        if isinstance(call, Prefill):
            # All rows write before any reads, in each layer.
            for row in call.rows:
                self.write(row)
            for row in call.rows:
                assert row.job.rank >= 0
                self.read(row.job, row.start + row.count, row.pages)
                if row.last:
                    self.tables[row.job.order] = list(row.pages)
                    self.lengths[row.job.order] = row.start + row.count
                    drawn[row.job.order] = self.draw(row.job, 1)
            return drawn
        for lane in call.lanes:
            drawn[lane.job.order] = self.decode(lane, call)
        return drawn

    def write(self, row: Row) -> None:
        job = row.job
        for position in range(row.start, row.start + row.count):
            place = self.place(job.rank, row.pages, position)
            self.cache[place] = self.up_to(job, position)
            if position + 1 < job.target:
                self.head[place] = self.up_to(job, position + 1)

    def read(self, job: Job, count: int, pages: Sequence[int]) -> None:
        for position in range(count):
            assert self.cache[self.place(job.rank, pages, position)] == self.up_to(job, position)
        if self.scheduler.config.num_speculative_tokens:
            for position in range(job.num_cached):
                assert self.head[self.place(job.rank, pages, position)] == self.up_to(job, position + 1)

    def draw(self, job: Job, count: int) -> list[int]:
        start = self.lengths[job.order]
        new = self.outputs[job.order][start : start + count]
        self.lengths[job.order] += len(new)
        return new

    def decode(self, lane: Lane, call: Decode) -> list[int]:
        job, drawn, pages = lane.job, list[int](), self.tables[lane.job.order]
        pages[lane.grown_from :] = lane.grown
        for _ in range(call.num_steps):
            length = self.lengths[job.order]
            if length == len(self.outputs[job.order]):  # ended
                break
            # The newest token is run, and drafts as far as the output's last but one.
            shared = {page for block in self.scheduler.pools[job.rank].blocks() for page in block.pages}
            for position in range(length - 1, min(length + call.num_drafts, job.end_length - 1)):
                place = self.place(job.rank, pages, position)
                assert place[1] not in shared
                self.cache[place] = -1
            new = self.draw(job, self.rng.randint(1, call.num_drafts + 1))
            drawn += new
            # What was drawn confirms the drafts before it.
            for position in range(length - 1, length - 1 + len(new)):
                self.cache[self.place(job.rank, pages, position)] = self.up_to(job, position)
            self.read(job, length, pages)
        return drawn


@dataclass
class Host:
    """Makes plans ahead of their results, by one call as the engine does, by none or by more."""

    device: Device
    jobs: dict[int, Job]
    ahead: int = 1  # calls whose results are taken only after the next is planned
    in_flight: deque[tuple[Call, dict[int, list[int]]]] = field(default_factory=deque)

    @property
    def scheduler(self) -> Scheduler:
        return self.device.scheduler

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        check(self.scheduler)
        if plan is not None:
            check_plan(self.scheduler, plan)
            self.in_flight.append((plan.call, self.device.run(plan.call)))
            self.scheduler.begun(plan.call)
        if self.in_flight and (plan is None or len(self.in_flight) > self.ahead):
            self.take(*self.in_flight.popleft())
        check(self.scheduler)
        return plan

    def take(self, call: Call, drawn: dict[int, list[int]]) -> None:
        for job in call.jobs:
            if job.order not in self.jobs:
                continue
            job.tokens.extend(drawn.get(job.order, []))
            if len(job.tokens) == len(self.device.outputs[job.order]):
                self.end(job.order)
        self.scheduler.done(call)

    def end(self, order: int) -> None:
        self.scheduler.remove(self.jobs.pop(order))

    def run(self, limit: int = 20_000) -> list[Plan]:
        plans = []
        for _ in range(limit):
            if not self.jobs:
                return plans
            plan = self.step()
            if plan is not None:
                plans.append(plan)
        raise AssertionError(f"{len(self.jobs)} requests never end")


def check(scheduler: Scheduler) -> None:
    """No slot twice; every page is free, one job's own, or in the tree, held by those who use it."""
    for rank, pool in enumerate(scheduler.pools):
        jobs = scheduler.running(rank)
        assert [scheduler.slots[rank].index(job) for job in jobs] == [job.slot for job in jobs]
        blocks = pool.blocks()
        shared = [page for block in blocks for page in block.pages]
        own = []
        for job in jobs:
            of_blocks = [page for block in job.blocks for page in block.pages]
            assert job.pages[: len(of_blocks)] == of_blocks
            own += job.pages[len(of_blocks) :]
        assert sorted(shared + own + pool._free) == list(range(pool.num_pages))
        assert pool.num_cached == sum(len(block.pages) for block in blocks if not block.holders)
        for block in blocks:
            assert block.holders == sum(block in job.blocks for job in jobs)
    placed = [job for rank in range(len(scheduler.pools)) for job in scheduler.running(rank)]
    assert not set(map(id, placed)) & set(map(id, scheduler.waiting))
    assert {id(job) for job in placed if not job.prefilled} == set(map(id, scheduler.prefilling))
    assert [job.order for job in scheduler.waiting] == sorted(job.order for job in scheduler.waiting)


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    """The call has a program, and its rows or lanes are distinct ones of it."""
    sizes, call = scheduler.config, plan.call
    if isinstance(call, Prefill):
        assert call.length in sizes.chunk_lengths
        indices = [row.place for row in call.rows]
        assert max(indices) < len(scheduler.pools) * sizes.rows_per_call(call.length)
        assert all(1 <= row.count <= call.length for row in call.rows)
    else:
        assert (call.batch, call.num_drafts) in sizes.decode_variants
        assert 1 <= call.num_steps <= sizes.num_steps
        indices = [lane.place for lane in call.lanes]
        assert all(len(lane.grown) <= sizes.max_growth for lane in call.lanes)
        if scheduler.waiting or scheduler.prefilling:
            assert call.num_steps == 1
    assert len(set(indices)) == len(indices)


def host(sizes: EngineConfig, ranks: int = 1, seed: int = 0) -> Host:
    return Host(Device(Scheduler(sizes, ranks), {}, rng=random.Random(seed)), {})


def add(
    host: Host,
    prompt: list[int],
    max_tokens: int,
    stops_after: int | None = None,
    leader: Job | None = None,
    **changes: Any,
) -> Job:
    order = len(host.device.outputs)
    rng = random.Random(order if leader is None else leader.order)
    drawn = [rng.randrange(1000) for _ in range(min(max_tokens, stops_after or max_tokens))]
    host.device.outputs[order] = prompt + drawn
    job = Job(order, list(prompt), len(prompt) + max_tokens, len(prompt) + max_tokens, leader=leader)
    for name, value in changes.items():
        setattr(job, name, value)
    host.jobs[order] = job
    host.scheduler.add(job)
    return job


def prompt_of(length: int, family: int = 0) -> list[int]:
    """Prompts of one family begin alike."""
    rng = random.Random(family)
    return [rng.randrange(1000) for _ in range(length)]


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 120),  # prompt
        st.integers(1, 60),  # max_tokens
        st.integers(1, 60),  # where it stops by itself
        st.integers(0, 3),  # family
        st.integers(1, 3),  # n
        st.integers(0, 20),  # steps before the next arrives
        st.sampled_from(["run", "run", "run", "abort"]),
        st.sampled_from([None, None, "salt"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    num_pages=st.integers(23, 60),
    max_num_seqs=st.integers(1, 5),
    ranks=st.integers(1, 2),
    drafts=st.integers(0, 2),
    page_size=st.sampled_from([8, 16, 32]),
    caching=st.booleans(),
    ahead=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_pages_hold_what_their_readers_expect_and_every_request_ends(
    requests: list[Any],
    num_pages: int,
    max_num_seqs: int,
    ranks: int,
    drafts: int,
    page_size: int,
    caching: bool,
    ahead: int,
    seed: int,
) -> None:
    sizes = config(
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=drafts,
        speculation_max_batch=3,
        page_size=page_size,
        prefix_caching=caching,
    )
    one = host(sizes, ranks, seed)
    one.ahead = ahead
    for length, max_tokens, stops_after, family, n, steps, fate, salt in requests:
        prompt, leader = prompt_of(length, family), None
        several = []
        for _ in range(n):
            job = add(one, prompt, max_tokens, stops_after, leader, salt=salt)
            leader = leader or job
            several.append(job.order)
        for _ in range(steps):
            one.step()
        if fate == "abort":
            for order in several:
                if order in one.jobs:
                    one.end(order)
    one.run()
    for pool in one.scheduler.pools:
        pool.evict_all()
        assert pool.num_free == num_pages


def first_token_calls(long: int, running: int) -> tuple[int, list[str]]:
    """Calls until a request of 100 tokens has its first token that comes while one of `long` tokens is read."""
    sizes = config(max_model_len=40_000, num_pages=5_000, max_num_batched_tokens=2048, max_num_seqs=16)
    one = host(sizes)
    for _ in range(running):
        add(one, prompt_of(20), 2_000)
    for _ in range(3):
        one.step()
    add(one, prompt_of(long, family=1), 10)
    one.step()
    one.step()
    short = add(one, prompt_of(100, family=2), 10)
    kinds = []
    while not any(isinstance(c, Prefill) and any(r.job is short and r.last for r in c.rows) for c, _ in one.in_flight):
        plan = one.step()
        assert plan is not None
        kinds.append(type(plan.call).__name__)
    return len(kinds), kinds


def test_100_tokens_do_not_wait_behind_30_000() -> None:
    assert first_token_calls(30_000, running=0)[0] <= 2  # of 15 that the long prompt takes
    assert first_token_calls(30_000, running=4)[0] <= 4  # every second draws for those that run


def test_a_long_prompt_and_running_sequences_take_turns() -> None:
    sizes = config(max_model_len=40_000, num_pages=5_000, max_num_batched_tokens=2048, max_num_seqs=16)
    one = host(sizes)
    add(one, prompt_of(20), 2_000)
    one.step()
    add(one, prompt_of(30_000, family=1), 10)
    plans = [one.step() for _ in range(28)]
    kinds = [type(plan.call).__name__ for plan in plans if plan is not None]
    assert kinds == ["Decode", "Prefill"] * 14


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    sizes = config(max_model_len=4_000, num_pages=2_000, max_num_batched_tokens=256, max_num_seqs=64)
    one = host(sizes)
    long = add(one, prompt_of(2_000), 1)
    calls = 0
    while long.order in one.jobs:
        add(one, prompt_of(100, family=calls + 1), 1)
        one.step()
        calls += 1
    assert calls < 40


def test_rows_of_one_prompt_share_a_call() -> None:
    one = host(config(num_pages=40))
    add(one, prompt_of(100), 1)
    calls = [plan.call for plan in one.run()]
    assert [[(row.start, row.count) for row in call.rows] for call in calls if isinstance(call, Prefill)] == [
        [(0, 16), (16, 16), (32, 16), (48, 16)],
        [(64, 16), (80, 16), (96, 4)],
    ]


def test_pages_are_taken_as_a_sequence_grows() -> None:
    one = host(config())
    job = add(one, prompt_of(9), 100)
    held = set()
    while one.jobs:
        one.step()
        if job.placed:
            held.add(len(job.pages))
            # What is known, two calls of four tokens that may be under way, and the rest of a page.
            assert len(job.pages) <= (len(job.tokens) + 2 * 4 + 7) // 8
    assert held == set(range(2, 15))


def test_the_youngest_leaves_when_pages_run_out_and_comes_back() -> None:
    one = host(config(num_pages=10))
    old, young = add(one, prompt_of(20), 50), add(one, prompt_of(20, family=1), 50)
    plans = one.run()
    assert {job.order for plan in plans for job in plan.preempted} == {young.order}
    assert sum(young in plan.admitted for plan in plans) == 2
    assert sum(old in plan.admitted for plan in plans) == 1
    assert one.scheduler.num_preemptions == 1


def test_a_second_prompt_finds_what_the_first_left() -> None:
    one = host(config())
    first = add(one, prompt_of(50), 4)
    one.run()
    second = add(one, prompt_of(50), 4)
    third = add(one, [*prompt_of(33), 7, 7], 4)
    other = add(one, prompt_of(50), 4, salt="other")
    one.run()
    assert [job.num_cached for job in (first, second, third, other)] == [0, 48, 32, 0]


def test_a_head_makes_a_hit_end_a_token_earlier() -> None:
    one = host(config(num_speculative_tokens=1))
    add(one, prompt_of(50), 4)
    one.run()
    same, forks = add(one, prompt_of(49), 4), add(one, [*prompt_of(32), 7, 7], 4)
    one.run()
    assert [same.num_cached, forks.num_cached] == [48, 16]


def test_a_prompt_is_never_wholly_cached() -> None:
    one = host(config())
    for _ in range(2):
        job = add(one, prompt_of(48), 4)
        one.run()
    assert job.num_cached == 32


def test_outputs_of_one_prompt_wait_for_the_first_to_read_it_and_share_its_pages() -> None:
    one = host(config(num_pages=40))
    first = add(one, prompt_of(50), 4)
    rest = [add(one, prompt_of(50), 4, leader=first) for _ in range(3)]
    one.run()
    assert [job.num_cached for job in (first, *rest)] == [0, 48, 48, 48]


def test_prompts_that_begin_alike_and_are_read_at_once_end_up_on_the_same_pages() -> None:
    one = host(config(num_pages=40, max_num_batched_tokens=32))
    jobs = [add(one, prompt_of(60), 8) for _ in range(2)]
    while not all(job.prefilled for job in jobs):
        one.step()
    assert jobs[0].pages[:6] == jobs[1].pages[:6]
    one.run()


def test_the_rank_that_knows_a_prompt_is_preferred_while_it_is_not_busier() -> None:
    one = host(config(max_num_seqs=2, num_pages=60), ranks=2)
    add(one, prompt_of(50), 4)
    one.run()
    warm = one.scheduler.pools.index(max(one.scheduler.pools, key=lambda pool: pool.num_cached))
    again = add(one, prompt_of(50), 40)
    one.step()
    assert again.rank == warm
    more = add(one, prompt_of(50), 40)
    one.step()
    assert (more.rank, more.num_cached) == (warm, 48)
    last = add(one, prompt_of(50), 40)
    one.step()
    assert (last.rank, last.num_cached) == (1 - warm, 0)
    one.run()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_call_runs_one_step_while_requests_wait_and_several_otherwise(waiting: bool) -> None:
    one = host(config(max_num_seqs=1))
    add(one, prompt_of(5), 40)
    one.step()
    if waiting:
        add(one, prompt_of(5), 1)
    plan = one.step()
    assert plan is not None
    assert isinstance(plan.call, Decode)
    assert plan.call.num_steps == (1 if waiting else 4)
    one.run()


def test_calls_run_one_step_from_a_reservation_until_its_pages_are_there() -> None:
    scheduler = Scheduler(config(), ranks=1)
    drawing, coming = (Job(order, prompt_of(5), end_length=60, max_cached=0) for order in range(2))

    def plan() -> tuple[int, int]:
        plan = scheduler.plan()
        assert plan is not None
        assert isinstance(plan.call, Decode)
        return plan.call.num_steps, len(plan.call.lanes)

    assert scheduler.reserve(drawing)
    scheduler.arrived(drawing)
    assert plan() == (4, 1)
    assert scheduler.reserve(coming)
    assert plan() == (1, 1)
    scheduler.arrived(coming)
    assert plan() == (4, 2)


def test_what_surely_ends_is_not_planned_again() -> None:
    one = host(config(max_num_seqs=1))
    add(one, prompt_of(5), 9)
    calls = [plan.call for plan in one.run()]
    assert [type(call).__name__ for call in calls] == ["Prefill", "Decode", "Decode"]
