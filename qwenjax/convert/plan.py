"""What the conversion will write, settled before the first weight is read: tensors, their shards, their sources."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from qwenjax.checkpoint import mapping
from qwenjax.checkpoint.mapping import MTP_PREFIX
from qwenjax.checkpoint.safetensors import CheckpointError, TensorInfo
from qwenjax.checkpoint.stored import FP8
from qwenjax.config import MODEL_TYPE, ModelConfig
from qwenjax.convert.source import ConvertError, Source
from qwenjax.quant.names import KINDS, fused_group, is_fused, kind_of, module_of, natural
from qwenjax_ffi.weights import MX_BLOCK

SHARD_BYTES = 4_980_000_000  # files of at most 5 GB, with 20 MB for the header: 36,000 tensors need 7
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Part:
    """One weight of the output: rows `first` to `first + shape[0]` of a source tensor, of one expert where fused.

    shape: [out, in], or a kept tensor's own. index: the leading index of a fused tensor, () otherwise.
    """

    name: str
    kind: str
    source: str
    index: tuple[int, ...]
    first: int
    shape: tuple[int, ...]
    dtype: np.dtype  # of the source
    quantised: bool

    @property
    def outputs(self) -> dict[str, TensorInfo]:
        if self.quantised:
            blocks = (*self.shape[:-1], self.shape[-1] // MX_BLOCK)
            return {
                self.name: TensorInfo(FP8, self.shape),
                self.name + "_scale": TensorInfo(np.dtype(np.uint8), blocks),
            }
        return {self.name: TensorInfo(BF16 if self.dtype == FP8 else self.dtype, self.shape)}

    @property
    def bytes_in(self) -> int:
        return TensorInfo(self.dtype, self.shape).nbytes

    @property
    def bytes_out(self) -> int:
        return sum(info.nbytes for info in self.outputs.values())


@dataclass
class Shard:
    """One file of the output."""

    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """Shards in order, and the modules whose linear layers stay as they are."""

    shards: list[Shard]
    ignore: list[str]

    @property
    def parts(self) -> list[Part]:
        return [part for shard in self.shards for part in shard.parts]

    def file_name(self, shard: int) -> str:
        return f"model-{shard + 1:05d}-of-{len(self.shards):05d}.safetensors"


def make_plan(
    source: Source, only: str | None = None, exclude: Sequence[str] = (), shard_bytes: int = SHARD_BYTES
) -> Plan:
    """Decides what is quantised and where it goes.

    Raises ConvertError for an `only` that is no kind, a glob that matches nothing, a contraction axis that 32
    does not divide, and a choice that splits matrices which engines hold as one.
    """
    if only is not None and only not in KINDS:
        raise ConvertError(f"--only {only}: choose one of {', '.join(KINDS)}")
    parts = [part for name in sorted(source.weights, key=natural) for part in _parts(source, name)]
    for glob in exclude:
        if not any(_matches(part, glob) for part in parts if part.quantised):
            raise ConvertError(f"--exclude {glob!r} matches no layer that would be quantised")
    parts = [_decide(part, only, exclude) for part in parts]
    if not any(part.quantised for part in parts):
        raise ConvertError(f"{source.folder}: nothing is left to quantise; choose --only and --exclude otherwise")
    _check_groups(parts)
    twice = {part.name for part in parts}
    if len(twice) != len(parts):
        raise ConvertError(f"{source.folder}: holds experts both fused and one by one")
    return Plan(_pack(parts, shard_bytes), _ignored(parts))


def check_model(source: Source, plan: Plan, must_be_ours: bool) -> None:
    """Raises ConfigError or CheckpointError where the result would be a model of ours and could not be loaded, or is
    none and has to be: a large conversion takes hours."""
    if source.config.get("model_type") != MODEL_TYPE and not must_be_ours:
        return
    config = ModelConfig.from_folder(source.folder)
    tensors = {part.name: TensorInfo(part.dtype, part.shape) for part in plan.parts}
    if any(name.startswith(MTP_PREFIX) for name in tensors):
        config = replace(config, mtp_num_hidden_layers=1)
    try:
        mapping.plan(config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{source.folder}: {error}") from None


def _parts(source: Source, name: str) -> list[Part]:
    """The output tensors that come from one source tensor, all that can be quantised marked so."""
    info, kind = source.checkpoint.tensors[name], kind_of(name)
    if not is_fused(name):
        return [Part(name, kind, name, (), 0, info.shape, info.dtype, kind in KINDS)]
    if len(info.shape) != 3:
        raise ConvertError(f"{name} has shape {list(info.shape)}; fused experts are [experts, out, in]")
    experts, rows, columns = info.shape
    width, hidden = (source.config.get(key) for key in ("moe_intermediate_size", "hidden_size"))
    gate_up = name.endswith("gate_up_proj")
    if width and hidden and (rows, columns) != ((2 * width, hidden) if gate_up else (hidden, width)):
        needed = "2 * moe_intermediate_size, hidden_size" if gate_up else "hidden_size, moe_intermediate_size"
        raise ConvertError(
            f"{name} has shape {list(info.shape)}; with hidden_size {hidden} and moe_intermediate_size {width} "
            f"it must be [experts, {needed}]"
        )
    base = module_of(name)
    names = ("gate_proj", "up_proj") if gate_up else ("down_proj",)
    each = rows // len(names)
    return [
        Part(f"{base}.{expert}.{part}.weight", kind, name, (expert,), i * each, (each, columns), info.dtype, True)
        for expert in range(experts)
        for i, part in enumerate(names)
    ]


def _matches(part: Part, glob: str) -> bool:
    return fnmatch.fnmatchcase(part.name, glob) or fnmatch.fnmatchcase(module_of(part.name), glob)


def _decide(part: Part, only: str | None, exclude: Sequence[str]) -> Part:
    wanted = part.quantised and only in (None, part.kind) and not any(_matches(part, glob) for glob in exclude)
    if wanted and (len(part.shape) != 2 or part.shape[-1] % MX_BLOCK):
        raise ConvertError(
            f"{part.name} has shape {list(part.shape)}: MXFP8 needs [out, in] with in a multiple of {MX_BLOCK}; "
            f"keep it as it is with --exclude '{module_of(part.name)}'"
        )
    return Part(part.name, part.kind, part.source, part.index, part.first, part.shape, part.dtype, wanted)


def _check_groups(parts: Sequence[Part]) -> None:
    seen: dict[str, Part] = {}
    for part in parts:
        if part.kind in KINDS:
            first = seen.setdefault(fused_group(module_of(part.name)), part)
            if first.quantised != part.quantised:
                kept, taken = (part, first) if first.quantised else (first, part)
                raise ConvertError(
                    f"--exclude keeps {module_of(kept.name)} and quantises {module_of(taken.name)}; engines hold them "
                    "in one matrix: exclude both or neither"
                )


def _pack(parts: Sequence[Part], shard_bytes: int) -> list[Shard]:
    """In order, each file filled until the next weight, scales included, would not fit."""
    shards: list[Shard] = []
    for part in parts:
        if not shards or shards[-1].nbytes + part.bytes_out > shard_bytes:
            shards.append(Shard())
        shards[-1].parts.append(part)
        shards[-1].nbytes += part.bytes_out
    return shards


def _ignored(parts: Sequence[Part]) -> list[str]:
    """Module names, in full: vLLM and SGLang both match those exactly, while they read wildcards differently."""
    linear = (*KINDS, "router", "head_input")
    kept = {module_of(part.name) for part in parts if not part.quantised and part.kind in linear}
    return ["lm_head", *sorted(kept, key=natural)]
