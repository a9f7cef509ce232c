"""What the server costs beside the library: tokens a second of `qwenjax serve` and of LLM.generate on the same load.

    python bench/serve.py [--config configs/tiny] [--streams 16] [--requests 64] [--rounds 5] [--data-parallel 1]
                          [--colocated] [--record NAME]

The server is router and workers, the default, or one engine in a process (`--colocated`), of the same sizes as the
LLM of this process: `--streams` slots over `--data-parallel` ranks, no drafts (`--speculation`: one). A round sends
`--requests` completions of random ids, `--streams` at a time, through the client of `qwenjax bench serve`, then gives
the same prompts to LLM.generate: the two take turns, so that other load on the machine meets both, and each pays for
its client in its own time. EOS is ignored; prompts of a round are new, so that no prefix is cached. Two ratios,
served / offline, medians over rounds: of tokens a second by the clock, which is held to the bar, and of tokens a
second of CPU time, server and client together, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from measure import header, recorded

from qwenjax import LLM, SamplingParams
from qwenjax_serving.bench.drive import drive
from qwenjax_serving.bench.report import Report
from qwenjax_serving.bench.sse_client import Target
from qwenjax_serving.bench.workload import Workload, random_prompts

BAR = 0.85  # of the offline throughput, at least


@contextmanager
def server(config: Path, *options: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a `qwenjax serve` that is ready; options: of its command line."""
    command = ["serve", str(config), "--port", "0", "--no-progress", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "qwenjax_serving.cli", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)/v1", process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start: status {process.wait()}")
        yield found[1], process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process and all below it, from Linux's /proc."""
    ticks = 0
    for one in process_tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> list[int]:
    """A process and all below it."""
    pids = [pid]
    for one in pids:  # which grows while it is walked
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            pids += map(int, children.read_text().split())
    return pids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).resolve().parent.parent / "configs" / "tiny")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--speculation", action="store_true")
    parser.add_argument("--colocated", action="store_true", help="serve with one engine")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    ranks, slots = arguments.data_parallel, arguments.streams // arguments.data_parallel
    os.environ["JAX_NUM_CPU_DEVICES"] = str(ranks)  # of the server; this process has imported JAX
    jax.config.update("jax_num_cpu_devices", ranks)
    sizes = ["--max-num-seqs", str(slots), "--data-parallel", str(ranks), "--dtype", arguments.dtype]
    drafts = int(arguments.speculation)
    sizes += ["--num-speculative-tokens", str(drafts)]
    options = [*sizes, *(["--colocated"] if arguments.colocated else [])]
    with server(arguments.config, *options) as (url, server_pid):
        llm = LLM(
            arguments.config,
            data_parallel=ranks,
            dtype=arguments.dtype,
            max_num_seqs=slots,
            num_speculative_tokens=drafts,
            progress=False,
        )
        workload = Workload(
            num_prompts=arguments.requests,
            max_tokens=arguments.output_len,
            concurrency=arguments.streams,
            extra={"ignore_eos": True},
        )
        params = SamplingParams(temperature=0.0, max_tokens=arguments.output_len, ignore_eos=True)

        def round_of(seed: int) -> tuple[Report, float, float]:
            """What clients saw, offline tokens a second, and CPU seconds offline / served."""
            vocab_size = llm.tokenizer.vocab_size
            prompts = random_prompts(arguments.requests, arguments.input_len, vocab_size, seed)
            target, model = Target(url), str(arguments.config)
            before = cpu_seconds(server_pid) + time.process_time()
            report = Report.of(asyncio.run(drive(target, model, prompts, workload, chat=False, timeout=600)))
            served_cpu = cpu_seconds(server_pid) + time.process_time() - before
            if report.failed:
                raise SystemExit(f"requests failed: {report.errors}")
            start, before = time.perf_counter(), time.process_time()
            llm.generate(prompts, params)
            seconds, offline_cpu = time.perf_counter() - start, time.process_time() - before
            return report, arguments.requests * arguments.output_len / seconds, offline_cpu / served_cpu

        round_of(0)
        with recorded(arguments.record):
            print(header("jax", "jaxlib", "starlette", "uvicorn", "msgspec"))
            print(
                f"{arguments.requests} requests, {arguments.streams} at a time, {arguments.input_len} random ids in, "
                f"{arguments.output_len} out, {arguments.dtype}, data ranks: {ranks}, "
                f"{'one engine' if arguments.colocated else 'router and workers'}, "
                f"drafts {'on' if arguments.speculation else 'off'}"
            )
            print(f"\n{'':>5} | {'new tokens/s':^19} | {'served / offline':^16} | {'median ms, served':^17}")
            print(f"round | {'served':>9} {'offline':>9} | {'clock':>7} {'CPU':>8} | {'TTFT':>8} {'TPOT':>8}")
            by_clock, by_cpu = [], []
            for number in range(1, arguments.rounds + 1):
                report, offline, cpu = round_of(number)
                served = report.completion_tokens_per_second
                by_clock.append(served / offline)
                by_cpu.append(cpu)
                print(
                    f"{number:>5} | {served:>9.0f} {offline:>9.0f} | {served / offline:>7.2f} {cpu:>8.2f} | "
                    f"{report.ttft.p50:>8.1f} {report.tpot.p50:>8.2f}"
                )
            clock, cpu = statistics.median(by_clock), statistics.median(by_cpu)
            print(f"\nmedian ratio by the clock {clock:.2f} / bar {BAR:.2f}; by CPU time {cpu:.2f}")
            print(f"load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
