"""WordNet's database files (wndb(5WN)): the synsets whose senses were met in tagged text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PARTS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_TYPE_NUMBERS = {"n": 1, "v": 2, "a": 3, "r": 4, "s": 5}


@dataclass(frozen=True)
class Synset:
    """words: the first is the one defined, the others mean the same. count: times its senses were tagged."""

    part: str
    words: tuple[str, ...]
    gloss: str
    examples: tuple[str, ...]
    count: int


def synsets(folder: Path) -> Iterator[Synset]:
    """The synsets of data.{noun,verb,adj,adv} whose first word cntlist.rev counts at least once."""
    counts: dict[str, int] = {}
    for line in (folder / "cntlist.rev").read_text("utf-8").splitlines():
        key, _, count = line.split(" ")
        lemma, sense = key.split("%")
        counts["%".join((lemma, ":".join(sense.split(":")[:3])))] = int(count)
    for name in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{name}").read_text("utf-8").splitlines():
            if line.startswith("  "):
                continue
            fields, _, definition = line.partition(" | ")
            _, file_number, kind, word_count, *rest = fields.split(" ")
            words = [re.sub(r"\(\w+\)$", "", rest[2 * i]) for i in range(int(word_count, 16))]
            identifier = f"{words[0].lower()}%{_TYPE_NUMBERS[kind]}:{file_number}:{int(rest[1], 16):02d}"
            count = counts.get(identifier, 0)
            gloss, *_ = definition.split('; "')
            examples = re.findall(r'"([^"]+)"', definition)
            if count:
                spelled = tuple(word.replace("_", " ") for word in words)
                yield Synset(_PARTS[kind], spelled, gloss.strip(), tuple(examples), count)
