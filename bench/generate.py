"""How fast the engine reads prompts and draws tokens, and what share of a decode step the host takes.

    python bench/generate.py [--config configs/tiny] [--batches 1 8 32] [--dtype float32] [--record NAME]

Random weights, prompts of 256 tokens, 8 steps a call, EOS ignored, tokens drawn at temperature 0.8. For each batch:
prompt tokens a second; milliseconds a step, which draws one token for every sequence; the share of an engine step that
is not XLA running the program. That share holds the engine's own Python (admission, detokenising, stop strings,
results) and the call's fixed cost: flattening arguments, dispatch and fetching the tokens, measured as a call of the
same program over no steps. The median of all calls of a round, and the best of the rounds, since other load on the
machine only ever adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.measure import header, median_seconds, recorded
from qwenjax import SamplingParams
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.engine.build import enable_compilation_cache
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.engine.programs import Drawn
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import random_model
from qwenjax.tokenizer import Tokenizer

PROMPT, OUTPUT, STEPS = 256, 8 * 12 + 1, 8
BAR = 0.15  # of a step, at most, outside XLA


class TimedEngine(Engine):
    """An engine that notes how long each decode call took, until its tokens were on the host."""

    call_seconds = 0.0

    def _run_decode(self, variant: tuple[int, int], num_steps: int, want: bool) -> Drawn:
        start = time.perf_counter()
        drawn = jax.device_get(super()._run_decode(variant, num_steps, want))
        self.call_seconds = time.perf_counter() - start
        return drawn


@dataclass
class Round:
    """Seconds: of all prefill steps together, and of each decode step and the device call within it."""

    prefill: float = 0.0
    steps: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)


def run_round(engine: TimedEngine, batch: int, rng: np.random.Generator) -> Round:
    for index in range(batch):
        prompt = rng.integers(0, engine.model.config.vocab_size, PROMPT).tolist()
        engine.add_request(str(index), prompt, SamplingParams(temperature=0.8, max_tokens=OUTPUT, ignore_eos=True))
    found = Round()
    while engine.has_unfinished:
        engine.call_seconds = 0.0
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        if engine.call_seconds:
            found.steps.append(seconds)
            found.calls.append(engine.call_seconds)
        else:
            found.prefill += seconds
    return found


def fixed_seconds(engine: TimedEngine, batch: int) -> float:
    """What a decode call costs that runs no step."""
    variant = (next(size for size in engine.config.decode_batches if size >= batch), 0)
    return median_seconds(lambda: engine._run_decode(variant, 0, False), 100)


def row(engine: TimedEngine, batch: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    run_round(engine, batch, rng)
    done = [run_round(engine, batch, rng) for _ in range(rounds)]
    best = min(done, key=lambda found: statistics.median(found.steps))
    step, call = statistics.median(best.steps), statistics.median(best.calls)
    fixed = fixed_seconds(engine, batch)
    return {
        "batch": batch,
        "prefill": batch * PROMPT / min(found.prefill for found in done),
        "step": step / STEPS * 1e3,
        "tokens": batch * STEPS / step,
        "engine": (step - call) * 1e3,
        "fixed": fixed * 1e3,
        "share": (step - call + fixed) / step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).resolve().parent.parent / "configs" / "tiny")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    enable_compilation_cache()
    config = ModelConfig.from_folder(arguments.config)
    model = random_model(config, make_mesh(), dtype=DTYPES[arguments.dtype])
    most = max(arguments.batches)
    pages = -(-(PROMPT + OUTPUT) // 64)
    sizes = {"max_num_seqs": most, "num_pages": most * pages, "page_size": 64, "num_steps": STEPS}
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
        print(f"\n{'':>5} | {'prefill':>9} | {'decode':>9} {'':>9} | {'ms a call outside XLA':^21} | outside XLA")
        print(f"batch | {'tokens/s':>9} | {'ms/step':>9} {'tokens/s':>9} | {'engine':>10} {'call':>10} | share / bar")
        for batch in arguments.batches:
            r = row(engine, batch, arguments.rounds)
            print(
                f"{r['batch']:>5} | {r['prefill']:>9.0f} | {r['step']:>9.2f} {r['tokens']:>9.0f} | "
                f"{r['engine']:>10.2f} {r['fixed']:>10.2f} | {r['share']:>5.1%} / {BAR:.0%}"
            )


if __name__ == "__main__":
    main()
