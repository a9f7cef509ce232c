"""What a request asks of the sampler, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

GREEDY_BELOW = 1e-5  # a temperature under this is greedy decoding, vLLM's _SAMPLING_EPS
MAX_LOGPROBS = 20  # vLLM's default of max_logprobs and OpenAI's limit of top_logprobs
MAX_LOGIT_BIAS = 1024  # width of the device's bias table, as vLLM's
MAX_N = 16_384  # outputs of a prompt, as vLLM's VLLM_MAX_N_SEQUENCES
MAX_END_IDS = 128  # width of the device's table of EOS and stop ids, as vLLM's
_FLOAT32_MAX = 3.4028234663852886e38
_MAX_BIAS = 1e30  # finite in float32 with room for any logit


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field acts: nothing is accepted and ignored.

    n: outputs per prompt, 1 to 16,384; more than 1 needs a temperature, since greedy outputs are all the same.
    presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logits of ids in the output, once, or
        once per occurrence.
    repetition_penalty: in [1e-6, 1e6]; divides the positive and multiplies the negative logits of ids in the
        prompt or the output.
    temperature: at least 0; below 1e-5 is greedy.
    top_p: in (0, 1].
    top_k: 0 and -1 are off, as is any value from the vocabulary's size up.
    min_p: in [0, 1].
    seed: in [0, 2^64), or None for one drawn by the engine. The same seed gives the same output.
    stop: strings that end the output and, unless `include_stop_str_in_output`, are cut from it.
    stop_token_ids: ids that end the output, besides the model's EOS ids.
    ignore_eos: EOS ids do not end the output.
    max_tokens: at least 1, or None for as many as the context holds.
    min_tokens: EOS and stop ids cannot be drawn, and stop strings do not match, before this many tokens.
    logprobs, prompt_logprobs: how many of the most likely ids to report at each output or prompt token,
        besides the token itself; 0 reports the token alone, None nothing.
    skip_special_tokens: special tokens leave no text.
    speculation: draft tokens for this request where the engine speculates; the output is the same either way.
    logit_bias: {id: bias} added to the logits, at most 1,024 of them, each within 1e30 of 0.

    `stop` and `stop_token_ids` are kept as tuples. NumPy numbers are taken as Python's.

    Raises ValueError, naming the field, its value and its limit.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculation: bool = True
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        self._keep_int("n", 1, MAX_N)
        self._keep_float("presence_penalty", -2.0, 2.0)
        self._keep_float("frequency_penalty", -2.0, 2.0)
        # A penalty that float32 flushes to zero would turn logits into NaN.
        self._keep_float("repetition_penalty", 1e-6, 1e6)
        self._keep_float("temperature", 0.0, _FLOAT32_MAX)
        self._keep_float("top_p", 0.0, 1.0, above_low=True)
        self._keep_int("top_k", -1)
        self._keep_float("min_p", 0.0, 1.0)
        self._keep_int("seed", 0, 2**64 - 1, optional=True)
        self._keep_int("max_tokens", 1, optional=True)
        self._keep_int("min_tokens", 0)
        self._keep_int("logprobs", 0, optional=True)
        self._keep_int("prompt_logprobs", 0, optional=True)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is True or False")
        self._keep("stop", _stop_strings(self.stop))
        self._keep("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._keep("logit_bias", _logit_bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it is at most max_tokens, {self.max_tokens}")
        if self.greedy and self.n > 1:
            raise ValueError(f"n is {self.n}; it is 1 at temperature 0, where all outputs would be the same")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature < GREEDY_BELOW

    @property
    def only_draws(self) -> bool:
        """Whether at most a temperature and truncation come between the model's logits and the draw, and nothing is
        asked besides."""
        edits = self.has_penalties or self.min_tokens > 0 or bool(self.logit_bias)
        return not edits and self.logprobs is None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        return _stop_strings(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs to know which ids the prompt and the output hold."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def end_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an output: `stop_token_ids`, then the model's EOS ids unless `ignore_eos`."""
        return tuple(dict.fromkeys([*(self.stop_token_ids or ()), *(() if self.ignore_eos else eos_ids)]))

    def resolve_max_tokens(self, prompt_len: int, max_model_len: int) -> int:
        """`max_tokens`, or all that the context holds after a prompt of `prompt_len` tokens."""
        return max_model_len - prompt_len if self.max_tokens is None else self.max_tokens

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _keep_int(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        limit += " or None" if optional else ""
        if not _is_integer(value):
            raise ValueError(f"{name} is {value!r}; it is an integer {limit}")
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError(f"{name} is {number}; it is {limit}")
        self._keep(name, number)

    def _keep_float(self, name: str, low: float, high: float, above_low: bool = False) -> None:
        value = getattr(self, name)
        limit = f"in {'(' if above_low else '['}{low:g}, {high:g}]"
        number = _as_float(value)
        if number is None:
            raise ValueError(f"{name} is {value!r}; it is a number {limit}")
        if not low <= number <= high or (above_low and number == low):  # NaN fails every comparison
            raise ValueError(f"{name} is {number}; it is {limit}")
        self._keep(name, number)


def validate_for(
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int],
    vocab_size: int,
    max_model_len: int,
    eos_ids: Sequence[int] = (),
    max_logprobs: int = MAX_LOGPROBS,
) -> None:
    """Checks what depends on the prompt and the model, before any work is done.

    Raises ValueError, naming the field, its value and its limit.
    """
    prompt_len = len(prompt_token_ids)
    if not prompt_len:
        raise ValueError("prompt is empty; it has at least one token")
    for name, ids in (
        ("prompt_token_ids", prompt_token_ids),
        ("stop_token_ids", params.stop_token_ids or ()),
        ("logit_bias", params.logit_bias or ()),
    ):
        for token_id in ids:
            if type(token_id) is not int and not _is_integer(token_id):  # the first is quick, prompts are long
                raise ValueError(f"{name} holds {token_id!r}; ids are integers")
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} holds id {token_id}; the model's ids are 0 to {vocab_size - 1}")
    if prompt_len >= max_model_len:
        raise ValueError(
            f"prompt has {prompt_len} tokens; the context of {max_model_len} holds at most {max_model_len - 1} and "
            f"one to generate"
        )
    if prompt_len + params.resolve_max_tokens(prompt_len, max_model_len) > max_model_len:
        raise ValueError(
            f"max_tokens is {params.max_tokens}; after a prompt of {prompt_len} tokens the context of "
            f"{max_model_len} holds {max_model_len - prompt_len} more; lower max_tokens or set it to None"
        )
    if prompt_len + params.min_tokens > max_model_len:
        room = max_model_len - prompt_len
        raise ValueError(f"min_tokens is {params.min_tokens}; the context holds {room} after the prompt")
    for name in ("logprobs", "prompt_logprobs"):
        limit = min(max_logprobs, vocab_size)
        if (getattr(params, name) or 0) > limit:
            raise ValueError(f"{name} is {getattr(params, name)}; it is at most {limit}")
    num_end_ids = len(params.end_ids(eos_ids))
    if num_end_ids > MAX_END_IDS:
        raise ValueError(f"stop_token_ids and EOS make {num_end_ids} ids; together at most {MAX_END_IDS}")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_float(value: object) -> float | None:
    """None for what is no number; infinity for integers beyond floats."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"stop is {stop!r}; it is a string or a list of strings")
    if not all(strings):
        raise ValueError(f"stop is {stop!r}; a stop string has at least one character")
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ValueError(f"{name} is {ids!r}; it is a list of ids")
    for token_id in ids:
        if not _is_integer(token_id) or token_id < 0:
            raise ValueError(f"{name} holds {token_id!r}; ids are integers of at least 0")
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))


def _logit_bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {bias!r}; it is a dict of id to bias")
    for token_id, value in bias.items():
        if not _is_integer(token_id) or token_id < 0:
            raise ValueError(f"logit_bias holds id {token_id!r}; ids are integers of at least 0")
        number = _as_float(value)
        if number is None or not abs(number) <= _MAX_BIAS:
            raise ValueError(f"logit_bias[{token_id}] is {value!r}; it is a number within {_MAX_BIAS:g} of 0")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias holds {len(bias)} ids; it holds at most {MAX_LOGIT_BIAS}")
    return {int(token_id): float(value) for token_id, value in bias.items()}
