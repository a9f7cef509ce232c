"""A prefill and a decode worker in one process, which move pages within it: what `LLM.generate` gives is what comes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwenjax import LLM
from tests.serving.cluster import Cluster, cluster
from tests.serving.test_disaggregated import CONFIG, check_equal

BOTH = CONFIG + "[both]\n[both.decode]\npage_size = 32\n"


@pytest.fixture(scope="module", params=["share_device = true\n", "share_device = false\n"], ids=["shared", "apart"])
def made(
    head_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "deployment.toml"
    config.write_text(BOTH.replace("[both]\n", "[both]\n" + request.param))
    with cluster(head_folder, config) as found:
        yield found


@pytest.mark.slow
def test_24_mixed_requests_at_once_equal_one_engine_s(made: Cluster, head_llm: LLM) -> None:
    check_equal(made, head_llm, 24)
    [process] = made.processes.values()
    assert not any("nixl" in line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    made.wait_until(lambda: not made.workers, 5)  # both have said that they end
