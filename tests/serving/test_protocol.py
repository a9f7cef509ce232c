"""Messages survive the wire, and nothing else gets through."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.outputs import Logprob
from qwenjax.sampling_params import SamplingParams
from qwenjax_serving.protocol.messages import (
    VERSION,
    Failed,
    Grown,
    Message,
    MessageError,
    Ping,
    Reserve,
    Taken,
    Tokens,
    Work,
    decode_to_router,
    decode_to_worker,
    encode,
)
from qwenjax_serving.protocol.secret import SECRET_VARIABLE, Keys, read_secret
from qwenjax_serving.protocol.sockets import MAX_MESSAGE, RouterSocket, WorkerSocket

SECRET = b"of sixteen bytes or more"
PARAMS = SamplingParams(temperature=0.5, seed=2**64 - 1, stop=("a", "b"), logit_bias={7: -1.5}, max_tokens=None)


def test_messages_are_equal_after_the_wire() -> None:
    reserve = Reserve(3, Work((1, 2, 3), PARAMS, 1, "salt"))
    assert decode_to_worker(encode(reserve)) == reserve
    logprobs = ({5: Logprob(-0.5, 1, "x"), 9: Logprob(-1.5, 2, "y")},)
    tokens = Tokens(((4, Grown(2, (5,), "x", logprobs, -0.5, "stop", 9)),))
    assert decode_to_router(encode(tokens)) == tokens


def test_nothing_that_goes_over_a_socket_is_pickled() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = [*(root / "serving").rglob("*.py"), root / "qwenjax" / "engine" / "processes.py"]
    assert len(sources) > 40
    assert [path for path in sources if re.search("pickle|pyobj|marshal", path.read_text())] == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "version None"),
        (bytes([VERSION + 1]) + encode(Ping((7,)))[1:], f"version {VERSION + 1}; this is {VERSION}"),
        (encode(Ping((7,)))[:-2], "truncated"),
        (encode(Taken(1, 2, 3)), "Invalid value 'Taken'"),  # one for the other side
        (bytes([VERSION]) + msgspec.msgpack.encode({"type": "Release", "ticket": "7"}), "Expected `int`"),
        (bytes([VERSION]) + msgspec.msgpack.encode({"type": "Release", "ticket": 7, "x": 1}), "unknown field `x`"),
        (bytes([VERSION]) + msgspec.msgpack.encode({"type": "Release"}), "missing required field `ticket`"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        decode_to_worker(data)


def test_parameters_out_of_range_are_refused() -> None:
    good = msgspec.to_builtins(Reserve(3, Work((1,), PARAMS, 0, None)))
    good["work"]["params"]["top_p"] = 2.0
    with pytest.raises(MessageError, match="top_p is 2"):
        decode_to_worker(bytes([VERSION]) + msgspec.msgpack.encode(good))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_refused_as_such(noise: bytes) -> None:
    for decode in (decode_to_router, decode_to_worker):
        for data in (noise, bytes([VERSION]) + noise):
            try:
                decode(data)
            except MessageError:
                continue
            # What it took for a message is one of the few without fields.
            assert isinstance(decode(data), Message)


def run(test: Callable[[RouterSocket], Awaitable[None]]) -> None:
    async def whole() -> None:
        router = RouterSocket("tcp://127.0.0.1:0", SECRET)
        try:
            await test(router)
        finally:
            await router.close()

    asyncio.run(asyncio.wait_for(whole(), timeout=30))


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    while text not in caplog.text:
        await asyncio.sleep(0.01)


async def ping_pong(router: RouterSocket) -> None:
    """A good worker gets a message through, and an answer."""
    worker = WorkerSocket(router.address, SECRET, "good")
    try:
        while not worker.send(Taken(1, 2, 3)):
            await asyncio.sleep(0.01)
        sender, message = await router.receive()
        assert (sender, message) == (b"good", Taken(1, 2, 3))
        router.send(sender, Ping((7,)))
        assert await worker.receive() == Ping((7,))
    finally:
        await worker.close()


def test_a_worker_with_the_secret_is_heard() -> None:
    run(ping_pong)


def test_a_message_that_nobody_takes_does_not_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(router: RouterSocket) -> None:
        loop: Any = asyncio.get_running_loop()
        worker, turns = WorkerSocket(router.address, SECRET, "worker"), 0
        reading = asyncio.create_task(router.receive())  # what waits for the first has the loop look at the socket
        try:
            for _ in range(2):
                while not worker.send(Taken(1, 2, 3)):
                    await asyncio.sleep(0.01)
            assert (await reading)[1] == Taken(1, 2, 3)
            reading = asyncio.create_task(router.receive())
            assert (await reading)[1] == Taken(1, 2, 3)
            reading = asyncio.create_task(router.receive())
            await asyncio.sleep(0.05)
            reading.cancel()
            worker.send(Taken(4, 5, 6))
            select = loop._selector.select

            def counted(timeout: float | None) -> Any:
                nonlocal turns
                turns += 1
                return select(timeout)

            monkeypatch.setattr(loop._selector, "select", counted)
            await asyncio.sleep(0.2)
            assert turns < 30
            assert (await router.receive())[1] == Taken(4, 5, 6)
        finally:
            await worker.close()

    run(test)


def test_an_ipv6_address_is_listened_on() -> None:
    async def test() -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
        router = RouterSocket("tcp://[::1]:0", SECRET)
        try:
            await ping_pong(router)
        finally:
            await router.close()

    asyncio.run(asyncio.wait_for(test(), timeout=30))


def test_a_worker_with_another_secret_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(router: RouterSocket) -> None:
        stranger = WorkerSocket(router.address, b"another secret, as long", "stranger")
        try:
            hint = "QWENJAX_SECRET may not be the same on both sides"
            await logged(caplog, f"refused a connection at {router.address}: HANDSHAKE_FAILED_PROTOCOL; {hint}")
            await logged(caplog, f"no connection to {router.address}: HANDSHAKE_FAILED_NO_DETAIL; {hint}")
            assert not stranger.send(Taken(1, 2, 3))
            await asyncio.sleep(0.5)  # it tries again every 0.1 s
            assert caplog.text.count(hint) == 2
        finally:
            await stranger.close()
        await ping_pong(router)

    run(test)


def test_who_knows_the_router_key_alone_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The router's public key is no secret: the worker's own key is what lets it in."""

    async def test(router: RouterSocket) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.curve_serverkey = Keys.of(SECRET).router_public
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.linger = 0
            stranger.connect(router.address)
            stranger.send(encode(Taken(1, 2, 3)))
            await logged(caplog, "DENIED")
            await ping_pong(router)

    with caplog.at_level(logging.DEBUG):
        run(test)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)), struct.pack(">Q", 2**63)])
def test_another_protocol_is_refused_and_logged(noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test(router: RouterSocket) -> None:
        host, port = router.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
            await logged(caplog, f"refused a connection at {router.address}: ")
            await ping_pong(router)

    run(test)


def test_lines_about_refused_connections_are_few_and_say_how_many_more_there_were(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = "qwenjax_serving.protocol.sockets._LINE_EVERY"
    monkeypatch.setattr(every, 60)

    async def test(router: RouterSocket) -> None:
        host, port = router.address.removeprefix("tcp://").split(":")
        for number in range(5):
            if number == 4:
                while [count for _, count in router._watch._said.values()] != [3]:
                    await asyncio.sleep(0.01)
                monkeypatch.setattr(every, 0)
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(ConnectionResetError):
                    await asyncio.to_thread(stranger.recv, 100)  # until it is closed
        await logged(caplog, "(3 more before)")
        lines = [record.getMessage() for record in caplog.records if "refused" in record.message]
        assert len(lines) == 2
        assert "closed before a handshake" in lines[0]

    run(test)


def test_a_worker_that_leaves_is_not_logged_as_refused_though_another_connection_came_before_its_handshake(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, succeeded, disconnected = zmq.Event.ACCEPTED, zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED
    worker, stranger = 7, 8  # descriptors
    events = [(accepted, worker), (accepted, stranger), (succeeded, 0), (disconnected, worker)]
    before = list[str]()
    events += [(accepted, worker), (disconnected, worker)]  # a descriptor is used again, by who does not get that far

    async def told(_: Any) -> dict[str, Any]:
        if not events:
            await asyncio.sleep(60)
        event, value = events.pop(0)
        if not events:
            before.append(caplog.text)
        return {"event": event, "value": value, "endpoint": b"tcp://here"}

    monkeypatch.setattr("qwenjax_serving.protocol.sockets.recv_monitor_message", told)

    async def test(_: RouterSocket) -> None:
        await logged(caplog, "refused a connection at tcp://here: closed before a handshake")
        assert before == [""]

    run(test)


def test_corrupt_messages_of_a_worker_are_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def test(router: RouterSocket) -> None:
        worker = WorkerSocket(router.address, SECRET, "worker")
        try:
            while not worker.send(Ping((7,))):  # a message, but not one for a router
                await asyncio.sleep(0.01)
            worker._socket.send_multipart([b"one", b"two"])
            worker._socket.send(bytes([VERSION]) + b"\x80\xff")
            worker.send(Taken(1, 2, 3))
            assert (await router.receive())[1] == Taken(1, 2, 3)
        finally:
            await worker.close()
        assert [record.getMessage().split(":")[0] for record in caplog.records if "refused" in record.message] == [
            "refused a message from b'worker'"
        ] * 3

    run(test)


def test_a_short_secret_is_refused_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ValueError, match="QWENJAX_SECRET has 5 bytes; it needs at least 16"):
        read_secret()


def test_a_message_that_the_router_would_not_take_is_an_error_and_others_get_through() -> None:
    async def test(router: RouterSocket) -> None:
        worker = WorkerSocket(router.address, SECRET, "worker")
        try:
            while not worker.send(Taken(1, 2, 3)):
                await asyncio.sleep(0.01)
            with pytest.raises(MessageError, match=r"a Failed of 67,\d+,\d+ bytes; there is room for 67,108,864"):
                worker.send(Failed(1, "x" * MAX_MESSAGE))
            assert worker.send(Taken(4, 5, 6))
            assert [(await router.receive())[1] for _ in range(2)] == [Taken(1, 2, 3), Taken(4, 5, 6)]
        finally:
            await worker.close()

    run(test)


def test_an_address_that_is_taken_is_named() -> None:
    async def test(router: RouterSocket) -> None:
        with pytest.raises(OSError, match=f"cannot listen at {router.address}: Address already in use"):
            RouterSocket(router.address, SECRET)

    run(test)
