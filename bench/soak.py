"""Minutes of mixed requests, a fifth of them given up half-way: what the server holds stays level.

    python bench/soak.py [--minutes 5] [--streams 16] [--deployment FILE] [--record NAME]

Prompts of 1 to 300 random ids, a third of them beginning alike; outputs of 1 to 100 tokens, some with several outputs,
log-probabilities, penalties or a stop string; one request in five closes its connection after a few events, one in
twenty is refused. Every 15 seconds a line: requests so far, new tokens a second, and of the server's processes together
the resident memory, open files and threads. When the load has ended, pages and gauges must be what they were before it,
open files too, and memory must have grown by less than 5% since the first minute; else the status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import header, recorded
from serve import process_tree, server

from qwenjax_serving.bench.sse_client import HttpError, Target, events, get

GROWTH = 0.05  # of resident memory, at most
WARM_SECONDS = 60.0  # in which caches fill
# Back where they began, when nothing runs.
GAUGES = ("num_requests_running", "num_requests_waiting", "queued_prompt_tokens", "decode_batch_size", "free_pages")


@dataclass(frozen=True)
class Held:
    """Of a process and all below it. memory: resident bytes."""

    memory: int
    files: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        pids = process_tree(pid)
        pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in pids)
        files = sum(len(os.listdir(f"/proc/{one}/fd")) for one in pids)
        threads = sum(len(os.listdir(f"/proc/{one}/task")) for one in pids)
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


@dataclass
class Load:
    """Requests by how they ended, and the tokens that came."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


def body_of(rng: random.Random, common: list[int]) -> dict[str, Any]:
    prompt = [rng.randrange(256, 4096) for _ in range(rng.randint(1, 300))]
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body["prompt"] = common + prompt[:100] if rng.random() < 1 / 3 else prompt
    body |= {"max_tokens": rng.randint(1, 100), "ignore_eos": rng.random() < 0.5, "seed": rng.randrange(2**32)}
    extra = rng.choice(
        [{}, {}, {"logprobs": 3}, {"n": 3}, {"presence_penalty": 0.5}, {"stop": "e"}, {"temperature": 0}]
    )
    return {**body, **extra, **({"top_p": 9} if rng.random() < 0.05 else {})}


async def one(target: Target, rng: random.Random, common: list[int], load: Load) -> None:
    leave_after = rng.randint(1, 6) if rng.random() < 0.2 else None
    stream = events(target, "/v1/completions", json.dumps(body_of(rng, common)).encode())
    count = tokens = 0
    try:
        async for data in stream:
            count += 1
            tokens = json.loads(data)["usage"]["completion_tokens"]
            if count == leave_after:
                load.ends["given up"] += 1
                break
        else:
            load.ends["finished"] += 1
    except HttpError as error:
        load.ends[f"status {error.status}"] += 1
    finally:
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        load.tokens += tokens


async def gauges(target: Target) -> dict[str, float]:
    text = (await get(target, "/metrics")).decode()
    found = re.findall(r"^qwenjax:(\w+(?:{.*})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found if name.partition("{")[0] in GAUGES}


async def soak(target: Target, pid: int, minutes: float, streams: int) -> list[str]:
    """What was not level, in words; empty where all was."""
    load, begun = Load(), time.monotonic()
    before = await gauges(target)
    rng = random.Random(-1)
    for _ in range(4):  # workers connect to each other when there is something to send
        await one(target, rng, list(range(300, 500)), Load())
    await asyncio.sleep(2)  # for those connections to close
    start = Held.by(pid)
    common = list(range(300, 500))
    warm: Held | None = None

    async def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < begun + minutes * 60:
            await one(target, rng, common, load)

    async def watch() -> None:
        nonlocal warm
        print(f"\n{'s':>5} | {'requests':>8} {'tokens/s':>8} | {'MiB':>7} {'files':>5} {'threads':>7}")
        seen = 0
        while True:
            await asyncio.sleep(15)
            held, seconds = Held.by(pid), time.monotonic() - begun
            if warm is None and seconds >= WARM_SECONDS:
                warm = held
            rate, seen = (load.tokens - seen) / 15, load.tokens
            print(
                f"{seconds:>5.0f} | {load.ends.total():>8} {rate:>8.0f} | "
                f"{held.memory / 2**20:>7.0f} {held.files:>5} {held.threads:>7}",
                flush=True,
            )

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*map(work, range(streams)))
    watcher.cancel()
    await asyncio.sleep(2)
    after = await gauges(target)
    for _ in range(10):  # a busy machine takes its time to close connections
        await asyncio.sleep(1)
        if (end := Held.by(pid)).files <= start.files:
            break
    print(f"\nended: {dict(load.ends)}")
    print(f"after: {end.memory / 2**20:.0f} MiB, {end.files} files (before: {start.files}), {end.threads} threads")
    wrong = [
        f"{name} was {before[name]:g} and is {after.get(name)}" for name in before if after.get(name) != before[name]
    ]
    if end.files > start.files:
        wrong.append(f"{end.files - start.files} files stayed open")
    if warm is not None and end.memory > warm.memory * (1 + GROWTH):
        wrong.append(f"memory grew from {warm.memory} to {end.memory} bytes")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).resolve().parent.parent / "configs" / "tiny")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--deployment", type=Path, help="serve with router and workers; sizes are the file's")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    sizes = ["--colocated", "--dtype", arguments.dtype, "--max-num-seqs", "8"]
    options = ["--config", str(arguments.deployment)] if arguments.deployment else sizes
    with (
        server(arguments.config, *options) as (url, pid),
        recorded(arguments.record),
    ):
        print(header("jax", "jaxlib", "starlette", "uvicorn", "msgspec"))
        wrong = asyncio.run(soak(Target(url), pid, arguments.minutes, arguments.streams))
        print("\n".join(wrong) if wrong else "level: pages, gauges, files and memory")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
