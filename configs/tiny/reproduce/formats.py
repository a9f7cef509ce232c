"""Readers for the file formats in which the packages hold their texts."""

from __future__ import annotations

import gzip
import html
import re
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_INDEX_ENTRY = struct.Struct("<III")  # offset, compressed bytes, plain bytes of one block
_R_CHARSXP = 9  # type code of one string, "R Internals", section 1.8


def sword_books(folder: Path) -> Iterator[str]:
    """The OSIS markup of each block (a book, or a chapter of one) of a compressed SWORD module, in order."""
    for index_path in sorted(folder.rglob("[on]t.?zs"), key=lambda path: path.name, reverse=True):
        index = index_path.read_bytes()
        data = index_path.with_name(index_path.name[:-1] + "z").read_bytes()
        for offset, size, _ in _INDEX_ENTRY.iter_unpack(index):
            if size:
                yield zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")


def osis_chapters(markup: str) -> Iterator[tuple[str, str]]:
    """(OSIS id such as "Ps.23", plain text) of each chapter; what precedes the first has the id "front"."""
    parts = re.split(r'<chapter [^>]*?osisID="([^"]+)"[^>]*?>', markup)
    yield "front", osis_text(parts[0])
    for identifier, part in zip(parts[1::2], parts[2::2], strict=True):
        yield identifier, osis_text(part)


def osis_text(markup: str) -> str:
    """OSIS markup as text: notes out, paragraphs and verse lines apart."""
    markup = re.sub(r"<note\b.*?</note>", "", markup, flags=re.DOTALL)
    markup = re.sub(r"<title\b[^>]*>(.*?)</title>", r"\n\n\1\n\n", markup, flags=re.DOTALL)
    markup = re.sub(r'<div\b[^>]*type="x-p"[^>]*>|<(table|row|lg)\b[^>]*>|</(table|row|p)>', "\n\n", markup)
    markup = re.sub(r"<(lb|l)\b[^>]*>", "\n", markup)
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def kjv_chapters(database: Path, codes: list[str]) -> Iterator[tuple[str, str]]:
    """(OSIS id, text) of each chapter of an SQLite Bible with columns BookID, ChapterID, Passage1 and Passage2."""
    rows = sqlite3.connect(database).execute(
        "SELECT BookID, ChapterID, Passage1, Passage2 FROM Bible ORDER BY BookID, ChapterID, VerseID"
    )
    chapters: dict[tuple[int, int], list[str]] = {}
    for book, chapter, *passages in rows:
        for passage in passages:
            if passage:
                verse = re.sub(r"\b\d+:\d+\s*", "", passage.strip())
                chapters.setdefault((book, chapter), []).append(verse)
    for (book, chapter), verses in chapters.items():
        yield f"{codes[book - 1]}.{chapter}", " ".join(verses)


def r_lines(database: Path) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database (.rdb): each a list of lines."""
    raw, position = database.read_bytes(), 0
    while position < len(raw):
        length = int.from_bytes(raw[position : position + 4], "big")
        inflate = zlib.decompressobj()
        plain = inflate.decompress(raw[position + 4 :])
        if len(plain) != length:
            raise ValueError(f"{database}: a block of {len(plain)} bytes, its header says {length}")
        position = len(raw) - len(inflate.unused_data)
        lines = _r_strings(plain)
        if lines:
            yield lines


def _r_strings(plain: bytes) -> list[str]:
    """The longest character vector in R's XDR serialisation."""
    best: list[str] = []
    for match in re.finditer(rb"\x00\x00[\x00\x02]\x10", plain):
        position = match.end()
        count, position = int.from_bytes(plain[position : position + 4], "big"), position + 4
        if count <= len(best):
            continue
        lines = []
        for _ in range(count):
            if plain[position + 3] != _R_CHARSXP:
                break
            size = int.from_bytes(plain[position + 4 : position + 8], "big", signed=True)
            position += 8
            lines.append(plain[position : position + max(size, 0)].decode("utf-8", "replace"))
            position += max(size, 0)
        if len(lines) == count:
            best = lines
    return best


def dictd_text(path: Path) -> str:
    """The text of a dictd database."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        return file.read()
