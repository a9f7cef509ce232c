"""Sampling on the device: pure functions over rows of logits, one row a position that draws a token.

A row is a slot's next token, or one of the k + 1 positions of a slot that speculation verifies in one pass;
rows know nothing of each other, so a row's token is the same to the bit whatever rows stand beside it.
"""

from qwenjax.sampling.arrays import SamplingArrays, SamplingRow, build_arrays, new_seed
from qwenjax.sampling.counts import TokenCounts, count_tokens
from qwenjax.sampling.logprobs import TopLogprobs, token_logprobs
from qwenjax.sampling.noise import gumbel_noise
from qwenjax.sampling.process import process_logits
from qwenjax.sampling.sample import draw, likeliest, sample, truncated

__all__ = [
    "SamplingArrays",
    "SamplingRow",
    "TokenCounts",
    "TopLogprobs",
    "build_arrays",
    "count_tokens",
    "draw",
    "gumbel_noise",
    "likeliest",
    "new_seed",
    "process_logits",
    "sample",
    "token_logprobs",
    "truncated",
]
