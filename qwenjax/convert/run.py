"""The conversion: source to plan to shards, over all cores, resumable."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qwenjax.checkpoint.resolve import resolve
from qwenjax.checkpoint.writer import SafetensorsWriter
from qwenjax.convert.destination import Destination, copy_extras, fingerprint, to_json, write_whole
from qwenjax.convert.encode import Error
from qwenjax.convert.modelopt import config_files
from qwenjax.convert.orbax import write_orbax
from qwenjax.convert.pieces import Piece, pieces_of, process
from qwenjax.convert.plan import SHARD_BYTES, Plan, Shard, check_model, make_plan
from qwenjax.convert.report import make_report
from qwenjax.convert.source import ConvertError, Source, open_source

FORMATS = ("mxfp8",)  # formats that a checkpoint can be written in; qwenjax.quant has more, for comparison
OUTPUTS = ("safetensors", "orbax")
VERSION = 1  # of the output: raise it when the same command gives other bytes


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "mxfp8",
    only: str | None = None,
    exclude: Sequence[str] = (),
    output: str = "safetensors",
    progress: bool = False,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Writes the checkpoint `src` (float, or FP8 in blocks) to folder `dst` in MXFP8; returns the report.

    src: a folder, or a Hugging Face repo id given as text.

    only: "experts", "attention" or "mlp", to quantise nothing else. exclude: globs of module or tensor names to
    keep. workers: threads, by default one a core. shard_bytes: largest file. A run that was killed continues when
    called again with the same arguments, and gives the same bytes; `src` is only read.

    output: "safetensors" streams, one tensor at a time. "orbax" writes what qwenjax.checkpoint.orbax restores on any
    mesh: its last step, Orbax's own, holds the whole quantised model in memory, begins anew after a kill, and gives the
    same values but, since Orbax names its files at random, not the same bytes.

    Raises ConvertError (arguments, `dst`), CheckpointError (files of `src`) and NonFiniteError (NaN or infinity in
    a weight), all of them ValueErrors.
    """
    if format not in FORMATS:
        raise ConvertError(f"--format {format}: checkpoints are written in {', '.join(FORMATS)}")
    if output not in OUTPUTS:
        raise ConvertError(f"--output {output}: choose one of {', '.join(OUTPUTS)}")
    if workers is not None and workers < 1:
        raise ConvertError(f"--workers is {workers}; it is at least 1")
    options = {"format": format, "only": only, "exclude": sorted(exclude)}
    source = open_source(resolve(src if isinstance(src, str) else Path(src)))
    plan = make_plan(source, only, exclude, shard_bytes)
    check_model(source, plan, must_be_ours=output == "orbax")
    of_output = {} if output == "safetensors" else {"output": output}
    identity = fingerprint(source, {**options, **of_output, "shard_bytes": shard_bytes, "version": VERSION})

    def as_safetensors(folder: Path) -> dict[str, Any]:
        return convert(
            source.folder,
            folder,
            format=format,
            only=only,
            exclude=exclude,
            progress=progress,
            workers=workers,
            shard_bytes=shard_bytes,
        )

    with Destination(dst, source, identity) as destination:
        if destination.finished:
            _check_whole(destination, plan, output)
        elif output == "orbax":
            destination.finish(write_orbax(source, plan, destination, as_safetensors, progress))
        else:
            errors = _write_shards(source, plan, destination, workers or len(os.sched_getaffinity(0)), progress)
            copy_extras(source, destination.folder)
            for name, content in config_files(source.config, plan).items():
                write_whole(destination.folder / name, content)
            destination.finish(make_report(source, plan, errors, options))
        return destination.report()


def _check_whole(destination: Destination, plan: Plan, output: str) -> None:
    """Raises ConvertError where a finished conversion has lost files since."""
    shards = (
        [plan.file_name(number) for number in range(len(plan.shards))] if output == "safetensors" else ["parameters"]
    )
    lost = [name for name in ["config.json", *shards] if not (destination.folder / name).exists()]
    if lost:
        raise ConvertError(
            f"{destination.folder}: was finished and has lost {', '.join(lost)}; remove it and start anew"
        )


def _write_shards(
    source: Source, plan: Plan, destination: Destination, workers: int, progress: bool
) -> dict[str, Error]:
    errors: dict[str, Error] = {}
    missing: list[tuple[int, Shard]] = []
    for number, shard in enumerate(plan.shards):
        noted = destination.done(number, plan.file_name(number))
        if noted is None:
            missing.append((number, shard))
        else:
            errors.update({name: Error(*values) for name, *values in noted})
    destination.check_space(sum(shard.nbytes for _, shard in missing))
    left = sum(part.bytes_in for _, shard in missing for part in shard.parts)
    total = sum(part.bytes_in for part in plan.parts)
    with (
        ThreadPoolExecutor(workers, "convert") as pool,
        tqdm(
            total=total, initial=total - left, desc="Converting", unit="B", unit_scale=True, disable=not progress
        ) as bar,
    ):
        writing: list[Future[None]] = []
        try:
            for number, shard in missing:
                writer = SafetensorsWriter(
                    destination.folder / plan.file_name(number),
                    {name: info for part in shard.parts for name, info in part.outputs.items()},
                    {"format": "pt"},  # transformers refuses a file without it
                )
                found = _write_shard(pool, source, writer, shard, 2 * workers, bar)
                errors.update(found)
                rows = [[name, e.squares, e.errors, e.clamped] for name, e in found.items()]
                write_whole(destination.shard_state(number), to_json({"errors": rows}))
                # The wait for the disk overlaps the next shard.
                writing.append(pool.submit(writer.close))
            for future in writing:
                future.result()
        except OSError as error:
            raise ConvertError(f"{destination.folder}: cannot be written: {error.strerror}") from error
    return errors


def _write_shard(
    pool: ThreadPoolExecutor, source: Source, writer: SafetensorsWriter, shard: Shard, ahead: int, bar: tqdm
) -> dict[str, Error]:
    """Fills one file; the errors of its weights by name."""
    found = {part.name: Error() for part in shard.parts}
    try:
        for piece, error in _in_order(pool, source, writer, shard, ahead):
            found[piece.part.name].add(error)
            bar.update(piece.nbytes)
    except Exception:
        writer.abandon()
        raise
    return found


def _in_order(
    pool: ThreadPoolExecutor, source: Source, writer: SafetensorsWriter, shard: Shard, ahead: int
) -> Iterator[tuple[Piece, Error]]:
    """Pieces as they finish, in order (so that sums are the same on every run), at most `ahead` under way."""
    waiting: deque[tuple[Piece, Future[Error]]] = deque()
    try:
        for part in shard.parts:
            for piece in pieces_of(part):
                if len(waiting) == ahead:
                    done, future = waiting.popleft()
                    yield done, future.result()
                waiting.append((piece, pool.submit(process, source, writer, piece)))
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        # After an error nothing more is begun, and the file is left alone before it is closed.
        for _, future in waiting:
            future.cancel()
        wait([future for _, future in waiting])
