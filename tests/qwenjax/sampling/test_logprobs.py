"""Log-probabilities against float64."""

import jax
import numpy as np

from qwenjax.sampling import token_logprobs

LOGPROBS = jax.jit(token_logprobs, static_argnums=2)


def test_logprobs_equal_float64_log_softmax():
    logits = np.random.default_rng(0).normal(0, 4, (5, 300)).astype(np.float32)
    ids = np.array([0, 7, 299, 12, 40], np.int32)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    found = LOGPROBS(logits, ids, 6)
    np.testing.assert_allclose(found.logprob, exact[np.arange(5), ids], atol=1e-5)
    order = np.argsort(-exact, axis=1, kind="stable")
    np.testing.assert_array_equal(found.top_ids, order[:, :6])
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(exact, order[:, :6], axis=1), atol=1e-5)
    np.testing.assert_array_equal(found.rank, [1 + order[i].tolist().index(ids[i]) for i in range(5)])


def test_equal_ids_share_a_rank_and_the_lowest_comes_first():
    logits = np.array([[1.0, 2.0, 2.0, 0.0]], np.float32)
    found = LOGPROBS(logits, np.array([2], np.int32), 3)
    assert found.rank.tolist() == [1]
    assert found.top_ids.tolist() == [[1, 2, 0]]


def test_no_alternatives_still_gives_the_token_itself():
    found = LOGPROBS(np.array([[0.0, 1000.0]], np.float32), np.array([0], np.int32), 0)
    assert found.top_ids.shape == found.top_logprobs.shape == (1, 0)
    assert found.logprob.tolist() == [-1000.0]
    assert found.rank.tolist() == [2]
