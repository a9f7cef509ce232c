"""The evaluation: one text through the model as it is, and through what each format leaves of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from qwenjax.config import ModelConfig
from qwenjax.evaluate.fake_quantise import ACTIVATIONS, check_format, decoded, fake_quantised
from qwenjax.evaluate.hidden import Scores, compare, hidden_states
from qwenjax.evaluate.windows import Window, windows
from qwenjax.logits import check_sequences
from qwenjax.quant import FORMATS
from qwenjax.sharded_model import ShardedModel

logger = logging.getLogger(__name__)

BASE = "base"
DEFAULT_CONTEXT = 2048  # tokens of a window, where the model reads as many: what published perplexities use


@dataclass(frozen=True)
class Variant:
    """What is quantised: the linear layers' weights to `format`, and their inputs as well where `activations`."""

    format: str
    activations: bool = False


@dataclass(frozen=True)
class Result:
    """Means over the scored tokens. nats: negative log-likelihood, its exponential the perplexity; kl: KL(base ||
    variant) in nats; top1: share of places at which both find the same token most likely.

    bits_per_byte: nats in bits over the bytes of the scored tokens; None where their bytes are not known.
    """

    format: str
    activations: bool
    nats: float
    perplexity: float
    bits_per_byte: float | None
    kl: float
    top1: float


@dataclass(frozen=True)
class Evaluation:
    """Results, the base model's first, and how they came about. tokens: those scored, in `windows` windows of at most
    `context` tokens, `stride` apart; dtype: of the base model's parameters and activations."""

    results: tuple[Result, ...]
    tokens: int
    windows: int
    context: int
    stride: int
    dtype: str


def all_variants(formats: Sequence[str] = tuple(FORMATS)) -> list[Variant]:
    """Each format for weights alone, then with activations. Raises ValueError for an unknown one."""
    return [Variant(check_format(name), activations) for activations in (False, True) for name in formats]


def evaluate(
    model: ShardedModel,
    ids: Sequence[int],
    variants: Sequence[Variant] | None = None,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int = 1,
    num_bytes: int | None = None,
    progress: bool = False,
) -> Evaluation:
    """Runs a text, token ids, through `model` and its variants (default: all there are).

    context: tokens of a window, by default max_position_embeddings or 2,048, whichever is less. stride: tokens between
    windows, by default half the context. batch: windows a call on each data rank. num_bytes: bytes of ids[1:], for bits
    per byte. Takes memory for two models: a variant shares with the base what is not quantised. Raises ValueError for
    ids, windows, formats or blocks that do not fit the model.
    """
    context, stride, cuts = cut(model.config, ids, context, stride, batch)
    variants = all_variants() if variants is None else variants
    for variant in variants:
        check_format(variant.format)
    targets = np.asarray(ids[1:], np.int32)
    model = decoded(model)
    with tqdm(
        total=len(targets) * (1 + len(variants)), unit="token", unit_scale=True, desc="Evaluating", disable=not progress
    ) as bar:
        base = hidden_states(model, ids, cuts, batch, bar.update)
        results = [_result(Variant(BASE), compare(model, base, base, targets), num_bytes)]
        for variant in variants:
            bar.set_postfix_str(variant.format + (" with activations" if variant.activations else ""))
            kept_as = ACTIVATIONS[variant.format] if variant.activations else "model"
            changed = fake_quantised(model, variant.format, kept_as)
            other = hidden_states(changed, ids, cuts, batch, bar.update)
            del changed  # before the next is made
            results.append(_result(variant, compare(model, base, other, targets), num_bytes))
    return Evaluation(tuple(results), len(targets), len(cuts), context, stride, str(model.dtype))


def cut(
    config: ModelConfig, ids: Sequence[int], context: int | None, stride: int | None, batch: int
) -> tuple[int, int, list[Window]]:
    """The context and stride of an evaluation, and its windows. Raises ValueError for what the model cannot read."""
    longest = config.max_position_embeddings
    context = min(longest, DEFAULT_CONTEXT) if context is None else context
    if not 2 <= context <= longest:
        raise ValueError(f"context is {context}; it is at least 2 and at most max_position_embeddings, {longest}")
    stride = max(1, context // 2) if stride is None else stride
    if batch < 1:
        raise ValueError(f"batch is {batch}; it is at least 1")
    found = list(windows(len(ids), context, stride))
    check_sequences(config, [ids[window.start : window.stop] for window in found])
    return context, stride, found


def _result(variant: Variant, scores: Scores, num_bytes: int | None) -> Result:
    nats, kl, top1 = (float(np.mean(score, dtype=np.float64)) for score in scores)
    total_bits = nats * len(scores.nats) / math.log(2)
    perplexity = math.exp(nats) if nats < 700 else math.inf
    return Result(
        variant.format, variant.activations, nats, perplexity, total_bits / num_bytes if num_bytes else None, kl, top1
    )
