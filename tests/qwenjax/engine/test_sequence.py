"""Log-probabilities as a request reports them."""

from __future__ import annotations

import numpy as np

from qwenjax.engine.sequence import logprob_entry
from qwenjax.sampling import TopLogprobs
from qwenjax.tokenizer import Tokenizer
from tests.generation import backend

TOKENIZER = Tokenizer(backend())


def found(logprob: float, rank: int, ids: list[int], values: list[float]) -> TopLogprobs:
    arrays = np.float32(logprob), np.int32(rank), np.int32(ids), np.float32(values)
    return TopLogprobs(*arrays)  # type: ignore[arg-type]


def test_the_token_comes_first_and_once() -> None:
    top = found(-1.0, 2, [70, 80, 90], [-0.5, -1.0, -2.0])
    assert list(logprob_entry(TOKENIZER, 80, top, 3)) == [80, 70, 90]
    assert list(logprob_entry(TOKENIZER, 80, top, 1)) == [80, 70]
    assert list(logprob_entry(TOKENIZER, 80, top, 0)) == [80]


def test_ids_of_equal_probability_share_a_rank() -> None:
    entries = logprob_entry(TOKENIZER, 99, found(-3.0, 5, [7, 8, 9, 10], [-0.5, -1.0, -1.0, -2.0]), 4)
    assert [(token, entry.rank) for token, entry in entries.items()] == [(99, 5), (7, 1), (8, 2), (9, 2), (10, 4)]


def test_each_entry_has_its_ids_own_text() -> None:
    entries = logprob_entry(TOKENIZER, 2, found(-1.0, 1, [300], [-2.0]), 1)
    assert [entry.decoded_token for entry in entries.values()] == ["<|im_end|>", ""]
