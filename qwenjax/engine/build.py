"""From a checkpoint to an engine that is ready: weights loaded, sizes settled, programs compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, get_origin, get_type_hints, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from qwenjax.cache import PAGE_SIZE
from qwenjax.checkpoint.load import has_mtp_head, load_model
from qwenjax.checkpoint.resolve import resolve
from qwenjax.config import DTYPES, ModelConfig
from qwenjax.engine.config import MEASURED_SPECULATION_BATCH, EngineConfig
from qwenjax.engine.engine import Engine
from qwenjax.engine.programs import spans_processes
from qwenjax.mesh import MODEL, check_processes, make_mesh
from qwenjax.sharded_model import ShardedModel
from qwenjax.tokenizer import Tokenizer
from qwenjax_ffi.activations import ActivationFormat

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Engine)

# A step with one draft cost 1.13 to 1.24 of one without on an H200, before a layer was two calls (bench/results/
# engine-h200.md). On a CPU one draft makes 0.57 to 0.83 times the tokens a second of none
# (bench/results/speculative-cpu.txt).
_DEFAULT_DRAFTS = {"cpu": 0, "gpu": 1}
_CPU_CACHE_BYTES = 1 << 30  # a laptop's share for the KV cache; a GPU gives what the weights leave
_GPU_CACHE_SHARE = 0.85  # of what is free once the weights are there: the rest is for activations
# One prefill call. On a CPU the time of a call is what a short prompt waits for. On an H200 8,192 read long prompts 11%
# faster (bench/results/engine-h200.md); but a row is then 2,048 tokens rather than 512, which is how long a prompt that
# the prefix cache finds must be, and all of a call's rows go through the projections, whoever fills them.
_BATCHED_TOKENS = {"cpu": 256, "gpu": 2048}


class EngineOptions(TypedDict, total=False):
    """What `build_engine` and `LLM` take besides the model, each with a default.

    data_parallel x model_parallel: the mesh, 1 x 1; experts are spread over all of it. dtype: "auto" (config.json's,
    the default), "bfloat16", "float16" or "float32", of weights, activations and cache. quantization: "mxfp8" quantises
    the linear layers while loading; checkpoints that are quantised need no word. activation_format: what the inputs of
    those layers are rounded to, by default as load_model says. max_model_len: tokens of a prompt and its output, by
    default the model's max_position_embeddings. max_num_seqs: sequences that decode together on each data rank, 32.
    max_num_batched_tokens: of one prefill call, 256 on a CPU and 2,048 on a GPU, where 8,192 reads long prompts faster,
    in rows and blocks of the prefix cache four times as long. num_steps: tokens a sequence draws in one decode call
    while no request waits or is on its way to a slot, 8. num_pages: KV pages of page_size (64) tokens on each data
    rank, by default what the memory allows. enable_prefix_caching: keep prompts' pages for prompts that begin alike,
    True. num_speculative_tokens: drafts of a decode step by the checkpoint's multi-token-prediction head, by default 1
    on a GPU where it has one, else 0; speculation_max_batch: sequences on a data rank beyond which steps do without,
    256. revision: of a Hugging Face repo. progress: bars for loading and compiling, True.
    """

    data_parallel: int
    model_parallel: int
    dtype: str
    quantization: str | None
    activation_format: ActivationFormat | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    num_steps: int
    num_pages: int | None
    page_size: int
    enable_prefix_caching: bool
    num_speculative_tokens: int | None
    speculation_max_batch: int
    revision: str | None
    progress: bool


DEFAULT_OPTIONS: EngineOptions = {
    "data_parallel": 1,
    "model_parallel": 1,
    "dtype": "auto",
    "quantization": None,
    "activation_format": None,
    "max_model_len": None,
    "max_num_seqs": 32,
    "max_num_batched_tokens": None,
    "num_steps": 8,
    "num_pages": None,
    "page_size": PAGE_SIZE,
    "enable_prefix_caching": True,
    "num_speculative_tokens": None,
    "speculation_max_batch": MEASURED_SPECULATION_BATCH,
    "revision": None,
    "progress": True,
}


@overload
def build_engine(model: str | Path, **options: Unpack[EngineOptions]) -> Engine: ...


@overload
def build_engine(
    model: str | Path,
    kind: type[E],
    *,
    devices: Sequence[jax.Device] | None = None,
    loaded: ShardedModel | None = None,
    cache_share: float = 1.0,
    landing_pages: Callable[[EngineConfig], int] | None = None,
    **options: Unpack[EngineOptions],
) -> E: ...


def build_engine(
    model: str | Path,
    kind: type[Any] = Engine,
    *,
    devices: Sequence[jax.Device] | None = None,
    loaded: ShardedModel | None = None,
    cache_share: float = 1.0,
    landing_pages: Callable[[EngineConfig], int] | None = None,
    **options: Unpack[EngineOptions],
) -> Any:
    """Loads `model`, a checkpoint folder or a Hugging Face repo id, and compiles the programs of an engine of `kind`.

    devices: of which the mesh takes the first, by default all that there are. loaded: the checkpoint on this mesh, read
    for another engine with the same options, whose weights both then use. cache_share: of the memory that caches may
    have, where num_pages is not given; landing_pages: pages that may be on a device besides, on their way to its cache,
    by the engine's sizes, which are taken off then, and which have to fit beside num_pages where that is given.

    Raises ConfigError, CheckpointError, MeshError or ValueError, each a ValueError that names the way out; TypeError
    for an option that there is not.
    """
    check_options(options)
    asked: EngineOptions = {**DEFAULT_OPTIONS, **options}
    dtype, num_pages = asked["dtype"], asked["num_pages"]
    folder = resolve(model, asked["revision"])
    config = ModelConfig.from_folder(folder)
    check_max_model_len(asked["max_model_len"], config)
    tokenizer = Tokenizer.from_folder(folder)
    mesh = make_mesh(asked["data_parallel"], asked["model_parallel"], devices)
    if loaded is not None and loaded.mesh != mesh:
        raise ValueError(f"the weights are on {loaded.mesh}, and the engine's mesh is {mesh}")
    check_processes(mesh, jax.process_count())
    sizes = _sizes(asked, config.max_position_embeddings, _platform(mesh))
    num_drafts = _num_drafts(folder, config, asked["num_speculative_tokens"], _platform(mesh))
    own_dtype = None if dtype == "auto" else DTYPES[dtype]
    if loaded is None:
        loaded = load_model(
            folder,
            mesh,
            own_dtype,
            quantization=asked["quantization"],
            progress=asked["progress"],
            activation_format=asked["activation_format"],
        )
    landing = 0 if landing_pages is None else landing_pages(sizes)
    if num_pages is not None:
        _check_room(loaded, _page_bytes(loaded, sizes.page_size, num_drafts > 0), num_pages, landing)
    else:
        fitting = pages_that_fit(loaded, sizes.page_size, num_drafts > 0, cache_share)
        if fitting <= landing:
            raise ValueError(
                f"{fitting} pages fit beside the weights, and up to {landing} may be on their way to the cache: lower "
                "staging_pages or max_model_len, or give num_pages"
            )
        num_pages = min(sizes.max_num_seqs * sizes.max_pages, fitting - landing)
    enable_compilation_cache()
    engine = kind(loaded, tokenizer, replace(sizes, num_pages=num_pages, num_speculative_tokens=num_drafts))
    engine.warm_up(asked["progress"])
    return engine


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the option, its value and its limit, for what no model allows; TypeError for an option
    that there is not."""
    if unknown := set(options) - set(DEFAULT_OPTIONS):
        raise TypeError(f"unknown options {sorted(unknown)}; there are {sorted(DEFAULT_OPTIONS)}")
    hints = get_type_hints(EngineOptions)
    for name, value in options.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} is {value!r}; it is {_written(hints[name])}")
    asked: EngineOptions = {**DEFAULT_OPTIONS, **options}  # type: ignore[typeddict-item]
    for name, known in (("dtype", ("auto", *DTYPES)), ("quantization", (None, "mxfp8"))):
        if (value := options.get(name, known[0])) not in known:
            raise ValueError(f"{name} is {value!r}; it may be {', '.join(map(repr, known))}")
    for name in ("data_parallel", "model_parallel"):
        if options.get(name, 1) < 1:
            raise ValueError(f"{name} is {options[name]}; it must be at least 1")
    _sizes(asked, 1, "cpu")


def check_max_model_len(max_model_len: int | None, config: ModelConfig) -> None:
    """Raises ValueError for a context that the model does not have."""
    longest = config.max_position_embeddings
    if max_model_len is not None and not 2 <= max_model_len <= longest:
        raise ValueError(f"max_model_len is {max_model_len}; it is 2 to {longest}, the model's max_position_embeddings")


def _sizes(asked: EngineOptions, longest: int, platform: str) -> EngineConfig:
    """The engine's, but for pages that depend on the memory and drafts that depend on the checkpoint."""
    max_model_len, num_pages = asked["max_model_len"], asked["num_pages"]
    batched = asked["max_num_batched_tokens"]
    return EngineConfig(
        max_model_len=longest if max_model_len is None else max_model_len,
        max_num_seqs=asked["max_num_seqs"],
        num_pages=1 if num_pages is None else num_pages,
        page_size=asked["page_size"],
        max_num_batched_tokens=_BATCHED_TOKENS[platform] if batched is None else batched,
        num_steps=asked["num_steps"],
        num_speculative_tokens=asked["num_speculative_tokens"] or 0,
        speculation_max_batch=asked["speculation_max_batch"],
        prefix_caching=asked["enable_prefix_caching"],
        programs_by_kind=platform == "gpu",
    )


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has a type, or one of a union's, or is one of a Literal's."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_args(hint):
        return any(_fits(value, one) for one in get_args(hint))
    if hint is int:  # NumPy's too; bool is an int to Python, and not to who gives the option
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, hint)


def _written(hint: Any) -> str:
    """What _fits lets pass, in words."""
    if get_origin(hint) is Literal:
        return ", ".join(map(repr, get_args(hint)))
    if get_args(hint):
        return " or ".join(map(_written, get_args(hint)))
    return {int: "an integer", bool: "True or False", str: "a string", NoneType: "None"}[hint]


def pages_that_fit(model: ShardedModel, page_size: int, with_head: bool, share: float = 1.0) -> int:
    """Pages of a data rank's cache that a share of the memory of every device of the mesh holds, with the weights in
    place.

    with_head: the multi-token-prediction head has a layer of cache besides.
    """
    page_bytes = _page_bytes(model, page_size, with_head)
    pages = int(share * min(_cache_bytes(device) for device in model.mesh.local_devices)) // page_bytes
    if spans_processes(model.mesh):  # which have to agree
        pages = int(np.min(multihost_utils.process_allgather(np.int32(pages))))
    return max(1, pages)


def _page_bytes(model: ShardedModel, page_size: int, with_head: bool) -> int:
    """Of a page on each device."""
    config = model.config
    kv_heads = max(1, config.num_key_value_heads // model.mesh.shape[MODEL])
    layers = config.num_hidden_layers + with_head
    return int(2 * layers * kv_heads * page_size * config.head_dim * jnp.dtype(model.dtype).itemsize)


def _check_room(model: ShardedModel, page_bytes: int, num_pages: int, landing: int) -> None:
    """Raises ValueError where a device has no room for a cache of so many pages and those on their way to it."""
    free = [found for device in model.mesh.local_devices if (found := _free_bytes(device)) is not None]
    needed = (num_pages + landing) * page_bytes
    if free and needed > min(free):
        on_their_way = f", and up to {landing:,} more may be on their way to the cache" if landing else ""
        raise ValueError(
            f"num_pages is {num_pages:,}{on_their_way}: {needed:,} bytes, {page_bytes:,} a page, where a device has "
            f"{min(free):,} beside the weights; lower num_pages{', staging_pages or max_model_len' if landing else ''}"
        )


def _free_bytes(device: jax.Device) -> int | None:
    """None where the device does not say."""
    if device.platform == "cpu" or not (stats := device.memory_stats()):
        return None
    return int(stats["bytes_limit"] - stats["bytes_in_use"])


def _cache_bytes(device: jax.Device) -> int:
    free = _free_bytes(device)
    return _CPU_CACHE_BYTES if free is None else int(_GPU_CACHE_SHARE * free)


def _platform(mesh: Mesh) -> str:
    return "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"


def _num_drafts(folder: Path, config: ModelConfig, asked: int | None, platform: str) -> int:
    has_head = has_mtp_head(folder, config)
    if asked and not has_head:
        raise ValueError(
            f"num_speculative_tokens is {asked}, and {folder} has no multi-token-prediction head (mtp.* tensors); "
            "leave it out, or train one with `qwenjax train mtp`"
        )
    if asked is None and not has_head:
        logger.info("%s has no multi-token-prediction head: speculative decoding is off", folder)
    return asked if asked is not None else _DEFAULT_DRAFTS[platform] * has_head


def enable_compilation_cache(folder: str | Path | None = None) -> None:
    """Keeps compiled programs in `folder` (default ~/.cache/qwenjax/programs), so that a second start is quick.

    A folder that JAX_COMPILATION_CACHE_DIR or jax.config names already stays.
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 - JAX declares no type for it
        place = Path(folder) if folder else Path.home() / ".cache" / "qwenjax" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(place))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
