"""64 greedy tokens equal transformers' in fp32, on every config of the logits' parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenjax import LLM
from tests.generation import add_tokenizer, assert_all_free, greedy, random_ids
from tests.helpers import TINY

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.qwenjax.test_parity import CASES, save_oracle  # noqa: E402 - it needs the oracle to be there

TOKENS = 64
PROMPTS = [random_ids(length, 1, TINY["vocab_size"]) for length in (17, 40, 1)]
# The best logit must lead by more than the two paths differ, or the choice would be no test.
CLEAR = 2e-4


def load_oracle(folder: Path) -> Any:
    return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def llm_of(folder: Path, data: int = 1, model: int = 1) -> LLM:
    """Two programs; prompts of more than 16 tokens run in several chunks."""
    return LLM(
        add_tokenizer(folder),
        data_parallel=data,
        model_parallel=model,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        page_size=16,
        dtype="float32",
        progress=False,
    )


# One of each kind of layer; the others compile for minutes together, and their logits are compared in test_parity.
_QUICK = ("plain", "a dense layer by mlp_only_layers")


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_64_greedy_tokens_are_transformers_choice_one_after_another(name: str, tmp_path: Path) -> None:
    # What transformers chooses after each prefix of our output: one pass in place of 64, to the same effect.
    save_oracle(name, tmp_path)
    llm, oracle = llm_of(tmp_path), load_oracle(tmp_path)
    for result in llm.generate(PROMPTS, greedy(TOKENS)):
        prompt, output = result.prompt_token_ids, result.outputs[0].token_ids
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :].numpy()
        second, best = np.sort(logits, axis=1)[:, -2:].T
        assert (best - second).min() > CLEAR
        assert output == logits.argmax(axis=1).tolist()
        assert len(output) == TOKENS
    assert_all_free(llm)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and what transformers' own `generate` makes of the prompts."""
    folder = tmp_path_factory.mktemp("plain")
    save_oracle("plain", folder)
    oracle = load_oracle(folder)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        # Without a mask it would leave out the ids that equal pad_token_id.
        settings = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        tokens = oracle.generate(ids, do_sample=False, max_new_tokens=TOKENS, **settings)
        expected.append(tokens[0, len(prompt) :].tolist())
    assert len({str(tokens) for tokens in expected}) == len(PROMPTS)
    return folder, expected


@pytest.mark.parametrize(
    ("data", "model"), [(2, 2), *[pytest.param(*shape, marks=pytest.mark.slow) for shape in ((1, 1), (4, 1), (1, 4))]]
)
def test_64_greedy_tokens_equal_transformers_generate_on_every_mesh(
    plain: tuple[Path, list[list[int]]], data: int, model: int
) -> None:
    folder, expected = plain
    llm = llm_of(folder, data, model)
    found = [result.outputs[0].token_ids for result in llm.generate(PROMPTS * 2, greedy(TOKENS))]
    assert found == expected * 2
    assert_all_free(llm)
