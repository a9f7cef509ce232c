"""The checkpoint that routers and workers of the tests serve, and what is to come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwenjax import LLM
from tests.generation import small_llm
from tests.qwenjax.engine.test_handover import SIZES
from tests.qwenjax.engine.test_speculation import with_head


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def head_llm(head_folder: Path) -> LLM:
    return small_llm(head_folder, **{**SIZES, "num_pages": 256})
