"""Checkpoints are told apart by their weights, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qwenjax.checkpoint.fingerprint import checkpoint_fingerprint
from tests.helpers import random_tensors, tiny, write_checkpoint


def test_a_fine_tune_of_one_tensor_has_another_fingerprint_and_other_files_do_not(tmp_path: Path) -> None:
    raw = tiny()
    tensors = random_tensors(raw)
    first = checkpoint_fingerprint(write_checkpoint(tmp_path / "one file", raw, tensors))
    assert checkpoint_fingerprint(write_checkpoint(tmp_path / "three files", raw, tensors, shards=3)) == first
    seen = {first}
    for place, name in enumerate(("model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight")):
        tuned = tensors | {name: tensors[name] + np.float32(1e-3)}
        seen.add(checkpoint_fingerprint(write_checkpoint(tmp_path / f"tuned {place}", raw, tuned)))
    assert len(seen) == 4


def test_folders_of_orbax_are_told_apart_by_their_files(tmp_path: Path) -> None:
    found = []
    for place, data in enumerate((b"weights" * 99, b"weights" * 99, b"Weights" * 99, b"weights" * 98)):
        (tmp_path / str(place) / "parameters" / "d").mkdir(parents=True)
        (tmp_path / str(place) / "parameters" / "d" / "data").write_bytes(data)
        found.append(checkpoint_fingerprint(tmp_path / str(place)))
    assert found[0] == found[1]
    assert len(set(found)) == 3
