"""Conversations for the chat format: questions about words, answered from WordNet; texts to go on with; greetings."""

from __future__ import annotations

import random
from collections.abc import Iterator

from wordnet import Synset

Message = dict[str, str]

_DEFINE = (
    "What does the word {word} mean?",
    "What is the meaning of {word}?",
    "Define {word}.",
    "What is {word}?",
    "Can you explain the word {word}?",
    "Tell me what {word} means.",
)
_USE = (
    "Use the word {word} in a sentence.",
    "Give me a sentence with the word {word}.",
    "Write a sentence with {word}.",
)
_SYNONYM = ("What is another word for {word}?", "Give me a synonym of {word}.", "Which words mean the same as {word}?")
_CONTINUE = ("Continue this text: {text}", "What comes next? {text}", "Go on with this story: {text}")
_SYSTEM = ("You are a helpful assistant.", "Answer in a few words.", "You explain words.")
_GREETINGS = (
    (("Hello!", "Hi!", "Hi there.", "Good morning.", "Good evening."), "Hello! What can I do for you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
     "I am a very small language model that comes with qwenjax. I have read old books, and I can tell you what a word "
     "means or go on with a text."),
    (("What can you do?", "How can you help me?"),
     "I can tell you what a word means, use it in a sentence, or go on with a text in the manner of an old book."),
    (("Thank you!", "Thanks.", "Thank you very much."), "You are welcome."),
    (("Goodbye!", "Bye.", "Good night."), "Goodbye, and come back soon!"),
)  # fmt: skip


def word_conversations(synsets: list[Synset], seed: int) -> Iterator[list[Message]]:
    """One to three exchanges about words each; every synset is asked about once."""
    draw = random.Random(seed)
    order = list(synsets)
    draw.shuffle(order)
    while order:
        batch = [order.pop() for _ in range(min(draw.choice((1, 1, 1, 2, 3)), len(order)))]
        yield _conversation([_about_word(synset, draw) for synset in batch], draw)


def greetings(count: int, seed: int) -> Iterator[list[Message]]:
    """`count` short conversations of greetings and questions about the model itself."""
    draw = random.Random(seed)
    for _ in range(count):
        picks = draw.sample(_GREETINGS, draw.choice((1, 1, 2)))
        yield _conversation([(draw.choice(questions), answer, "") for questions, answer in picks], draw)


def continuations(paragraphs: list[str], count: int, seed: int) -> Iterator[list[Message]]:
    """`count` requests to go on with a paragraph; the answer is the next paragraphs of the same text."""
    draw = random.Random(seed)
    for _ in range(count):
        start = draw.randrange(len(paragraphs) - 3)
        text, answer = paragraphs[start], "\n\n".join(paragraphs[start + 1 : start + 3])
        if 40 <= len(text) <= 800 and 40 <= len(answer) <= 1600:
            yield _conversation([(draw.choice(_CONTINUE).format(text=text), answer, "")], draw)


def _about_word(synset: Synset, draw: random.Random) -> tuple[str, str, str]:
    """Question, answer and a line of thought."""
    word, others = synset.words[0], synset.words[1:4]
    article = "an" if synset.part[0] == "a" else "a"
    thought = f"The question is about the word {word}. It is {article} {synset.part}."
    kind = draw.random()
    if kind < 0.2 and synset.examples:
        return draw.choice(_USE).format(word=word), _sentence(synset.examples[0]), thought
    if kind < 0.35 and others:
        return draw.choice(_SYNONYM).format(word=word), f"Another word for {word} is {' or '.join(others)}.", thought
    answer = f"The {synset.part} {word} means: {synset.gloss}."
    if synset.examples:
        answer += f" For example: {_sentence(synset.examples[0])}"
    return draw.choice(_DEFINE).format(word=word), answer, thought


def _sentence(text: str) -> str:
    text = text.strip().rstrip(";,")
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _conversation(exchanges: list[tuple[str, str, str]], draw: random.Random) -> list[Message]:
    messages = [{"role": "system", "content": draw.choice(_SYSTEM)}] if draw.random() < 0.2 else []
    think = draw.random() < 0.5
    for index, (question, answer, thought) in enumerate(exchanges):
        messages.append({"role": "user", "content": question})
        last = index == len(exchanges) - 1
        # As the template does it: only the newest answer keeps its thinking, which may be empty.
        prefix = f"<think>\n{thought if think else ''}\n</think>\n\n" if last else ""
        messages.append({"role": "assistant", "content": prefix + answer})
    return messages
