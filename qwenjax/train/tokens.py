"""Token files: what training reads, memory-mapped, and the batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np


class TokenFileError(ValueError):
    """A token file that cannot be trained on; the message names it and what would do."""


def write_tokens(path: str | Path, documents: Iterable[Sequence[int]], separator: int, vocab_size: int) -> int:
    """Writes a token file: every document's ids, each followed by `separator`. Returns the number of ids.

    The file is a NumPy array [tokens] of uint16, or of uint32 where the vocabulary needs it. Raises TokenFileError for
    ids outside the vocabulary.
    """
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    parts = [np.asarray([*document, separator], np.int64) for document in documents]
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise TokenFileError(f"{path}: ids from {ids.min()} to {ids.max()}; the vocabulary is 0 to {vocab_size - 1}")
    np.save(path, ids.astype(dtype))
    return ids.size


class TokenFiles:
    """Token files as one long text, cut into windows that every epoch shuffles and shifts anew.

    A batch is a function of the seed and the step alone: training that is resumed at a step sees what it would have
    seen, and no state of a reader has to be saved.
    """

    def __init__(self, paths: Sequence[str | Path], length: int, batch: int, seed: int, vocab_size: int) -> None:
        """Windows of `length` ids, `batch` of them a step. Raises TokenFileError for files that are missing, of
        another type, out of the vocabulary, or too short for one batch."""
        self.length, self.batch, self.seed, self.vocab_size = length, batch, seed, vocab_size
        self._files = [_open(Path(path), vocab_size) for path in paths]
        self._ends = np.cumsum([len(file) for file in self._files])
        self.tokens = int(self._ends[-1]) if self._files else 0
        # One window less than fit, so that every epoch may start at another offset.
        self._windows = self.tokens // length - 1
        self.steps_per_epoch = self._windows // batch
        if self.steps_per_epoch < 1:
            raise TokenFileError(
                f"{self.tokens:,} tokens in {', '.join(map(str, paths)) or 'no files'} do not fill one batch of "
                f"{batch} x {length}, and {length} more for the shift: give more text or a smaller batch"
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def windows(self, step: int) -> np.ndarray:
        """int32 [batch, length]: the ids of step `step`, counted from 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        offset, order = self._order(epoch)
        starts = offset + order[index * self.batch : (index + 1) * self.batch] * self.length
        return np.stack([self._read(int(start)) for start in starts]).astype(np.int32)

    def _shuffled(self, epoch: int) -> tuple[int, np.ndarray]:
        draw = np.random.default_rng([self.seed, epoch])
        return int(draw.integers(self.length)), draw.permutation(self._windows)

    def _read(self, start: int) -> np.ndarray:
        parts, stop = [], start + self.length
        for file, end in zip(self._files, self._ends, strict=True):
            first = end - len(file)
            if start < end and stop > first:
                parts.append(file[max(start - first, 0) : stop - first])
        return np.concatenate(parts) if len(parts) > 1 else np.asarray(parts[0])


def held_out_windows(paths: Sequence[str | Path], length: int, vocab_size: int) -> np.ndarray:
    """int32 [windows, length]: the files' ids in order, without overlap; the last, unfilled window is left out."""
    ids = np.concatenate([_open(Path(path), vocab_size) for path in paths])
    count = len(ids) // length
    if count < 1:
        raise TokenFileError(f"{len(ids)} tokens do not fill one window of {length}: give more text or shorter windows")
    return ids[: count * length].reshape(count, length).astype(np.int32)


def _open(path: Path, vocab_size: int) -> np.ndarray:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise TokenFileError(f"{path}: no such token file; `qwenjax train tokens` makes one from text") from None
    except ValueError as error:
        raise TokenFileError(
            f"{path}: not a token file ({error}); `qwenjax train tokens` makes one from text"
        ) from None
    if ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32):
        raise TokenFileError(f"{path}: holds {ids.dtype}{list(ids.shape)}; token files are one row of uint16 or uint32")
    if ids.size and int(ids.max()) >= vocab_size:
        raise TokenFileError(
            f"{path}: has id {int(ids.max())}; the model's vocabulary is 0 to {vocab_size - 1}: was it made with this "
            "model's tokenizer?"
        )
    return ids
