"""What the model card says, measured: `python evaluate.py WORK MODEL`.

Bits per byte of held-out text, the model's and a 5-gram model's on the same tokens; how many of the head's drafts
greedy verification accepts on the model's own greedy continuations of held-out text; and samples.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from ngram import ORDER, NGramModel

from qwenjax import LLM
from qwenjax.checkpoint.load import load_model
from qwenjax.mesh import make_mesh
from qwenjax.sharded_model import ShardedModel
from qwenjax.train.evaluate import draft_acceptance, greedy_continuations, text_nats

WINDOW = 1024
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, DEPTHS = 128, 64, 128, 3
SAMPLES = (
    "The old house stood at the end of the lane, and",
    '"I am very glad to see you," said the captain,',
)
QUESTIONS = ("Who are you?", "What does the word river mean?", "What is another word for begin?")


def bits_per_byte(model: ShardedModel, train: np.ndarray, held_out: np.ndarray, size: int) -> tuple[float, float]:
    """The model's and the n-gram model's."""
    gram = -NGramModel(train, model.config.vocab_size).log_probabilities(held_out).sum()
    return text_nats(model, held_out, WINDOW) / np.log(2) / size, gram / np.log(2) / size


def acceptance(model: ShardedModel, held_out: np.ndarray) -> list[float]:
    """Of prompts spread evenly over the held-out text."""
    starts = np.linspace(0, len(held_out) - PROMPT_TOKENS, PROMPTS).astype(int)
    prompts = np.stack([held_out[start : start + PROMPT_TOKENS] for start in starts])
    sequences = greedy_continuations(model, prompts, NEW_TOKENS)
    return draft_acceptance(model, sequences, PROMPT_TOKENS, DEPTHS)


def print_samples(folder: Path) -> None:
    """Continuations and answers, drawn with a fixed seed and the settings of generation_config.json."""
    llm = LLM(folder, max_model_len=512, max_num_seqs=len(SAMPLES) + len(QUESTIONS), progress=False)
    params = replace(llm.get_default_sampling_params(), max_tokens=100, seed=1)
    for prompt, output in zip(SAMPLES, llm.generate(SAMPLES, params), strict=True):
        print(f"\n> {prompt}\n{output.outputs[0].text}")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = llm.chat(chats, params, chat_template_kwargs={"enable_thinking": False})
    for question, output in zip(QUESTIONS, answers, strict=True):
        print(f"\n? {question}\n{output.outputs[0].text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder that tokenizer.py filled")
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    train, held_out = np.load(args.work / "train.npy"), np.load(args.work / "held_out.npy")
    size = json.loads((args.work / "held_out.json").read_text("utf-8"))["bytes"]
    model = load_model(args.model, make_mesh(), progress=False)
    shares = acceptance(model, held_out)
    print(f"drafts accepted, 1 to depth {DEPTHS}: {', '.join(f'{share:.3f}' for share in shares)}", flush=True)
    print(f"mean accepted length with {DEPTHS} drafts: {1 + sum(shares):.3f}", flush=True)
    ours, grams = bits_per_byte(model, train, held_out, size)
    print(f"held out: {ours:.4f} bits a byte; {ORDER}-gram: {grams:.4f}", flush=True)
    print_samples(args.model)


if __name__ == "__main__":
    main()
