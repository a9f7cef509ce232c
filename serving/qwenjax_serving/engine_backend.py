"""The backend of a server that is one process: an engine in a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from qwenjax.engine.async_engine import AsyncEngine
from qwenjax.engine.engine import Engine
from qwenjax.outputs import EngineStats, RequestOutput
from qwenjax.sampling_params import SamplingParams
from qwenjax_serving.backend import BackendError, Overloaded, ServedModel

logger = logging.getLogger(__name__)


class EngineBackend:
    """A Backend (see there). It is the engine's owner from now on."""

    def __init__(self, engine: Engine, model: ServedModel, max_queue: int) -> None:
        """max_queue: sequences that may wait beyond those that the engine's slots hold; Overloaded comes after them."""
        self.model = model
        self._engine = AsyncEngine(engine)
        self._room = engine.ranks * engine.config.max_num_seqs + max_queue
        self._sequences: dict[str, int] = {}  # of each request that is not finished

    @property
    def failure(self) -> BaseException | None:
        return self._engine.failure

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prompt: str | None,
        params: SamplingParams,
        cache_salt: str | None,
    ) -> AsyncIterator[RequestOutput]:
        if params.n > self._room:
            raise ValueError(f"n is {params.n}; this server holds {self._room} sequences")
        held = sum(self._sequences.values())
        if held + params.n > self._room:
            raise Overloaded(f"{held} sequences run or wait, of at most {self._room}; try again later")
        try:
            stream = self._engine.add(request_id, prompt_token_ids, params, prompt=prompt, cache_salt=cache_salt)
        except RuntimeError as error:
            raise BackendError(str(error)) from error
        self._sequences[request_id] = params.n
        return self._outputs(request_id, stream)

    async def _outputs(self, request_id: str, stream: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        try:
            async for result in stream:
                if result.finished:
                    self._sequences.pop(request_id, None)
                yield result
        except RuntimeError as error:
            logger.exception("request %s failed", request_id)
            raise BackendError(str(error)) from error

    def abort(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)
        self._engine.abort(request_id)

    def stats(self) -> Mapping[str, EngineStats]:
        return {"0": self._engine.stats()}

    def healthy(self) -> bool:
        return self.failure is None

    async def aclose(self) -> None:
        await self._engine.aclose()
