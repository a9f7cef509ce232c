"""What the docs name is there: files that they link to, headings, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from qwenjax_serving import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path for pattern in ("*.md", "[!.]*/*.md", "configs/*/*.md", "bench/results/*.md") for path in ROOT.glob(pattern)
)


def heading_ids(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[list[str]]:
    """The words of every `qwenjax ...` line of a page's blocks of code, without comments and redirections."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("qwenjax ")]
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in heading_ids(target), link


def test_every_command_that_is_shown_is_one() -> None:
    shown = [words for page in PAGES for words in commands(page)]
    assert {words[1] for words in shown} >= {"generate", "logits", "convert", "eval", "serve", "bench"}
    for words in shown:
        try:
            cli._parse(words[1:], words[1])
        except SystemExit:
            pytest.fail(shlex.join(words))
