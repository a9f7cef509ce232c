"""From the text of a package to paragraphs fit for training."""

from __future__ import annotations

import hashlib
import re
import unicodedata

# Typographic marks, and spaces of other widths, by their code points.
_PUNCTUATION = {
    0x201C: '"',
    0x201D: '"',
    0x2018: "'",
    0x2019: "'",
    0x2014: "--",
    0x2013: "-",
    0x2026: "...",
    0x00A0: " ",
    0x2009: " ",
    0xFEFF: "",
}
_MIN_LETTERS = 0.6  # of a paragraph's characters: what has fewer is a table, a rule or a list of references
_BOILERPLATE = re.compile(r"gutenberg|pgdp\.net|proofread|e-?text|^produced by|small print", re.IGNORECASE)


def clean(text: str, verse: bool = False) -> str:
    """Paragraphs apart by one empty line, typographic marks in ASCII, the lines of a paragraph joined.

    `verse` keeps the lines of a paragraph as they are, for plays and poems. Paragraphs of few letters
    and those about the making of the electronic text are dropped.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n")).translate(_PUNCTUATION)
    text = re.sub(r"\b_|_\b", "", text)  # _emphasis_
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = [re.sub(r"[ \t]+", " ", line).strip() for line in block.split("\n")]
        paragraph = ("\n" if verse else " ").join(line for line in lines if line)
        letters = sum(map(str.isalpha, paragraph))
        if paragraph and letters >= _MIN_LETTERS * len(paragraph) and not _BOILERPLATE.search(paragraph):
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def fingerprint(paragraph: str) -> bytes:
    """The same for paragraphs that differ only in case, spacing and punctuation."""
    letters = re.sub(r"[^a-z]+", " ", paragraph.lower()).strip()
    return hashlib.blake2b(letters.encode(), digest_size=12).digest()


def chance(key: str) -> float:
    """A number in [0, 1) drawn from the key alone, so that every run draws the same."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48
