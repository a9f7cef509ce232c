"""Workers of several processes: what they give is what `LLM.generate` gives."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from qwenjax import LLM
from qwenjax_serving.backend import BackendError
from tests.generation import greedy, random_ids
from tests.serving.cluster import Cluster, cluster
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


def test_two_processes_on_either_side_give_what_one_engine_gives_and_end_with_one_another(
    head_folder: Path, head_llm: LLM, tmp_path: Path
) -> None:
    (tmp_path / "deployment.toml").write_text(TWO_EACH)
    with cluster(head_folder, tmp_path / "deployment.toml") as made:
        check_equal(made, head_llm, 24)
        for process in made.processes.values():
            assert listening(process.pid) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # of IPv4, in IPv6 too

        # A process that is stopped is noticed within seconds, whether its worker runs something or not.
        began = time.monotonic()
        with pytest.raises(BackendError, match="decode worker decode-0 has ended"):
            made.run(stream_and_stop(made, "prefill-0/1", "decode-0/1"), timeout=60)
        assert time.monotonic() - began < 5 + 5
        for name in "prefill-0", "decode-0":
            assert made.processes[name].wait(timeout=15) == 2
        bring_back(made, "prefill-0", "decode-0")
        result = made.run(made.generate("again", random_ids(20), greedy(60)), timeout=60)
        assert result.outputs[0].token_ids == head_llm.generate([random_ids(20)], greedy(60))[0].outputs[0].token_ids

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


async def stream_and_stop(made: Cluster, *names: str) -> None:
    """Stops processes once an output is decoding."""
    async for output in await made.stream("stopped", random_ids(20), greedy(100)):
        if len(output.outputs[0].token_ids) >= 3:
            for name in names:
                made.processes[name].send_signal(signal.SIGSTOP)


def bring_back(made: Cluster, *workers: str) -> None:
    """As a supervisor does: what is left of a worker ends, and all of it starts again."""
    for name in workers:
        for process in made.processes[name], made.processes[f"{name}/1"]:
            process.kill()
            process.wait()
    made.start(workers)
    made.wait_for_workers()
