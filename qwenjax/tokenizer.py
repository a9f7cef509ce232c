"""Text to ids and back, by a checkpoint's own tokenizer files."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from qwenjax.chat_template import ChatTemplate
from qwenjax.text_files import read_text

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CHAT_TEMPLATES = "additional_chat_templates"  # transformers' folder of templates beside the default one
_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class Tokenizer:
    """A byte-level BPE tokenizer, Qwen's kind, with its special tokens, EOS ids and chat templates.

    eos_ids: every id that ends a generation, in the checkpoint's order; empty where it names none.
    special_ids: ids that leave no text where special tokens are skipped.
    vocab_size: one more than the highest id. A model's own vocabulary may be larger (Qwen3 pads it from
    151,669 to 151,936); ids beyond the tokenizer's decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        extra_special_tokens: Iterable[str] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """special_tokens: by name, {"eos_token": "<|im_end|>"}; templates can read them. chat_templates: by
        name.

        Raises ValueError where the tokenizer is not byte-level, a special token is not in its vocabulary, or
        a template is not Jinja.
        """
        if not isinstance(backend.decoder, decoders.ByteLevel):
            kind = type(backend.decoder).__name__
            raise ValueError(f"tokenizer.json: decoder is {kind}; qwenjax reads byte-level BPE, decoder ByteLevel")
        # A checkpoint may carry the settings its training used; here they would cut prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = {name: ChatTemplate(text) for name, text in (chat_templates or {}).items()}
        self._bytes: dict[int, bytes] = {}
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        special_ids |= {self._id_of(token) for token in [*self._special_tokens.values(), *extra_special_tokens]}
        self.special_ids = frozenset(special_ids)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, where there, tokenizer_config.json, generation_config.json, config.json,
        chat_template.jinja and additional_chat_templates/*.jinja. Layouts of transformers 4 and 5.

        Raises ValueError, with the file's name, for files that are missing or cannot be used.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; qwenjax reads tokenizers in that form")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{path}: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = {name: _content(config[name]) for name in _NAMED_SPECIAL_TOKENS if config.get(name)}
        eos_token_id = backend.token_to_id(special_tokens.get("eos_token", ""))
        eos_ids = _eos_ids(folder) or ([] if eos_token_id is None else [eos_token_id])
        templates = _chat_templates(folder, config)
        try:
            return cls(
                backend,
                eos_ids=eos_ids,
                special_tokens=special_tokens,
                extra_special_tokens=_extra_special_tokens(config),
                chat_templates=templates,
            )
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens written out in it become their ids.

        add_special_tokens: lets the tokenizer add its BOS or EOS, where it has any (Qwen's adds none); False
        for text from a chat template, which holds them already. Raises ValueError for text that is not
        Unicode.
        """
        if not isinstance(text, str):
            raise ValueError(f"prompt is a {type(text).__name__}; it is a string")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # what a lone surrogate gives
            raise ValueError("prompt holds half of a surrogate pair, which is no Unicode text") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that make no character become U+FFFD, ids beyond the tokenizer's nothing."""
        data = b"".join(self.token_bytes(token_id, skip_special_tokens) for token_id in ids)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """One id's bytes: part of a character, or several. Empty for skipped and unknown ids."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        if not 0 <= token_id < self.vocab_size:  # not kept: there are many of them
            return b""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = self._bytes[token_id] = b"" if token is None else _token_bytes(token)
        return data

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt's text for a chat, to be encoded with `add_special_tokens=False`.

        Arguments are named as transformers' and the results equal; `chat_template_kwargs` reach the template.
        A checkpoint with several templates has "tool_use" used where there are tools, else "default".

        Raises ValueError without a template, for malformed messages, and where the template refuses.
        """
        name = "tool_use" if tools and "tool_use" in self._chat_templates else "default"
        if name not in self._chat_templates:
            has = f"only those named {sorted(self._chat_templates)}" if self._chat_templates else "none"
            raise ValueError(f"chat template: the checkpoint has {has}; use plain prompts or add chat_template.jinja")
        variables = self._special_tokens | chat_template_kwargs
        return self._chat_templates[name].render(messages, tools, add_generation_prompt, variables)

    def _id_of(self, token: str) -> int:
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer_config.json: special token {token!r} is not in tokenizer.json")
        return token_id


class IncrementalDetokenizer:
    """Text of an output as its ids arrive: joined, the pieces are the output's text as the prompt goes on to
    it.

    A piece holds whole characters only. A character begun by the prompt belongs to the output; the prompt's
    own text never comes again. The work per id does not grow with the output.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = tokenizer.token_bytes(token_id, skip_special_tokens) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        # A character that is still open began within the last three bytes; what comes before is the prompt's.
        self._decoder.decode(tail)
        # CPython keeps half a surrogate pair open, which no byte completes: two U+FFFD of the prompt's own text.
        if len(self._decoder.getstate()[0].decode(errors="replace")) > 1:
            self._decoder.reset()

    def feed(self, ids: int | Iterable[int]) -> str:
        """The text that one more id, or several, completes; often none."""
        several = ids if isinstance(ids, Iterable) else (ids,)
        data = b"".join(self._tokenizer.token_bytes(token_id, self._skip_special_tokens) for token_id in several)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD where the output ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: visible Latin-1 stands for itself, the other 68 bytes for U+0100 upwards."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    # A token with a character outside the alphabet can only be an added one, written as plain text.
    if all(character in _BYTE_ALPHABET for character in token):
        return bytes(_BYTE_ALPHABET[character] for character in token)
    return token.encode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds a {type(data).__name__}; it holds an object")
    return data


def _content(token: Any) -> str:
    """A special token's text, from the text itself or, in transformers 4's layout, {"content": ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"tokenizer_config.json: special token {token!r} is neither a string nor has a content")
    return text


def _extra_special_tokens(config: Mapping[str, Any]) -> list[str]:
    """transformers 4 lists them as additional_special_tokens, 5 as extra_special_tokens, a list or a dict."""
    tokens: list[Any] = list(config.get("additional_special_tokens") or ())
    extra = config.get("extra_special_tokens") or ()
    tokens.extend(extra.values() if isinstance(extra, dict) else extra)
    return [_content(token) for token in tokens]


def _eos_ids(folder: Path) -> list[int]:
    """generation_config.json's eos_token_id, an id or a list; config.json's where the former has none."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ValueError(f"{folder / name}: eos_token_id is {value!r}; it is an id or a list of ids")
        return ids
    return []


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own, transformers 5's layout, go before tokenizer_config.json."""
    files = {path.stem: path for path in sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(path) for name, path in files.items()}
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        return {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError) as error:
        raise ValueError(
            "tokenizer_config.json: chat_template is neither a string nor a list of {name, template}"
        ) from error
