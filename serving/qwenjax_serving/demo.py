"""What `make demo` runs: the small model that ships with the project, with speculative decoding and without."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import qwenjax
from qwenjax import LLM, SamplingParams
from qwenjax_serving.commands.generate import figures, show

_PROMPT = "The king went up to the city, and"
_TOKENS = 120


def tiny_model() -> Path:
    """The folder of the small model: beside the package in a checkout, inside it in a wheel.

    Raises FileNotFoundError where the installation lacks it.
    """
    package = Path(qwenjax.__file__).parent
    for folder in (package.parent / "configs" / "tiny", package / "configs" / "tiny"):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(f"configs/tiny is neither beside nor in {package}; install qwenjax anew")


def main() -> int:
    """Streams one continuation with drafts and one without, each with its figures: the text is the same."""
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    speeds, texts = [], []
    for num_drafts in (1, 0):
        print(f"\nqwenjax {'with' if num_drafts else 'without'} speculative decoding", file=sys.stderr)
        # float32: a CPU has few bf16 instructions, and XLA converts the weights anew at every step.
        llm = LLM(tiny_model(), dtype="float32", num_speculative_tokens=num_drafts, max_num_seqs=1)
        print(_PROMPT, end="", flush=True)
        start = time.monotonic()
        results = show(llm, [_PROMPT], params, sys.stdout)
        speeds.append(sum(len(r.outputs[0].token_ids) for r in results) / (time.monotonic() - start))
        texts.append(results[0].outputs[0].token_ids)
        print(figures(results, time.monotonic() - start, llm.speculation), file=sys.stderr)
    same = "the same text" if texts[0] == texts[1] else "ANOTHER TEXT: please report this"
    print(f"\nSpeculative decoding: {speeds[0] / speeds[1]:.2f}x the speed, {same}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
