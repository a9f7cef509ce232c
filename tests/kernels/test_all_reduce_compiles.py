"""The all-reduce kernels compile without a GPU for Hopper and Blackwell: no spills, the instructions they stand on."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from qwenjax_kernels.heap_layout import INBOX_BYTES, MAX_BLOCKS, MAX_RANKS, TEAMS, HeapLayout
from tests.kernels.compiling import compile_cases

COMPILE = Path(__file__).with_name("compile_all_reduce.py")

Case = tuple[str, int, str, int, int]  # algorithm, ranks, dtype, elements, features of a row (0: plain)
FAST: list[Case] = [
    ("one_shot", 2, "bfloat16", 1001, 0),
    ("two_shot", 2, "bfloat16", 16384 * 4096, 4096),
    ("two_shot of rows", 2, "bfloat16", 16384 * 4096, 4096),
    ("multicast", 2, "float16", 16384 * 2880, 0),
]
SLOW: list[Case] = [
    (algorithm, ranks, dtype, rows * 2880, row)
    for algorithm, rows in (("one_shot", 8), ("two_shot", 2048), ("multicast", 2048))
    for ranks in (2, 4, 8, 16)
    for dtype in ("bfloat16", "float16", "float32")
    for row in (0, 2880)
] + [("two_shot of rows", ranks, "bfloat16", 16384 * 4096, row) for ranks in (2, 4, 8, 16) for row in (0, 4096)]
ARCHITECTURES = ["sm_90a", "sm_100a"]

# What each waits with, and what it moves data with.
INSTRUCTIONS = {
    "one_shot": ["st.relaxed.sys.global.v2.b64", "ld.relaxed.sys.global.v2.b64"],
    "two_shot": ["st.relaxed.sys.global.b64", "ld.relaxed.sys.global.v4.b32", "st.relaxed.sys.global.v4.b32"],
    "two_shot of rows": ["st.relaxed.sys.global.b64", "st.relaxed.sys.global.v4.b32", "vote.sync.ballot"],
    "multicast": [
        "st.relaxed.sys.global.b64",
        "multimem.ld_reduce.relaxed.sys.global.add",
        "multimem.st.relaxed.sys.global.v4",
        "fence.proxy.alias",
    ],
}
EPOCHS = ["ld.acquire.sys.global.b64", "atom.relaxed.gpu.global.add.u64"]


def check(cases: list[Case], architecture: str) -> None:
    remarks, texts = compile_cases(COMPILE, cases, architecture)
    assert len(re.findall("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", remarks)) == len(cases)
    for (algorithm, *_, row), ptx in zip(cases, texts, strict=True):
        assert f".target {architecture}" in ptx
        for instruction in [*EPOCHS, *INSTRUCTIONS[algorithm]]:
            assert instruction in ptx, (algorithm, instruction)
        # Peers' memory is never read or written through an address that only the multicast form has, nor otherwise.
        assert ("multimem" in ptx) == (algorithm == "multicast")
        assert ("rsqrt" in ptx) == (row > 0)
        # Every wait looks at the clock, and a failure stops the kernel.
        assert "%globaltimer" in ptx
        assert "trap;" in ptx
        # Signals follow a fence of the whole system, which orders what other threads of the block stored.
        if algorithm != "one_shot":
            assert re.search(r"fence\.acq_rel\.sys;(?:(?!\bst\.).)*?st\.relaxed\.sys\.global\.b64", ptx, re.DOTALL)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_spills_to_system_scope_accesses(architecture: str) -> None:
    check(FAST, architecture)


def test_a_barrier_of_some_blocks_compiles_to_acquire_and_release_and_so_does_what_tests_launch() -> None:
    _, (ptx, *_) = compile_cases(COMPILE, [("barrier",), ("without JAX", 0), ("without JAX", 1024)], "sm_90a")
    assert "atom.acq_rel.gpu.global.add.u64" in ptx
    assert "ld.acquire.sys.global.b64" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("algorithm", INSTRUCTIONS)
def test_every_form_compiles(algorithm: str, architecture: str) -> None:
    for fused in (False, True):  # apart: the compiler cuts the names of its files before they differ by that
        check([case for case in SLOW if case[0] == algorithm and bool(case[-1]) == fused], architecture)


@pytest.mark.parametrize("ranks", range(2, MAX_RANKS + 1))
def test_regions_of_the_heap_do_not_overlap(ranks: int) -> None:
    layout = HeapLayout(ranks)
    ends = [
        (layout.arrivals, 8),
        (layout.abort, 8),
        (layout.grid_barrier, 8),
        (layout.header(0, 0), layout.header(1, ranks - 1) + 8 - layout.header(0, 0)),
        (layout.signal(0, 0, 0), layout.signal(MAX_BLOCKS - 1, TEAMS - 1, ranks - 1) + 8 - layout.signal(0, 0, 0)),
        (layout.inboxes, 2 * INBOX_BYTES),
        (layout.staged, layout.results - layout.staged),
        (layout.results, layout.num_bytes - layout.results),
    ]
    for (begin, size), (following, _) in itertools.pairwise(ends):
        assert begin + size <= following
    assert all(begin % 8 == 0 for begin, _ in ends)


def arguments_of(**changes: Any) -> dict[str, Any]:
    import cutlass

    return {"ranks": 2, "dtype": cutlass.BFloat16, "elements": 4096, "algorithm": "two_shot", **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"elements": 0}, "a message of 0 elements"),
        ({"ranks": 17}, "17 ranks; 2 to 16"),
        ({"algorithm": "one_shot", "elements": (1 << 20) + 1}, "at most 2097152"),
        ({"row": 12, "elements": 24}, "rows must be whole vectors of 16 bytes"),
        ({"row": 65536, "elements": 65536}, "at most 32768 fit a tile"),
        ({"max_blocks": 129}, "room for 1 to 128"),
        ({"teams": 16}, "16 teams a block; 1, 2, 4 or 8"),
        ({"top_k": 8, "features": 512, "algorithm": "one_shot"}, "rows are added up by two_shot alone"),
        ({"top_k": 8, "features": 4}, "rows are added up by two_shot alone, in BFloat16 and multiples of 8"),
        ({"top_k": 33, "features": 512}, "at most 32 rows"),
        ({"top_k": 8, "features": 1000}, "4096 sums of up to 8 rows of 1000 features"),
    ],
)
def test_a_message_that_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    from qwenjax_kernels.all_reduce import AllReduce

    with pytest.raises(ValueError, match=message):
        AllReduce(**arguments_of(**changes))


def test_another_call_has_another_tag() -> None:
    from qwenjax_kernels.all_reduce import AllReduce

    changes: list[dict[str, Any]] = [{}, {"elements": 4095}, {"algorithm": "one_shot"}, {"row": 64}]
    changes += [{"elements": 1 << 20}, {"elements": 1 << 20, "max_blocks": 1}]
    changes += [{"elements": 2048 * n} for n in range(100, 120)]
    changes += [{"elements": 1 << 20, "top_k": k, "features": 2048} for k in (4, 8)]
    tags = [AllReduce(**arguments_of(**change)).tag for change in changes]
    assert len(set(tags)) == len(tags)
    assert all(0 < tag < 1 << 16 for tag in tags)
