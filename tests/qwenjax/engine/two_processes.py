"""One process of an engine over two: `python two_processes.py PROCESS PORT DATA MODEL`. The first prints what it
generated."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax

from qwenjax import SamplingParams
from qwenjax.config import ModelConfig
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import random_model
from qwenjax.tokenizer import Tokenizer
from tests.generation import EOS_IDS, VOCABULARY, backend, random_ids
from tests.helpers import tiny

REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (random_ids(40), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
    (random_ids(5), SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20, logprobs=2, ignore_eos=True)),
    (random_ids(40), SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, presence_penalty=1.5)),
]


def engine_on(data: int, model: int) -> Engine:
    config = ModelConfig.from_dict(tiny(vocab_size=VOCABULARY, initializer_range=0.2))
    # Two programs, since most of the time goes into compiling them: rows of 16 tokens and a slot of each data rank.
    sizes = {"max_model_len": 64, "max_num_seqs": 1, "num_pages": 12, "page_size": 8, "max_num_batched_tokens": 32}
    engine = Engine(
        random_model(config, make_mesh(data, model)),
        Tokenizer(backend(), eos_ids=EOS_IDS),
        EngineConfig(**sizes, num_steps=4),
    )
    engine.warm_up(progress=False)
    return engine


def generate(engine: Engine) -> list[Any]:
    """Tokens, and the ids of log-probabilities where asked for, of every request."""
    for index, (prompt, params) in enumerate(REQUESTS):
        engine.add_request(str(index), prompt, params)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return [
        [
            [[part.token_ids, [list(entries) for entries in part.logprobs or []]] for part in output.outputs],
            [list(entries) for entries in (output.prompt_logprobs or [])[1:] if entries],
        ]
        for _, output in sorted(outputs.items())
    ]


def main() -> None:
    process, port, mesh = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    engine = engine_on(*map(int, mesh))
    if process:
        engine.follow()
    else:
        print(json.dumps(generate(engine)))
        engine.close()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
