"""Dispatch and combine compile without a GPU for Hopper and Blackwell: no spills, the instructions they stand on."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiling import compile_cases
from tests.kernels.test_all_reduce_compiles import ARCHITECTURES, EPOCHS

COMPILE = Path(__file__).with_name("compile_token_exchange.py")

Case = tuple[str, int, str, int, int, int]  # kernel, ranks, dtype, tokens, hidden, top_k
FAST: tuple[Case, ...] = tuple((name, 2, "bfloat16", 64, 4096, 8) for name in ("dispatch", "combine"))
MXFP8: tuple[Case, ...] = (("dispatch MXFP8", 2, "bfloat16", 64, 4096, 8),)
SLOW: list[Case] = [
    (name, ranks, dtype, tokens, hidden, 8)
    for name in ("dispatch", "combine")
    for ranks in (2, 4, 8, 16)
    for dtype in ("bfloat16", "float16", "float32")
    for tokens, hidden in ((1, 2048), (64, 4096), (1024, 7168))
]
SLOW += [("dispatch MXFP8", ranks, "bfloat16", 64, hidden, 8) for ranks in (2, 4, 8, 16) for hidden in (2048, 7168)]

# The kernels that test_token_exchange_emulated runs by default, dispatch and combine of each case; experts and blocks
# behind the rest.
EMULATED: dict[str, tuple[tuple[Any, ...], ...]] = {
    "three ranks": tuple((name, 3, "float32", 4, 132, 2, 9, 3) for name in ("dispatch", "combine")),
    "MXFP8 rows": tuple((name, 2, "bfloat16", 3, 1056, 2, 8, 2) for name in ("dispatch MXFP8", "combine")),
}
ALL_EMULATED = tuple(case for cases in EMULATED.values() for case in cases)

# What peers see: rows, then a flag each after a fence of the whole system; the waits for it.
PUSH = ["st.relaxed.sys.global.v", "ld.relaxed.sys.global.v", "st.relaxed.sys.global.b64"]


@functools.cache
def compiled(cases: tuple[tuple[Any, ...], ...], architecture: str) -> tuple[str, list[str]]:
    """The compiler's remarks and the PTX of each."""
    return compile_cases(COMPILE, cases, architecture)


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
        assert ("vote.sync.ballot" in ptx) == (name != "combine")
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == ("cvt.rn.f16x2.e4m3x2" in ptx) == (name == "dispatch MXFP8")
        # The block's barrier, the fence, the flag, and no store between: what its threads stored is there before the
        # flag is.
        no_store = r"(?:(?!\bst\.).)*?"
        order = rf"\bbar\.sync{no_store}fence\.acq_rel\.sys;{no_store}st\.relaxed\.sys\.global\.b64"
        assert re.search(order, ptx, re.DOTALL), name
        # Every wait looks at the clock, and a failure stops the kernel.
        assert "%globaltimer" in ptx
        assert "trap;" in ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_spills_to_system_scope_accesses(architecture: str) -> None:
    check(*((FAST, architecture, ALL_EMULATED) if architecture == "sm_90a" else (FAST + MXFP8, architecture)))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["dispatch", "dispatch MXFP8", "combine"])
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


def test_mxfp8_rows_are_of_bfloat16_in_blocks_of_32() -> None:
    from cutlass import Float32

    from qwenjax_kernels.token_dispatch_mxfp8 import MXFP8TokenDispatch

    for changes in ({"hidden": 4112}, {"dtype": Float32}):
        with pytest.raises(ValueError, match="MXFP8 rows are made of multiples of 32 BFloat16"):
            MXFP8TokenDispatch(**arguments_of(**changes), top_k=8, experts_per_rank=64)


def test_another_call_has_another_tag() -> None:
    from qwenjax_kernels.token_combine import TokenCombine
    from qwenjax_kernels.token_dispatch import TokenDispatch

    changes: list[dict[str, Any]] = [{}, {"tokens": 63}, {"hidden": 2048}, {"max_blocks": 8}]
    tags = [TokenCombine(**arguments_of(**change)).tag for change in changes]
    tags += [TokenDispatch(**arguments_of(**change), top_k=8, experts_per_rank=64).tag for change in changes]
    tags += [TokenDispatch(**arguments_of(), top_k=4, experts_per_rank=64).tag]
    assert len(set(tags)) == len(tags)
    assert all(0 < tag < 1 << 16 for tag in tags)
