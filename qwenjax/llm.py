"""LLM: generate text from Python, with vLLM's names."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from qwenjax.cache import PAGE_SIZE
from qwenjax.checkpoint.load import has_mtp_head, load_model
from qwenjax.checkpoint.resolve import resolve
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.engine.engine import Engine, EngineConfig
from qwenjax.logits import sequence_logits
from qwenjax.mesh import MODEL, make_mesh
from qwenjax.outputs import RequestOutput, SpeculationStats
from qwenjax.sampling_params import SamplingParams
from qwenjax.sharded_model import ShardedModel
from qwenjax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_DEFAULT_DRAFTS = 1  # costs least where it does not pay, see bench/results/speculative-cpu.txt
_CPU_CACHE_BYTES = 1 << 30  # a laptop's share for the KV cache; a GPU gives what the weights leave
_GPU_CACHE_SHARE = 0.85  # of what is free once the weights are there: the rest is for activations
# One prefill call. On a CPU the time of a call is what a short prompt waits for, on a GPU larger calls fill it.
_BATCHED_TOKENS = {"cpu": 256, "gpu": 2048}


class LLM:
    """A model, loaded and compiled, that turns prompts into text.

    >>> llm = LLM("Qwen/Qwen3-30B-A3B")
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | Path,
        *,
        data_parallel: int = 1,
        model_parallel: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        num_steps: int = 8,
        num_pages: int | None = None,
        page_size: int = PAGE_SIZE,
        num_speculative_tokens: int | None = None,
        speculation_max_batch: int = 32,
        revision: str | None = None,
        progress: bool = True,
    ) -> None:
        """Loads `model`, a checkpoint folder or a Hugging Face repo id, and compiles its programs.

        data_parallel x model_parallel: the mesh; experts are spread over all of it. dtype: "auto" (config.json's),
        "bfloat16", "float16" or "float32", of weights, activations and cache. quantization: "mxfp8" quantises the
        linear layers while loading; checkpoints that are quantised need no word. max_model_len: tokens of a prompt and
        its output, by default the model's max_position_embeddings. max_num_seqs: sequences that decode together on
        each data rank. max_num_batched_tokens: of one prefill call. num_steps: tokens a sequence draws in one decode
        call. num_pages: KV pages of page_size tokens on each data rank, by default what the memory allows.
        num_speculative_tokens: drafts of a decode step by the checkpoint's multi-token-prediction head, by default 1
        where it has one, else 0; speculation_max_batch: sequences on a data rank beyond which steps do without.
        progress: bars for loading and compiling.

        Raises ConfigError, CheckpointError, MeshError or ValueError, each a ValueError that names the way out.
        """
        if dtype != "auto" and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; it may be 'auto', {', '.join(map(repr, DTYPES))}")
        folder = resolve(model, revision)
        config = ModelConfig.from_folder(folder)
        longest = config.max_position_embeddings
        if max_model_len is not None and not 1 < max_model_len <= longest:
            raise ValueError(f"max_model_len is {max_model_len}; the model's max_position_embeddings is {longest}")
        self.tokenizer = Tokenizer.from_folder(folder)
        self._default_sampling_params = default_sampling_params(folder)
        mesh = make_mesh(data_parallel, model_parallel)
        platform = "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"
        sizes = EngineConfig(  # here, so that bad ones are refused before the weights are read
            max_model_len=longest if max_model_len is None else max_model_len,
            max_num_seqs=max_num_seqs,
            num_pages=1 if num_pages is None else num_pages,
            page_size=page_size,
            max_num_batched_tokens=_BATCHED_TOKENS[platform]
            if max_num_batched_tokens is None
            else max_num_batched_tokens,
            num_steps=num_steps,
            num_speculative_tokens=num_speculative_tokens or 0,
            speculation_max_batch=speculation_max_batch,
        )
        num_drafts = self._num_drafts(folder, config, num_speculative_tokens)
        own_dtype = None if dtype == "auto" else DTYPES[dtype]
        self.model = load_model(folder, mesh, own_dtype, quantization=quantization, progress=progress)
        if num_pages is None:
            num_pages = min(max_num_seqs * sizes.max_pages, _pages_that_fit(self.model, page_size))
        self.config = replace(sizes, num_pages=num_pages, num_speculative_tokens=num_drafts)
        enable_compilation_cache()
        self._engine = Engine(self.model, self.tokenizer, self.config)
        self._engine.warm_up(progress)
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
        if not messages:
            raise ValueError("messages is empty; it holds at least one message")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [
            self.tokenizer.apply_chat_template(
                conversation, tools, add_generation_prompt, **(chat_template_kwargs or {})
            )
            for conversation in conversations
        ]
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [tokens, vocab]: row i holds the logits of the token after token_ids[i]."""
        return sequence_logits(self.model, [token_ids])[0]

    def _num_drafts(self, folder: Path, config: ModelConfig, asked: int | None) -> int:
        has_head = has_mtp_head(folder, config)
        if asked and not has_head:
            raise ValueError(
                f"num_speculative_tokens is {asked}, and {folder} has no multi-token-prediction head (mtp.* tensors); "
                "leave it out, or train one with `qwenjax train mtp`"
            )
        if asked is None and not has_head:
            logger.info("%s has no multi-token-prediction head: speculative decoding is off", folder)
        return asked if asked is not None else _DEFAULT_DRAFTS * has_head

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
        else:
            params = list(sampling_params)
        if len(params) != len(several):
            raise ValueError(f"sampling_params holds {len(params)} items for {len(several)} prompts")
        for place, (prompt, own) in enumerate(zip(several, params, strict=True)):
            if not isinstance(prompt, str | Sequence | np.ndarray):
                raise ValueError(f"prompt {place} is a {type(prompt).__name__}; it is text or token ids")
            if not isinstance(own, SamplingParams):
                raise ValueError(f"sampling_params holds a {type(own).__name__}; it holds SamplingParams")
        call, requests = next(self._calls), []
        for index, (prompt, own) in enumerate(zip(several, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            self._engine.check(ids, own)
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
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    settings = {name: found[name] for name in names if found.get(name) is not None}
    if found.get("do_sample") is False:
        settings["temperature"] = 0.0
    try:
        return SamplingParams(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a list of numbers is one prompt of token ids."""
    if not isinstance(prompts, str | Sequence | np.ndarray):
        raise ValueError(f"prompts is a {type(prompts).__name__}; it is text, token ids, or a list of such")
    if isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], str | Sequence | np.ndarray)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _pages_that_fit(model: ShardedModel, page_size: int) -> int:
    """Pages of a data rank's cache that the memory of its devices holds, with the weights in place."""
    config, device = model.config, model.mesh.devices.flat[0]
    kv_heads = max(1, config.num_key_value_heads // model.mesh.shape[MODEL])
    page_bytes = 2 * config.num_hidden_layers * kv_heads * page_size * config.head_dim * jnp.dtype(model.dtype).itemsize
    free = _CPU_CACHE_BYTES
    if device.platform != "cpu" and (stats := device.memory_stats()):
        free = int(_GPU_CACHE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    return max(1, free // page_bytes)


def enable_compilation_cache(folder: str | Path | None = None) -> None:
    """Keeps compiled programs in `folder` (default ~/.cache/qwenjax/programs), so that a second start is quick.

    A folder that JAX_COMPILATION_CACHE_DIR or jax.config names already stays.
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 - JAX declares no type for it
        place = Path(folder) if folder else Path.home() / ".cache" / "qwenjax" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(place))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
