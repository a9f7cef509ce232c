"""The batch that keeps a minimum decoding speed, against decoders whose speed is a function of the batch."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax_serving.workers.batch_limit import BatchLimit

LARGEST = 64


class Decoder:
    """Has more requests than places: the limit is its batch, but for outputs that run on and end one by one."""

    def __init__(self, limit: BatchLimit, speed: Callable[[int], float]) -> None:
        self.limit, self.speed = limit, speed
        self.now, self.batch, self.longest_batch = 0.0, limit.at(0.0), 0

    def step(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.limit.observe(self.batch, self.speed(self.batch) * seconds, seconds, self.now)
        most = self.limit.at(self.now)
        assert 1 <= most <= LARGEST
        self.batch = most if self.batch <= most else self.batch - 1


@st.composite
def speeds(draw: st.DrawFn) -> list[float]:
    """Tokens a second of a sequence, by batch: the more, the slower, in steps as compiled sizes make them."""
    drops = draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 3.0]), min_size=LARGEST, max_size=LARGEST))
    found = [draw(st.floats(5, 100))]
    for drop in drops:
        found.append(max(found[-1] - drop, 0.1))
    return found


@settings(max_examples=60, deadline=None)
@given(speeds(), st.floats(1, 110))
def test_the_batch_becomes_the_largest_that_is_quick_enough_and_stays_there(table: list[float], wanted: float) -> None:
    best = max((batch for batch in range(1, LARGEST + 1) if table[batch] >= wanted), default=1)
    decoder = Decoder(BatchLimit(LARGEST, wanted), lambda batch: table[batch])
    for _ in range(1500):
        decoder.step()
    for _ in range(300):
        decoder.step()
        # A batch that was too slow is tried again, by one or a tenth, some time later.
        assert decoder.batch in range(best, best + 2 + best // 10)
    if best == LARGEST:
        assert decoder.batch == LARGEST


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, LARGEST), st.floats(0.1, 50), st.floats(0.01, 3)), max_size=60))
def test_too_slow_a_batch_is_not_taken_again_at_once_and_a_quick_one_lowers_nothing(
    seen: list[tuple[int, float, float]],
) -> None:
    limit, now = BatchLimit(LARGEST, 10), 0.0
    for batch, speed, seconds in seen:
        now += seconds
        before = limit.at(now)
        limit.observe(batch, speed * 0.6, 0.6, now)  # long enough to be judged by itself
        if speed < 10:
            assert limit.at(now) < max(batch, 2)
            assert limit.at(now) <= before
        else:
            assert limit.at(now) >= before


@given(st.integers(2, LARGEST), st.floats(0.001, 0.24))
def test_one_late_step_changes_nothing(batch: int, late: float) -> None:
    limit = BatchLimit(LARGEST, 10)
    limit.observe(batch, 0.0, late, 1.0)
    limit.observe(batch, 11.0, 1.0 - late, 2.0)
    assert limit.at(2.0) == LARGEST


def test_the_limit_goes_when_what_made_decoding_slow_is_over() -> None:
    slow = True
    decoder = Decoder(BatchLimit(LARGEST, 10), lambda batch: 200 / batch if slow else 50.0)
    for _ in range(1000):
        decoder.step()
    assert 20 <= decoder.batch <= 22
    slow = False
    for _ in range(20_000):
        decoder.step()
    assert decoder.batch == LARGEST


def test_a_batch_of_one_is_taken_however_slow_it_is() -> None:
    decoder = Decoder(BatchLimit(LARGEST, 1000), lambda batch: 1.0)
    for _ in range(300):
        decoder.step()
    assert decoder.batch == 1
