"""How fast KV pages go from one staging buffer to another: over NIXL between processes, and by copies within one.

    python bench/kv_transfer.py [--pages 256] [--layers 48] [--kv-heads 4] [--head-dim 128] [--rounds 5] [--record NAME]

Pages are of 64 tokens of bfloat16, by default Qwen3-30B-A3B's. Buffers are in GPU memory where there are GPUs, the
source on the first and the target on the last, else in host memory. Pages are read in eight groups of layers, as those
of a prompt are: in slots in order, and in slots drawn by chance, few of them neighbours. What arrived is compared with
what was sent, on the target's device. The clock runs from asking for a read to its end, the transport's millisecond
between two looks at it included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measure import copy_bandwidth, header, recorded

from qwenjax.engine.handover import layer_groups
from qwenjax.engine.prefill_engine import StagedPages
from qwenjax.kv_transfer import KVLayout, Pages, plan_transfer
from qwenjax_serving.transfer.device_staging import DeviceStagingBuffer
from qwenjax_serving.transfer.local_transport import LocalTransport
from qwenjax_serving.transfer.nixl_transport import NixlTransport
from qwenjax_serving.transfer.staging import StagingBuffer, StagingLayout, byte_ranges

PAGE_SIZE = 64
NVLINK = 450.0  # GB/s each way between two H200s, by datasheet


class Sizes(msgspec.Struct, frozen=True):
    pages: int
    layers: int
    kv_heads: int
    head_dim: int


def buffer(sizes: Sizes, places: Sequence[int]) -> StagingBuffer:
    """places: of the parts, which divide the heads, the devices they are on."""
    layout = KVLayout(sizes.kv_heads, PAGE_SIZE, len(places))
    shape = layout, 2 * sizes.layers, sizes.head_dim, jnp.bfloat16, sizes.pages
    bounds = [2 * first for first, _ in layer_groups(sizes.layers)] + [2 * sizes.layers]
    if jax.devices()[0].platform == "cpu":
        return StagingBuffer(*shape, bounds=bounds)
    return DeviceStagingBuffer([[jax.devices()[place] for place in places]], *shape, bounds=bounds)


@partial(jax.jit, static_argnums=1)
def random_pages(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def sent(sizes: Sizes, first: int, places: Sequence[int]) -> StagedPages:
    """Sixteen pages of random numbers, from page `first` on, spread over the places."""
    mesh = Mesh(np.array([jax.devices()[place] for place in places]), ("model",))
    shape = (16, sizes.kv_heads, 2 * sizes.layers, PAGE_SIZE, sizes.head_dim)
    pages = random_pages(jax.random.key(first), shape)
    return StagedPages([jax.device_put(pages, NamedSharding(mesh, PartitionSpec(None, "model")))], 0, ())


def fill(into: StagingBuffer, sizes: Sizes, places: Sequence[int]) -> None:
    for first in range(0, sizes.pages, 16):
        staged = sent(sizes, first, places)
        into.put(into.fetch(staged), 0, range(first, first + 16), (0, 2 * sizes.layers))


def check(found: StagingBuffer, sizes: Sizes, places: Sequence[int]) -> None:
    for first in range(0, sizes.pages, 16):
        pages = found.take_out(range(first, first + 16), 0)
        [array] = sent(sizes, first, places).arrays
        wanted = sorted(array.addressable_shards, key=lambda shard: shard.index[1].start or 0)
        for rank, want in enumerate(wanted):
            own = pages[rank] if isinstance(pages, np.ndarray) else pages.blocks[0][rank]
            if not bool(jnp.array_equal(jax.device_put(own, want.device), want.data)):
                raise SystemExit(f"pages {first} to {first + 15} of rank {rank} are not what was sent")


async def be_source(sizes: Sizes, places: Sequence[int]) -> None:
    """A process that is read from: says what it has, and ends with its standard input."""
    staging, transport = buffer(sizes, places), NixlTransport("source")
    fill(staging, sizes, places)
    await transport.start(staging)
    described = {"metadata": transport.metadata, "layout": staging.layout}
    print(f"SOURCE {msgspec.json.encode(described).decode()}", flush=True)
    with transport.serving():
        await asyncio.to_thread(sys.stdin.read)
    await transport.aclose()


async def measure(
    name: str, source: StagingLayout, metadata: bytes, own: StagingBuffer, transport: Any, arguments: Any, sizes: Sizes
) -> None:
    groups = [(2 * first, 2 * last) for first, last in layer_groups(sizes.layers)]
    chance = np.random.default_rng(0).permutation(sizes.pages).tolist()
    peer = await transport.connect(metadata)
    for how, parts, slots in (("in order", groups, range(sizes.pages)), ("scattered", groups, chance)):
        pages = Pages(slots, slots, 0, sizes.pages * PAGE_SIZE)
        plan = plan_transfer(source.kv, own.layout.kv, pages)
        ranges = [byte_ranges(plan.copies, source, own.layout, part) for part in parts]
        seconds = []
        for _ in range(arguments.rounds + 1):  # the first connects
            start = time.perf_counter()
            for each in ranges:
                await transport.read(peer, each, 30, source.memory)
            seconds.append(time.perf_counter() - start)
        num_bytes, median = sum(int(each[:, 2].sum()) for each in ranges), statistics.median(seconds[1:])
        print(
            f"{name:<34} {how:<9} {sum(map(len, ranges)):>6} {num_bytes / 1e6:>8.0f} {1e3 * median:>8.2f} "
            f"{num_bytes / median / 1e9:>8.1f} {1e3 * seconds[0]:>9.1f}",
            flush=True,
        )


async def between_processes(name: str, sizes: Sizes, arguments: Any, source: list[int], target: list[int]) -> None:
    given = msgspec.json.encode({"sizes": sizes, "places": source}).decode()
    process = subprocess.Popen(
        [sys.executable, __file__, "--source", given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        own, transport = buffer(sizes, target), NixlTransport("reader")
        await transport.start(own)
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("SOURCE ")), None)
        if line is None:
            raise SystemExit(f"the source ended with status {process.wait()}")
        described = msgspec.json.decode(line.removeprefix("SOURCE "))
        layout, metadata = (
            msgspec.convert(described[key], kind) for key, kind in (("layout", StagingLayout), ("metadata", bytes))
        )
        await measure(name, layout, metadata, own, transport, arguments, sizes)
        check(own, sizes, target)
        await transport.aclose()
        own.close()
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


async def within(name: str, sizes: Sizes, arguments: Any, source: list[int], target: list[int]) -> None:
    peers = dict[str, LocalTransport]()
    buffers = buffer(sizes, source), buffer(sizes, target)
    transports = LocalTransport("source", peers), LocalTransport("reader", peers)
    fill(buffers[0], sizes, source)
    for transport, staging in zip(transports, buffers, strict=True):
        await transport.start(staging)
    await measure(name, buffers[0].layout, transports[0].metadata, buffers[1], transports[1], arguments, sizes)
    check(buffers[1], sizes, target)
    for staging in buffers:
        staging.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("pages", 256), ("layers", 48), ("kv-heads", 4), ("head-dim", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    parser.add_argument("--source", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.source:
        given = msgspec.json.decode(arguments.source)
        asyncio.run(be_source(msgspec.convert(given["sizes"], Sizes), given["places"]))
        return
    if arguments.pages % 16:
        raise SystemExit("--pages is a multiple of 16")
    sizes = Sizes(arguments.pages, arguments.layers, arguments.kv_heads, arguments.head_dim)
    on_gpu, last = jax.devices()[0].platform != "cpu", len(jax.devices()) - 1
    kind = "GPU" if on_gpu else "host memory"
    with recorded(arguments.record):
        print(header("jax", "jaxlib", "nixl", "msgspec"))
        print(f"{sizes}, {kind}; limits: NVLink {NVLINK:g} GB/s", end="")
        print(f", a copy at home {copy_bandwidth() / 2e9:.0f} GB/s" if on_gpu else " (not used)")
        print(f"\n{'':<34} {'slots':<9} {'ranges':>6} {'MB':>8} {'ms':>8} {'GB/s':>8} {'first ms':>9}")
        asyncio.run(between_processes(f"NIXL, {kind} 0 to {last}", sizes, arguments, [0], [last]))
        if on_gpu and last:
            asyncio.run(between_processes("NIXL, GPUs 0 1 to 1 0, 2 parts", sizes, arguments, [0, 1], [1, 0]))
        asyncio.run(within(f"one process, {kind} 0 to 0", sizes, arguments, [0], [0]))
        if last:
            asyncio.run(within(f"one process, {kind} 0 to {last}", sizes, arguments, [0], [last]))


if __name__ == "__main__":
    main()
