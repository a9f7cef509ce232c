"""The secret that router and workers share, and the keys that are made of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import zmq
from zmq.utils import z85

SECRET_VARIABLE = "QWENJAX_SECRET"
_SHORTEST_SECRET = 16  # bytes


def read_secret() -> bytes:
    """That of the environment. Raises ValueError where there is none, or one that is too short."""
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    if not secret:
        raise ValueError(f"router and workers that are started one by one share a secret: set {SECRET_VARIABLE}")
    Keys.of(secret)
    return secret


@dataclass(frozen=True)
class Keys:
    """CURVE keys, in Z85: of the router, and of all workers together."""

    router_public: bytes
    router_secret: bytes
    worker_public: bytes
    worker_secret: bytes

    @classmethod
    def of(cls, secret: bytes) -> Keys:
        """From a secret that router and workers share. Raises ValueError for one that is too short."""
        if len(secret) < _SHORTEST_SECRET:
            raise ValueError(f"{SECRET_VARIABLE} has {len(secret)} bytes; it needs at least {_SHORTEST_SECRET}")
        # Any 32 bytes are a private key of Curve25519 (RFC 7748).
        router, worker = (z85.encode(hashlib.sha256(side + b"\0" + secret).digest()) for side in (b"router", b"worker"))
        return cls(zmq.curve_public(router), router, zmq.curve_public(worker), worker)
