"""A process with a staging buffer that others read from. Its argument is a JSON object: kv_heads, page_size, ranks,
planes, head_dim, slots, seed. Prints one line that describes it, and ends with its standard input."""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec
import numpy as np

from qwenjax.kv_transfer import KVLayout
from qwenjax_serving.transfer.nixl_transport import NixlTransport
from qwenjax_serving.transfer.staging import StagingBuffer


async def main() -> None:
    given = json.loads(sys.argv[1])
    layout = KVLayout(given["kv_heads"], given["page_size"], given["ranks"])
    buffer = StagingBuffer(layout, given["planes"], given["head_dim"], np.float32, given["slots"])
    generator = np.random.default_rng(given["seed"])
    buffer.pages[:] = generator.standard_normal(buffer.pages.shape, np.float32)
    transport = NixlTransport(f"source-{given['seed']}")
    await transport.start(buffer)
    described = {"metadata": transport.metadata, "layout": buffer.layout}
    print(msgspec.json.encode(described).decode(), flush=True)
    with transport.serving():
        await asyncio.to_thread(sys.stdin.read)
    await transport.aclose()


asyncio.run(main())
