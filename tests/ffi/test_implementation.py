"""The choice between reference and kernel."""

from __future__ import annotations

import pytest

from qwenjax_ffi.implementation import KernelUnavailableError, choose


@pytest.mark.parametrize(
    ("implementation", "unavailable", "chosen"),
    [
        ("auto", None, "kernel"),
        ("auto", "no GPU", "reference"),
        ("reference", None, "reference"),
        ("reference", "no GPU", "reference"),
        ("kernel", None, "kernel"),
    ],
)
def test_choice(implementation: str, unavailable: str | None, chosen: str) -> None:
    assert choose("op", implementation, unavailable) == chosen  # type: ignore[arg-type]


def test_a_kernel_that_cannot_run_is_an_error_that_says_why() -> None:
    with pytest.raises(KernelUnavailableError, match=r"moe_down: no kernel here: float16 has none"):
        choose("moe_down", "kernel", "float16 has none")


@pytest.mark.parametrize("unavailable", [None, "no GPU"])
def test_another_word_is_an_error_that_lists_the_words(unavailable: str | None) -> None:
    with pytest.raises(ValueError, match=r"'fast'.*'auto', 'reference' or 'kernel'"):
        choose("op", "fast", unavailable)  # type: ignore[arg-type]
