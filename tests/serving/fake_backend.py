"""A backend without a model: it says a given text, a few tokens at a time, and notes what it was asked."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from qwenjax.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput, SpeculationStats
from qwenjax.sampling_params import SamplingParams
from qwenjax.tokenizer import IncrementalDetokenizer, Tokenizer
from qwenjax_serving.backend import ServedModel
from tests.generation import EOS_IDS, TEMPLATE, backend

DEFAULTS = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
STATS = EngineStats(3, 2, 70, 1, 500, 120, 90, 4, (10, 11), 16, (2, 0), SpeculationStats(40, 60, [40], [20]))


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(
        backend(), eos_ids=EOS_IDS, special_tokens={"eos_token": "<|im_end|>"}, chat_templates={"default": TEMPLATE}
    )


@dataclass(frozen=True)
class Asked:
    request_id: str
    prompt_token_ids: list[int]
    prompt: str | None
    params: SamplingParams
    cache_salt: str | None


@dataclass
class FakeBackend:
    """text: of every output. pace: seconds between two tokens; None gives the next when `more` is set. refuse: raised
    by generate. fail: raised in place of the token after the third. cached: prompt tokens said to be cached."""

    text: str = "hello w€"
    pace: float | None = 0.0
    refuse: Exception | None = None
    fail: Exception | None = None
    cached: int = 0
    max_model_len: int = 64
    well: bool = True
    failure: Exception | None = None
    asked: list[Asked] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    on_token: Callable[[int], None] = lambda count: None

    def __post_init__(self) -> None:
        self.model = ServedModel(("small", "alias"), tokenizer(), self.max_model_len, DEFAULTS, 1_700_000_000)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prompt: str | None,
        params: SamplingParams,
        cache_salt: str | None,
    ) -> AsyncIterator[RequestOutput]:
        if self.refuse is not None:
            raise self.refuse
        asked = Asked(request_id, list(prompt_token_ids), prompt, params, cache_salt)
        self.asked.append(asked)
        self.running.add(request_id)
        return self._outputs(asked)

    async def _outputs(self, asked: Asked) -> AsyncIterator[RequestOutput]:
        params = asked.params
        ids = [*self.model.tokenizer.encode(self.text), EOS_IDS[0]]
        reason = "length" if params.max_tokens is not None and params.max_tokens < len(ids) else "stop"
        ids = ids[: params.max_tokens]
        yield self._result(asked, [], None)  # as an engine that has read a part of the prompt
        for count in range(1, len(ids) + 1):
            await asyncio.sleep(self.pace or 0)
            if self.fail is not None and count > 3:
                raise self.fail
            self.on_token(count)
            last = count == len(ids)
            if last:
                self.running.discard(asked.request_id)
            yield self._result(asked, ids[:count], reason if last else None)

    def _result(self, asked: Asked, ids: list[int], reason: str | None) -> RequestOutput:
        params, tokenizer = asked.params, self.model.tokenizer
        detokenizer = IncrementalDetokenizer(tokenizer, asked.prompt_token_ids, params.skip_special_tokens)
        text = detokenizer.feed([token for token in ids if token not in EOS_IDS])
        logprobs = None if params.logprobs is None else [entries(token, params.logprobs) for token in ids]
        parts = [
            CompletionOutput(index, text, list(ids), logprobs, None, reason)  # type: ignore[arg-type]
            for index in range(params.n)
        ]
        prompt_logprobs = None
        if params.prompt_logprobs is not None and ids:
            prompt_logprobs = [None, *(entries(t, params.prompt_logprobs) for t in asked.prompt_token_ids[1:])]
        return RequestOutput(
            asked.request_id,
            asked.prompt,
            asked.prompt_token_ids,
            parts,
            prompt_logprobs,
            reason is not None,
            RequestMetrics(1.0, 1.25),
            num_cached_tokens=self.cached,
        )

    def abort(self, request_id: str) -> None:
        self.running.discard(request_id)
        self.aborted.append(request_id)

    def stats(self) -> dict[str, EngineStats]:
        return {"0": STATS}

    def healthy(self) -> bool:
        return self.well

    async def aclose(self) -> None:
        self.running.clear()


def entries(token: int, top: int) -> dict[int, Logprob]:
    """A token that is the third most likely, after ids 100 and 101 (and the impossible 102)."""
    others = {100: -0.5, 101: -1.0, 102: float("-inf")}
    found = {token: Logprob(-2.0, 3, "")}
    return found | {other: Logprob(value, 0, "") for other, value in list(others.items())[:top]}
