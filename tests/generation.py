"""What the tests of generation share: a small checkpoint with tokenizer and chat template, outputs made to order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qwenjax import LLM, SamplingParams
from qwenjax.engine.engine import Engine
from qwenjax.outputs import RequestOutput
from qwenjax.sampling import gumbel_noise
from tests.helpers import random_tensors, tiny, write_checkpoint

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_IDS = (2, 0)  # as Qwen3 has two: the end of a turn and the end of a text
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "h"), ("Ġ", "a"), ("Ġ", "w")]
TOLERANCE = 1e-4  # between the logits of cached steps and those of whole sequences
VOCABULARY = 320  # the model's; the tokenizer's ids end before it
TEMPLATE = (Path(__file__).parent / "qwenjax" / "qwen_like_chat_template.jinja").read_text(encoding="utf-8")


def backend() -> tokenizers.Tokenizer:
    """A byte-level tokenizer: the special tokens, 256 bytes, a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in MERGES)]
    made = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return made


def ids_of_bytes(text: str) -> list[int]:
    """The ids of a text's bytes, one each, without merges."""
    characters = {byte: character for character, byte in _alphabet().items()}
    return [backend().token_to_id(characters[byte]) for byte in text.encode()]


def _alphabet() -> dict[str, int]:
    from qwenjax.tokenizer import _byte_alphabet

    return _byte_alphabet()


def add_tokenizer(folder: Path) -> Path:
    """Puts tokenizer files, chat template and generation_config.json into a checkpoint folder."""
    backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": list(EOS_IDS)}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def write_folder(folder: Path, **changes: Any) -> Path:
    """A whole checkpoint of random weights, one dense layer among its three."""
    raw = tiny(vocab_size=VOCABULARY, num_hidden_layers=3, mlp_only_layers=[1], **changes)
    return add_tokenizer(write_checkpoint(folder, raw, random_tensors(raw)))


def small_llm(folder: Path, **changes: Any) -> LLM:
    """An LLM of few small programs: prompts in rows of 16 tokens, four a call, decode for 1 and 8 slots."""
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "page_size": 16, "num_pages": 512}
    return LLM(folder, **{"progress": False, **sizes, **changes})


def random_ids(length: int, seed: int = 0, vocab_size: int = VOCABULARY) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, vocab_size, length).tolist()


def greedy(max_tokens: int | None, **changes: Any) -> SamplingParams:
    """The most likely tokens, EOS or not."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def forced(token_ids: Sequence[int], **changes: Any) -> SamplingParams:
    """Parameters under which these distinct ids are drawn in this order whatever the model says.

    Biases far above any logit order them, and a repetition penalty takes each out once it is drawn. The prompt must
    hold none of them.
    """
    assert len(set(token_ids)) == len(token_ids)
    bias = {token: 1000.0 * (len(token_ids) - place) for place, token in enumerate(token_ids)}
    settings: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1e6, "max_tokens": len(token_ids)}
    return SamplingParams(logit_bias=bias, **{**settings, **changes})


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_all_free(llm: LLM) -> None:
    """No request, slot or page is in use."""
    assert_engine_free(llm._engine)


def assert_engine_free(engine: Engine) -> None:
    """No request, slot or page is in use, and every page is free or holds a prompt for later."""
    scheduler = engine.scheduler
    assert not engine.has_unfinished
    assert not engine._sequences
    assert not scheduler.waiting
    assert not scheduler.prefilling
    assert all(job is None for table in scheduler.slots for job in table)
    for pool in scheduler.pools:
        cached = [page for block in pool.blocks() for page in block.pages]
        assert sorted(pool._free + cached) == list(range(pool.num_pages))
        assert all(not block.holders for block in pool.blocks())


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [part.token_ids for part in output.outputs]


def processed(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """vLLM's steps from a model's logits to those drawn from, one row, written out in float64."""
    logits = logits.astype(np.float64)
    end_ids = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else EOS_IDS)]
    if len(output) < params.min_tokens:
        logits[end_ids] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    seen = np.array(sorted({*prompt, *output}))
    penalty = params.repetition_penalty
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.greedy:
        return logits
    logits /= params.temperature
    probabilities = np.exp(log_softmax(logits))
    logits[probabilities < params.min_p * probabilities.max()] = -np.inf
    if params.top_k > 0:
        logits[np.argsort(-logits, kind="stable")[params.top_k :]] = -np.inf
    probabilities = np.exp(log_softmax(logits))
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    logits[order[before >= params.top_p]] = -np.inf
    return logits


def assert_follows(llm: LLM, result: RequestOutput, params: SamplingParams) -> None:
    """Every token is the argmax of the processed logits, and of the noise of (seed, sample index, position)."""
    prompt = result.prompt_token_ids
    for part in result.outputs:
        assert part.token_ids
        rows = llm.logits([*prompt, *part.token_ids[:-1]])[len(prompt) - 1 :]
        for place, (row, token) in enumerate(zip(rows, part.token_ids, strict=True)):
            scores = processed(row, params, prompt, part.token_ids[:place])
            if not params.greedy:
                assert params.seed is not None
                seed = np.array([[params.seed >> 32, params.seed & 0xFFFFFFFF]], np.uint32)
                index, position = np.int32([part.index]), np.int32([len(prompt) + place])
                scores = scores + np.asarray(gumbel_noise(seed, index, position, VOCABULARY))[0]
            assert scores[token] > scores.max() - TOLERANCE, f"output {part.index}, token {place}"
