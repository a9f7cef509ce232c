"""The engine in its thread: streams on an asyncio loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from qwenjax.engine.async_engine import AsyncEngine
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.mesh import make_mesh
from qwenjax.outputs import RequestOutput
from qwenjax.sampling_params import SamplingParams
from qwenjax.tokenizer import Tokenizer
from tests.generation import EOS_IDS, VOCABULARY, assert_engine_free, backend, greedy, random_ids
from tests.helpers import model_from_tensors, random_tensors, tiny


@pytest.fixture(scope="module")
def shared() -> Engine:
    raw = tiny(vocab_size=VOCABULARY)
    model = model_from_tensors(raw, make_mesh(), random_tensors(raw))
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "num_pages": 9, "page_size": 8, "max_num_batched_tokens": 32}
    engine = Engine(model, Tokenizer(backend(), eos_ids=EOS_IDS), EngineConfig(**sizes, num_steps=4))
    engine.warm_up(progress=False)
    return engine


@pytest.fixture
def engine(shared: Engine) -> Any:
    yield shared
    assert_engine_free(shared)


def run(engine: Engine, test: Any) -> Any:
    """Runs `test(AsyncEngine)` on a loop, with a bound, and closes the engine's thread."""

    async def body() -> Any:
        running = AsyncEngine(engine)
        try:
            return await asyncio.wait_for(test(running), 60)
        finally:
            await running.aclose()
            assert not running._thread.is_alive()

    coroutine: Coroutine[Any, Any, Any] = body()
    return asyncio.run(coroutine)


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    seen = [output async for output in outputs]
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    return seen[-1]


def test_streams_side_by_side_give_what_the_engine_gives(engine: Engine) -> None:
    prompts = [random_ids(length) for length in (3, 20, 40)]
    params = SamplingParams(temperature=0.9, n=2, seed=4, max_tokens=16, ignore_eos=True)
    expected = []
    for prompt in prompts:
        engine.add_request("a", prompt, params)
        while engine.has_unfinished:
            outputs = engine.step()
        expected.append([part.token_ids for part in outputs[0].outputs])

    async def test(running: AsyncEngine) -> list[RequestOutput]:
        streams = [running.add(str(i), prompt, params, prompt="text") for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(last, streams))

    found = run(engine, test)
    assert [[part.token_ids for part in output.outputs] for output in found] == expected
    assert [output.prompt for output in found] == ["text"] * 3


@pytest.mark.parametrize("how", ["abort", "close", "drop", "cancel"])
def test_a_reader_that_leaves_ends_its_request(engine: Engine, how: str) -> None:
    async def test(running: AsyncEngine) -> None:
        other = asyncio.create_task(last(running.add("other", random_ids(5), greedy(50))))
        outputs: Any = running.add("a", random_ids(3), greedy(60))
        await anext(outputs)
        if how == "abort":
            running.abort("a")
            running.abort("never seen")
            final = await last(outputs)
            assert final.outputs[0].finish_reason == "abort"
        elif how == "close":
            await outputs.aclose()
            assert [output async for output in outputs] == []
        elif how == "cancel":
            task = asyncio.create_task(last(outputs))
            await asyncio.sleep(0)
            task.cancel()
            del task
        del outputs
        gc.collect()
        assert len((await other).outputs[0].token_ids) == 50
        deadline = time.monotonic() + 20
        while running.stats().num_running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert running.stats().free_pages == (9,)
        # Its id may be used again.
        assert len((await last(running.add("a", random_ids(3), greedy(2)))).outputs[0].token_ids) == 2

    before = engine.stats().num_aborts
    run(engine, test)
    assert engine.stats().num_aborts - before == 1


def test_what_cannot_run_is_refused_at_once(engine: Engine) -> None:
    async def test(running: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="prompt is empty"):
            running.add("a", [], greedy(2))
        first = running.add("a", [1], greedy(2))
        with pytest.raises(ValueError, match="'a' is in use"):
            running.add("a", [1], greedy(2))
        await last(first)
        await running.aclose()
        with pytest.raises(RuntimeError, match="closed"):
            running.add("a", [1], greedy(2))

    run(engine, test)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_ends_requests_or_lets_them_end(engine: Engine, drain: bool) -> None:
    async def test(running: AsyncEngine) -> RequestOutput:
        outputs = running.add("a", random_ids(3), greedy(50))
        await anext(outputs)
        await running.aclose(drain)
        return await last(outputs)

    part = run(engine, test).outputs[0]
    assert part.finish_reason == ("length" if drain else "abort")
    assert (len(part.token_ids) == 50) == drain


def test_a_failure_reaches_every_reader(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("no device")

    async def test(running: AsyncEngine) -> None:
        monkeypatch.setattr(engine, "step", fail)
        streams = [running.add(str(i), [1], greedy(2)) for i in range(2)]
        for stream in streams:
            with pytest.raises(RuntimeError, match="the engine failed: no device"):
                await anext(stream)
        assert isinstance(running.failure, ZeroDivisionError)
        with pytest.raises(RuntimeError, match="the engine failed: no device"):
            running.add("2", [1], greedy(2))

    run(engine, test)
    monkeypatch.undo()
    engine.abort(["0", "1"])


def test_a_failure_reaches_calls_that_wait_behind_it(engine: Engine) -> None:
    def fail() -> None:
        raise KeyboardInterrupt("as if of the device")  # of a kind that `call` does not hand on

    async def test(running: AsyncEngine) -> None:
        calls = [asyncio.ensure_future(running.call(each)) for each in (fail, lambda: 1, lambda: 2)]
        for call in calls:
            with pytest.raises(RuntimeError, match="the engine failed: as if of the device"):
                await asyncio.wait_for(call, 10)

    run(engine, test)


def test_a_request_that_does_not_enter_fails_alone(engine: Engine) -> None:
    def refuse() -> None:
        raise ValueError("no such reservation")

    async def test(running: AsyncEngine) -> None:
        other = running.add("other", [1], greedy(2))
        with pytest.raises(ValueError, match="no such reservation"):
            await anext(running.stream("refused", refuse))
        assert (await last(other)).finished
        assert (await last(running.add("refused", [1], greedy(2)))).finished  # its id is free

    run(engine, test)
