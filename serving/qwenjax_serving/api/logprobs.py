"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qwenjax.outputs import Logprob
from qwenjax.tokenizer import IncrementalDetokenizer, Tokenizer
from qwenjax_serving.api.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

_LEAST = -9999.0  # OpenAI's and vLLM's minus infinity, which JSON lacks


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None], top: int
) -> ChatLogprobs:
    """logprobs: per token, the token's own first, then the most likely. top: how many of those to report."""
    content = []
    for token, entries in zip(token_ids, logprobs, strict=True):
        assert entries is not None  # as only a prompt's first are
        best = sorted(entries.items(), key=lambda item: -item[1].logprob)[:top]
        drawn = _top(tokenizer, token, entries[token])
        likely = [_top(tokenizer, other, entry) for other, entry in best]
        content.append(ChatLogprob(drawn.token, drawn.logprob, drawn.bytes, likely))
    return ChatLogprobs(content)


def _top(tokenizer: Tokenizer, token: int, entry: Logprob) -> TopLogprob:
    data = tokenizer.token_bytes(token, skip_special_tokens=False)
    return TopLogprob(_token_text(data), _finite(entry.logprob), list(data))


class CompletionLogprobsWriter:
    """The tokens of one choice as they arrive, with the place in the text where each begins."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens)
        self._offset = 0

    def write(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None]) -> CompletionLogprobs:
        """logprobs: per token, as RequestOutput has them; None for a prompt's first."""
        found = CompletionLogprobs([], [], [], [])
        for token, entries in zip(token_ids, logprobs, strict=True):
            found.tokens.append(self._text(token))
            found.token_logprobs.append(None if entries is None else _finite(entries[token].logprob))
            # The drawn token is among them even where it is none of the most likely, as OpenAI has it.
            found.top_logprobs.append(
                None if entries is None else {self._text(t): _finite(entry.logprob) for t, entry in entries.items()}
            )
            found.text_offset.append(self._offset)
            self._offset += len(self._detokenizer.feed(token))
        return found

    def _text(self, token: int) -> str:
        return _token_text(self._tokenizer.token_bytes(token, skip_special_tokens=False))


def _token_text(data: bytes) -> str:
    """A token's text or, where it is part of a character, OpenAI's "bytes:\\xe2\\x82", which keeps tokens apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
