"""The engine on GPUs: the small model's tokens against a CPU's, and steps of a large model's shapes.

    python bench/engine_gpu.py ids [--record NAME]
    python bench/engine_gpu.py steps [--shapes configs/qwen3-30b-a3b] [--data 1] [--model 1] [--quantization mxfp8]
                                     [--batches 1 16 64 256] [--context 2048] [--drafts 0] [--budgets 2048 8192]
                                     [--engine] [--profile] [--record NAME]

ids: configs/tiny draws greedily on the GPU, in float32 and bfloat16, what it draws on a CPU in float32. The rule of
margins: where the two part, the CPU's own choice was ahead of the next by less than TOLERANCE (nats).

steps: random weights, bfloat16 or quantised as they are made, on a mesh of data x model GPUs. Milliseconds a decode
step for each batch (of a data rank), of a program of 8 steps over slots that are put there as if their prompts had been
read, beside the roof (what a GPU reads in a step, of the experts those that an even routing touches, at 4.3 TB/s;
NVLink is not in it), and the tokens a second of a GPU and of a user; prompt tokens a second of 8 prompts of 6,000
tokens, through the engine, milliseconds to the first token of a short one alone, and between two tokens of 16 sequences
while the 8 are read, for each budget of a call; with --engine milliseconds a step through it at batch 64, short
contexts, beside those of the device alone on the same sequences: the difference is what the host stalls. vLLM 0.26 is
of one H200. Every line is printed as it is measured.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from measure import header, median_seconds, recorded

from qwenjax import LLM, SamplingParams
from qwenjax.config import ModelConfig
from qwenjax.engine.calls import chunk_columns, decode_table, lane_columns
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.engine.programs import Programs
from qwenjax.engine.schedule import Decode, Job, Lane, Prefill
from qwenjax.engine.slots import Slots, create_slots, slots_specs
from qwenjax.mesh import DATA, make_mesh
from qwenjax.sharded_model import ShardedModel, by_name
from qwenjax.tokenizer import Tokenizer
from qwenjax_ffi.collectives import unarmed

ROOT = Path(__file__).resolve().parent.parent
TINY, LARGE = ROOT / "configs" / "tiny", ROOT / "configs" / "qwen3-30b-a3b"
# XLA multiplies float32 in TF32 on a GPU, 11 bits as against bfloat16's 8; logits reach 20.
TOLERANCE = {"float32": 0.02, "bfloat16": 0.15}
STEPS, PAGE = 8, 64
ROOM = 128  # tokens that a slot may draw: 16 calls
PROMPTS, PROMPT_TOKENS = 8, 6000
SHORT_PROMPTS = (100, 1000)  # tokens; each alone
DRAWING = 16  # sequences that draw while prompts are read
BANDWIDTH = 4.3e12  # bytes a second of an H200's memory, as copies reach
PEERS: dict[str | None, tuple[dict[int, float], int]] = {  # vLLM 0.26 on one H200, the shapes of LARGE
    None: ({1: 4.20, 16: 12.8, 64: 20.1, 256: 31.6}, 60_800),  # ms a decode step by batch, prefill tokens/s
    "mxfp8": ({1: 5.23, 16: 10.3, 64: 16.7, 256: 31.2}, 34_500),
}


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


def traced(model: ShardedModel, config: EngineConfig, what: tuple[str, Any]) -> jax.stages.Traced:
    """One of the engine's programs, to be compiled, without an engine: nothing is allocated but the mesh's heap."""
    name, size = what
    rows = config.rows_per_call(size) if name == "prefill" else size[0]
    columns = chunk_columns(config, size) if name == "prefill" else lane_columns(config)
    programs = Programs(model.graphdef, model.mesh, config)
    function = programs.prefill[size] if name == "prefill" else programs.decode[name, size]  # type: ignore[index]
    return function.trace(model.state, abstract_slots(model, config), columns.table(model.mesh.shape[DATA] * rows))


def abstract_slots(model: ShardedModel, config: EngineConfig) -> Slots:
    def placed(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(model.mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part)

    slots = jax.eval_shape(lambda: idle_slots(model, config))
    specs = slots_specs(config.num_speculative_tokens > 0)
    return jax.tree.map(placed, specs, slots, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def layer_cache_bytes(model: ShardedModel, config: EngineConfig) -> int:
    """Of one layer's keys and values on a GPU."""
    keys = abstract_slots(model, config).cache.keys
    return 2 * math.prod(keys.sharding.shard_shape(keys.shape)[1:]) * keys.dtype.itemsize


def roof_seconds(model: ShardedModel, batch: int, context: int) -> float:
    """Of a decode step without drafts: what a GPU reads of weights and of the cache. batch: of a data rank."""
    config, (data, ranks) = model.config, model.mesh.devices.shape
    touched = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** (batch * data)  # of all experts, evenly
    kv_heads = max(1, config.num_key_value_heads // ranks)
    read = batch * context * config.num_hidden_layers * 2 * kv_heads * config.head_dim * model.dtype.itemsize
    for name, weight in by_name(model.state).items():
        if name.startswith("mtp.") or (name == "embed_tokens" and not config.tie_word_embeddings):
            continue
        leaves = jax.tree.leaves(weight)
        held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        read += held * (touched if name in ("experts.w13", "experts.w2") else 1)
    return read / BANDWIDTH


def decode_call(model: ShardedModel, config: EngineConfig) -> np.ndarray:
    """The table of a call of all slots, with the most drafts."""
    ranks = model.mesh.shape[DATA]
    lanes = [Lane(Job(i, [], 0, 0), i, 0, ()) for i in range(ranks * config.max_num_seqs)]
    call = Decode(config.max_num_seqs, config.num_speculative_tokens, STEPS, lanes)
    return decode_table(config, ranks, call, False)


def load_kernels(model: ShardedModel, config: EngineConfig, program: Any) -> None:
    """What Engine.warm_up does where a process drives several GPUs: a decode program once over slots that end with the
    first step, with collectives that return at once, so that none waits for a kernel that is being loaded."""
    slots = idle_slots(model, config)
    slots = replace(slots, epochs=unarmed(slots.epochs, model.mesh.size), active=jnp.ones_like(slots.active))
    slots, _ = program(model.state, slots, decode_call(model, config))
    jax.tree.map(lambda leaf: leaf.delete(), jax.block_until_ready(slots))


def filled_slots(model: ShardedModel, config: EngineConfig, context: int) -> Slots:
    """All slots at this context, each with a token of its own, with the most drafts."""
    ranks = model.mesh.shape[DATA]
    count = ranks * config.max_num_seqs
    slots = idle_slots(model, config)
    rows = np.arange(config.max_num_seqs * config.max_pages, dtype=np.int32).reshape(config.max_num_seqs, -1)

    def put(old: jax.Array, new: Any) -> jax.Array:
        return jax.device_put(jnp.asarray(new, old.dtype), old.sharding)

    return replace(
        slots,
        page_table=put(slots.page_table, np.tile(rows, (ranks, 1))),
        lengths=put(slots.lengths, np.full(count, context)),
        tokens=put(slots.tokens, np.arange(count) % model.config.vocab_size),
        end_lengths=put(slots.end_lengths, np.full(count, config.max_model_len)),
        active=put(slots.active, np.ones(count, bool)),
        speculates=put(slots.speculates, np.ones(count, bool)),
    )


def decode_step(
    model: ShardedModel, config: EngineConfig, program: Any, slots: Slots, profile: bool = False
) -> tuple[float, int]:
    """Seconds of the device a step, and how many different tokens the slots draw in the last. Random weights accept no
    draft, so that a step draws one token of each. Every call begins with the tokens that are in the slots, which are
    gone afterwards: greedy sequences that meet go on as one, and what they then choose are fewer experts."""
    table = decode_call(model, config)
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
    """What the first GPU does in a call, as JAX's profiler sees it: milliseconds and launches by kernel, the longest
    first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    gpus = [e["pid"] for e in named if e["name"] == "process_name" and "/device:GPU:0" in e["args"]["name"]]
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


def draw_the_rest(engine: Engine) -> tuple[list[float], int]:
    """Seconds of each step until all requests are done, and how many different tokens were their last."""
    seconds, last = [], {}
    while engine.has_unfinished:
        start = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - start)
        last |= {output.request_id: output.outputs[0].token_ids[-1] for output in outputs}
    return seconds, len(set(last.values()))


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


def measure_steps(arguments: argparse.Namespace) -> None:
    from random_weights import random_weights

    start = time.perf_counter()
    config = ModelConfig.from_folder(arguments.shapes)
    if any(arguments.drafts):
        config = replace(config, mtp_num_hidden_layers=1)
    model = random_weights(
        config, jnp.bfloat16, arguments.quantization, mesh=make_mesh(arguments.data, arguments.model)
    )
    jax.block_until_ready(jax.tree.leaves(model.state))
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(model.state) for shard in leaf.addressable_shards[:1])
    say(f"{arguments.shapes.name}, data={arguments.data} x model={arguments.model}")
    kind, took = arguments.quantization or "bfloat16", time.perf_counter() - start
    say(f"weights: {kind}, {held / 1e9:.1f} GB a GPU, made in {took:.0f} s")
    decodes = {
        (batch, count): engine_config(
            batch, arguments.context + ROOM, num_speculative_tokens=count, speculation_max_batch=batch * (count > 0)
        )
        for batch in arguments.batches
        for count in arguments.drafts
    }
    prefills = {
        budget: engine_config(PROMPTS + DRAWING, PROMPT_TOKENS + 200, max_num_batched_tokens=budget)
        for budget in arguments.budgets
    }
    for sizes in prefills.values():
        vars(sizes)["decode_batches"] = [PROMPTS + DRAWING]  # one program, whatever few draw at first
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        # All compiled before the first is timed: compiling takes the host's cores. Traced one by one: tracing makes the
        # mesh's heap.
        def compiled(sizes: EngineConfig, name: str, size: Any) -> Future[Any]:
            trace = traced(model, sizes, (name, size))
            return pool.submit(lambda: trace.lower().compile())

        decode_futures = {variant: compiled(sizes, "greedy", variant) for variant, sizes in decodes.items()}
        prefill_futures = {
            budget: {("prefill", length): compiled(sizes, "prefill", length) for length in sizes.chunk_lengths}
            | {("decode", size): compiled(sizes, "decode", size) for size in sizes.decode_variants}
            for budget, sizes in prefills.items()
        }
    say(f"programs: compiled in {time.perf_counter() - start:.0f} s")
    peers, peer_prefill = PEERS[arguments.quantization] if is_of_peers(arguments) else ({}, None)
    if decodes:
        say(f"\ndecode, context {arguments.context}, batch of a data rank, after 8 steps so many different tokens; GB:")
        say(
            "batch | tokens | drafts | ms a step |  roof | vLLM | tokens/s a GPU, a user | temporaries, a layer's cache"
        )
    for (batch, count), sizes in decodes.items():
        peer = peers.get(batch, "-") if not count else ""
        try:
            columns = decode_columns(model, sizes, decode_futures[batch, count].result(), peer, arguments)
            say(f"{batch:>5} | {columns}")
        except Exception as error:  # a batch that does not fit leaves the others to be measured
            say(f"{batch:>5} | {'':>6} | {count:>6} | failed: {type(error).__name__}: {str(error)[:1000]}")
        gc.collect()
    if prefills:
        shorts = " | ".join(f"of {length:,}" for length in SHORT_PROMPTS)
        say(f"\nprefill of {PROMPTS} x {PROMPT_TOKENS:,} tokens; ms to the first token of one prompt alone; ms between")
        say(f"two tokens of {DRAWING} sequences while the {PROMPTS} are read (median, most):")
        say(f"budget of a call | tokens/s | a GPU | vLLM | {shorts} | gap")
    for budget, sizes in prefills.items():
        try:
            engine = Engine(model, Tokenizer.from_folder(TINY), sizes)
            engine._compiled = {program: future.result() for program, future in prefill_futures[budget].items()}
            if model.mesh.size > 1:
                engine._load_kernels()
            measure_prefill(engine, budget, peer_prefill, arguments.profile)
            del engine
        except Exception as error:
            say(f"{budget:>16} | failed: {type(error).__name__}: {str(error)[:1000]}")
        gc.collect()
    if arguments.engine:
        measure_engine(model)


def decode_columns(
    model: ShardedModel, config: EngineConfig, program: Any, peer: object, arguments: argparse.Namespace
) -> str:
    """What a row says of a decode program, after the batch."""
    batch, drafts = config.max_num_seqs, config.num_speculative_tokens
    if model.mesh.size > 1:
        load_kernels(model, config, program)
    slots = filled_slots(model, config, arguments.context)
    seconds, tokens = decode_step(model, config, program, slots, arguments.profile)
    roof = "" if drafts else f"{roof_seconds(model, batch, arguments.context) * 1e3:.2f}"
    speed = f"{batch / arguments.model / seconds:>7.0f}, {1 / seconds:>6.1f}"
    memory = f"{program.memory_analysis().temp_size_in_bytes / 1e9:.3f}, {layer_cache_bytes(model, config) / 1e9:.3f}"
    return f"{tokens:>6} | {drafts:>6} | {seconds * 1e3:>9.2f} | {roof:>5} | {peer!s:>4} | {speed:>22} | {memory}"


def is_of_peers(arguments: argparse.Namespace) -> bool:
    """Whether the peers' figures are of what is measured."""
    return arguments.shapes.name == LARGE.name and arguments.data * arguments.model == 1 and arguments.context == 2048


def random_prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, engine.model.config.vocab_size, length).tolist() for _ in range(count)]


def measure_prefill(engine: Engine, budget: int, peer: int | None, profile: bool) -> None:
    prompts = random_prompts(engine, PROMPTS, PROMPT_TOKENS)
    best = min(prefill_seconds(engine, prompts) for _ in range(2))
    if profile:
        for name, (milliseconds, count) in kernel_times(partial(prefill_seconds, engine, prompts)).items():
            say(f"{milliseconds:>10.1f} ms in {count:>5} of {name[:100]}")
    alone = [min(prefill_seconds(engine, [prompts[0][:length]]) for _ in range(4)) for length in SHORT_PROMPTS]
    firsts = " | ".join(f"{seconds * 1e3:.1f}" for seconds in alone)
    gaps = np.asarray(gaps_while_reading(engine, prompts)) * 1e3
    between = f"{np.median(gaps):.1f}, {np.max(gaps):.1f}"
    rate = PROMPTS * PROMPT_TOKENS / best
    say(f"{budget:>16} | {rate:>8.0f} | {rate / engine.model.mesh.size:>5.0f} | {peer or '-'} | {firsts} | {between}")


def measure_engine(model: ShardedModel) -> None:
    """Steps through the engine, 64 sequences on each data rank, beside those of the device alone."""
    engine = Engine(model, Tokenizer.from_folder(TINY), engine_config(64, 512))
    engine.warm_up(progress=False)
    prompts = random_prompts(engine, 64 * engine.ranks, 64)
    halves, differ = list[float](), list[int]()
    for _ in range(3):
        read_prompts(engine, prompts, 193)
        seconds, tokens = draw_the_rest(engine)
        halves += seconds[len(seconds) // 4 : len(seconds) // 2]
        differ.append(tokens)
    milliseconds = np.median(halves) / STEPS * 1e3
    say(f"\nthrough the engine, batch 64, contexts of some 112 to 160: {milliseconds:.2f} ms a step; last tokens")
    say(f"that differ, run by run: {', '.join(map(str, differ))}")
    # The same sequences on the way, without the engine: other ones would choose more experts, or fewer.
    read_prompts(engine, prompts, 193)
    for _ in range(8):
        engine.step()
    alone, tokens = decode_step(model, engine.config, engine._compiled["greedy", (64, 0)], engine._slots)
    say(f"the device alone, at contexts of some 136 to 184 ({tokens} different tokens at the end): {alone * 1e3:.2f}")
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
    parser.add_argument("--shapes", type=Path, default=LARGE, help="a folder with a config.json")
    parser.add_argument("--data", type=int, default=1, help="data ranks: DP, and with --model 1 EP")
    parser.add_argument("--model", type=int, default=1, help="model ranks: TP, and with --data 1 EP")
    parser.add_argument("--quantization", choices=["mxfp8"])
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[1, 16, 64, 256], help="of a data rank; none: no decode"
    )
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence that decodes")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0])
    parser.add_argument("--budgets", type=int, nargs="*", default=[2048, 8192], help="prefill calls; none: no prefill")
    parser.add_argument("--record", metavar="NAME", help="write the output to bench/results/NAME too")
    arguments = parser.parse_args()
    of_ids = {"dump", "expected"}
    others = vars(arguments).keys() - {"what", "record"} - of_ids if arguments.what == "ids" else of_ids
    given = sorted(name for name in others if getattr(arguments, name) != parser.get_default(name))
    if given:
        parser.error(f"--{given[0]} has no effect with {arguments.what}")
    if arguments.dump:
        print(json.dumps(greedy_outputs("float32")))
        return
    with recorded(arguments.record):
        say(header("jax", "jaxlib", "flax", "numpy"))
        if arguments.what == "ids":
            compare_ids(arguments.expected)
        else:
            measure_steps(arguments)


if __name__ == "__main__":
    main()
