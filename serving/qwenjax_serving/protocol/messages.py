"""The messages between router and workers: typed, versioned, in MessagePack.

A request that the router sends through the workers is an attempt with a `ticket` of its own; another try is another
ticket. The router alone decides when an attempt is over: workers free what they hold for it on its word, and what they
still say about it is passed over. All of a worker's messages are void until it has said Hello to this router.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from qwenjax.outputs import EngineStats, FinishReason, Logprob, SpeculationStats
from qwenjax.sampling_params import SamplingParams
from qwenjax_serving.transfer.staging import StagingLayout

VERSION = 4  # of everything below; the first byte of every message

Role = Literal["prefill", "decode"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # tokens, pages, ids and numbers of them: engines have int32

READ_TIMES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds
ReadTimes = Annotated[tuple[int, ...], msgspec.Meta(min_length=len(READ_TIMES) + 1, max_length=len(READ_TIMES) + 1)]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Any of the messages below."""


class Hello(Message, frozen=True):
    """A worker is ready, and holds nothing. name: of the deployment; instance: of this process alone; number: of this
    Hello among those of the process. model: of the checkpoint, its config and dtype, each equal for workers that may
    work together. num_slots: sequences that it may hold at once. metadata: what NIXL needs in order to read from each
    of its processes."""

    name: str
    instance: str
    number: int
    role: Role
    model: dict[str, str]
    num_slots: Count
    max_model_len: Count
    staging: StagingLayout
    metadata: tuple[bytes, ...]


class Status(Message, frozen=True):
    """Sent several times a second: the worker lives. num_slots: sequences that it now holds at most. bytes_read,
    read_seconds: of all transfers so far; read_times: how many of them took at most the seconds of each of READ_TIMES
    and more than those before, and how many took longer than all. staging_free: slots; held: tickets that it holds
    something for; num_prefill_calls, num_decode_calls: of the engine so far."""

    stats: EngineStats
    num_slots: Count
    bytes_read: int
    read_seconds: float
    read_times: ReadTimes
    staging_free: Count
    held: Count
    num_prefill_calls: int
    num_decode_calls: int


class Leaving(Message, frozen=True):
    """The worker wants to end: give it no more work."""


class Goodbye(Message, frozen=True):
    """The worker ends and has let go of everything."""


class Welcome(Message, frozen=True):
    """Answers the Hello of this number. What came between the two was for what the worker was before: it is void.
    transfer_timeout: seconds that a read of pages may take."""

    number: int
    transfer_timeout: Annotated[float, msgspec.Meta(gt=0)]


class Unwelcome(Message, frozen=True):
    """The other answer: the router does not use the worker, which may ask again."""

    number: int
    reason: str


class Rejoin(Message, frozen=True):
    """Let go of everything and say Hello: the router has not heard it, or gave the worker up."""


class Ping(Message, frozen=True):
    """The router lives, and these are the tickets that the worker is to hold something for. What else it holds was
    released by a message that got lost: messages come in the order in which they were sent."""

    tickets: tuple[int, ...]


class Source(Message, frozen=True):
    """A prefill worker that a decode worker may be told to read from; `gone` once it is not."""

    worker: str
    staging: StagingLayout
    metadata: tuple[bytes, ...]
    gone: bool = False


class Work(msgspec.Struct, frozen=True):
    """One output of a request. params: of that output alone (n is 1), with its seed; index: its place among the n."""

    prompt_token_ids: tuple[Count, ...]
    params: SamplingParams
    index: Count
    cache_salt: str | None


class Reserve(Message, frozen=True):
    """To a decode worker: take a slot, pages and staging for this."""

    ticket: int
    work: Work


class Reserved(Message, frozen=True):
    """The answer. num_cached: tokens of the prompt that it has, which need not be sent."""

    ticket: int
    num_cached: Count


class Full(Message, frozen=True):
    """The other answer: no room now."""

    ticket: int


class Prefill(Message, frozen=True):
    """To a prefill worker: run the prompt, offer tokens from num_cached on, and draw the first token."""

    ticket: int
    work: Work
    num_cached: Count


class Offer(Message, frozen=True):
    """Pages that a prefill worker has staged, and the order to a decode worker to read them.

    part: number of the offer, from 0. Tokens [start, stop) of planes [first_plane, end_plane) lie in `slots` of the
    source's staging, of which the first holds positions from `first` on. source: the prefill worker's instance.
    """

    ticket: int
    source: str
    part: Count
    start: Count
    stop: Count
    first_plane: Count
    end_plane: Count
    slots: tuple[Count, ...]
    first: Count


class Taken(Message, frozen=True):
    """A decode worker has all bytes of an offer."""

    ticket: int
    part: Count
    num_bytes: int


class Handover(msgspec.Struct, frozen=True):
    """What decoding goes on from, besides the pages. hidden: the model's last normalised hidden state, raw bytes of the
    model's dtype, for the multi-token-prediction head; empty without one."""

    token: Count
    hidden: bytes


class Grown(msgspec.Struct, frozen=True):
    """What an output has gained. start: tokens that it had before."""

    start: Count
    token_ids: tuple[Count, ...]
    text: str
    logprobs: tuple[dict[int, Logprob], ...] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    speculation: SpeculationStats | None = None


class Prefilled(Message, frozen=True):
    """The prompt is run. grown: the first token; num_parts: offers made. handover: None where the output has ended."""

    ticket: int
    grown: Grown
    num_parts: Count
    handover: Handover | None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    num_cached_tokens: Count


class Admit(Message, frozen=True):
    """To a decode worker that has all parts: put them into the cache and decode."""

    ticket: int
    grown: Grown
    handover: Handover


class Tokens(Message, frozen=True):
    """From a decode worker: more of its outputs, by ticket. One message for all that a decode call drew: a message has
    a cost of its own, which a token does not repay."""

    outputs: tuple[tuple[int, Grown], ...]


class Release(Message, frozen=True):
    """Let go of what is held for an attempt, wherever it stands. Unknown tickets are passed over."""

    ticket: int


class Halt(Message, frozen=True):
    """To a prefill worker: run no more of an attempt that is over, and keep what is staged of it until the Release: a
    decode worker may still be reading."""

    ticket: int


class LetGo(Message, frozen=True):
    """From a decode worker: the answer to a Release, once nothing reads or holds anything of the attempt any more."""

    ticket: int


class Failed(Message, frozen=True):
    """An attempt cannot go on at this worker, which has let go of it. refused: it never could, anywhere."""

    ticket: int
    reason: str
    refused: bool = False


class Joined(Message, frozen=True):
    """From one of the processes of a worker after the first to that one: it is ready. staging, metadata: its own."""

    process: int
    staging: StagingLayout
    metadata: bytes


class Alive(Message, frozen=True):
    """From that process again, several times a second."""


class Read(Message, frozen=True):
    """From the first process of a worker to another: read those of an offer's pages that are for `ranks`, model ranks
    of its own, into `slots` of its staging, of which the first holds positions from `first` on, within `timeout`
    seconds. order: a number."""

    order: int
    offer: Offer
    slots: tuple[int, ...]
    first: int
    ranks: tuple[int, ...]
    timeout: float


class Stop(Message, frozen=True):
    """To that one: give up an order, which it answers as any."""

    order: int


class Done(Message, frozen=True):
    """The answer to an order, when nothing touches its slots any more. error: why the bytes are not all there."""

    order: int
    num_bytes: int
    error: str | None


class Serve(Message, frozen=True):
    """To another process of a prefill worker: whether its pages are being read."""

    on: bool


ToRouter = Hello | Status | Leaving | Goodbye | Reserved | Full | Offer | Taken | Prefilled | Tokens | Failed | LetGo
ToWorker = Welcome | Unwelcome | Rejoin | Ping | Source | Reserve | Prefill | Offer | Admit | Halt | Release
ToLeader = Joined | Alive | Done
ToFollower = Source | Read | Stop | Serve


class MessageError(ValueError):
    """Bytes that are no message of this version."""


T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_router: msgspec.msgpack.Decoder[ToRouter] = msgspec.msgpack.Decoder(ToRouter)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_leader: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
_to_follower: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)


def encode(message: Message) -> bytes:
    return bytes([VERSION]) + _encoder.encode(message)


def decode_to_router(data: bytes) -> ToRouter:
    """Raises MessageError."""
    return _decode(_to_router, data)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises MessageError."""
    return _decode(_to_worker, data)


def decode_to_leader(data: bytes) -> ToLeader:
    """Raises MessageError."""
    return _decode(_to_leader, data)


def decode_to_follower(data: bytes) -> ToFollower:
    """Raises MessageError."""
    return _decode(_to_follower, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if not data or data[0] != VERSION:
        raise MessageError(f"version {data[0] if data else None}; this is {VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise MessageError(str(error)) from None
