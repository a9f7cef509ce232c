"""Token files and the batches drawn from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qwenjax.train.tokens import TokenFileError, TokenFiles, held_out_windows, write_tokens


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The numbers from 0 to 999, over three files."""
    paths = [tmp_path / f"{name}.npy" for name in "abc"]
    for path, part in zip(paths, np.split(np.arange(1000, dtype=np.uint16), [313, 320]), strict=True):
        np.save(path, part)
    return paths


def test_an_epoch_reads_every_window_once(files: list[Path]) -> None:
    data = TokenFiles(files, length=10, batch=3, seed=1, vocab_size=1000)
    assert data.steps_per_epoch == 33
    rows = np.concatenate([data.windows(step) for step in range(33)])
    assert (np.diff(rows, axis=1) == 1).all()  # windows that span files too
    assert len(set(rows[:, 0].tolist())) == 99
    assert len(set((rows[:, 0] % 10).tolist())) == 1
    second = np.concatenate([data.windows(step) for step in range(33, 66)])
    assert set(second[:, 0].tolist()) != set(rows[:, 0].tolist())


def test_a_batch_depends_on_seed_and_step_alone(files: list[Path]) -> None:
    first, second = (TokenFiles(files, 10, 3, 1, 1000) for _ in range(2))
    for step in range(40):
        first.windows(step)
    np.testing.assert_array_equal(first.windows(35), second.windows(35))
    assert (TokenFiles(files, 10, 3, 2, 1000).windows(35) != second.windows(35)).any()


def test_held_out_windows_keep_the_texts_order(files: list[Path]) -> None:
    np.testing.assert_array_equal(held_out_windows(files, 300, 1000).ravel(), np.arange(900))


def test_documents_are_separated(tmp_path: Path) -> None:
    assert write_tokens(tmp_path / "t.npy", [[1, 2], [], [3]], separator=9, vocab_size=10) == 6
    written = np.load(tmp_path / "t.npy")
    assert written.dtype == np.uint16
    assert written.tolist() == [1, 2, 9, 9, 3, 9]
    write_tokens(tmp_path / "wide.npy", [[1]], separator=9, vocab_size=1 << 17)
    assert np.load(tmp_path / "wide.npy").dtype == np.uint32


def test_bad_files_are_named(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"nowhere\.npy: no such"):
        TokenFiles([tmp_path / "nowhere.npy"], 10, 1, 0, 1000)
    (tmp_path / "text.npy").write_text("In the beginning")
    with pytest.raises(TokenFileError, match=r"text\.npy: not a token file"):
        TokenFiles([tmp_path / "text.npy"], 10, 1, 0, 1000)
    np.save(tmp_path / "floats.npy", np.zeros(4))
    with pytest.raises(TokenFileError, match=r"floats\.npy: holds float64\[4\]"):
        TokenFiles([tmp_path / "floats.npy"], 10, 1, 0, 1000)
    with pytest.raises(TokenFileError, match=r"c\.npy: has id 999; the model's vocabulary is 0 to 511"):
        TokenFiles(files[2:], 10, 1, 0, 512)
    with pytest.raises(TokenFileError, match="do not fill one batch"):
        TokenFiles(files, 100, 10, 0, 1000)
    with pytest.raises(TokenFileError, match="ids from 1 to 12"):
        write_tokens(tmp_path / "t.npy", [[1, 12]], separator=9, vocab_size=10)
