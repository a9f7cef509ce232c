"""Who runs when: from the state of queues, slots and pages to the plan of the next device call.

No JAX, no clock and no randomness: the same state gives the same plan. Plans take effect in the order in which they
are made, which is the order in which the device runs their calls. A page may therefore be given to another sequence
while an earlier call that writes to it still runs.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qwenjax.engine.config import EngineConfig
from qwenjax.engine.pages import Block, PagePool, block_keys


@dataclass(eq=False)
class Job:
    """A sequence as the scheduler sees it.

    order: of arrival, unique; the youngest has the highest. tokens: the prompt and what the host has seen drawn;
    whoever runs the plans appends to it. end_length: tokens at which the output is full. max_cached: how many tokens
    may come from the prefix cache. salt: prompts of different salts share nothing. leader: a job with the same prompt
    that is to fill the cache first. drafts: whether drafts help.

    The rest is the scheduler's. target: tokens to prefill; num_prefilled of them are in the cache once the calls
    planned so far have run, the first num_cached from the prefix cache. blocks: of the prefix tree, holding the first
    of `pages`; the rest of those is the job's own. drawing_min and drawing_max: bounds of what calls whose results the
    host has not seen draw.
    """

    order: int
    tokens: list[int]
    end_length: int
    max_cached: int
    salt: str | None = None
    leader: Job | None = None
    drafts: bool = True

    rank: int = -1
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    keys: list[bytes] | None = None
    target: int = 0
    num_prefilled: int = 0
    num_cached: int = 0
    drawing_min: int = 0
    drawing_max: int = 0

    @property
    def placed(self) -> bool:
        """Whether it is in a slot."""
        return self.slot >= 0

    @property
    def prefilled(self) -> bool:
        return self.placed and self.num_prefilled == self.target

    @property
    def max_left(self) -> int:
        """Most tokens that are still to be drawn, beyond what is under way."""
        return self.end_length - len(self.tokens) - self.drawing_min


@dataclass(frozen=True)
class Row:
    """Tokens start to start + count of a job, in row `place` of a prefill call. first: of this stay in its slot; last:
    it draws a token. pages: the job's, at the time."""

    job: Job
    place: int
    slot: int
    start: int
    count: int
    first: bool
    last: bool
    pages: Sequence[int]


@dataclass(frozen=True)
class Prefill:
    length: int
    rows: Sequence[Row]

    @property
    def jobs(self) -> list[Job]:
        return list({row.job.order: row.job for row in self.rows}.values())


class Lane(NamedTuple):
    """A job in column `place` of a decode call, with the pages it is given for it, from place `grown_from` on."""

    job: Job
    place: int
    grown_from: int
    grown: Sequence[int]


@dataclass(frozen=True)
class Decode:
    batch: int
    num_drafts: int
    num_steps: int
    lanes: Sequence[Lane]

    @property
    def jobs(self) -> list[Job]:
        return [lane.job for lane in self.lanes]


@dataclass(frozen=True)
class Plan:
    """What happens next. `admitted` entered slots, `preempted` left theirs, num_evicted cached pages were given up."""

    call: Prefill | Decode
    admitted: Sequence[Job]
    preempted: Sequence[Job]
    num_evicted: int


class Scheduler:
    """The state that plans are made from, over `ranks` data ranks."""

    def __init__(self, config: EngineConfig, ranks: int) -> None:
        self.config = config
        self.pools = [PagePool(config.num_pages) for _ in range(ranks)]
        self.slots: list[list[Job | None]] = [[None] * config.max_num_seqs for _ in range(ranks)]
        self.waiting: list[Job] = []  # by order
        self.prefilling: deque[Job] = deque()  # in turn
        self.num_preemptions = 0
        self.max_running = config.max_num_seqs  # on a data rank; whoever runs the plans may lower it
        self._prefilled_last = False

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=lambda job: job.order)

    def reserve(self, job: Job) -> bool:
        """Gives a job whose prompt another engine runs a slot and all the pages that it may come to need, so that it
        never has to leave; false where there is no room. num_cached tokens are there already."""
        placed = self._place(job, job.end_length - 1, spare=0)
        if placed is not None:
            self._enter(job, *placed, job.end_length - 1)
        return placed is not None

    def arrived(self, job: Job) -> None:
        """The pages of a reserved job hold its prompt, of which `target` tokens: from now on it decodes."""
        job.num_prefilled = job.target
        self._keep_blocks(job)

    def remove(self, job: Job) -> None:
        """Takes a job out, wherever it is. No later plan writes to its pages."""
        if job.placed:
            self._leave(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def running(self, rank: int) -> list[Job]:
        return [job for job in self.slots[rank] if job is not None]

    def plan(self) -> Plan | None:
        """The next call; None where there is nothing to run."""
        evicted = sum(pool.num_evicted for pool in self.pools)
        admitted = self._admit()
        preempted = list[Job]()
        call: Prefill | Decode | None = None
        # Turn about: neither a long prompt nor a stream of short ones keeps the others from drawing.
        if not (self.prefilling and not self._prefilled_last):
            call = self._decode(preempted)
        if call is None and self.prefilling:
            call = self._prefill()
        self._prefilled_last = isinstance(call, Prefill)
        if call is None:
            return None
        evicted = sum(pool.num_evicted for pool in self.pools) - evicted
        return Plan(call, admitted, preempted, evicted)

    def begun(self, call: Prefill | Decode) -> None:
        """Counts what a call may draw as under way."""
        self._count(call, 1)

    def done(self, call: Prefill | Decode) -> None:
        """The host has seen what a call drew, and appended it to its jobs' tokens."""
        self._count(call, -1)

    def _count(self, call: Prefill | Decode, sign: int) -> None:
        if isinstance(call, Prefill):
            for row in call.rows:
                if row.last:
                    row.job.drawing_min += sign
                    row.job.drawing_max += sign
            return
        most = sign * call.num_steps * (call.num_drafts + 1)
        for lane in call.lanes:
            lane.job.drawing_min += sign * call.num_steps
            lane.job.drawing_max += most

    def _admit(self) -> list[Job]:
        """Waiting jobs enter free slots in order; the first that finds no room keeps the rest behind it."""
        admitted = list[Job]()
        for job in list(self.waiting):
            if job.drawing_max:  # preempted while a call drew for it: what it has to run is not known yet
                break
            if job.leader is not None and not self._led(job, job.leader):
                continue
            # A page for each that runs, so that who enters does not have to leave at the next border.
            if (placed := self._place(job, len(job.tokens), spare=1)) is None:
                break
            self.waiting.remove(job)
            self._enter(job, *placed, len(job.tokens))
            self.prefilling.append(job)
            admitted.append(job)
        return admitted

    def _led(self, job: Job, leader: Job) -> bool:
        """Whether the leader has put into the cache what it can of the prompt that both have."""
        return leader.prefilled or not leader.placed or leader.num_prefilled >= self._cacheable(job)

    def _cacheable(self, job: Job) -> int:
        """Tokens of the longest prefix that may come from the cache: whole blocks, and one token at least is run."""
        if not self.config.prefix_caching:
            return 0
        most = min(job.max_cached, len(job.tokens) - 1)
        return most // self.config.block_size * self.config.block_size

    def _place(self, job: Job, tokens: int, spare: int) -> tuple[int, list[Block]] | None:
        """A rank with room for `tokens` tokens of the job, and `spare` pages for each that runs there, and the blocks
        that the job finds there. Of the ranks that have about as much to do
        as the idlest, the one that knows most of the prompt."""
        config = self.config
        if job.keys is None:
            job.keys = self._keys(job)
        keys = job.keys[: self._cacheable(job) // config.block_size]
        found = list[tuple[int, int, int, list[Block]]]()
        for rank, pool in enumerate(self.pools):
            busy = config.max_num_seqs - self.slots[rank].count(None)
            if busy >= self.max_running:
                continue
            blocks = pool.match(keys)
            needed = config.pages_for(tokens) - sum(len(block.pages) for block in blocks)
            if needed + spare * busy <= pool.num_available_beside(blocks):
                found.append((len(blocks), busy, rank, blocks))
        if not found:
            return None
        idlest = min(busy for _, busy, _, _ in found)
        near = [one for one in found if one[1] <= idlest + max(1, config.max_num_seqs // 8)]
        blocks_found, _, rank, blocks = max(near, key=lambda one: (one[0], -one[1], -one[2]))
        return rank, blocks if blocks_found else []

    def _keys(self, job: Job) -> list[bytes]:
        if not self.config.prefix_caching:
            return []
        return block_keys(job.tokens, self.config.block_size, self.config.lookahead, job.salt)

    def _enter(self, job: Job, rank: int, blocks: list[Block], tokens: int) -> None:
        """Puts a job into a slot, with pages for `tokens` tokens."""
        pool = self.pools[rank]
        pool.hold(blocks)
        job.rank, job.slot = rank, self.slots[rank].index(None)
        job.blocks = blocks
        job.pages = [page for block in blocks for page in block.pages]
        job.target = len(job.tokens)
        job.pages += pool.take(self.config.pages_for(tokens) - len(job.pages))
        job.num_prefilled = job.num_cached = len(blocks) * self.config.block_size
        self.slots[rank][job.slot] = job

    def _leave(self, job: Job) -> None:
        pool = self.pools[job.rank]
        if job in self.prefilling:
            self.prefilling.remove(job)
        self.slots[job.rank][job.slot] = None
        num_shared = sum(len(block.pages) for block in job.blocks)
        pool.give_back(job.pages[num_shared:])
        pool.let_go(job.blocks)
        job.rank, job.slot, job.pages, job.blocks, job.keys = -1, -1, [], [], None

    def _prefill(self) -> Prefill:
        """One call: a row for each job in turn whose next row has the length of the first job's; rows that are left
        over go to the same jobs again."""
        config = self.config

        def length_for(job: Job) -> int:
            return config.chunk_length_for(job.target - job.num_prefilled)

        length = length_for(self.prefilling[0])
        per_rank = config.rows_per_call(length)
        used = [0] * len(self.pools)
        rows = list[Row]()
        served = dict[int, Job]()
        round_of = list(self.prefilling)
        while round_of:
            again = list[Job]()
            for job in round_of:
                if length_for(job) != length or used[job.rank] == per_rank:
                    continue
                start = job.num_prefilled
                count = min(length, job.target - start)
                place = job.rank * per_rank + used[job.rank]
                first, last = start == job.num_cached, start + count == job.target
                rows.append(Row(job, place, job.slot, start, count, first, last, job.pages))
                used[job.rank] += 1
                job.num_prefilled += count
                served[job.order] = job
                if not last:
                    again.append(job)
            round_of = again
        for job in served.values():
            self.prefilling.remove(job)
            if not job.prefilled:
                self.prefilling.append(job)
            self._keep_blocks(job)
        return Prefill(length, rows)

    def _keep_blocks(self, job: Job) -> None:
        """Puts the blocks that a job has filled into the prefix tree: what calls later than this one may read."""
        pool, keys, size = self.pools[job.rank], job.keys or [], self.config.block_size
        pages_each = size // self.config.page_size
        pages = list(job.pages)  # a list of its own: rows of this call have the old one
        while len(job.blocks) < min(len(keys), job.num_prefilled // size):
            place = len(job.blocks)
            own = pages[place * pages_each : (place + 1) * pages_each]
            if job.prefilled and pool.knows(job.blocks, keys[place]):
                break  # the device has its table already, so that its pages cannot be given for those of the tree
            block = pool.keep(job.blocks, keys[place], own)
            pages[place * pages_each : (place + 1) * pages_each] = block.pages
            job.blocks = [*job.blocks, block]
        job.pages = pages

    def _decode(self, preempted: list[Job]) -> Decode | None:
        """One call for every job that draws; the youngest leave their slots where pages run out."""
        config = self.config
        drawing = [
            job for table in self.slots for job in table if job is not None and job.prefilled and job.max_left > 0
        ]
        if not drawing:
            return None
        busiest = max(config.max_num_seqs - table.count(None) for table in self.slots)
        drafts = busiest <= config.speculation_max_batch and any(job.drafts for job in drawing)
        num_drafts = config.num_speculative_tokens if drafts else 0
        # Nobody waits, is prefilled, or is reserved a place by `reserve`: who comes does not wait for many steps.
        alone = not self.waiting and all(job.prefilled for rank in self._ranks for job in self.running(rank))
        num_steps = min(config.num_steps, max(job.max_left for job in drawing)) if alone else 1
        growth = self._growth(drawing, num_steps * (num_drafts + 1))
        if num_steps > 1 and any(self._missing(rank, growth) for rank in self._ranks):
            num_steps = 1  # rather than that one has to leave
            growth = self._growth(drawing, num_drafts + 1)
        for rank in self._ranks:
            while self._missing(rank, growth):
                youngest = max(self.running(rank), key=lambda job: job.order)
                self._leave(youngest)
                self.add(youngest)
                preempted.append(youngest)
                self.num_preemptions += 1
                growth = [(job, count) for job, count in growth if job is not youngest]
        if not growth:
            return None
        highest = max(job.slot for job, _ in growth)
        batch = next(size for size in config.decode_batches if size > highest)
        return Decode(batch, num_drafts, num_steps, [self._lane(job, batch, count) for job, count in growth])

    @property
    def _ranks(self) -> range:
        return range(len(self.pools))

    def _growth(self, jobs: Sequence[Job], most: int) -> list[tuple[Job, int]]:
        """The pages that each job lacks for drawing `most` more tokens: the newest of them is not run."""
        size = self.config.page_size
        found = []
        for job in jobs:
            longest = min(len(job.tokens) + job.drawing_max - 1 + most, job.end_length - 1)
            found.append((job, max(0, -(-longest // size) - len(job.pages))))
        return found

    def _missing(self, rank: int, growth: Iterable[tuple[Job, int]]) -> bool:
        """Whether a rank has fewer pages than its jobs are to grow by."""
        return sum(count for job, count in growth if job.rank == rank) > self.pools[rank].num_available

    def _lane(self, job: Job, batch: int, growth: int) -> Lane:
        before = len(job.pages)
        grown = self.pools[job.rank].take(growth) if growth else ()
        if grown:
            job.pages = [*job.pages, *grown]
        return Lane(job, job.rank * batch + job.slot, before, grown)
