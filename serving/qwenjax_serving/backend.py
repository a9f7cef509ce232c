"""What the HTTP front end asks of whatever runs the model: an engine in this process, or a router to workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qwenjax.outputs import EngineStats, RequestOutput
from qwenjax.sampling_params import SamplingParams
from qwenjax.tokenizer import Tokenizer

DEFAULT_QUEUE = 256  # sequences that may wait


class Overloaded(Exception):
    """The queues are full. retry_after: seconds after which another try may find room."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BackendError(Exception):
    """A request failed for a reason that is not its own: a worker died, the server stops."""


@dataclass(frozen=True)
class ServedModel:
    """What the front end knows of the model.

    names: that requests may call it by; answers carry the first. max_model_len: tokens of prompt and output together,
    for which there is room in the cache too. default_sampling_params: the checkpoint's own, for what a request leaves
    out. created: Unix time, seconds.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    max_model_len: int
    default_sampling_params: SamplingParams
    created: int


class Backend(Protocol):
    """Runs requests. All methods are called on the event loop's thread and return soon."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def failure(self) -> BaseException | None:
        """What ended the backend, if anything did: nothing can run any more."""
        ...

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prompt: str | None,
        params: SamplingParams,
        cache_salt: str | None,
    ) -> AsyncIterator[RequestOutput]:
        """Accepts a request, and then yields its outputs so far; the last has `finished`. A reader that is slow may get
        fewer, longer ones.

        Raises ValueError for what can never run, Overloaded where the queues are full and BackendError where nothing
        runs, all before it returns; the iterator raises BackendError where the request fails later.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request where it is and frees what it holds. Ids that are not running are passed over."""
        ...

    def stats(self) -> Mapping[str, EngineStats]:
        """Counters and gauges of each engine by its name, which metrics carry as the label `engine`."""
        ...

    def healthy(self) -> bool:
        """Whether a request sent now would be run."""
        ...

    async def aclose(self) -> None:
        """Ends what is running, and the backend."""
        ...
