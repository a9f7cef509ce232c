"""The pipeline behind the small model: what it cleans, keeps apart and measures with."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

REPRODUCE = Path(__file__).parents[2] / "configs" / "tiny" / "reproduce"


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    """The scripts import one another by name, as when they are run."""
    sys.path.insert(0, str(REPRODUCE))


def test_cleaning_joins_lines_and_drops_what_is_no_prose() -> None:
    from cleaning import clean

    text = (
        "CHAPTER ONE\r\n\r\nIt was a “dark” night—\r\nand _very_ cold.\r\n\r\n1 2 3 | 4 5\r\n\r\nProduced by Anyone\r\n"
    )
    assert clean(text) == 'CHAPTER ONE\n\nIt was a "dark" night-- and very cold.'
    assert clean("Friends, Romans,\n  countrymen", verse=True) == "Friends, Romans,\ncountrymen"


def test_held_out_text_is_in_no_training_document() -> None:
    from cleaning import chance
    from gather import deduplicate, held_out
    from sources import Document

    long = "Whoever reads this paragraph in two places has found what deduplication is there to take out. " * 3
    kept = list(deduplicate([Document("a", "x", long)], seen := set()))
    assert [document.text for document in kept] == [long]
    other = "Nothing of this is elsewhere, and therefore all of it is kept, whatever was seen before it was. " * 3
    (left,) = deduplicate([Document("b", "y", f"{long.upper()}\n\n{other}")], seen)
    assert left.text == other
    # The same chapter of two translations is held out of both or of none: its key is the same.
    chapters = [f"bible/Ps.{number}" for number in range(1, 151)]
    assert 0 < sum(map(held_out, chapters)) < 15
    assert held_out("austen/persuasion")
    assert not held_out("austen/emma")
    assert chance("bible/Ps.23") == chance("bible/Ps.23") != chance("bible/Ps.24")


def test_conversations_are_the_same_every_time_and_fit_the_template() -> None:
    from chat import greetings, word_conversations
    from wordnet import Synset

    from qwenjax.chat_template import ChatTemplate

    synsets = [
        Synset("noun", (f"word{number}", "other"), "a thing", ("the thing was there",), 1) for number in range(40)
    ]
    first, second = (list(word_conversations(synsets, seed=3)) for _ in range(2))
    assert first == second
    asked = " ".join(message["content"] for chat in first for message in chat if message["role"] == "user")
    assert all(f"word{number}" in asked for number in range(40))
    template = ChatTemplate((REPRODUCE.parent / "chat_template.jinja").read_text("utf-8"))
    for chat in (*first, *greetings(5, seed=0)):
        prompt = template.render(chat[:-1], None, True, {"enable_thinking": False})
        text = template.render(chat, None, False, {})
        # What inference gives the model to go on from is how training's text begins, where thinking is off.
        empty = chat[-1]["content"].startswith("<think>\n\n</think>")
        assert text.startswith(prompt) == empty
        assert text.startswith(template.render(chat[:-1], None, True, {}))


def brute_force(ids: list[int], vocabulary: int, history: tuple[int, ...], token: int) -> float:
    """Interpolated modified Kneser-Ney, from the definition, for a trigram model."""

    def counts(size: int) -> dict[tuple[int, ...], int]:
        grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
        if size == 3:
            return {gram: grams.count(gram) for gram in set(grams)}
        longer = set(counts(size + 1))
        suffixes = [gram[1:] for gram in longer]
        return {gram: suffixes.count(gram) for gram in set(suffixes)}

    def discount(table: dict[tuple[int, ...], int], count: int) -> float:
        n = [max(sum(value == k for value in table.values()), 1) for k in (1, 2, 3, 4)]
        y = n[0] / (n[0] + 2 * n[1])
        k = min(count, 3)
        return min(max(k - (k + 1) * y * n[k] / n[k - 1], 0.1), float(k))

    def probability(size: int) -> float:
        if size == 0:
            return 1 / vocabulary
        table = counts(size)
        context = history[len(history) - size + 1 :]
        following = {gram: count for gram, count in table.items() if gram[:-1] == context}
        if not following:
            return probability(size - 1)
        total, count = sum(following.values()), following.get((*context, token), 0)
        taken = count - discount(table, count) if count else 0.0
        left = sum(discount(table, other) for other in following.values())
        return taken / total + left / total * probability(size - 1)

    return probability(3)


def test_ngram_model_follows_kneser_and_ney_and_sums_to_one() -> None:
    from ngram import NGramModel

    vocabulary = 5
    ids = np.random.default_rng(0).integers(0, 4, 60)  # 4 is never seen
    model = NGramModel(ids, vocabulary, order=3)
    for history in itertools.product(range(vocabulary), repeat=2):
        chances = [np.exp(model.log_probabilities(np.array([*history, token]))[-1]) for token in range(vocabulary)]
        np.testing.assert_allclose(sum(chances), 1.0)
        wanted = [brute_force(ids.tolist(), vocabulary, history, token) for token in range(vocabulary)]
        np.testing.assert_allclose(chances, wanted)
    with pytest.raises(ValueError, match="do not pack into 63 bits"):
        NGramModel(ids, 1 << 13)
