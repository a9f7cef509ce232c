"""How many sequences a decode worker takes at a time, so that each of them is drawn quickly enough."""

from __future__ import annotations

_WINDOW = 0.5  # seconds of decoding at a batch size before it is judged: one step alone may be late
_RISE = 0.1 / 60  # a second, of a batch that was too slow: a tenth a minute


class BatchLimit:
    """Finds the largest batch of a data rank whose sequences draw `min_tokens_per_second` each, by halving what lies
    between the largest batch that was measured to be quick enough and the smallest that was too slow.

    Sequences end and shorter ones come, or what else the machine did is over: a batch that was too slow counts as a
    slightly larger one with every minute, so that it is tried again. No clock of its own: `now` is in seconds.
    """

    def __init__(self, max_batch: int, min_tokens_per_second: float) -> None:
        self._max_batch, self._min_tokens_per_second = max_batch, min_tokens_per_second
        self._measured: dict[int, tuple[float, float]] = {}  # by batch: tokens and seconds, not judged yet
        self._quick = 0
        self._slow: tuple[int, float] | None = None  # and when that was seen

    def observe(self, batch: int, tokens: float, seconds: float, now: float) -> None:
        """While the fullest data rank had `batch` sequences each drew `tokens`, on average, in `seconds`."""
        before = self._measured.pop(batch, (0.0, 0.0))
        tokens, seconds = before[0] + tokens, before[1] + seconds
        if seconds < _WINDOW:
            self._measured[batch] = tokens, seconds
        elif tokens >= self._min_tokens_per_second * seconds:
            self._quick = max(self._quick, batch)  # what counts as too slow lies beyond it
        else:
            self._quick = min(self._quick, batch - 1)
            if batch < self._too_slow(now):
                self._slow = batch, now

    def at(self, now: float) -> int:
        """The limit: 1 at least, however slow that is."""
        slow = self._too_slow(now)
        return self._max_batch if slow > self._max_batch else max(1, (self._quick + slow) // 2)

    def _too_slow(self, now: float) -> int:
        """The smallest batch that counts as too slow; beyond the largest where none does."""
        if self._slow is None:
            return self._max_batch + 1
        batch, seen = self._slow
        return max(self._quick + 1, int(batch * (1 + _RISE * (now - seen))))
