"""The engine on one GPU: the small model's tokens against a CPU's, and steps of Qwen3-30B-A3B's shapes.

    python bench/engine_gpu.py ids [--record NAME]
    python bench/engine_gpu.py steps [--quantization mxfp8] [--batches 1 16 64 256] [--drafts 0] [--budgets 2048 8192]
                                     [--engine] [--profile] [--record NAME]

ids: configs/tiny draws greedily on the GPU, in float32 and bfloat16, what it draws on a CPU in float32. The rule of
margins: where the two part, the CPU's own choice was ahead of the next by less than TOLERANCE (nats).

steps: random weights, bfloat16 or quantised as they are made. Milliseconds a decode step at a context of 2,048 for each
batch, of a program of 8 steps over slots that are put there as if their prompts had been read; prompt tokens a second
of 8 prompts of 6,000 tokens, through the engine, milliseconds to the first token of a short one alone, and between two
tokens of 16 sequences while the 8 are read, for each budget of a call; with --engine milliseconds a step through it at
batch 64, short contexts, beside those of the device alone on the same sequences: the difference is what the host
stalls. vLLM 0.26 and the roofs (4.3 TB/s) are of one H200, see the columns' header. Every line is printed as it is
measured.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import header, median_seconds, recorded

from qwenjax import LLM, SamplingParams
from qwenjax.config import ModelConfig
from qwenjax.engine.calls import chunk_columns, decode_table, lane_columns
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.engine.programs import Programs
from qwenjax.engine.schedule import Decode, Job, Lane, Prefill
from qwenjax.engine.slots import Slots, create_slots
from qwenjax.sharded_model import ShardedModel
from qwenjax.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY, LARGE = ROOT / "configs" / "tiny", ROOT / "configs" / "qwen3-30b-a3b"
# XLA multiplies float32 in TF32 on a GPU, 11 bits as against bfloat16's 8; logits reach 20.
TOLERANCE = {"float32": 0.02, "bfloat16": 0.15}
CONTEXT, STEPS, PAGE = 2048, 8, 64
SHORT_PROMPTS = (100, 1000)  # tokens; each alone
DRAWING = 16  # sequences that draw while prompts are read
PEERS = {  # ms a decode step by batch, prefill tokens/s: vLLM 0.26 on one H200
    None: ({1: 4.20, 16: 12.8, 64: 20.1, 256: 31.6}, 60_800),
    "mxfp8": ({1: 5.23, 16: 10.3, 64: 16.7, 256: 31.2}, 34_500),
}
ROOFS = {None: {1: 1.46, 64: 16.8, 256: 26.0}, "mxfp8": {1: 0.85, 64: 10.2, 256: 19.3}}


def say(text: str) -> None:
    print(text, flush=True)


def greedy_outputs(dtype: str) -> list[dict[str, list[Any]]]:
    """Tokens and by how many nats each was ahead of the next."""
    llm = LLM(TINY, dtype=dtype, max_model_len=512, max_num_seqs=16, progress=False, num_speculative_tokens=0)
    prompts = (ROOT / "bench" / "prompts.txt").read_text(encoding="utf-8").splitlines()[:16]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)
    found = []
    for output in llm.generate([prompt for prompt in prompts if prompt], params):
        part = output.outputs[0]
        values = [sorted((e.logprob for e in entries.values()), reverse=True) for entries in part.logprobs or []]
        found.append({"tokens": part.token_ids, "margins": [row[0] - row[1] for row in values]})
    return found


def compare_ids(file: Path | None) -> None:
    if file is None:
        command = [sys.executable, __file__, "ids", "--dump"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        on_cpu = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    else:
        on_cpu = file.read_text(encoding="utf-8")
    expected = json.loads(on_cpu.splitlines()[-1])
    say(f"{'dtype':>9} | tokens equal before any parting | partings | widest margin at one / tolerance")
    for dtype, tolerance in TOLERANCE.items():
        equal = total = partings = 0
        widest = 0.0
        for ours, theirs in zip(greedy_outputs(dtype), expected, strict=True):
            pairs = list(zip(ours["tokens"], theirs["tokens"], strict=True))
            place = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
            equal, total = equal + place, total + len(pairs)
            if place < len(pairs):
                partings, widest = partings + 1, max(widest, theirs["margins"][place])
        verdict = "holds" if widest < tolerance else "BROKEN"
        say(f"{dtype:>9} | {equal:>15} of {total:<12} | {partings:>8} | {widest:.4f} / {tolerance}: {verdict}")


def engine_config(batch: int, tokens: int, **changes: Any) -> EngineConfig:
    """For `batch` sequences of up to `tokens` tokens."""
    pages = -(-tokens // PAGE)
    sizes: dict[str, Any] = {
        "max_model_len": pages * PAGE,
        "max_num_seqs": batch,
        "num_pages": batch * (pages + 1) + 1,
        "page_size": PAGE,
        "max_num_batched_tokens": 2048,
        "num_steps": STEPS,
        "programs_by_kind": True,
    }
    return EngineConfig(**{**sizes, **changes})


def idle_slots(model: ShardedModel, config: EngineConfig) -> Slots:
    return create_slots(
        model.config,
        model.mesh,
        slots_per_rank=config.max_num_seqs,
        pages_per_rank=config.num_pages,
        max_pages=config.max_pages,
        page_size=config.page_size,
        dtype=model.dtype,
        num_drafts=config.num_speculative_tokens,
    )


def compiled(model: ShardedModel, config: EngineConfig, what: tuple[str, Any]) -> jax.stages.Compiled:
    """One of the engine's programs, without an engine: nothing is allocated."""
    slots = jax.eval_shape(lambda: idle_slots(model, config))
    name, size = what
    rows = config.rows_per_call(size) if name == "prefill" else size[0]
    columns = chunk_columns(config, size) if name == "prefill" else lane_columns(config)
    programs = Programs(model.graphdef, model.mesh, config)
    function = programs.prefill[size] if name == "prefill" else programs.decode[name, size]  # type: ignore[index]
    return function.trace(model.state, slots, columns.table(rows)).lower().compile()


def layer_cache_bytes(model: ShardedModel, config: EngineConfig) -> int:
    """Of one layer's keys and values."""
    keys = jax.eval_shape(lambda: idle_slots(model, config)).cache.keys
    return 2 * keys.size * keys.dtype.itemsize // keys.shape[0]


def filled_slots(model: ShardedModel, config: EngineConfig) -> Slots:
    """All slots at a context of CONTEXT, each with a token of its own, with the most drafts."""
    batch = config.max_num_seqs
    slots = idle_slots(model, config)
    rows = np.arange(batch * config.max_pages, dtype=np.int32).reshape(batch, -1)

    def put(old: jax.Array, new: Any) -> jax.Array:
        return jax.device_put(jnp.asarray(new, old.dtype), old.sharding)

    return replace(
        slots,
        page_table=put(slots.page_table, rows),
        lengths=put(slots.lengths, np.full(batch, CONTEXT)),
        tokens=put(slots.tokens, np.arange(batch)),
        end_lengths=put(slots.end_lengths, np.full(batch, config.max_model_len)),
        active=put(slots.active, np.ones(batch, bool)),
        speculates=put(slots.speculates, np.ones(batch, bool)),
    )


def decode_step(
    model: ShardedModel, config: EngineConfig, program: Any, slots: Slots, profile: bool = False
) -> tuple[float, int]:
    """Seconds of the device a step, and how many different tokens the slots draw in the last. Random weights accept no
    draft, so that a step draws one token of each. Every call begins with the tokens that are in the slots, which are
    gone afterwards: greedy sequences that meet go on as one, and what they then choose are fewer experts."""
    batch, num_drafts = config.max_num_seqs, config.num_speculative_tokens
    lanes = [Lane(Job(i, [], 0, 0), i, 0, ()) for i in range(batch)]
    table = decode_table(config, 1, Decode(batch, num_drafts, STEPS, lanes), False)
    first = jnp.copy(slots.tokens)
    tokens = np.empty(0)

    def call() -> None:
        nonlocal slots, tokens
        slots, drawn = program(model.state, replace(slots, tokens=jnp.copy(first)), table)
        tokens = np.asarray(drawn.tokens)

    seconds = median_seconds(call, 5) / STEPS
    if profile:
        for name, (milliseconds, count) in kernel_times(call).items():
            say(f"{milliseconds / STEPS:>10.3f} ms in {count // STEPS:>4} of {name[:100]}")
    return seconds, len(np.unique(tokens[-1, 0]))


def kernel_times(call: Callable[[], object], most: int = 20) -> dict[str, tuple[float, int]]:
    """What a GPU does in a call, as JAX's profiler sees it: milliseconds and launches by kernel, the longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    gpus = {e["pid"] for e in named if e["name"] == "process_name" and "/device:GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"]) for e in named if e["name"] == "thread_name" and e["args"]["name"].startswith("Stream")
    }
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.get("ph") == "X" and event["pid"] in gpus and (event["pid"], event["tid"]) in streams:
            milliseconds, count = found.get(event["name"], (0.0, 0))
            found[event["name"]] = milliseconds + event["dur"] / 1e3, count + 1
    return dict(sorted(found.items(), key=lambda item: -item[1][0])[:most])


def read_prompts(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds until the results of all prompts are there, and all are done where one token of each is wanted."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    start = time.perf_counter()
    while engine.scheduler.waiting or engine.scheduler.prefilling or (max_tokens == 1 and engine.has_unfinished):
        engine.step()
    while any(isinstance(flight.call, Prefill) for flight in engine._in_flight):
        engine.step()
    return time.perf_counter() - start


def draw_the_rest(engine: Engine) -> tuple[float, int]:
    """Seconds until all requests are done, and decode steps; what is in flight has begun just now."""
    start, steps = time.perf_counter(), sum(flight.call.num_steps for flight in engine._in_flight)
    while engine.has_unfinished:
        before = len(engine._in_flight)
        engine.step()
        if len(engine._in_flight) >= before and isinstance(engine._in_flight[-1].call, Decode):
            steps += engine._in_flight[-1].call.num_steps
    return time.perf_counter() - start, steps


def prefill_seconds(engine: Engine, prompts: list[list[int]]) -> float:
    """Until all prompts are read, none of them from the prefix cache."""
    engine.clear_prefix_cache()
    return read_prompts(engine, prompts, 1)


def gaps_while_reading(engine: Engine, prompts: list[list[int]]) -> list[float]:
    """Seconds between two tokens of sequences that draw, while prompts are read."""
    engine.clear_prefix_cache()
    drawing = [str(index) for index in range(DRAWING)]
    for name in drawing:
        engine.add_request(name, prompts[0][:64], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"long {index}", prompt, SamplingParams(temperature=0, max_tokens=1))
    seen = list[float]()
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        if any(output.request_id == drawing[0] for output in engine.step()):
            seen.append(time.perf_counter())
    engine.abort(list(engine._requests))
    return np.diff(seen).tolist()


def measure_steps(
    quantization: str | None,
    batches: list[int],
    drafts: list[int],
    budgets: list[int],
    through_engine: bool,
    profile: bool = False,
) -> None:
    from random_weights import random_weights

    start = time.perf_counter()
    config, tokenizer = ModelConfig.from_folder(LARGE), Tokenizer.from_folder(TINY)
    if any(drafts):
        config = replace(config, mtp_num_hidden_layers=1)
    model = random_weights(config, jnp.bfloat16, quantization)
    jax.block_until_ready(jax.tree.leaves(model.state))
    say(f"weights: {quantization or 'bfloat16'}, made in {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    peers, peer_prefill = PEERS[quantization]
    roofs = ROOFS[quantization]
    decodes = {
        (batch, count): engine_config(
            batch, CONTEXT + 512, num_speculative_tokens=count, speculation_max_batch=batch * (count > 0)
        )
        for batch in batches
        for count in drafts
    }
    prefills = {budget: engine_config(8 + DRAWING, 6200, max_num_batched_tokens=budget) for budget in budgets}
    for sizes in prefills.values():
        vars(sizes)["decode_batches"] = [8 + DRAWING]  # one program, whatever few draw at first
    with ThreadPoolExecutor() as pool:
        # All compiled before the first is timed: compiling takes the host's cores.
        futures = {
            variant: pool.submit(compiled, model, sizes, ("greedy", variant)) for variant, sizes in decodes.items()
        }
        prefill_futures = {
            (budget, length): pool.submit(compiled, model, sizes, ("prefill", length))
            for budget, sizes in prefills.items()
            for length in sizes.chunk_lengths
        }
        meanwhile = {
            budget: pool.submit(compiled, model, sizes, ("decode", (8 + DRAWING, 0)))
            for budget, sizes in prefills.items()
        }
    say(f"programs: compiled in {time.perf_counter() - start:.0f} s")
    say(f"\ndecode, context {CONTEXT}, after 8 steps so many different tokens:")
    say("batch | tokens | drafts | ms a step | roof | vLLM | temporaries, a layer's cache (GB)")
    for (batch, count), sizes in decodes.items():
        try:
            decode = futures[batch, count].result()
            seconds, tokens = decode_step(model, sizes, decode, filled_slots(model, sizes), profile)
            limits = f"{roofs.get(batch, '-')!s:>4} | {peers.get(batch, '-')!s:>4}" if not count else "     |     "
            temporaries = decode.memory_analysis().temp_size_in_bytes
            memory = f"{temporaries / 1e9:.3f}, {layer_cache_bytes(model, sizes) / 1e9:.3f}"
            say(f"{batch:>5} | {tokens:>6} | {count:>6} | {seconds * 1e3:>9.2f} | {limits} | {memory}")
        except Exception as error:  # a batch that does not fit leaves the others to be measured
            say(f"{batch:>5} | {'':>6} | {count:>6} | failed: {type(error).__name__}: {str(error)[:1000]}")
        gc.collect()
    rng = np.random.default_rng(0)
    shorts = " | ".join(f"of {length:,}" for length in SHORT_PROMPTS)
    say("\nprefill of 8 x 6,000 tokens; ms to the first token of one prompt alone; ms between two tokens of")
    say(f"{DRAWING} sequences while the 8 are read (median, most): budget of a call | tokens/s | vLLM | {shorts} | gap")
    for budget, sizes in prefills.items():
        try:
            engine = Engine(model, tokenizer, sizes)
            engine._compiled = {
                ("prefill", length): prefill_futures[budget, length].result() for length in sizes.chunk_lengths
            }
            engine._compiled["decode", (8 + DRAWING, 0)] = meanwhile[budget].result()
            prompts = [rng.integers(0, config.vocab_size, 6000).tolist() for _ in range(8)]
            best = min(prefill_seconds(engine, prompts) for _ in range(2))
            if profile:
                for name, (milliseconds, count) in kernel_times(partial(prefill_seconds, engine, prompts)).items():
                    say(f"{milliseconds:>10.1f} ms in {count:>5} of {name[:100]}")
            alone = [min(prefill_seconds(engine, [prompts[0][:length]]) for _ in range(4)) for length in SHORT_PROMPTS]
            firsts = " | ".join(f"{seconds * 1e3:.1f}" for seconds in alone)
            gaps = np.asarray(gaps_while_reading(engine, prompts)) * 1e3
            between = f"{np.median(gaps):.1f}, {np.max(gaps):.1f}"
            say(f"{budget:>45} | {8 * 6000 / best:>8.0f} | {peer_prefill} | {firsts} | {between}")
            del engine
        except Exception as error:
            say(f"{budget:>45} | failed: {type(error).__name__}: {str(error)[:1000]}")
        gc.collect()
    if not through_engine:
        return
    engine = Engine(model, tokenizer, engine_config(64, 512))
    engine.warm_up(progress=False)
    prompts = [rng.integers(0, config.vocab_size, 64).tolist() for _ in range(64)]
    runs = []
    for _ in range(3):
        read_prompts(engine, prompts, 129)
        runs.append(draw_the_rest(engine))
    seconds, steps = min(runs)
    milliseconds = seconds / steps * 1e3
    say(f"\nthrough the engine, batch 64, contexts of 64 to 192: {milliseconds:.2f} ms a step over {steps} steps")
    # The same sequences half way, without the engine: other ones would choose more experts, or fewer.
    read_prompts(engine, prompts, 129)
    for _ in range(9):
        engine.step()
    alone, tokens = decode_step(model, engine.config, engine._compiled["greedy", (64, 0)], engine._slots)
    say(f"the device alone, from half way on ({tokens} different tokens after 8 steps): {alone * 1e3:.2f}")
    say(f"the host adds {milliseconds / (alone * 1e3) - 1:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ids", "steps"])
    parser.add_argument("--dump", action="store_true", help="print this backend's outputs as JSON")
    parser.add_argument("--expected", type=Path, help="what --dump printed on a CPU, to save the time")
    parser.add_argument("--engine", action="store_true", help="steps through the engine, too")
    parser.add_argument(
        "--profile", action="store_true", help="the kernels of each decode step and of the prefill, before its line"
    )
    parser.add_argument("--quantization", choices=["mxfp8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0])
    parser.add_argument("--budgets", type=int, nargs="*", default=[2048, 8192], help="prefill calls; none: no prefill")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    if arguments.dump:
        print(json.dumps(greedy_outputs("float32")))
        return
    with recorded(arguments.record):
        say(header("jax", "jaxlib", "flax", "numpy"))
        if arguments.what == "ids":
            compare_ids(arguments.expected)
        else:
            measure_steps(
                arguments.quantization,
                arguments.batches,
                arguments.drafts,
                arguments.budgets,
                arguments.engine,
                arguments.profile,
            )


if __name__ == "__main__":
    main()
