"""LLM: generate text from Python, with vLLM's names."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from tqdm import tqdm

from qwenjax.chat_template import message_text
from qwenjax.checkpoint.resolve import resolve
from qwenjax.engine.build import EngineOptions, build_engine, check_options
from qwenjax.logits import sequence_logits
from qwenjax.outputs import RequestOutput, SpeculationStats
from qwenjax.sampling_params import SamplingParams
from qwenjax.tokenizer import read_json

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

# What generation_config.json says of sampling, and what else Qwen's files hold.
_SETTINGS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
_NO_SETTINGS = {"do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}


class LLM:
    """A model, loaded and compiled, that turns prompts into text.

    >>> llm = LLM("Qwen/Qwen3-30B-A3B")
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str | Path, **options: Unpack[EngineOptions]) -> None:
        """Loads `model`, a checkpoint folder or a Hugging Face repo id, and compiles its programs.

        options: those of qwenjax.engine.build.EngineOptions, such as data_parallel=4, max_model_len=2048,
        quantization="mxfp8" or num_speculative_tokens=2; all have defaults.

        Raises ConfigError, CheckpointError, MeshError or ValueError, each a ValueError that names the way out.
        """
        check_options(options)
        folder = resolve(model, options.pop("revision", None))
        self._default_sampling_params = default_sampling_params(folder)  # first: weights take minutes to read
        self._engine = build_engine(folder, **options)
        self.tokenizer, self.model, self.config = self._engine.tokenizer, self._engine.model, self._engine.config
        self._calls = itertools.count()
        self._arrived: dict[str, RequestOutput] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes each prompt (text or token ids); results in the prompts' order.

        sampling_params: one for all or one each; get_default_sampling_params() by default. Raises ValueError,
        naming the field and its limit, before anything is run.
        """
        results: dict[str, RequestOutput] = {}
        ids = self._add(prompts, sampling_params)
        with tqdm(total=len(ids), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            for output in self._run(ids):
                if output.finished:
                    results[output.request_id] = output
                    bar.update()
        return [results[request_id] for request_id in ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As generate, yielding each request as it grows; outputs are cumulative, the last of each `finished`.

        The requests are checked and queued at once; closing the iterator aborts them.
        """
        return self._run(self._add(prompts, sampling_params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """generate on one conversation or several, rendered by the checkpoint's chat template.

        A message's content is text, or a list of parts {"type": "text", "text": ...}, a line each.
        chat_template_kwargs reach the template: {"enable_thinking": False}. Raises ValueError for what the template
        refuses, and as generate does.
        """
        prompts = self.chat_prompts(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """The token ids that `chat` would complete, for `stream`."""
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"messages is {messages!r}; it is a list of at least one message, or of conversations")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        texts = [
            self.tokenizer.apply_chat_template(
                _with_text(conversation), tools, add_generation_prompt, **(chat_template_kwargs or {})
            )
            for conversation in conversations
        ]
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [tokens, vocab]: row i holds the logits of the token after token_ids[i]."""
        return sequence_logits(self.model, [token_ids])[0]

    @property
    def speculation(self) -> SpeculationStats | None:
        """How drafts have fared over all requests so far; None where none are made."""
        return self._engine.speculation if self.config.num_speculative_tokens else None

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with what the checkpoint's generation_config.json says instead; greedy where that has
        do_sample false."""
        return self._default_sampling_params

    def _add(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[str]:
        """Queues the requests, or none of them where one is refused."""
        several = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self._default_sampling_params] * len(several)
        elif isinstance(sampling_params, list | tuple):
            params = list(sampling_params)
        else:
            kind = type(sampling_params).__name__
            raise ValueError(f"sampling_params is a {kind}; it is SamplingParams, or a list of them")
        if len(params) != len(several):
            raise ValueError(f"sampling_params holds {len(params)} items for {len(several)} prompts")
        for place, (prompt, own) in enumerate(zip(several, params, strict=True)):
            if not _is_prompt(prompt):
                raise ValueError(f"prompts[{place}] is a {type(prompt).__name__}; it is text or token ids")
            if not isinstance(own, SamplingParams):
                raise ValueError(f"sampling_params holds a {type(own).__name__}; it holds SamplingParams")
        call, requests = next(self._calls), []
        for index, (prompt, own) in enumerate(zip(several, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            try:
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                self._engine.check(ids, own)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}" if len(several) > 1 else error) from None
            requests.append((f"{call}-{index}", ids, own, text))
        for request in requests:
            self._engine.add_request(*request)
        return [request[0] for request in requests]

    def _run(self, request_ids: list[str]) -> Iterator[RequestOutput]:
        """The requests' outputs as they come. Ends the requests when it is closed or dropped, begun or not."""
        outputs = self._outputs(request_ids)
        next(outputs)  # into its try block: closing a generator that has not begun runs none of it
        return outputs

    def _outputs(self, request_ids: list[str]) -> Iterator[Any]:
        unfinished = dict.fromkeys(request_ids)
        try:
            yield None
            while unfinished:
                for output in self._arrived_of(list(unfinished)):
                    if output.finished:
                        del unfinished[output.request_id]
                    yield output
        finally:
            self._engine.abort(unfinished)
            for request_id in unfinished:
                self._arrived.pop(request_id, None)

    def _arrived_of(self, request_ids: list[str]) -> list[RequestOutput]:
        """The newest outputs of these requests. Those of others, which a step brings too, wait for their reader."""
        while not any(request_id in self._arrived for request_id in request_ids):
            self._arrived |= {output.request_id: output for output in self._engine.step()}
        return [self._arrived.pop(request_id) for request_id in request_ids if request_id in self._arrived]


def prompt_index(output: RequestOutput) -> int:
    """The place of an output's prompt among those of its generate or stream call."""
    return int(output.request_id.rsplit("-", 1)[1])


def default_sampling_params(folder: Path) -> SamplingParams:
    """What LLM.get_default_sampling_params gives for a checkpoint folder. Raises ValueError for a bad setting."""
    path = folder / "generation_config.json"
    found = {name: value for name, value in read_json(path).items() if value is not None}
    settings = {name: found[name] for name in _SETTINGS if name in found}
    if found.get("do_sample") is False:
        settings["temperature"] = 0.0
    if unknown := sorted(found.keys() - _SETTINGS - _NO_SETTINGS):
        logger.warning("%s has settings that qwenjax leaves out: %s", path, ", ".join(unknown))
    try:
        return SamplingParams(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _with_text(conversation: Any) -> Any:
    """The conversation with every message's content as one string. What is no conversation the template refuses."""
    if not isinstance(conversation, list | tuple):
        return conversation
    messages = []
    for place, message in enumerate(conversation):
        if isinstance(message, Mapping) and message.get("content") is not None:
            try:
                message = {**message, "content": message_text(message["content"])}
            except ValueError as error:
                raise ValueError(f"messages[{place}].{error}") from None
        messages.append(message)
    return messages


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a list of numbers is one prompt of token ids."""
    if not _is_prompt(prompts):
        raise ValueError(f"prompts is a {type(prompts).__name__}; it is text, token ids, or a list of such")
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Number)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_prompt(value: object) -> bool:
    """Whether a value is text or a row of items; bytes would be a row of ids to Python, and are neither."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, str | Sequence) and not isinstance(value, bytes | bytearray | memoryview)
