"""Call tables: what the host writes is what the device reads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from qwenjax import SamplingParams
from qwenjax.engine.calls import chunk_of, prefill_table
from qwenjax.engine.config import EngineConfig
from qwenjax.engine.schedule import Job, Prefill, Row
from qwenjax.sampling import SamplingRow

CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=2, num_pages=8, page_size=16, max_num_batched_tokens=64, num_steps=1
)


def test_every_row_of_a_prompt_knows_its_length() -> None:
    """Also one that neither begins nor ends it: what lies past the prompt's length is counted as output."""
    prompt = list(range(100, 140))
    job = Job(0, prompt, end_length=50, max_cached=0)
    job.target = len(prompt)
    starts = [(0, 16), (16, 16), (32, 8)]
    rows = [
        Row(job, place, 1, start, count, start == 0, start == 32, [3, 4, 5])
        for place, (start, count) in enumerate(starts)
    ]
    params = SamplingParams(temperature=0.5, presence_penalty=0.25)
    own = SamplingRow(params, 7, 0, len(prompt), (2,))
    chunk = chunk_of(
        CONFIG, 16, jnp.asarray(prefill_table(CONFIG, 1, Prefill(16, rows), lambda row: own, False, False))
    )
    np.testing.assert_array_equal(chunk.prompt_len[:3], [40, 40, 40])
    np.testing.assert_array_equal(chunk.positions[:3, 0], [0, 16, 32])
    np.testing.assert_array_equal(chunk.tokens[1], prompt[16:32])
    np.testing.assert_array_equal(chunk.sampling.presence_penalty[jnp.array([0, 2])], [0.25, 0.25])
    np.testing.assert_array_equal(chunk.slot, [1, 1, 1, CONFIG.max_num_seqs])
