"""Decode and prefill workers with engine, transport and router played: what they let go of, and what ends them."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwenjax.checkpoint.load import with_mxfp8
from qwenjax.config import ModelConfig
from qwenjax.kv_transfer import KVLayout
from qwenjax.mesh import make_mesh
from qwenjax.model import abstract_model
from qwenjax.outputs import RequestOutput
from qwenjax.sampling_params import SamplingParams
from qwenjax.sharded_model import ShardedModel
from qwenjax_serving.deployment import WorkerPlan
from qwenjax_serving.protocol.messages import (
    Admit,
    Failed,
    Full,
    Grown,
    Handover,
    Message,
    Offer,
    Ping,
    Prefill,
    Read,
    Rejoin,
    Reserve,
    Reserved,
    Status,
    Stop,
    ToWorker,
    Unwelcome,
    Welcome,
    Work,
)
from qwenjax_serving.transfer.nixl_transport import NixlTransport, TransferError
from qwenjax_serving.transfer.staging import StagingBuffer
from qwenjax_serving.workers import follower as follower_module
from qwenjax_serving.workers import peers as peers_module
from qwenjax_serving.workers import process
from qwenjax_serving.workers import worker as worker_module
from qwenjax_serving.workers.decode import DecodeWorker
from qwenjax_serving.workers.follower import Follower
from qwenjax_serving.workers.peers import Peers
from qwenjax_serving.workers.prefill import PrefillWorker
from tests.helpers import tiny
from tests.serving.any_message import messages
from tests.serving.test_router import Played, World

WORK = Work((1, 2, 3), SamplingParams(max_tokens=2), 0, None)


class PlayedEngine:
    """Holds reservations, and takes `seconds` over each call."""

    failure: BaseException | None = None
    seconds = 0.0

    def __init__(self) -> None:
        self.config = SimpleNamespace(page_size=4)
        self.model = SimpleNamespace(dtype=np.float32)
        self.handovers: dict[str, Any] = {}
        self.reserved: set[str] = set()

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if not prompt_token_ids:
            raise ValueError("empty")

    def add_prompt(self, *_: Any) -> None:
        raise ValueError("not of this size")

    def reserve(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *_: Any) -> int:
        self.check(prompt_token_ids, params)
        self.reserved.add(request_id)
        return 0

    def data_rank(self, request_id: str) -> int:
        return 0

    def cancel(self, request_id: str) -> None:
        self.reserved.discard(request_id)

    def admit(self, request_id: str, arrived: Any) -> None:
        raise ValueError("not of this size")

    async def stream(self, request_id: str, enter: Callable[[], None]) -> AsyncIterator[RequestOutput]:
        enter()
        return
        yield

    async def call(self, function: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.seconds)
        return function()


class PlayedSocket:
    def __init__(self) -> None:
        self.said: list[Message] = []
        self.tell: asyncio.Queue[Any] = asyncio.Queue()
        self.connected = True

    def send(self, message: Message) -> bool:
        if self.connected:
            self.said.append(message)
        return self.connected

    async def receive(self) -> Any:
        return await self.tell.get()


class Staging:
    def __init__(self) -> None:
        self.num_free = 8
        self.pages = np.zeros((1, 8))

    def fetch(self, staged: Any) -> Any:
        return staged.on_host()

    def take_out(self, slots: list[int], data_rank: int) -> np.ndarray:
        return self.pages[:, slots]

    def take(self, count: int) -> list[int]:
        self.num_free -= count
        return list(range(count))

    def give_back(self, slots: list[int]) -> None:
        self.num_free += len(slots)


def bare(kind: type, engine: PlayedEngine, socket: PlayedSocket) -> Any:
    """A worker without what it would load."""
    worker = kind.__new__(kind)
    worker.name, worker.engine, worker._engine, worker._decode_engine = "worker", engine, engine, engine
    worker._socket, worker.staging, worker.transport = socket, Staging(), SimpleNamespace(failure=None)
    worker._number, worker._welcome, worker._heard, worker._said_hello = 1, True, 1e12, 0.0
    worker._rejoining, worker._leave_by, worker._tasks = None, None, set()
    worker._ended = asyncio.get_running_loop().create_future()
    worker._places, worker._dropping, worker._prompts, worker._grown, worker.peers = {}, set(), {}, [], None
    worker._limit, worker.transfer_timeout, worker._unwelcome = None, 0.01, ""
    worker._status = lambda: None

    def hello() -> None:
        worker._number += 1
        worker._said_hello = asyncio.get_running_loop().time()
        socket.said.append(worker._number)

    worker._hello = hello
    return worker


def test_a_decode_worker_that_joins_anew_frees_what_it_held_and_then_says_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_BEAT", 0.01)

    async def test() -> None:
        engine, socket = PlayedEngine(), PlayedSocket()
        worker = bare(DecodeWorker, engine, socket)
        conversation = [asyncio.create_task(worker._listen()), asyncio.create_task(worker._beat())]
        socket.tell.put_nowait(Reserve(7, WORK))
        while Reserved(7, 0) not in socket.said:
            await asyncio.sleep(0.01)
        assert engine.reserved == {"1-7"}
        engine.seconds = 0.1  # several beats: a Hello would have been said meanwhile
        socket.tell.put_nowait(Rejoin())
        while worker._number == 1:
            await asyncio.sleep(0.005)
        assert engine.reserved == set()
        assert worker.staging.num_free == 8
        assert worker._number == 2
        for task in conversation:
            task.cancel()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_worker_whose_message_cannot_be_sent_joins_anew() -> None:
    async def test() -> None:
        engine, socket = PlayedEngine(), PlayedSocket()
        worker = bare(DecodeWorker, engine, socket)
        await worker.handle(Reserve(7, WORK))
        await asyncio.sleep(0.01)
        socket.connected = False
        worker.send(Status(*[0] * 9))  # the next one says all that this one would have said
        assert worker._welcome
        worker.send(Full(8))
        assert not worker._welcome
        while worker._rejoining is not None:
            await asyncio.sleep(0.01)
        assert (worker._number, engine.reserved) == (2, set())

    asyncio.run(asyncio.wait_for(test(), 20))


def test_what_the_decode_engine_refuses_ends_alone_and_so_does_what_the_router_no_longer_knows() -> None:
    async def test() -> None:
        engine, socket = PlayedEngine(), PlayedSocket()
        worker = bare(DecodeWorker, engine, socket)
        listening = asyncio.create_task(worker._listen())
        for ticket in (7, 8, 9):
            socket.tell.put_nowait(Reserve(ticket, WORK))
        socket.tell.put_nowait(Admit(8, Grown(0, (5,), "", None, None, None, None), Handover(5, b"")))
        while len(socket.said) < 4:
            await asyncio.sleep(0.01)
        assert Failed(8, "not of this size") in socket.said
        socket.tell.put_nowait(Ping((7,)))  # the Release of 9 was lost
        while worker.num_held > 1:
            await asyncio.sleep(0.01)
        assert engine.reserved == {"1-7"}
        assert worker.staging.num_free == 8 - 1
        assert not worker._ended.done()
        listening.cancel()

    asyncio.run(asyncio.wait_for(test(), 20))


class PlayedTransport:
    """Reads nothing, and says so."""

    failure: Exception | None = None

    async def connect(self, metadata: bytes) -> str:
        return "peer"

    async def read(self, *_: Any) -> None:
        raise TransferError("there is nothing")

    def names_of(self, metadata: Any) -> list[str]:
        return []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(told=st.lists(messages(ToWorker, tickets=(1, 2)), max_size=8))
def test_well_formed_messages_that_make_no_sense_end_no_worker(
    monkeypatch: pytest.MonkeyPatch, told: list[ToWorker]
) -> None:
    monkeypatch.setattr("qwenjax_serving.workers.decode.ranks_by_process", lambda *_: {0: [0]})

    async def test() -> None:
        decode, prefill = (bare(kind, PlayedEngine(), PlayedSocket()) for kind in (DecodeWorker, PrefillWorker))
        decode.staging = StagingBuffer(KVLayout(1, 4), 4, 2, np.float32, 8)
        prefill._waiting, prefill._prefill_engine = deque(), prefill.engine
        for worker in (decode, prefill):
            worker.transport = PlayedTransport()
            for message in told:
                if not isinstance(message, Rejoin):
                    await worker.handle(message)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not worker._ended.done()
            await worker.drop_all()
            assert not worker._ended.done()
            assert worker.staging.num_free == 8

    asyncio.run(asyncio.wait_for(test(), 20))


def test_reads_have_the_deadline_that_the_router_says() -> None:
    async def test() -> None:
        world = World(transfer_timeout=7.5)
        world.join(played := Played("decode", "d"))
        (welcome,) = (message for message in played.inbox if isinstance(message, Welcome))
        worker, deadlines = bare(DecodeWorker, PlayedEngine(), PlayedSocket()), list[float]()

        async def read(offer: Offer, slots: Any, first: int, ranks: Any, timeout: float) -> int:
            deadlines.append(timeout)
            return 1

        worker.reader = SimpleNamespace(read=read)
        worker._engine.model.mesh = make_mesh(1, 1)
        listening = asyncio.create_task(worker._listen())
        for message in (welcome, Reserve(7, WORK), Offer(7, "prefill", 0, 0, 3, 0, 4, (0,), 0)):
            worker._socket.tell.put_nowait(message)
        while not deadlines:
            await asyncio.sleep(0.01)
        assert deadlines == [7.5]
        listening.cancel()

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("told", [1, 2])
def test_a_worker_that_is_told_to_end_waits_for_what_runs_for_its_grace_and_no_longer_when_told_twice(
    monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    monkeypatch.setattr(worker_module, "_BEAT", 0.01)

    async def test() -> None:
        worker, clock = bare(DecodeWorker, PlayedEngine(), PlayedSocket()), asyncio.get_running_loop().time
        await worker.handle(Reserve(7, WORK))
        begun = clock()
        grace = 0.3 if told == 1 else 60
        for _ in range(told):
            worker.leave(grace)
        await worker._beat()
        assert (clock() - begun > 0.25) if told == 1 else (clock() - begun < 15)
        assert worker.num_held == 1

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_worker_that_is_not_used_says_why_once_and_passes_over_what_answers_an_earlier_hello(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        worker = bare(DecodeWorker, PlayedEngine(), PlayedSocket())
        worker._welcome = False
        listening = asyncio.create_task(worker._listen())
        worker._socket.tell.put_nowait(Unwelcome(0, "dtype is c, and b at p"))
        for reason in ("dtype is a, and b at p", "dtype is a, and b at p", "there is a worker d"):
            worker._socket.tell.put_nowait(Unwelcome(1, reason))
        while "there is a worker d" not in caplog.text:
            await asyncio.sleep(0.01)
        assert caplog.text.count("the router does not use it: dtype is a, and b at p") == 1
        assert "dtype is c" not in caplog.text
        listening.cancel()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_hidden_state_of_half_a_number_ends_its_output_alone() -> None:
    async def test() -> None:
        worker = bare(DecodeWorker, PlayedEngine(), PlayedSocket())
        await worker.handle(Reserve(7, WORK))
        await asyncio.sleep(0.01)
        await worker.handle(Admit(7, Grown(0, (5,), "", None, None, None, None), Handover(5, b"odd")))
        while worker.num_held:
            await asyncio.sleep(0.01)
        (failed,) = (message for message in worker._socket.said if isinstance(message, Failed))
        assert "buffer size" in failed.reason
        assert not worker._ended.done()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_slots_of_an_output_that_is_let_go_of_are_free_once_nothing_takes_pages_out_of_them() -> None:
    goes_on, begun = threading.Event(), threading.Event()

    async def test() -> None:
        worker = bare(DecodeWorker, PlayedEngine(), PlayedSocket())

        def take_out(slots: list[int], data_rank: int) -> np.ndarray:
            begun.set()
            assert goes_on.wait(10)
            return np.zeros((1, len(slots)))

        worker.staging.take_out = take_out
        await worker.handle(Reserve(7, WORK))
        await asyncio.sleep(0.02)
        await worker.handle(Admit(7, Grown(0, (5,), "", None, None, None, None), Handover(5, b"")))
        await asyncio.to_thread(begun.wait, 10)
        dropping = asyncio.create_task(worker.drop_all())
        await asyncio.sleep(0.05)
        assert not dropping.done()
        assert worker.staging.num_free < 8
        goes_on.set()
        while worker.num_held:
            await asyncio.sleep(0.01)
        dropping.cancel()  # it goes on to the reader, which is not here
        assert worker.staging.num_free == 8

    asyncio.run(asyncio.wait_for(test(), 20))


def test_slots_that_a_failed_transport_may_write_to_are_not_given_back() -> None:
    async def test() -> None:
        worker = bare(DecodeWorker, PlayedEngine(), PlayedSocket())
        await worker.handle(Reserve(7, WORK))
        await asyncio.sleep(0.02)
        assert worker.staging.num_free < 8
        worker.transport.failure = TransferError("a copy does not end")
        worker._drop(7)
        while worker.num_held:
            await asyncio.sleep(0.01)
        assert worker.staging.num_free < 8
        assert worker.engine.reserved == set()  # no read touches the pages of the cache

    asyncio.run(asyncio.wait_for(test(), 20))


def test_threads_that_do_not_end_are_said_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_JOIN", 0.02)
    ends = threading.Event()
    quick, slow = threading.Thread(target=lambda: None), threading.Thread(target=ends.wait, args=(10,))
    for thread in (quick, slow):
        thread.start()
    assert follower_module._all_end([quick])
    assert not follower_module._all_end([quick, slow])
    ends.set()
    slow.join()


@pytest.mark.parametrize(
    ("staged", "error"),
    [
        (SimpleNamespace(on_host=lambda: 1 / 0), ZeroDivisionError),  # in the stager's thread
        (SimpleNamespace(on_host=lambda: np.zeros(1), first_plane=0, num_planes=None), TypeError),  # on the loop
    ],
)
def test_an_error_while_staging_ends_the_prefill_worker(staged: SimpleNamespace, error: type[Exception]) -> None:
    async def test() -> None:
        worker = bare(PrefillWorker, PlayedEngine(), PlayedSocket())
        worker._staged, worker._num_staged = queue.SimpleQueue(), 0
        worker._prefill_engine = SimpleNamespace(wait_for_others=lambda count: None)
        worker._staged.put(staged)
        worker._staged.put(None)
        await asyncio.to_thread(worker._stage, asyncio.get_running_loop())
        with pytest.raises(error):
            await worker._ended

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_transport_that_fails_ends_its_reads_and_the_worker() -> None:
    async def test() -> None:
        transport = NixlTransport("reader")
        played = {"get_xfer_descs": lambda *_: None, "initialize_xfer": lambda *_: None, "transfer": lambda _: None}
        transport._agent = SimpleNamespace(get_new_notifs=lambda: 1 / 0, **played)
        with pytest.raises(TransferError, match="the transport failed: division by zero"):
            await transport.read("peer", np.zeros((1, 5), np.uint64), timeout=5)
        with pytest.raises(TransferError, match="the transport failed"):
            await transport.read("peer", np.zeros((1, 5), np.uint64), timeout=1)
        worker = bare(DecodeWorker, PlayedEngine(), PlayedSocket())
        worker.transport = transport
        with pytest.raises(RuntimeError, match="the transport failed: division by zero"):
            await worker._beat()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_read_that_goes_on_after_its_peer_was_disconnected_fails_the_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qwenjax_serving.transfer.nixl_transport._SETTLE", 0.05)

    async def test() -> None:
        transport = NixlTransport("reader")
        transport._agent = SimpleNamespace(
            get_new_notifs=lambda: None,
            get_xfer_descs=lambda *_: None,
            initialize_xfer=lambda *_: None,
            transfer=lambda _: None,
            check_xfer_state=lambda _: "PROC",
            remove_remote_agent=lambda _: None,
        )
        with pytest.raises(TransferError, match="not done within"):
            await transport.read("peer", np.zeros((1, 5), np.uint64), timeout=0.05)
        assert "does not end" in str(transport.failure)

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("reading", [False, True])
def test_a_transport_that_fails_ends_a_follower_that_reads_and_one_that_does_not(reading: bool) -> None:
    async def test() -> None:
        follower: Any = Follower.__new__(Follower)
        follower._orders, follower._socket = {}, PlayedSocket()
        follower._ended = asyncio.get_running_loop().create_future()
        follower._transport = SimpleNamespace(failure=None)
        if reading:

            async def read() -> int:
                raise TransferError("it does not end")

            follower._orders[3] = task = asyncio.create_task(read())
            await asyncio.wait([task])
            follower._transport.failure = OSError("broken")
            follower._answer(3, task)
            assert follower._socket.said == []  # its slots may still be written to
        else:
            watching = asyncio.create_task(follower._watch())
            follower._transport.failure = OSError("broken")
            await watching
        with pytest.raises(OSError, match="broken"):
            await follower._ended

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_follower_that_cannot_say_what_it_has_done_ends() -> None:
    async def test() -> None:
        follower: Any = Follower.__new__(Follower)
        follower._ended = asyncio.get_running_loop().create_future()
        follower._socket, follower._transport = PlayedSocket(), SimpleNamespace(failure=None)
        follower._socket.connected = False

        async def read() -> int:
            return 1

        follower._orders = {3: (task := asyncio.create_task(read()))}
        await asyncio.wait([task])
        follower._answer(3, task)
        with pytest.raises(ConnectionError, match="order 3"):
            await follower._ended

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_follower_that_is_told_to_end_does_so_though_the_first_process_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_module, "_LEAVE_LATER", 0.02)

    async def test() -> None:
        follower: Any = Follower.__new__(Follower)
        follower._ended = asyncio.get_running_loop().create_future()
        follower.leave(0)
        assert not follower._ended.done()
        with pytest.raises(TimeoutError, match="process 0 has not ended"):
            await follower._ended

    asyncio.run(asyncio.wait_for(test(), 20))


def test_another_process_that_left_while_nothing_ran_ends_the_worker() -> None:
    async def test() -> None:
        worker = bare(DecodeWorker, PlayedEngine(), PlayedSocket())
        worker._engine = SimpleNamespace(failure=ConnectionError("process 1 does not take call 5"))
        with pytest.raises(RuntimeError, match="other processes failed: process 1 does not take call 5"):
            await worker._beat()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_slots_that_a_silent_process_may_write_to_are_not_given_back_and_the_worker_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "_SETTLE", 0.05)
    monkeypatch.setattr("qwenjax_serving.workers.decode.ranks_by_process", lambda *_: {1: [0]})

    async def test() -> None:
        worker = bare(DecodeWorker, PlayedEngine(), PlayedSocket())
        said = list[Message]()
        peers: Any = Peers.__new__(Peers)
        peers._socket = SimpleNamespace(send=lambda to, message: said.append(message))
        peers._joined, peers._orders, peers._numbers = {1: (b"1", None)}, {}, itertools.count()
        peers._on_failure, worker.peers = worker.end_with, peers
        await worker.handle(Reserve(7, WORK))
        while not worker._socket.said:
            await asyncio.sleep(0.01)
        offer = Offer(7, "prefill", 0, 0, 3, 0, 4, (0,), 0)
        await worker.handle(offer)
        while not said:
            await asyncio.sleep(0.01)
        worker._drop(7)
        with pytest.raises(RuntimeError, match=r"process 1 does not answer, 0.06 s after"):
            await worker._ended
        while worker._dropping:
            await asyncio.sleep(0.01)
        assert said == [Read(0, offer, (0,), 0, (0,), 0.01), Stop(0)]
        assert worker.staging.num_free == 8 - 1

    asyncio.run(asyncio.wait_for(test(), 20))


def test_prompts_that_wait_do_not_begin_in_the_slots_of_those_that_are_dropped() -> None:
    async def test() -> None:
        worker, began = bare(PrefillWorker, PlayedEngine(), PlayedSocket()), list[str]()

        async def run(request_id: str, prompt: Any) -> None:
            began.append(request_id)
            await asyncio.sleep(60)

        def take(count: int) -> list[int] | None:
            if count > worker.staging.num_free:
                return None
            return Staging.take(worker.staging, count)

        worker._run_prompt, worker._waiting, worker.staging.take = run, deque(), take
        worker._engine.check = lambda *_: None
        worker._prefill_engine = SimpleNamespace(handovers={})
        for ticket, tokens in enumerate((24, 28, 4)):  # 6, 7 and 1 of 8 pages: the third waits for the second
            worker._take(Prefill(ticket, msgspec.structs.replace(WORK, prompt_token_ids=(1,) * tokens), 0))
        await asyncio.sleep(0)
        assert began == ["1-0"]
        await worker.drop_all()
        assert began == ["1-0"]
        assert worker.staging.num_free == 8

    asyncio.run(asyncio.wait_for(test(), 20))


def test_one_of_several_processes_that_cannot_load_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.delenv(process.PARENT_VARIABLE, raising=False)
    monkeypatch.setattr(process, "_join", lambda *_: None)
    monkeypatch.setattr(process, "keep_pages_local", lambda *_: None)
    monkeypatch.setattr(process.logging, "shutdown", lambda: None)
    monkeypatch.setattr(process.os, "_exit", end)
    plan = WorkerPlan("decode-0", "decode", {"model_parallel": 2}, processes=2, coordinator="127.0.0.1:1")
    with pytest.raises(SystemExit, match="2"):
        process.run_worker("/there/is/none", plan, "tcp://127.0.0.1:1", b"", process=1)
    assert "decode-0: process 1 ends" in caplog.text
    with pytest.raises(ValueError, match="/there/is/none"):
        process.run_worker("/there/is/none", WorkerPlan("decode-0", "decode", {}), "tcp://127.0.0.1:1", b"")


def test_workers_that_read_the_weights_in_other_ways_have_other_keys() -> None:
    config = ModelConfig.from_dict(tiny(hidden_size=64))
    mesh = make_mesh(1, 1)

    def key(quantised: set[str], activation_format: Any) -> dict[str, str]:
        graphdef, state = abstract_model(config, mesh, None, activation_format)
        model = ShardedModel(config, mesh, graphdef, with_mxfp8(state, quantised))
        sizes = SimpleNamespace(num_speculative_tokens=0)
        engine: Any = SimpleNamespace(model=model, tokenizer=SimpleNamespace(eos_ids=[1]), config=sizes)
        return worker_module._model(engine, "fingerprint")

    names = {"attention.q_proj"}
    assert key(set(), "model") == key(set(), "model")
    first, second, third = key(set(), "model"), key(names, "model"), key(names, "mxfp8")
    assert {what for what in first if first[what] != second[what]} == {"the set of quantised weights"}
    assert {what for what in second if second[what] != third[what]} == {"activation_format"}


def test_a_worker_whose_parent_ended_before_it_could_say_so_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[int, ...]]()
    monkeypatch.setattr(process.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *each: said.append(each)))
    process._end_with(os.getppid())
    with pytest.raises(RuntimeError, match="process 1234567890, which started this worker, has ended"):
        process._end_with(1234567890)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("address", "coordinator", "given", "expected"),
    [
        ("tcp://127.0.0.1:5555", None, None, "lo"),
        ("tcp://localhost:1", None, None, "lo"),
        ("tcp://[::1]:1", None, None, "lo"),
        ("tcp://127.0.0.1:5555", None, "mlx5_0:1", "mlx5_0:1"),
        ("tcp://10.0.0.1:5555", None, None, None),
        ("tcp://router:5555", None, None, None),
        ("tcp://127.0.0.1:5555", "[::1]:9", None, "lo"),
        ("tcp://127.0.0.1:5555", "10.0.0.1:9", None, None),  # the worker's own processes are on several machines
    ],
)
def test_pages_stay_on_the_loopback_interface_of_a_deployment_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, address: str, coordinator: str | None, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {"UCX_NET_DEVICES": given})
    process.keep_pages_local(address, coordinator)
    assert os.environ.get("UCX_NET_DEVICES") == expected
