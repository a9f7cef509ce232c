"""The command line: `generate` and `logits`, in this process and as users start them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenjax import LLM
from qwenjax_serving import cli
from qwenjax_serving.commands import generate
from tests.generation import greedy, log_softmax, small_llm, write_folder

FIGURES = re.compile(
    r"(\d+) prompt tokens, (\d+) new; time to first token \d+ ms; [\d.]+ tokens/s"
    r"; no drafts, as by default on a CPU and without a multi-token-prediction head"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return small_llm(folder)


@pytest.fixture
def llm(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """What `qwenjax generate` loads, here made once for all tests."""
    monkeypatch.setattr(generate, "LLM", lambda *_, **__: shared)
    return shared


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.removesuffix("\n").split("\n")


@pytest.mark.usefixtures("llm")
def test_generate_shows_each_output_and_then_the_figures(
    llm: LLM, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--temperature", "0", "--max-tokens", "9", "--ignore-eos"]
    assert cli.main(["generate", str(folder), "--prompt", "hello a", "--prompt", "th", *arguments]) == 0
    captured = capsys.readouterr()
    expected = [result.outputs[0].text for result in llm.generate(["hello a", "th"], greedy(9))]
    assert captured.out == "".join(text + "\n" for text in expected)
    numbers = FIGURES.fullmatch(captured.err.strip())
    assert numbers
    assert [int(number) for number in numbers.groups()] == [len(llm.tokenizer.encode("hello a")) + 1, 18]


def test_generate_streams(llm: LLM, folder: Path) -> None:
    class Watched:
        def __init__(self) -> None:
            self.flushed: list[str] = []
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            self.flushed.append(self.text)

    stream: Any = Watched()
    expected = llm.generate("hello a", greedy(33))[0].outputs[0].text
    generate.show(llm, ["hello a"], greedy(33), stream)
    assert stream.text == expected + "\n"
    # The first token, then eight a call: what is shown grows before the end.
    assert len(stream.flushed) == 5
    assert all(expected.startswith(shown) for shown in stream.flushed[:-1])
    assert len(set(stream.flushed)) > 3


@pytest.mark.usefixtures("llm")
def test_several_outputs_are_numbered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "th", "--n", "2", "--seed", "1", "--temperature", "1", "--max-tokens", "1"]
    assert cli.main(["generate", str(folder), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[0] ")
    assert "\n[1] " in out


def test_json_is_one_object_a_prompt_in_order(llm: LLM, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos", "--logprobs", "2", "--json"]
    assert cli.main(["generate", str(folder), "--prompt", "th", "--prompt", "hello", *arguments]) == 0
    objects = [json.loads(line) for line in lines_of(capsys)]
    for found, result in zip(objects, llm.generate(["th", "hello"], greedy(4, logprobs=2)), strict=True):
        assert found["prompt"] == result.prompt
        assert found["prompt_token_ids"] == result.prompt_token_ids
        assert found["finished"] is True
        assert set(found["metrics"]) == {"queue_time", "time_to_first_token", "inter_token_time", "num_tokens"}
        assert 0 <= found["metrics"]["queue_time"] < found["metrics"]["time_to_first_token"]
        part = result.outputs[0]
        assert found["outputs"][0]["token_ids"] == part.token_ids
        assert found["outputs"][0]["text"] == part.text
        assert found["outputs"][0]["finish_reason"] == "length"
        assert part.logprobs is not None
        names = [list(entries) for entries in found["outputs"][0]["logprobs"]]
        assert names == [[str(token) for token in entries] for entries in part.logprobs]


def test_a_file_holds_a_prompt_on_every_line(
    llm: LLM, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\nth\u2028a\r\n", encoding="utf-8")  # U+2028 ends a line of text, not one of a file
    assert cli.main(["generate", str(folder), "--file", str(file), "--max-tokens", "2", "--json"]) == 0
    assert [json.loads(line)["prompt"] for line in lines_of(capsys)] == ["hello", "th\u2028a"]


def test_chat_goes_through_the_template(llm: LLM, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "system", "content": "th"}, {"role": "user", "content": "hello"}]
    for extra, kwargs in ([], {}), (["--no-thinking"], {"enable_thinking": False}):
        arguments = ["--chat", "hello", "--system", "th", "--max-tokens", "2", "--json", *extra]
        assert cli.main(["generate", str(folder), *arguments]) == 0
        expected = llm.chat_prompts(messages, chat_template_kwargs=kwargs)
        assert [json.loads(line)["prompt_token_ids"] for line in lines_of(capsys)] == expected


def test_parameters_are_the_checkpoints_where_not_given(folder: Path, llm: LLM) -> None:
    parser = generate.argparse.ArgumentParser()
    generate.add_arguments(parser)
    base = llm.get_default_sampling_params()
    given = generate.sampling_params(base, parser.parse_args(["MODEL", "--prompt", "a"]))
    assert given == generate.replace(base, max_tokens=128)
    given = generate.sampling_params(base, parser.parse_args(["MODEL", "--prompt", "a", "--min-tokens", "200"]))
    assert given == generate.replace(base, max_tokens=200, min_tokens=200)
    words = ["--top-k", "3", "--stop", "x", "--stop", "y", "--stop-token-ids", "5", "6", "--min-tokens", "2"]
    words += ["--seed", "4", "--ignore-eos"]
    given = generate.sampling_params(base, parser.parse_args(["MODEL", "--prompt", "a", *words]))
    changes: dict[str, Any] = {"top_k": 3, "stop": ("x", "y"), "stop_token_ids": (5, 6), "min_tokens": 2, "seed": 4}
    assert given == generate.replace(base, max_tokens=128, ignore_eos=True, **changes)


def test_outputs_end_with_the_context_where_max_tokens_is_not_given(
    llm: LLM, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", "th", "--temperature", "0", "--ignore-eos", "--json"]
    assert cli.main(["generate", str(folder), *arguments]) == 0
    part = json.loads(lines_of(capsys)[0])["outputs"][0]
    assert (len(part["token_ids"]), part["finish_reason"]) == (127, "length")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "a", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "a", "--max-tokens", "128"], "max_tokens is 128"),
        (["--prompt", "a", "--stop-token-ids", "320"], "stop_token_ids holds id 320"),
        (["--prompt", "a", "--no-thinking"], "use them with --chat"),
        (["--prompt", "a", "--max-model-len", "500"], "max_model_len is 500; it is 2 to 128"),
        (["--prompt", "a", "--max-model-len", "-5"], "max_model_len is -5; it is 2 to 128"),
        (["--prompt", "a", "--logprobs", "5"], "--logprobs shows in the output of --json alone"),
        (["--prompt", "a", "--prompt-logprobs", "0"], "--prompt-logprobs shows in the output of --json alone"),
        (["--prompt", "a", "--revision", "main"], "revision is 'main', and "),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--file", "LATIN"], "is not UTF-8 text"),
    ],
)
def test_bad_input_is_one_line_and_status_2_before_the_weights_are_read(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("qwenjax.engine.build.load_model", None)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    own = [str(latin) if word == "LATIN" else word for word in arguments]
    assert cli.main(["generate", str(folder), *own]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("qwenjax generate: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["generate", "MODEL", "--prompt", "a"], "--temprature"),
        (["generate", "MODEL", "--prompt", "a"], "--temp"),  # no abbreviations: a new option would change their meaning
        (["bench", "serve"], "--num-prompt"),
    ],
)
def test_an_unknown_option_is_an_error_of_its_command(
    capsys: pytest.CaptureFixture[str], command: list[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, option, "1"])
    name = "bench serve" if command[0] == "bench" else command[0]
    assert f"qwenjax {name}: error: unrecognized arguments: {option} 1\n" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"qwenjax \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["generate", "MODEL"], ["logits", "MODEL"]])
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: qwenjax" in capsys.readouterr().err


def test_an_extra_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "qwenjax_serving.commands.serve", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client.registry", None)  # what an import of it then finds
    assert cli.main(["serve", "MODEL"]) == 2
    expected = "qwenjax serve: error: needs prometheus_client: pip install 'qwenjax[serve]'\n"
    assert capsys.readouterr().err == expected


def test_a_folder_that_is_no_checkpoint_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in "generate", "logits":
        assert cli.main([command, str(tmp_path), "--prompt", "a"]) == 2
        assert f"{tmp_path}/" in capsys.readouterr().err


def rows_of(table: list[str]) -> list[tuple[int, int, float, float]]:
    words = [line.split() for line in table[1:]]
    return [(int(w[0]), int(w[1]), float(w[2]), float(w[3].rstrip("%")) / 100) for w in words]


def test_the_logits_table_is_transformers_top_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert cli.main(["logits", str(folder), "--token-ids", "5,60,7", "--top", "12", "--no-progress"]) == 0
    table = lines_of(capsys)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 60, 7]])).logits[0, -1].numpy()
    best = np.argsort(-logits)[:12]
    probabilities = np.exp(log_softmax(logits))
    assert table[0].split() == ["rank", "id", "logit", "probability", "token"]
    rows = rows_of(table)
    assert [(rank, token) for rank, token, _, _ in rows] == list(enumerate(best.tolist(), 1))
    np.testing.assert_allclose([logit for _, _, logit, _ in rows], logits[best], atol=2e-4)
    np.testing.assert_allclose([share for _, _, _, share in rows], probabilities[best], atol=2e-6)


def test_logits_as_json_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logits", str(folder), "--prompt", "hello a", "--no-progress"]) == 0
    rows = rows_of(lines_of(capsys))
    assert cli.main(["logits", str(folder), "--prompt", "hello a", "--json", "--no-progress"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(rows) == len(found["top"]) == 10
    assert [row["id"] for row in found["top"]] == [row[1] for row in rows]
    assert [round(row["logit"], 4) for row in found["top"]] == [row[2] for row in rows]
    assert len(found["prompt_token_ids"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-ids", "5,x"], "--token-ids is '5,x'"),
        (["--token-ids", "320"], "the vocabulary is 0 to 319"),
        (["--prompt", ""], "empty"),
        (["--prompt", "a", "--top", "0"], "--top is 0"),
    ],
)
def test_logits_refuses_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["logits", str(folder), "--no-progress", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home directory of the processes below, where compiled programs are kept."""
    return tmp_path_factory.mktemp("home")


# One slot, so few programs, the same for all; and room for an output that no test waits for the end of.
LONG = 100_000
SIZES = ["--max-num-seqs", "1", "--max-model-len", str(LONG)]
PROMPT = ["--prompt", "hello a", "--temperature", "0", "--ignore-eos"]


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("long"), max_position_embeddings=LONG)


def start(home: Path, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return start_command(home, "generate", str(folder), *SIZES, *PROMPT, *arguments)


def start_command(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    # Without PYTHONUNBUFFERED and the like: text waits in buffers, as it does for users.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PYTEST_", "PYTHON"))}
    environment |= {"HOME": str(home), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "qwenjax_serving.cli", *arguments]
    # Who starts the tests in the background has SIGINT ignored, which what they start would inherit.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def endless(home: Path, long_folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun to write an output of almost 100,000 tokens."""
    process = start(home, long_folder, "--max-tokens", str(LONG - 10), "--no-progress")
    assert process.stdout is not None
    assert len(process.stdout.read(4)) == 4
    yield process
    process.kill()
    process.wait()


def programs_in(home: Path) -> list[str]:
    """The engine's; other programs are kept where a busy machine takes more than 0.1 s to compile them."""
    return sorted(path.name for path in (home / ".cache" / "qwenjax" / "programs").glob("jit_whole-*-cache"))


def test_a_process_shows_progress_text_and_figures_and_keeps_its_programs(home: Path, long_folder: Path) -> None:
    process = start(home, long_folder, "--max-tokens", "6")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    text = err.decode()
    assert "Compiling: 100%" in text
    assert "Loading" in text
    assert FIGURES.fullmatch(text.splitlines()[-1])
    assert out.decode().endswith("\n")
    kept = programs_in(home)
    assert len(kept) >= 3  # two of prefill and one of decode
    again = start(home, long_folder, "--max-tokens", "6", "--no-progress")
    second_out, second_err = again.communicate(timeout=120)
    assert second_out == out
    assert len(second_err.splitlines()) == 1
    assert programs_in(home) == kept


def test_ctrl_c_stops_cleanly(endless: subprocess.Popen[bytes]) -> None:
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=60)
    assert endless.returncode == 130
    assert err.decode().strip() == "qwenjax: stopped"


def test_a_reader_that_leaves_ends_the_process_quietly(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None
    assert endless.stderr is not None
    endless.stdout.close()
    assert endless.stderr.read() == b""
    assert endless.wait(timeout=60) == 141


def test_a_reader_that_is_not_there_is_no_error(home: Path, folder: Path) -> None:
    process = start_command(home, "train", "mtp", str(folder), "--memory")
    assert process.stdout is not None
    process.stdout.close()  # before the table, which Python would write as it ends
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141
