"""A 5-gram model with interpolated modified Kneser-Ney smoothing (Chen and Goodman 1999, section 3): the yardstick.

`python ngram.py WORK` trains it on WORK/train.npy and prints its bits per byte on WORK/held_out.npy.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ORDER = 5
MIN_DISCOUNT = 0.1  # on little text the formulas can give 0, and what was never seen would have no chance at all


@dataclass(frozen=True)
class _Grams:
    """All n-grams of one order, packed and sorted, with their counts, and their contexts with what smoothing needs."""

    keys: np.ndarray
    counts: np.ndarray
    discounts: np.ndarray  # taken from a count of 1, 2 and 3 or more
    contexts: np.ndarray
    totals: np.ndarray
    backoff: np.ndarray  # the mass that each context leaves to the next lower order


class NGramModel:
    """Trained on one text of ids. The highest order has raw counts, the lower ones the numbers of different tokens
    that precede an n-gram."""

    def __init__(self, ids: np.ndarray, vocab_size: int, order: int = ORDER) -> None:
        """ids: int [tokens]. Raises ValueError where `order` ids do not pack into 63 bits."""
        self.vocab_size, self.order = vocab_size, order
        self.bits = max(1, (vocab_size - 1).bit_length())
        if self.bits * order > 63:
            raise ValueError(
                f"{order} ids of a vocabulary of {vocab_size} do not pack into 63 bits; take a lower order"
            )
        keys, counts = np.unique(self._pack(ids, order), return_counts=True)
        self.levels = [self._grams(keys, counts)]
        for size in range(order - 1, 0, -1):
            suffixes = keys & ((1 << self.bits * size) - 1)
            keys, counts = np.unique(suffixes, return_counts=True)
            self.levels.insert(0, self._grams(keys, counts))

    def log_probabilities(self, ids: np.ndarray) -> np.ndarray:
        """float64 [tokens]: the natural logarithm of each token's probability after the order - 1 ids before it; the
        first tokens have fewer."""
        probability = np.full(len(ids), 1.0 / self.vocab_size)
        for size, level in enumerate(self.levels, 1):
            if len(ids) < size:
                break
            keys = self._pack(ids, size)
            context, known = _find(level.contexts, keys >> self.bits)
            gram, seen = _find(level.keys, keys)
            count = np.where(seen, level.counts[gram], 0)
            taken = np.where(count > 0, count - level.discounts[np.minimum(count, 3) - 1], 0.0)
            lower = probability[size - 1 :]
            with_context = taken / level.totals[context] + level.backoff[context] * lower
            probability[size - 1 :] = np.where(known, with_context, lower)
        return np.log(probability)

    def _pack(self, ids: np.ndarray, size: int) -> np.ndarray:
        ids = ids.astype(np.int64)
        keys = np.zeros(len(ids) - size + 1, np.int64)
        for offset in range(size):
            keys = (keys << self.bits) | ids[offset : offset + len(keys)]
        return keys

    def _grams(self, keys: np.ndarray, counts: np.ndarray) -> _Grams:
        n1, n2, n3, n4 = (max(int(np.sum(counts == k)), 1) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        discounts = np.array([1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        discounts = np.clip(discounts, MIN_DISCOUNT, [1.0, 2.0, 3.0])
        contexts, starts = np.unique(keys >> self.bits, return_index=True)
        totals = np.add.reduceat(counts, starts)
        left = np.add.reduceat(discounts[np.minimum(counts, 3) - 1], starts)
        return _Grams(keys, counts, discounts, contexts, totals, left / totals)


def _find(sorted_keys: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each key lies, and whether it is there at all."""
    index = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return index, sorted_keys[index] == keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder that tokenizer.py filled")
    parser.add_argument("--vocabulary", type=int, default=4096)
    args = parser.parse_args()
    train, held_out = np.load(args.work / "train.npy"), np.load(args.work / "held_out.npy")
    size = json.loads((args.work / "held_out.json").read_text("utf-8"))["bytes"]
    nats = -NGramModel(train, args.vocabulary).log_probabilities(held_out).sum()
    print(f"{ORDER}-gram: {nats / len(held_out):.4f} nats a token, {nats / np.log(2) / size:.4f} bits a byte")


if __name__ == "__main__":
    main()
