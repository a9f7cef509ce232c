"""How much the engine generates at several numbers of requests at once, and what the host adds to a device call.

    python bench/engine.py [--config configs/tiny] [--requests 1 4 16 64] [--dtype float32] [--record NAME]

Random weights, prompts of 256 tokens that share nothing, 97 tokens each, EOS ignored, temperature 0.8, 8 steps a call.
Per number of requests: prompt and generated tokens a second over the whole run, milliseconds a decode step, and the
host's milliseconds a decode call: the scheduler (planning it and writing its table), dispatch (flattening arguments
and handing the call to XLA) and results (detokenising, stop strings, outputs), all of which run beside the call before.
The host's are CPU time of its thread, since on a CPU the "device" computes on the same cores. Medians over the calls
of a run, and the best of the runs, since other load on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measure import header, recorded

from qwenjax import SamplingParams
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.engine.build import enable_compilation_cache
from qwenjax.engine.engine import Engine, EngineConfig, Program
from qwenjax.engine.schedule import Decode, Prefill
from qwenjax.mesh import make_mesh
from qwenjax.outputs import RequestOutput
from qwenjax.sharded_model import random_model
from qwenjax.tokenizer import Tokenizer

PROMPT, OUTPUT, STEPS = 256, 8 * 12 + 1, 8
BAR = 0.5  # ms a call of the scheduler at 64 requests, at most


@dataclass
class Times:
    """Seconds: of a whole run, and of each decode call's parts."""

    prefill: float = 0.0
    decode: float = 0.0
    steps: int = 0
    scheduler: list[float] = field(default_factory=list)
    dispatch: list[float] = field(default_factory=list)
    results: list[float] = field(default_factory=list)


class TimedEngine(Engine):
    """An engine that notes what the host does for each decode call."""

    times = Times()
    _dispatch = 0.0

    def _begin_call(self) -> bool:
        start = time.thread_time()
        begun = super()._begin_call()
        seconds = time.thread_time() - start
        if begun and isinstance(self._in_flight[-1].call, Decode):
            self.times.scheduler.append(seconds - self._dispatch)
            self.times.dispatch.append(self._dispatch)
            self.times.steps += self._in_flight[-1].call.num_steps
        return begun

    def _run(self, program: Program, table: np.ndarray) -> tuple[Any, ...]:
        start = time.thread_time()
        results = super()._run(program, table)
        self._dispatch = time.thread_time() - start
        return results

    def _take_results(self, call: Prefill | Decode, found: dict[str, Any]) -> list[RequestOutput]:
        start = time.thread_time()
        outputs = super()._take_results(call, found)
        if isinstance(call, Decode):
            self.times.results.append(time.thread_time() - start)
        return outputs


def run(engine: TimedEngine, requests: int, rng: np.random.Generator) -> Times:
    engine.clear_prefix_cache()
    times = engine.times = Times()
    for index in range(requests):
        prompt = rng.integers(0, engine.model.config.vocab_size, PROMPT).tolist()
        engine.add_request(str(index), prompt, SamplingParams(temperature=0.8, max_tokens=OUTPUT, ignore_eos=True))
    start, read = time.perf_counter(), engine.stats().prompt_tokens + requests * PROMPT
    # Prefill and decode take turns at first: what is measured of decoding begins when all prompts are read.
    while engine.stats().prompt_tokens < read:
        engine.step()
    times.prefill, times.steps = time.perf_counter() - start, 0
    start = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    times.decode = time.perf_counter() - start
    return times


def row(engine: TimedEngine, requests: int, runs: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    run(engine, requests, rng)
    done = [run(engine, requests, rng) for _ in range(runs)]
    best = min(done, key=lambda times: times.decode)

    def milliseconds(name: str) -> float:
        return min(statistics.median(getattr(times, name)) for times in done) * 1e3

    return {
        "prompt": requests * PROMPT / min(times.prefill for times in done),
        "generated": requests * OUTPUT / min(times.prefill + times.decode for times in done),
        "step": best.decode / best.steps * 1e3,
        **{name: milliseconds(name) for name in ("scheduler", "dispatch", "results")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).resolve().parent.parent / "configs" / "tiny")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    enable_compilation_cache()
    config = ModelConfig.from_folder(arguments.config)
    model = random_model(config, make_mesh(), dtype=DTYPES[arguments.dtype])
    most = max(arguments.requests)
    pages = -(-(PROMPT + OUTPUT) // 64)
    sizes = {"max_num_seqs": most, "num_pages": (most + 1) * (pages + 1), "page_size": 64, "num_steps": STEPS}
    engine = TimedEngine(
        model,
        Tokenizer.from_folder(arguments.config),
        EngineConfig(max_model_len=pages * 64, max_num_batched_tokens=256, **sizes),
    )
    engine.warm_up()
    with recorded(arguments.record):
        print(header("jax", "jaxlib", "flax", "numpy"))
        print(
            f"model: {config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.num_experts} experts, "
            f"top {config.num_experts_per_tok}, vocabulary {config.vocab_size}, {arguments.dtype}; {STEPS} steps a call"
        )
        print(f"\n{'':>8} | {'prompt':>9} {'generated':>9} | {'decode':>8} | {'host, ms a decode call':^32}")
        print(
            f"requests | {'tokens/s':>9} {'tokens/s':>9} | {'ms/step':>8} | {'scheduler / bar':>15} "
            f"{'dispatch':>8} {'results':>7}"
        )
        for requests in arguments.requests:
            r = row(engine, requests, arguments.runs)
            print(
                f"{requests:>8} | {r['prompt']:>9.0f} {r['generated']:>9.0f} | {r['step']:>8.2f} | "
                f"{r['scheduler']:>8.3f} / {BAR:<4} {r['dispatch']:>8.3f} {r['results']:>7.3f}"
            )


if __name__ == "__main__":
    main()
