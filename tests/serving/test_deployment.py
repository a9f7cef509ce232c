"""Deployment files: what they say, and what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from qwenjax_serving.deployment import read_deployment
from qwenjax_serving.router.router import RouterSettings

FILES = sorted((Path(__file__).resolve().parents[2] / "configs" / "deployments").glob("*.toml"))
BOTH = "[[prefill]]\n[[decode]]\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_in_configs_can_be_read(path: Path) -> None:
    workers = read_deployment(path).workers
    assert {each.role for worker in workers for each in worker.parts or [worker]} == {"prefill", "decode"}


def test_the_documented_settings_of_the_router_are_those_that_there_are() -> None:
    text = (FILES[0].parents[2] / "docs" / "disaggregation.md").read_text()
    table = text[text.index("| setting | default |") :].partition("\n\n")[0]
    found = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    assert found.pop("address") == f'`"{read_deployment(FILES[0]).address}"`'
    assert {name: float(value) for name, value in found.items()} == asdict(RouterSettings())


def test_the_article_s_meshes() -> None:
    found = read_deployment(next(path for path in FILES if path.stem == "tp4-dp16"))
    sizes = [(worker.role, worker.num_devices, worker.processes) for worker in found.workers]
    assert sizes == [("prefill", 4, 1), ("decode", 16, 2)]


def test_a_worker_s_options_are_those_of_all_with_its_own_on_top(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text(
        "[router]\nworker_timeout = 2\n[engine]\npage_size = 32\nmax_num_seqs = 4\n"
        '[[prefill]]\nmax_num_seqs = 2\nenv = { A = "b" }\n[[prefill]]\nname = "other"\n'
        "[[decode]]\nstaging_pages = 9\nmin_tokens_per_second = 20\n"
    )
    found = read_deployment(path)
    first, other, decode = found.workers
    assert (first.name, other.name, decode.name) == ("prefill-0", "other", "decode-0")
    assert (first.options["page_size"], first.options["max_num_seqs"], first.env) == (32, 2, {"A": "b"})
    assert (other.options["max_num_seqs"], decode.staging_pages) == (4, 9)
    assert (decode.min_tokens_per_second, first.min_tokens_per_second) == (20, None)
    assert found.settings.worker_timeout == 2
    assert found.address.startswith("tcp://127.0.0.1:")
    assert found.worker("other") is other
    with pytest.raises(ValueError, match="there is no worker 'x'; there are"):
        found.worker("x")


def test_both_roles_in_one_process_are_two_workers_to_the_router(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text(
        '[engine]\nmax_num_seqs = 4\n[both]\nname = "gpu"\nstaging_pages = 9\nnum_pages = 50\nenv = { A = "b" }\n'
        "[both.prefill]\nmodel_parallel = 2\n[both.decode]\nmax_num_seqs = 8\nmin_tokens_per_second = 20\n"
    )
    found = read_deployment(path)
    [plan] = found.workers
    assert (plan.role, plan.env, plan.num_devices, plan.share_device) == ("both", {"A": "b"}, 3, False)
    assert found.names == plan.names == ["gpu-prefill", "gpu-decode"]
    prefill, decode = plan.parts
    assert (prefill.role, prefill.options["max_num_seqs"], prefill.options["num_pages"]) == ("prefill", 4, 50)
    assert (decode.role, decode.options["max_num_seqs"], decode.min_tokens_per_second) == ("decode", 8, 20)
    assert (prefill.staging_pages, decode.staging_pages) == (9, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[prefill]]\n", r"there is no \[\[decode\]\]"),
        ("[decode]\n[[prefill]]\n", r"\[decode\] is one table; workers are a list of them, \[\[decode\]\]"),
        (BOTH + "[extra]\n", r"unknown \['extra'\]"),
        (BOTH + "[router]\ntimeout = 1\n", r"\[router\]: unknown \['timeout'\]"),
        (BOTH + "[router]\nworker_timeout = 0\n", "worker_timeout is 0; it is a number above 0"),
        (BOTH + "[router]\nworker_timeout = nan\n", "worker_timeout is nan; it is a number above 0"),
        (BOTH + "[router]\nmax_waiting = 1.5\n", "max_waiting is 1.5; it is an integer above 0"),
        (BOTH + '[router]\naddress = "localhost"\n', "it is tcp://HOST:PORT"),
        (BOTH + '[router]\naddress = "tcp://localhost"\n', "it is tcp://HOST:PORT"),
        (BOTH + '[router]\naddress = "tcp://localhost:65536"\n', "it is tcp://HOST:PORT"),
        (BOTH + "[engine]\nmax_num_seqs = 0\n", r"\[engine\]: max_num_seqs is 0"),
        (BOTH + '[engine]\nquantization = "fp4"\n', r"\[engine\]: quantization is 'fp4'"),
        (BOTH + '[engine]\nrevision = "main"\n', r"\[engine\]: unknown \['revision'\]"),
        (BOTH + "[engine]\npages = 3\n", r"\[engine\]: unknown \['pages'\]"),
        (BOTH + "[engine]\nnum_pages = true\n", "num_pages is True; it is an integer"),
        (BOTH + '[engine]\nactivation_format = "fp7"\n', "activation_format is 'fp7'; it is 'model'"),
        ('[[prefill]]\nname = "a"\n[[decode]]\nname = "a"\n', "names of workers are not distinct"),
        ("[[prefill]]\ndata_parallel = 2\n[[decode]]\n", "prefill-0: data_parallel is 2; prefill has one data rank"),
        ("[[prefill]]\nname = 5\n[[decode]]\n", "the name of a prefill worker is 5; it is a string"),
        ("[[prefill]]\nenv = { A = 1 }\n[[decode]]\n", "it is a table of strings"),
        ("[[prefill]]\nstaging_pages = 0\n[[decode]]\n", "staging_pages is 0"),
        ("[[prefill]]\nprocesses = 0\n[[decode]]\n", "prefill-0: processes is 0; it is an integer above 0"),
        ("[[prefill]]\nprocesses = 2\n[[decode]]\n", "prefill-0: 1 devices do not divide over 2 processes"),
        ('[[prefill]]\ncoordinator = "host"\n[[decode]]\n', "coordinator is 'host'; it is HOST:PORT"),
        ("[[prefill]]\n[[decode]]\nmin_tokens_per_second = 0\n", "decode-0: min_tokens_per_second is 0"),
        ("[[prefill]]\nmin_tokens_per_second = 9\n[[decode]]\n", r"prefill-0: unknown \['min_tokens_per_second'\]"),
        ("router = 3\n" + BOTH, r"file.toml: \[router\] is 3; it is a table"),
        ("prefill = [3]\n[[decode]]\n", r"file.toml: prefill has 3; workers are tables, \[\[prefill\]\]"),
        (
            "[[prefill]]\nnum_speculative_tokens = 1\n[[prefill]]\nnum_speculative_tokens = 2\n[[decode]]\n",
            "num_speculative_tokens is 1 for prefill-0 and not given for decode-0",
        ),
        (
            "[both]\n[both.prefill]\nnum_speculative_tokens = 1\n[both.decode]\nnum_speculative_tokens = 0\n",
            "num_speculative_tokens is 1 for both-0-prefill and 0 for both-0-decode",
        ),
        ("x = [", "file.toml: "),
        ("[both]\n[[prefill]]\n", r"there are \[both\] and \[\[prefill\]\]"),
        ("[[both]]\n", "it is a table"),
        ("[both]\nprocesses = 2\n", r"\[both\]: unknown \['processes'\]"),
        ("[both]\nnum_pages = true\n", r"\[both\]: num_pages is True"),
        ("[both]\nshare_device = 1\n", "share_device is 1; it is true or false"),
        ("[both]\n[both.prefill]\nmin_tokens_per_second = 9\n", r"\[both.prefill\]: unknown \['min_tokens_per"),
        ("[both]\nshare_device = true\n[both.decode]\ndata_parallel = 2\n", "share_device is for meshes of one device"),
        (
            '[both]\nshare_device = true\n[both.decode]\nquantization = "mxfp8"\n',
            "quantization is not given for both-0-prefill and mxfp8 for both-0-decode: it is one for all workers",
        ),
        (
            '[[prefill]]\n[[decode]]\n[[decode]]\ndtype = "float32"\n',
            "dtype is not given for prefill-0 and float32 for decode-1: it is one for all workers",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_deployment(tmp_path / "file.toml")
