"""Stop strings, matched on text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes an output's text on up to its stop string, and holds back what may become one.

    How the text is cut into pieces makes no difference: the stop string that is complete first ends the
    output; of several complete at the same character, the longest. What is held back is the longest end of
    the text that begins a stop string, so every piece passed on is final.

    matched: the stop string that ended the output, or None.
    """

    def __init__(self, stop_strings: Sequence[str], include_in_output: bool = False) -> None:
        """include_in_output: the stop string is passed on too. Raises ValueError for an empty stop string."""
        if not all(stop_strings):
            raise ValueError(f"stop is {list(stop_strings)!r}; a stop string has at least one character")
        self._stop_strings = tuple(stop_strings)
        self._longest_prefix = max(map(len, self._stop_strings), default=1) - 1
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The text that is final now that `text` has come; nothing once a stop string matched.

        may_stop: whether a stop string that `text` completes ends the output; False for the first `min_tokens`
            tokens, as vLLM has it.
        """
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        if may_stop and (found := self._first_stop(buffer)) is not None:
            end, self.matched = found
            self._held = ""
            return buffer[:end] if self._include_in_output else buffer[: end - len(self.matched)]
        split = len(buffer) - self._length_to_hold(buffer)
        self._held = buffer[split:]
        return buffer[:split]

    def finish(self) -> str:
        """What was held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, buffer: str) -> tuple[int, str] | None:
        """The end and the text of the first stop string that is complete in `buffer` beyond what was held."""
        matches = []
        for stop in self._stop_strings:
            # Complete within the held text means complete where it was not allowed to stop.
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), -len(stop), stop))
        if not matches:
            return None
        end, _, stop = min(matches)
        return end, stop

    def _length_to_hold(self, buffer: str) -> int:
        for length in range(min(self._longest_prefix, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop_strings):
                return length
        return 0
