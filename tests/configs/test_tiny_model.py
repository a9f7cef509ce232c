"""The small model that ships with the project: its files, its logits, its drafts and its tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.checkpoint.load import load_model
from qwenjax.checkpoint.safetensors import Checkpoint
from qwenjax.config import ModelConfig
from qwenjax.logits import sequence_logits
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel, by_name, from_names
from qwenjax.tokenizer import Tokenizer
from qwenjax.train.evaluate import draft_acceptance, greedy_continuations

FOLDER = Path(__file__).parents[2] / "configs" / "tiny"
PROMPTS = (
    "It was a cold night, and the rain had not ceased to fall upon the town when the old man came to the door",
    "And it came to pass in those days, that there went out a man from the city, and he said unto the people",
    "The young lady had been expected by her aunt for more than an hour, and her mother was beginning to fear",
    "The king sat upon his throne, and all his servants stood before him; but the youngest of the princes was",
)


@pytest.fixture(scope="module")
def model() -> ShardedModel:
    return load_model(FOLDER, make_mesh(), np.float32, progress=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


def prompt_ids(tokenizer: Tokenizer) -> np.ndarray:
    return np.array([tokenizer.encode(prompt)[:20] for prompt in PROMPTS])


def test_files_are_of_the_size_and_shape_promised() -> None:
    config = ModelConfig.from_folder(FOLDER)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        256,
        8,
        2,
        64,
    )
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (16, 4, 128)
    assert config.max_position_embeddings == 2048
    assert config.mtp_num_hidden_layers == 1
    shards = sorted(FOLDER.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in shards]
    assert max(sizes) <= 12e6
    assert sum(sizes) <= 16e6
    assert {info.dtype.name for info in Checkpoint(FOLDER).tensors.values()} == {"bfloat16"}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file() and path not in shards) < 1e6


def test_logits_equal_those_of_transformers(model: ShardedModel, tokenizer: Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    oracle, report = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    # The head is all that transformers has no place for.
    assert all(name.startswith("mtp.") for name in report["unexpected_keys"])
    ids = prompt_ids(tokenizer)
    with torch.no_grad():
        wanted = oracle(torch.tensor(ids)).logits.numpy()
    for found, want in zip(sequence_logits(model, ids.tolist()), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=2e-3)


def test_tokenizer_equals_that_of_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(FOLDER)
    messages = [
        {"role": "system", "content": "Answer in a few words."},
        {"role": "user", "content": "What does river mean?"},
        {"role": "assistant", "content": "<think>\nA noun.\n</think>\n\nA large stream of water."},
        {"role": "user", "content": "And l'été, 北京 or 😀?"},
    ]
    for thinking in (True, False):
        text = tokenizer.apply_chat_template(messages, enable_thinking=thinking)
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
        assert text == oracle.apply_chat_template(messages, **options)
        assert text.endswith("<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n\n"))
        assert "A noun." not in text  # of an earlier answer, as Qwen3's template has it
        assert tokenizer.encode(text, add_special_tokens=False) == oracle(text)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    import unicodedata

    tokenizer = Tokenizer.from_folder(FOLDER) if not _TOKENIZER else _TOKENIZER[0]
    _TOKENIZER[:] = [tokenizer]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == unicodedata.normalize("NFC", text)


_TOKENIZER: list[Tokenizer] = []


def test_special_tokens_are_single_ids_and_end_the_vocabulary(tokenizer: Tokenizer) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    names += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    assert [tokenizer.encode(name) for name in names] == [[4087 + i] for i in range(9)]
    assert tokenizer.vocab_size == 4096 == ModelConfig.from_folder(FOLDER).vocab_size
    assert tokenizer.eos_ids == (4089, 4087)
    assert tokenizer.special_ids == {4087, 4088, 4089}  # as Qwen3: a thought's marks are text


COMMON_WORDS = """a about after all an and any are as at be been before but by came can could day did do for from god
good great had has have he her him his i if in into is it king know lord made man may me men more my no not now of on
one or our out over people said say see shall she should so some such than that the thee their them then there they
thing this thou time to up upon us very was we were what when which who will with would you"""


def test_model_writes_english(model: ShardedModel, tokenizer: Tokenizer) -> None:
    """Half of the words that it goes on with are among the commonest: noise would hold almost none."""
    sequences = greedy_continuations(model, prompt_ids(tokenizer), 40)
    words = tokenizer.decode(sequences[:, 20:].reshape(-1).tolist()).lower().split()
    assert len(words) > 80
    common = set(COMMON_WORDS.split())
    assert np.mean([word.strip('.,;:!?"') in common for word in words]) > 0.5


def test_head_drafts_what_the_model_goes_on_to_say(model: ShardedModel, tokenizer: Tokenizer) -> None:
    sequences = greedy_continuations(model, prompt_ids(tokenizer), 60)
    first, second = draft_acceptance(model, sequences, 20, 2)
    assert first >= 0.55
    assert 0.3 < second < first
    shuffled = {
        name: jax.numpy.asarray(np.random.default_rng(0).permutation(np.asarray(value).ravel()).reshape(value.shape))
        if name.startswith("mtp.")
        else value
        for name, value in by_name(model.state).items()
    }
    # A head of the same weights in another order accepts next to nothing: the figure is the training's.
    broken = replace(model, state=from_names(model.state, shuffled))
    assert draft_acceptance(broken, sequences, 20, 1)[0] < 0.05


def test_shape_of_the_record_of_sources() -> None:
    record = json.loads((FOLDER / "reproduce" / "sources.json").read_text("utf-8"))
    for source in record["sources"]:
        assert source["version"]
        assert "GPL" not in source["licence"] or "unused" in source["licence"]
    assert sum(source["held_out_bytes"] for source in record["sources"]) > 1e6
