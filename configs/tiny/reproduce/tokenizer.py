"""Trains the tokenizer on gathered text and turns the text into token files: `python tokenizer.py WORK MODEL`.

MODEL receives tokenizer.json and tokenizer_config.json; WORK receives train.npy (prose and conversations),
held_out.npy and held_out.json (the bytes that held_out.npy encodes, for bits per byte).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qwenjax.train.tokens import write_tokens

VOCABULARY = 4096
# Names, order and which of them count as special follow Qwen3's tokenizer, which has more, for images and code.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Qwen2's and Qwen3's split: contractions, words with a leading mark, single digits, marks, line breaks, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of VOCABULARY ids, the added tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(PLAIN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN])
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    """What transformers reads beside tokenizer.json."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                "special": token in SPECIAL,
            }
            for token in (*SPECIAL, *PLAIN)
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }  # fmt: skip


def texts(path: Path) -> Iterator[str]:
    """The texts of gather.py's documents."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder that gather.py filled")
    parser.add_argument("model", type=Path, help="checkpoint folder for the tokenizer's files")
    args = parser.parse_args()
    work: Path = args.work
    tokenizer = train_tokenizer(text for name in ("train", "chat") for text in texts(work / f"{name}.jsonl"))
    tokenizer.save(str(args.model / "tokenizer.json"))
    config = json.dumps(tokenizer_config(tokenizer), indent=1) + "\n"
    (args.model / "tokenizer_config.json").write_text(config, "utf-8")
    end = tokenizer.token_to_id("<|endoftext|>")
    for name, files in (("train", ("train", "chat")), ("held_out", ("held_out",))):
        documents = [text for file in files for text in texts(work / f"{file}.jsonl")]
        encoded = (encoding.ids for encoding in tokenizer.encode_batch_fast(documents))
        count = write_tokens(work / f"{name}.npy", encoded, end, VOCABULARY)
        size = sum(len(text.encode()) for text in documents)
        print(f"{name}: {count:,} tokens, {size:,} bytes, {size / (count - len(documents)):.3f} bytes a token")
        (work / f"{name}.json").write_text(
            json.dumps({"tokens": count, "bytes": size, "documents": len(documents)}), "utf-8"
        )


if __name__ == "__main__":
    main()
