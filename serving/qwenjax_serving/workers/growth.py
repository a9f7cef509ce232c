"""What an output has gained since it was last looked at: engines give outputs whole, the wire carries what is new."""

from __future__ import annotations

from qwenjax.outputs import CompletionOutput, SpeculationStats
from qwenjax_serving.protocol.messages import Grown


class Growth:
    """Of one output. `before`: what has been told of it already."""

    def __init__(self, before: Grown | None = None) -> None:
        self._num_tokens = 0 if before is None else before.start + len(before.token_ids)
        self._text_length = 0 if before is None else len(before.text)

    def of(self, output: CompletionOutput, speculation: SpeculationStats | None) -> Grown:
        """What is new in it."""
        start, text_start = self._num_tokens, self._text_length
        self._num_tokens, self._text_length = len(output.token_ids), len(output.text)
        return Grown(
            start,
            tuple(output.token_ids[start:]),
            output.text[text_start:],
            None if output.logprobs is None else tuple(output.logprobs[start:]),
            output.cumulative_logprob,
            output.finish_reason,
            output.stop_reason,
            speculation,
        )
