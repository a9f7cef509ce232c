"""Dispatch and combine compile without a GPU for Hopper and Blackwell: no spills, the instructions they stand on."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_all_reduce_compiles import ARCHITECTURES, EPOCHS, compile_cases

COMPILE = Path(__file__).with_name("compile_token_exchange.py")

Case = tuple[str, int, str, int, int, int]  # kernel, ranks, dtype, tokens, hidden, top_k
FAST: tuple[Case, ...] = (("dispatch", 2, "bfloat16", 64, 4096, 8), ("combine", 2, "bfloat16", 64, 4096, 8))
SLOW: list[Case] = [
    (name, ranks, dtype, tokens, hidden, 8)
    for name in ("dispatch", "combine")
    for ranks in (2, 4, 8, 16)
    for dtype in ("bfloat16", "float16", "float32")
    for tokens, hidden in ((1, 2048), (64, 4096), (1024, 7168))
]

# The kernels of test_token_exchange_emulated, in its order; experts and blocks behind the rest.
EMULATED = tuple((name, 3, "float32", 4, 132, 2, 9, 3) for name in ("dispatch", "combine"))

# What peers see: rows, then a flag each after a fence of the whole system; the waits for it.
PUSH = ["st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.v4.b32", "st.relaxed.sys.global.b64"]


@functools.cache
def compiled(cases: tuple[tuple[Any, ...], ...], architecture: str) -> tuple[str, list[str]]:
    """The compiler's remarks and the PTX of each."""
    with tempfile.TemporaryDirectory() as folder:
        return compile_cases(cases, architecture, Path(folder), COMPILE)


def check(cases: tuple[Case, ...], architecture: str, others: tuple[tuple[Any, ...], ...] = ()) -> None:
    """others: what is compiled with them."""
    remarks, texts = compiled(cases + others, architecture)
    assert len(texts) == len(cases + others)
    spills = re.findall("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", remarks)
    assert len(spills) == len(cases + others)
    for (name, *_), ptx in zip(cases, texts, strict=False):
        assert f".target {architecture}" in ptx
        for instruction in [*EPOCHS, *PUSH]:
            assert instruction in ptx, (name, instruction)
        assert ("vote.sync.ballot" in ptx) == (name == "dispatch")
        # The block's barrier, the fence, the flag: what its threads stored is there before the flag is.
        assert re.search(r"bar\S*\.sync[^@]*?.*?fence\.acq_rel\.sys;.*?st\.relaxed\.sys\.global\.b64", ptx, re.DOTALL)
        # Every wait looks at the clock, and a failure stops the kernel.
        assert "%globaltimer" in ptx
        assert "trap;" in ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_spills_to_system_scope_accesses(architecture: str) -> None:
    check(FAST, architecture, EMULATED if architecture == "sm_90a" else ())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_every_form_compiles(name: str, architecture: str) -> None:
    check(tuple(case for case in SLOW if case[0] == name), architecture)


def arguments_of(**changes: Any) -> dict[str, Any]:
    import cutlass

    return {"ranks": 2, "units": 1, "dtype": cutlass.BFloat16, "tokens": 64, "hidden": 4096, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "0 tokens a rank; the kernel is for 1 to 1024"),
        ({"tokens": 1025, "units": 16}, "1025 tokens a rank"),
        ({"tokens": 129}, "129 rows of 8192 bytes; the heap has room for 1,048,576 bytes from each rank"),
        ({"hidden": 12}, "rows of 24 bytes; they must be whole vectors of 16"),
        ({"ranks": 17}, "17 ranks; 2 to 16"),
        ({"units": 0}, "0 units of rows"),
        ({"tokens": 1, "hidden": 32776}, "rows of 65552 bytes; at most 65536"),
        ({"max_blocks": 129}, "at most 128 are resident"),
    ],
)
def test_a_call_that_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    from qwenjax_kernels.token_combine import TokenCombine

    with pytest.raises(ValueError, match=message):
        TokenCombine(**arguments_of(**changes))


def test_another_call_has_another_tag() -> None:
    from qwenjax_kernels.token_combine import TokenCombine
    from qwenjax_kernels.token_dispatch import TokenDispatch

    changes: list[dict[str, Any]] = [{}, {"tokens": 63}, {"hidden": 2048}, {"max_blocks": 8}]
    tags = [TokenCombine(**arguments_of(**change)).tag for change in changes]
    tags += [TokenDispatch(**arguments_of(**change), top_k=8, experts_per_rank=64).tag for change in changes]
    tags += [TokenDispatch(**arguments_of(), top_k=4, experts_per_rank=64).tag]
    assert len(set(tags)) == len(tags)
    assert all(0 < tag < 1 << 16 for tag in tags)
