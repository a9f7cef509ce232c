"""Workers of several processes: what they give is what `LLM.generate` gives."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from qwenjax_serving.backend import BackendError
from tests.generation import greedy, random_ids, small_llm
from tests.qwenjax.engine.test_handover import SIZES
from tests.qwenjax.engine.test_speculation import with_head
from tests.serving.cluster import cluster
from tests.serving.test_disaggregated import CONFIG, check_equal, listening

pytest.importorskip("nixl")
pytestmark = pytest.mark.slow

TWO_EACH = (
    CONFIG
    + """
[[prefill]]
model_parallel = 2
processes = 2
[[decode]]
data_parallel = 2
page_size = 32
processes = 2
"""
)


def test_two_processes_on_either_side_give_what_one_engine_gives_and_end_with_one_another(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "model")
    (tmp_path / "deployment.toml").write_text(TWO_EACH)
    llm = small_llm(folder, **{**SIZES, "num_pages": 256})
    with cluster(folder, tmp_path / "deployment.toml") as made:
        check_equal(made, llm, 24)
        for process in made.processes.values():
            assert listening(process.pid) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # of IPv4, in IPv6 too

        # A process that dies takes the worker with it.
        made.processes["decode-0/1"].send_signal(signal.SIGKILL)
        with pytest.raises(BackendError):
            made.run(made.generate("a", random_ids(20), greedy(60)), timeout=60)
        made.processes["decode-0"].wait(timeout=60)

        # Told to end, the others do so in order.
        prefill = [made.processes[name] for name in ("prefill-0", "prefill-0/1")]
        for process in prefill:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=60) for process in prefill] == [0, 0]
