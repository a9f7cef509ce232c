"""Sends a workload and notes when what comes back comes back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from qwenjax_serving.bench.sse_client import HttpError, Target, events, get
from qwenjax_serving.bench.workload import Prompt, Workload, request_body


@dataclass
class Record:
    """One request. Times are seconds since the load began. arrivals: of each event with text. error: None for a request
    that went well; status: of its HTTP answer, 0 where there was none."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    finished: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    status: int = 200

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def time_per_output_token(self) -> float | None:
        """Of the tokens after the first; None where there is one."""
        if self.completion_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def latency(self) -> float:
        return self.finished - self.sent


@dataclass(frozen=True)
class Run:
    """seconds: from the first request's start to the last one's end."""

    records: list[Record]
    seconds: float


async def served_model(target: Target) -> str:
    """The first model that the server lists. Raises ValueError where it lists none, HttpError or OSError without it."""
    listed = json.loads(await get(target, "/v1/models")).get("data") or []
    if not listed:
        raise ValueError(f"{target.url}/v1/models lists no model; name it with --model")
    return str(listed[0]["id"])


async def drive(
    target: Target, model: str, prompts: Sequence[Prompt], workload: Workload, *, chat: bool, timeout: float
) -> Run:
    """Sends every prompt; failures are records too. timeout: seconds that one request may take."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    bodies = [json.dumps(request_body(prompt, model, workload, chat)).encode() for prompt in prompts]
    start = time.perf_counter()

    records: list[Record] = []

    async def send(body: bytes) -> None:
        records.append(await _send(target, path, body, start, timeout))

    if workload.concurrency is not None:
        waiting = iter(bodies)

        async def work() -> None:
            for body in waiting:
                await send(body)

        await asyncio.gather(*(work() for _ in range(workload.concurrency)))
    else:

        async def wait_and_send(arrival: float, body: bytes) -> None:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            await send(body)

        await asyncio.gather(*map(wait_and_send, workload.arrivals(), bodies))
    return Run(records, time.perf_counter() - start)


async def _send(target: Target, path: str, body: bytes, start: float, timeout: float) -> Record:
    record = Record(time.perf_counter() - start)
    counted = False
    try:
        async with asyncio.timeout(timeout):
            async for data in events(target, path, body):
                now = time.perf_counter() - start
                event = json.loads(data)
                if "error" in event:
                    raise HttpError(200, str(event["error"].get("message")))
                if usage := event.get("usage"):
                    record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    counted = True
                if any(_text(choice) for choice in event["choices"]):
                    record.arrivals.append(now)
    except HttpError as error:
        record.error, record.status = str(error), error.status
    except TimeoutError:
        record.error, record.status = f"no end within --timeout, {timeout:g} s", 0
    except (OSError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
        record.error, record.status = f"{type(error).__name__}: {error}", 0
    record.finished = time.perf_counter() - start
    if record.error is None and not (counted and record.arrivals):
        record.error = "the stream had no usage" if record.arrivals else "the stream had no text"
    return record


def _text(choice: dict[str, object]) -> object:
    delta = choice.get("delta")
    return delta.get("content") if isinstance(delta, dict) else choice.get("text")
