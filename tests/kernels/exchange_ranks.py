"""Dispatch and combine on GPUs without JAX's calls, against their definition in numpy.

As a program, one process of several: `python exchange_ranks.py PROCESS PROCESSES FOLDER ITERATIONS`, a rank each.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import jax.numpy as jnp
import numpy as np
from cutlass import Int64

from qwenjax_ffi.activations import quantise_activations
from qwenjax_ffi.symmetric_memory_exchange import Rendezvous
from qwenjax_kernels.token_combine import TokenCombine
from qwenjax_kernels.token_dispatch import TokenDispatch
from qwenjax_kernels.token_dispatch_mxfp8 import MXFP8TokenDispatch
from qwenjax_kernels.token_exchange_layout import ExchangeLayout, units_for
from tests.ffi.heap_process import FolderStore
from tests.kernels.gpu_ranks import APART_NS, DTYPES, Ranks, call, compiled

NAN, JUNK = 0xFF, 0x77  # bytes that results are filled with before: NaN as floats, and integers that no result is


@dataclass(frozen=True)
class Shape:
    """Sizes of a call of `ranks` ranks; mxfp8: whether rows are dispatched as MXFP8."""

    ranks: int
    dtype: str
    tokens: int
    hidden: int
    top_k: int
    experts: int
    mxfp8: bool = False

    @property
    def per_rank(self) -> int:
        return self.experts // self.ranks

    @property
    def units(self) -> int:
        return units_for(self.tokens, self.hidden * self.item, self.top_k)

    @property
    def item(self) -> int:
        return DTYPES[self.dtype][1].itemsize

    @property
    def dispatched(self) -> list[tuple[tuple[int, ...], Any, int]]:
        """Shape, numpy dtype and poison of each result of a dispatch."""
        slots = (self.ranks, self.tokens)
        return [
            ((*slots, self.hidden), DTYPES[self.dtype][1], NAN),
            ((*slots, self.top_k), np.dtype(np.int32), JUNK),
            ((*slots, self.top_k), np.dtype(np.float32), NAN),
            ((self.ranks,), np.dtype(np.int32), JUNK),
            ((self.tokens, self.ranks), np.dtype(np.int32), JUNK),
        ]


def size(shape: tuple[int, ...], dtype: Any) -> int:
    return int(np.prod(shape)) * int(dtype.itemsize)


def make_ranks(shape: Shape, rendezvous: Rendezvous | None = None, local: dict[int, int] | None = None) -> Ranks:
    """Ranks whose heap holds calls of this shape, on the GPUs that there are."""
    call("cuInit", 0)
    devices = call("cuDeviceGetCount")
    local = local or {rank: rank % devices for rank in range(shape.ranks)}
    return Ranks(local, shape.ranks, rendezvous, ExchangeLayout(shape.ranks, shape.units).num_bytes)


def compiled_dispatch(shape: Shape, **settings: Any) -> Any:
    """The kernel, as a function of (stream, x, table, ids, weights, the five results)."""
    settings = {"timeout_ns": 5 * 10**9, "trap": False} | settings
    kind = MXFP8TokenDispatch if shape.mxfp8 else TokenDispatch
    kernel = kind(
        ranks=shape.ranks,
        units=shape.units,
        dtype=DTYPES[shape.dtype][0],
        tokens=shape.tokens,
        hidden=shape.hidden,
        top_k=shape.top_k,
        experts_per_rank=shape.per_rank,
        **settings,
    )

    @cute.jit
    def launch(
        stream: cuda.CUstream,
        x: Int64,
        table: Int64,
        ids: Int64,
        weights: Int64,
        out_x: Int64,
        out_ids: Int64,
        out_weights: Int64,
        counts: Int64,
        slots: Int64,
    ) -> None:
        kernel.launch(stream, x, ids, weights, table, out_x, out_ids, out_weights, counts, slots)

    return cute.compile(launch, cuda.CUstream(0), *[Int64(0)] * 9)


def compiled_combine(shape: Shape, **settings: Any) -> Any:
    """The kernel, as a function of (stream, partial, table, counts, slots, out)."""
    settings = {"timeout_ns": 5 * 10**9, "trap": False} | settings
    kernel = TokenCombine(
        ranks=shape.ranks,
        units=shape.units,
        dtype=DTYPES[shape.dtype][0],
        tokens=shape.tokens,
        hidden=shape.hidden,
        **settings,
    )

    @cute.jit
    def launch(stream: cuda.CUstream, partial: Int64, table: Int64, counts: Int64, slots: Int64, out: Int64) -> None:
        kernel.launch(stream, partial, counts, slots, table, out)

    return cute.compile(launch, cuda.CUstream(0), *[Int64(0)] * 5)


def routings(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """ids int32 [ranks, tokens, top_k] of each kind that a model may come to."""
    draw = np.random.default_rng(seed)
    tokens = shape.ranks * shape.tokens
    random = np.stack([draw.permutation(shape.experts)[: shape.top_k] for _ in range(tokens)]).astype(np.int32)
    whole = (shape.ranks, shape.tokens, shape.top_k)
    idle = random.reshape(whole).copy()
    idle[draw.integers(shape.ranks)] = -1
    uneven = random.reshape(whole).copy()
    for rank in range(shape.ranks):
        uneven[rank, draw.integers(shape.tokens + 1) :] = -1
    gaps = random.copy()
    gaps[draw.random(tokens) < 0.4] = -1
    one = np.full((tokens, shape.top_k), -1, np.int32)
    one[:, draw.integers(shape.top_k)] = shape.experts - 1
    alone = np.full((tokens, shape.top_k), -1, np.int32)
    alone[draw.integers(tokens)] = random[0]
    kinds = {
        "random": random,
        "a rank has no tokens": idle,
        "other counts on each rank": uneven,
        "padding between tokens": gaps,
        "all to one expert": one,
        "all to the first experts": np.tile(np.arange(shape.top_k, dtype=np.int32), (tokens, 1)),
        "some experts never": np.where(random >= shape.experts - shape.per_rank, -1, random),
        "one token in all": alone,
        "none": np.full((tokens, shape.top_k), -1, np.int32),
    }
    return {name: ids.reshape(whole) for name, ids in kinds.items()}


@dataclass
class Case:
    """Operands of all ranks and what must come of them, by rank: x arrives as `arrives`.

    partial: [ranks, ranks, tokens, hidden].
    """

    x: np.ndarray
    arrives: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    partial: np.ndarray
    slots: np.ndarray
    counts: np.ndarray
    out: np.ndarray

    def check(self, shape: Shape, rank: int, results: list[np.ndarray], out: np.ndarray | None, where: str) -> None:
        """Holds a rank's results, of a dispatch and of a combine, against the definition, bit for bit."""
        x, ids, weights, counts, slots = results
        np.testing.assert_array_equal(slots, self.slots[rank], err_msg=f"slots, {where}")
        np.testing.assert_array_equal(counts, self.counts[rank], err_msg=f"counts, {where}")
        for source in range(shape.ranks):
            tokens = np.flatnonzero(self.slots[source, :, rank] >= 0)
            n = len(tokens)
            told = f"of rank {source}, {where}"
            np.testing.assert_array_equal(
                bits(x[source, :n]), bits(self.arrives[source, tokens]), err_msg=f"rows {told}"
            )
            np.testing.assert_array_equal(ids[source, :n], self.ids[source, tokens], err_msg=f"ids {told}")
            np.testing.assert_array_equal(weights[source, :n], self.weights[source, tokens], err_msg=f"weights {told}")
            assert (ids[source, n:] == -1).all(), f"unused ids {told}"
            assert (weights[source, n:] == 0).all(), f"unused weights {told}"
        if out is not None:
            np.testing.assert_array_equal(bits(out), bits(self.out[rank]), err_msg=f"sums, {where}")


def bits(value: np.ndarray) -> np.ndarray:
    """Every NaN as the same one: kernels make other bits of it than numpy."""
    return np.where(np.isnan(value), value.dtype.type(np.nan), value).view(f"u{value.dtype.itemsize}")


def make_case(shape: Shape, ids: np.ndarray, seed: int, integers: bool) -> Case:
    """integers: rows whose sums are exact in any dtype; else normal numbers, where the order of a sum matters."""
    draw, dtype = np.random.default_rng(seed), DTYPES[shape.dtype][1]

    def rows(*dims: int) -> np.ndarray:
        return (draw.integers(-8, 8, dims) if integers else draw.normal(size=dims)).astype(dtype)

    x = rows(shape.ranks, shape.tokens, shape.hidden)
    if shape.mxfp8:
        x[..., 3], x[..., -1] = np.nan, -np.inf  # of each row the first and the last block arrive as NaN
    weights = draw.random((shape.ranks, shape.tokens, shape.top_k), np.float32)
    partial = rows(shape.ranks, shape.ranks, shape.tokens, shape.hidden)
    slots = np.full((shape.ranks, shape.tokens, shape.ranks), -1, np.int32)
    out = np.zeros((shape.ranks, shape.tokens, shape.hidden), np.float32)
    for source in range(shape.ranks):
        x[source][(ids[source] < 0).all(-1)] = np.nan  # what goes nowhere is not read
        for to in range(shape.ranks):
            goes = ((ids[source] >= 0) & (ids[source] // shape.per_rank == to)).any(-1)
            slots[source, goes, to] = np.arange(goes.sum())
            out[source, goes] += partial[to, source, : goes.sum()].astype(np.float32)
            partial[to, source, goes.sum() :] = np.nan  # nor what lies behind the last row
    counts = (slots >= 0).sum(1, dtype=np.int32).T.copy()
    arrives = np.asarray(quantise_activations(jnp.asarray(x), "mxfp8")) if shape.mxfp8 else x
    return Case(x, arrives, ids, weights, partial, slots, counts, out.astype(dtype))


class Layer:
    """A layer's operands and results on the local ranks."""

    def __init__(self, ranks: Ranks, shape: Shape, cases: list[Case]) -> None:
        self.ranks, self.shape = ranks, shape
        self.operands = [
            {r: [ranks.put(r, value[r]) for value in (case.x, case.ids, case.weights)] for r in ranks.local}
            for case in cases
        ]
        self.partials = [{r: ranks.put(r, case.partial[r]) for r in ranks.local} for case in cases]
        self.results = {r: [ranks.empty(r, size(s, t)) for s, t, _ in shape.dispatched] for r in ranks.local}
        self.out_bytes = shape.tokens * shape.hidden * shape.item
        self.out = {r: ranks.empty(r, self.out_bytes) for r in ranks.local}

    def dispatch(self, kernel: Any, rank: int, case: int, armed: bool = True) -> None:
        if armed:
            for address, (dims, dtype, poison) in zip(self.results[rank], self.shape.dispatched, strict=True):
                self.ranks.fill(rank, address, poison, size(dims, dtype))
        x, *others = self.operands[case][rank]
        self.ranks.launch(kernel, rank, x, *others, *self.results[rank], armed=armed)

    def combine(self, kernel: Any, rank: int, case: int, armed: bool = True) -> None:
        if armed:
            self.ranks.fill(rank, self.out[rank], NAN, self.out_bytes)
        counts, slots = self.results[rank][3:]
        self.ranks.launch(kernel, rank, self.partials[case][rank], counts, slots, self.out[rank], armed=armed)

    def dispatched(self, rank: int, addresses: list[int] | None = None) -> list[np.ndarray]:
        kinds = zip(addresses or self.results[rank], self.shape.dispatched, strict=True)
        return [self.ranks.get(address, dims, dtype) for address, (dims, dtype, _) in kinds]

    def combined(self, address: int) -> np.ndarray:
        return self.ranks.get(address, (self.shape.tokens, self.shape.hidden), DTYPES[self.shape.dtype][1])


def nothing_to_wait_for(layer: Layer, rank: int) -> None:
    """Makes the counts and slots of a rank say that its tokens went nowhere, and that no rows came."""
    for address, (dims, dtype, _), byte in zip(
        layer.results[rank][3:], layer.shape.dispatched[3:], (0, 0xFF), strict=True
    ):
        layer.ranks.fill(rank, address, byte, size(dims, dtype))


def load(ranks: Ranks, layer: Layer, dispatch: Any, combine: Any) -> None:
    """Has the kernels loaded on every device before one waits for a peer."""
    for rank in ranks.local:
        layer.dispatch(dispatch, rank, 0, armed=False)
        layer.combine(combine, rank, 0, armed=False)
    ranks.synchronise()


def many_layers(ranks: Ranks, shape: Shape, iterations: int, seed: int, **settings: Any) -> None:
    """`iterations` of dispatch, dispatch, combine, combine of two layers, an all-reduce in every fifth, integers whose
    sums are exact, all routings in turn, ranks late by chance; every result is kept and looked at in the end. Each
    process draws its own delays. settings: of `compiled_dispatch`, by default with few blocks."""
    settings = {"max_blocks": 32} | settings
    cases = [make_case(shape, ids, k, integers=True) for k, ids in enumerate(routings(shape, 0).values())]
    layers = [Layer(ranks, shape, cases) for _ in range(2)]
    dispatch, combine = compiled_dispatch(shape, **settings), compiled_combine(shape, **settings)
    elements = 1001
    reduce = compiled(shape.ranks, "bfloat16", elements, "one_shot", **settings | {"max_blocks": 4})
    operand = {r: ranks.put(r, np.zeros(elements, np.uint16)) for r in ranks.local}
    for rank in ranks.local:
        ranks.launch(reduce, rank, operand[rank], operand[rank], armed=False)
    load(ranks, layers[0], dispatch, combine)
    sizes = [*(size(dims, dtype) for dims, dtype, _ in shape.dispatched), layers[0].out_bytes]
    log = {rank: [ranks.empty(rank, 2 * iterations * n) for n in sizes] for rank in ranks.local}
    late = random.Random(seed)

    def pause() -> None:
        if late.random() < 0.01:
            time.sleep(late.random() * 2e-3)

    def case_of(iteration: int, layer: int) -> int:
        return (2 * iteration + layer) * 5 % len(cases)

    for iteration in range(iterations):
        for rank in ranks.local:
            for step in ("dispatch", "combine"):
                for i, layer in enumerate(layers):
                    pause()
                    kernel = dispatch if step == "dispatch" else combine
                    getattr(layer, step)(kernel, rank, case_of(iteration, i))
            if iteration % 5 == 0:
                ranks.launch(reduce, rank, operand[rank], operand[rank])
            for i, layer in enumerate(layers):
                for target, source, n in zip(log[rank], [*layer.results[rank], layer.out[rank]], sizes, strict=True):
                    ranks.copy(rank, target + (2 * iteration + i) * n, source, n)
    ranks.synchronise()
    ranks.memory.check()
    turns = {case: [t for t in range(2 * iterations) if case_of(t // 2, t % 2) == case] for case in range(len(cases))}
    kinds = [*((dims, dtype) for dims, dtype, _ in shape.dispatched), (cases[0].out.shape[1:], cases[0].out.dtype)]
    for rank in ranks.local:
        got = [
            ranks.get(base, (2 * iterations, *dims), dtype)
            for base, (dims, dtype) in zip(log[rank], kinds, strict=True)
        ]
        for case, times in zip(cases, turns.values(), strict=True):
            if not times:
                continue
            *results, out = (value[times[0]] for value in got)
            case.check(shape, rank, results, out, f"turn {times[0]}, rank {rank}")
            # Rows behind the last one that came are anything.
            came = (np.arange(shape.tokens) < case.counts[rank][:, None])[..., None]
            for number, value in enumerate(got):
                raw = value[times].view(f"u{value.itemsize}")
                differ = (raw != raw[0]) & (came if number == 0 else True)
                where = sorted({times[i] for i in np.nonzero(differ)[0]})
                assert not where, f"rank {rank}: result {number} of turns {where[:8]} is not that of turn {times[0]}"


SMALL = Shape(ranks=2, dtype="bfloat16", tokens=9, hidden=264, top_k=3, experts=8)


def main() -> None:
    process, processes, folder, iterations = sys.argv[1:]
    rank, count = int(process), int(processes)
    call("cuInit", 0)
    rendezvous = Rendezvous(FolderStore(Path(folder)), "ranks", rank, count, 60.0)
    shape = replace(SMALL, ranks=count, experts=4 * count)
    mine = make_ranks(shape, rendezvous, {rank: rank % call("cuDeviceGetCount")})
    many_layers(mine, shape, int(iterations), seed=rank, timeout_ns=APART_NS)
    rendezvous.gather("done", True)
    mine.close()
    print("ok", flush=True)


if __name__ == "__main__":
    main()
