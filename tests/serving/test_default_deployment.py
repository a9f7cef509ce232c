"""What `qwenjax serve MODEL` runs without a deployment file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwenjax.config import ModelConfig
from qwenjax.mesh import MeshError
from qwenjax_ffi.device_memory import DeviceMemoryError
from qwenjax_serving import cli, launch
from qwenjax_serving import default_deployment as module
from qwenjax_serving.default_deployment import count_gpus, default_deployment
from qwenjax_serving.deployment import Deployment, read_deployment
from qwenjax_serving.protocol.secret import SECRET_VARIABLE
from qwenjax_serving.supervisor import Supervisor
from tests.generation import write_folder
from tests.helpers import tiny

CONFIG = ModelConfig.from_dict(tiny())  # 4 query heads over 2 of keys and values, 8 experts


@pytest.fixture(autouse=True)
def _no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def read(tmp_path: Path, text: str) -> Deployment:
    (tmp_path / "file.toml").write_text(text)
    return read_deployment(tmp_path / "file.toml")


def meshes(found: Deployment) -> list[tuple[str, int, int]]:
    return [
        (plan.role, plan.options.get("data_parallel", 1), plan.options.get("model_parallel", 1))
        for plan in found.workers
    ]


def test_without_a_gpu_there_are_two_workers_of_one_device_each(tmp_path: Path) -> None:
    found = read(tmp_path, default_deployment(CONFIG, 0, {}))
    assert meshes(found) == [("prefill", 1, 1), ("decode", 1, 1)]
    assert not any(plan.env for plan in found.workers)


def test_on_one_gpu_both_are_one_process_with_one_copy_of_the_weights(tmp_path: Path) -> None:
    found = read(tmp_path, default_deployment(CONFIG, 1, {"quantization": "mxfp8"}))
    [plan] = found.workers
    assert (plan.role, plan.share_device, plan.num_devices) == ("both", True, 1)
    assert [part.options["quantization"] for part in plan.parts] == ["mxfp8", "mxfp8"]
    with pytest.raises(MeshError, match="there is one GPU"):
        default_deployment(CONFIG, 1, {}, model_parallel=2)


@pytest.mark.parametrize(
    ("gpus", "prefill", "decode"), [(2, 1, 1), (3, 1, 1), (4, 2, 2), (8, 4, 4), (15, 4, 4), (16, 4, 8)]
)
def test_gpus_are_halved_as_far_as_the_model_divides(tmp_path: Path, gpus: int, prefill: int, decode: int) -> None:
    found = read(tmp_path, default_deployment(CONFIG, gpus, {}))
    assert meshes(found) == [("prefill", 1, prefill), ("decode", decode, 1)]
    visible = [plan.env["CUDA_VISIBLE_DEVICES"].split(",") for plan in found.workers]
    assert [len(each) for each in visible] == [prefill, decode]
    assert len({*visible[0], *visible[1]}) == prefill + decode
    assert all(int(name) < gpus for each in visible for name in each)


def test_one_mesh_that_is_given_leaves_the_other_the_rest(tmp_path: Path) -> None:
    assert meshes(read(tmp_path, default_deployment(CONFIG, 6, {}, model_parallel=2))) == [
        ("prefill", 1, 2),
        ("decode", 4, 1),
    ]
    assert meshes(read(tmp_path, default_deployment(CONFIG, 5, {}, data_parallel=1))) == [
        ("prefill", 1, 4),
        ("decode", 1, 1),
    ]
    with pytest.raises(MeshError, match="need 5 GPUs; 4 are here"):
        default_deployment(CONFIG, 4, {}, model_parallel=4)


def test_gpus_that_the_environment_names_are_those_that_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b, 5,7")
    found = read(tmp_path, default_deployment(CONFIG, 3, {}, data_parallel=2))
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in found.workers] == ["GPU-b", "5,7"]


def test_meshes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="need 5 GPUs; 4 are here"):
        default_deployment(CONFIG, 4, {}, model_parallel=1, data_parallel=4)
    with pytest.raises(MeshError, match="does not divide"):
        default_deployment(CONFIG, 0, {}, model_parallel=3)


def test_gpus_are_counted_by_a_process_that_does_not_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = subprocess.run
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(module, "_PLUGINS", ("json",))
    answers = {"found": subprocess.CompletedProcess([], 0, "a line of the driver's\ngpu 4\n", "")}
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: answers["found"])
    assert count_gpus() == 4
    answers["found"] = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no driver\n")
    with pytest.raises(OSError, match="JAX finds no devices: RuntimeError: no driver"):
        count_gpus()
    answers["found"] = subprocess.CompletedProcess([], -11, "", "")
    with pytest.raises(OSError, match="JAX finds no devices: its process ended with status -11"):
        count_gpus()
    answers["found"] = subprocess.CompletedProcess([], 0, "cpu 1\n", "")
    assert count_gpus() == 0
    assert "json is installed, and JAX finds no GPU" in caplog.text
    monkeypatch.setattr(module, "_START", 0.01)
    monkeypatch.setattr(module.subprocess, "run", run)
    with pytest.raises(OSError, match=r"JAX finds no devices within 0.01 s; .*JAX_PLATFORMS=cpu"):
        count_gpus()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert count_gpus() == 0


class Started(Exception):
    """What would be served."""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `qwenjax serve` up to where it would start workers; the deployment."""
    folder = write_folder(tmp_path / "model")

    async def serve(arguments: Any, deployment: Deployment, *_: Any, **__: Any) -> None:
        assert arguments.config.is_file()
        raise Started(deployment)

    monkeypatch.setattr(launch, "_serve", serve)

    def run(*options: str) -> Deployment:
        with pytest.raises(Started) as found:
            cli.main(["serve", str(folder), "--port", "0", *options])
        deployment: Deployment = found.value.args[0]
        return deployment

    return run


def test_options_of_the_command_line_reach_the_workers_and_the_router(started: Any) -> None:
    pytest.importorskip("nixl")
    options = ["--max-num-seqs", "5", "--quantization", "mxfp8", "--no-enable-prefix-caching", "--dtype", "float32"]
    found = started(*options, "--model-parallel", "2", "--data-parallel", "4", "--max-queue", "7", "--num-pages", "99")
    assert meshes(found) == [("prefill", 1, 2), ("decode", 4, 1)]
    for plan in found.workers:
        given = {name: plan.options.get(name) for name in ("max_num_seqs", "quantization", "dtype", "num_pages")}
        assert given == {"max_num_seqs": 5, "quantization": "mxfp8", "dtype": "float32", "num_pages": 99}
        assert plan.options["enable_prefix_caching"] is False
    assert found.settings.max_waiting == 7


def test_a_queue_that_a_router_cannot_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path), "--port", "0", "--max-queue", "0"]) == 2
    assert "--max-queue is 0; a router's is at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model-parallel", "--data-parallel"])
@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_a_mesh_without_ranks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, ranks: str
) -> None:
    assert cli.main(["serve", str(tmp_path), "--port", "0", option, ranks]) == 2
    assert f"{option} is {ranks}; it is at least 1" in capsys.readouterr().err


def test_a_worker_that_does_not_start_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = write_folder(tmp_path / "model"), tmp_path / "both.toml"
    start = Supervisor._start

    async def broken(self: Supervisor, plan: Any) -> Any:
        self._command = [sys.executable, "-c", "raise SystemExit(2)"]
        return await start(self, plan)

    monkeypatch.setattr(Supervisor, "_start", broken)
    file.write_text("[both]\n")
    assert cli.main(["serve", str(folder), "--port", "0", "--config", str(file)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert said == ["qwenjax serve: error: worker both-0 ended with status 2 before it was ready"]


def test_what_ends_a_worker_of_a_role_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_worker(*_: Any) -> None:
        raise DeviceMemoryError("no room")

    monkeypatch.setattr(launch, "run_worker", run_worker)
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the tests alone")
    (tmp_path / "both.toml").write_text('[router]\naddress = "tcp://127.0.0.1:5555"\n[both]\n')
    assert cli.main(["serve", "model", "--config", str(tmp_path / "both.toml"), "--role", "both"]) == 2
    assert capsys.readouterr().err == "qwenjax serve: error: both-0: no room\n"


def test_without_nixl_the_extra_and_the_other_way_are_named(
    started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert cli.main(["serve", str(tmp_path / "model"), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "pip install 'qwenjax[disagg]'" in err
    assert "--colocated" in err
    (tmp_path / "both.toml").write_text("[both]\nshare_device = true\n")  # moves pages within itself
    assert started("--config", str(tmp_path / "both.toml")).names == ["both-0-prefill", "both-0-decode"]
