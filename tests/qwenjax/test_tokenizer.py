"""Tokenizers, chat templates and incremental text, against transformers and the tokenizers package."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qwenjax.tokenizer import IncrementalDetokenizer, Tokenizer

TEMPLATE = (Path(__file__).parent / "qwen_like_chat_template.jinja").read_text(encoding="utf-8")
CORPUS = [
    "The quick brown fox. 你好 世界 こんにちは 👩‍👩‍👧 😀😃 naïve café",
    "def f(x):\n    return x + 1\n",
    "안녕하세요 🇩🇪 Ωμέγα",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTROL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "é à"]  # added, yet not special; one with a space


def make_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    return backend


def write_folder(folder: Path, layout: str = "v5", **files) -> Path:
    """A checkpoint folder's tokenizer files; `files` replace or, where None, leave out generation_config and config."""
    backend = make_backend()
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    config: dict = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    if layout == "v5":
        config |= {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]}
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    else:
        config |= {
            "eos_token": {"content": "<|im_end|>", "special": True},
            "additional_special_tokens": ["<|im_start|>"],
        }
        config |= {"chat_template": TEMPLATE if layout == "v4" else [{"name": "default", "template": TEMPLATE}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in (
        {"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 2}} | files
    ).items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def oracle(folder) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


TOKENIZER = Tokenizer(make_backend())
BACKEND = make_backend()
IDS = st.integers(0, TOKENIZER.vocab_size + 5)  # a few beyond the tokenizer's range
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.lists(
    st.sampled_from([*CORPUS, *SPECIAL, *CONTROL, "👩‍👩‍👧", "🇩🇪", "你", "e\u0301"]), max_size=6
).map("".join)


@given(TEXT)
@settings(max_examples=100, deadline=None)
def test_text_survives_encode_and_decode(text):
    ids = TOKENIZER.encode(text)
    assert ids == BACKEND.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == normalizers.NFC().normalize_str(text) or "é à" in text


@given(st.lists(IDS, max_size=30), st.booleans())
@settings(max_examples=200, deadline=None)
def test_decode_of_any_ids_equals_the_tokenizers_package(ids, skip):
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == BACKEND.decode(ids, skip_special_tokens=skip)


def test_encode_and_decode_equal_transformers(folder, oracle):
    tokenizer = Tokenizer.from_folder(folder)
    text = "<|im_start|>user\n" + " ".join(CORPUS) + "<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert len(ids) > 4, "the file's truncation to 4 ids must not apply"
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_ids_beyond_the_range_leave_nothing_behind():
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(TOKENIZER._backend.to_str()))
    tokenizer.decode(range(10**6, 10**6 + 50))
    assert not tokenizer._bytes


def test_ids_beyond_the_range_decode_to_nothing():
    ids = TOKENIZER.encode("fox")
    assert TOKENIZER.decode([TOKENIZER.vocab_size, *ids, 151_935, -1, np.int32(2**31 - 1)]) == "fox"


CHATS = {
    "user": [{"role": "user", "content": "Hi 你好 <b>"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "\nadd\n"},
        {"role": "user", "content": "2+2?"},
    ],
    "tool": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "call it",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <&>", "a": 1}}}
            ],
        },
        {"role": "tool", "content": "rain"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "b": [1, None, True]}}}]


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_chat_templates_render_as_transformers(folder, oracle, chat, tools):
    tokenizer = Tokenizer.from_folder(folder)
    for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"add_generation_prompt": False}):
        theirs = oracle.apply_chat_template(
            chat, tools=tools, tokenize=False, **({"add_generation_prompt": True} | options)
        )
        assert tokenizer.apply_chat_template(chat, tools=tools, **options) == theirs


def test_thinking_can_be_switched_off(folder):
    tokenizer = Tokenizer.from_folder(folder)
    prompt = tokenizer.apply_chat_template(CHATS["user"], enable_thinking=False)
    assert prompt == "<|im_start|>user\nHi 你好 <b><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.encode(prompt, add_special_tokens=False)[0] == SPECIAL.index("<|im_start|>")


@pytest.mark.parametrize("layout", ["v4", "v4-list", "v5"])
def test_layouts_of_both_transformers_are_read_alike(tmp_path, layout):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, layout))
    assert tokenizer.apply_chat_template(CHATS["user"]).endswith("<|im_start|>assistant\n")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_ids == (2, 0)


def render(template: str, messages=None, **variables) -> str:
    tokenizer = Tokenizer(
        make_backend(), special_tokens={"eos_token": "<|im_end|>"}, chat_templates={"default": template}
    )
    return tokenizer.apply_chat_template(messages or CHATS["user"], **variables)


def test_templates_see_special_tokens_and_the_date():
    assert render("{{ eos_token }} {{ strftime_now('%Y') | length }}") == "<|im_end|> 4"


def test_the_tool_template_is_used_where_there_are_tools():
    tokenizer = Tokenizer(make_backend(), chat_templates={"default": "plain", "tool_use": "tools"})
    assert tokenizer.apply_chat_template(CHATS["user"]) == "plain"
    assert tokenizer.apply_chat_template(CHATS["user"], tools=TOOLS) == "tools"


def test_named_templates_are_read_where_transformers_writes_them(tmp_path):
    saved = PreTrainedTokenizerFast.from_pretrained(write_folder(tmp_path))
    saved.chat_template = {"default": "plain", "tool_use": "tools"}
    saved.save_pretrained(tmp_path / "saved")
    tokenizer = Tokenizer.from_folder(tmp_path / "saved")
    assert tokenizer.apply_chat_template(CHATS["user"]) == "plain"
    assert tokenizer.apply_chat_template(CHATS["user"], tools=TOOLS) == "tools"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% if %}", "line 1"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.join(1) }}", "can only join an iterable"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_a_value_error(template, message):
    with pytest.raises(ValueError, match=f"chat template.*{message}"):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages is \[\]"),
        ({"role": "user"}, r"it is a list of at least one message"),
        (["hi"], r"messages holds 'hi'; a message is a dict"),
        ([{"role": "user", "content": object()}], r"messages holds a object"),
    ],
)
def test_malformed_messages_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        TOKENIZER_WITH_TEMPLATE.apply_chat_template(messages)


TOKENIZER_WITH_TEMPLATE = Tokenizer(make_backend(), chat_templates={"default": TEMPLATE})


def test_a_checkpoint_without_a_template_says_so():
    with pytest.raises(ValueError, match="the checkpoint has none; use plain prompts"):
        TOKENIZER.apply_chat_template(CHATS["user"])
    named = Tokenizer(make_backend(), chat_templates={"rag": "x"})
    with pytest.raises(ValueError, match=r"only those named \['rag'\]"):
        named.apply_chat_template(CHATS["user"])


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"generation_config": {"eos_token_id": 0}}, (0,)),
        ({"generation_config": {"eos_token_id": [2, 0, 2]}}, (2, 0)),
        ({"generation_config": {}}, (2,)),
        ({"generation_config": None, "config": {"eos_token_id": [1]}}, (1,)),
        ({"generation_config": None, "config": None}, (2,)),
    ],
)
def test_every_eos_id_counts_with_fallbacks(tmp_path, files, eos_ids):
    assert Tokenizer.from_folder(write_folder(tmp_path, **files)).eos_ids == eos_ids


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, generation_config={"eos_token_id": "2"})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is '2'"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: not JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|gone|>"}')
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"special token '<\|gone\|>' is not in tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        Tokenizer.from_folder(tmp_path)


def test_other_kinds_of_tokenizer_are_refused():
    backend = make_backend()
    backend.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="decoder is Metaspace; qwenjax reads byte-level BPE"):
        Tokenizer(backend)


@pytest.mark.parametrize(("text", "message"), [("a\ud83d", "half of a surrogate pair"), (b"a", "prompt is a bytes")])
def test_text_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        TOKENIZER.encode(text)


@given(st.lists(IDS, max_size=12), st.lists(st.lists(IDS, max_size=4), max_size=12), st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_output_as_the_prompt_goes_on(prompt, chunks, skip):
    output = [token_id for chunk in chunks for token_id in chunk]
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt, skip_special_tokens=skip)
    text = "".join(detokenizer.feed(chunk) for chunk in chunks) + detokenizer.finish()
    # The prompt's whole characters: its text without the U+FFFD that a character it leaves open would be.
    whole = BACKEND.decode(prompt, skip_special_tokens=skip)
    full = BACKEND.decode(prompt + output, skip_special_tokens=skip)
    assert full in (whole + text, whole.removesuffix("\ufffd") + text)
    if prompt == [] or not whole.endswith("\ufffd"):
        assert full == whole + text


@given(TEXT, st.data())
@settings(max_examples=200, deadline=None)
def test_no_piece_of_whole_text_holds_half_a_character(text, data):
    """Single bytes as tokens are the hardest split of a text; pairs of them come from the data."""
    ids = [BYTE_IDS[byte] for byte in text.encode()]
    detokenizer = IncrementalDetokenizer(TOKENIZER, data.draw(st.sampled_from([[], TOKENIZER.encode("你好")])))
    pieces = []
    while ids:
        length = data.draw(st.integers(1, 3))
        pieces.append(detokenizer.feed(ids[:length]))
        ids = ids[length:]
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_half_a_surrogate_pair_at_a_prompts_end_is_the_prompts():
    detokenizer = IncrementalDetokenizer(TOKENIZER, [BYTE_IDS[0xED], BYTE_IDS[0xA1]], skip_special_tokens=False)
    assert detokenizer.feed(BYTE_IDS[0x61]) + detokenizer.finish() == "a"


BYTE_IDS = {
    data[0]: token_id
    for token_id in range(TOKENIZER.vocab_size)
    if len(data := TOKENIZER.token_bytes(token_id, skip_special_tokens=False)) == 1
}


def test_a_character_left_open_shows_only_at_the_end():
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    smile = [BYTE_IDS[byte] for byte in "😀".encode()]
    assert [detokenizer.feed(token_id) for token_id in [*smile, *smile[:3]]] == ["", "", "", "😀", "", "", ""]
    assert detokenizer.finish() == "\ufffd"


def test_a_character_begun_by_the_prompt_belongs_to_the_output():
    smile = [BYTE_IDS[byte] for byte in "😀".encode()]
    detokenizer = IncrementalDetokenizer(TOKENIZER, np.array([*TOKENIZER.encode("prompt"), *smile[:2]]))
    assert [detokenizer.feed(token_id) for token_id in smile[2:]] == ["", "😀"]


def test_the_cost_of_an_id_does_not_grow_with_the_output():
    """Counted in bytes looked up: a detokenizer that decoded its past again would look them up again."""

    class Counting:
        calls = 0

        def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
            self.calls += 1
            return TOKENIZER.token_bytes(token_id, skip_special_tokens)

    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting, TOKENIZER.encode("fox " * 500))
    in_prompt = counting.calls
    for token_id in [BYTE_IDS[0x80]] * 1000:
        detokenizer.feed(token_id)
    assert in_prompt <= 4
    assert counting.calls - in_prompt == 1000
