"""LLM: what it draws follows from the model's logits and the parameters, and its API keeps its word."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import qwenjax.llm
from qwenjax import LLM, SamplingParams
from qwenjax.outputs import RequestOutput
from tests.generation import (
    EOS_IDS,
    TOLERANCE,
    VOCABULARY,
    assert_all_free,
    assert_follows,
    forced,
    greedy,
    ids_of_bytes,
    log_softmax,
    processed,
    random_ids,
    small_llm,
    tokens_of,
    write_folder,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return small_llm(folder)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The module's LLM; whatever a test does, everything must be free after it."""
    yield shared
    assert_all_free(shared)


@pytest.fixture
def steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device calls that a test makes, in order: "prefill", "decode"."""
    calls: list[str] = []
    run = llm._engine._run

    def counted(program: tuple[str, Any], table: np.ndarray) -> Any:
        calls.append(program[0])
        return run(program, table)

    monkeypatch.setattr(llm._engine, "_run", counted)
    return calls


SAMPLED = {"temperature": 0.9, "max_tokens": 24, "ignore_eos": True}
REQUESTS: dict[str, tuple[int, SamplingParams]] = {
    "greedy": (5, greedy(24)),
    "greedy, a prompt of two chunks": (100, greedy(20)),
    "a prompt of one token": (1, greedy(24)),
    "repetition penalty": (20, greedy(24, repetition_penalty=1.7)),
    "presence and frequency penalties": (9, greedy(24, presence_penalty=1.5, frequency_penalty=1.0)),
    # What the penalties count begins after the prompt, in whichever of its rows a token was read.
    "presence penalty after a prompt of many rows": (100, greedy(20, presence_penalty=1.5)),
    "negative penalties": (9, greedy(24, presence_penalty=-2.0, frequency_penalty=-0.5)),
    "logit bias": (9, greedy(24, logit_bias={7: 3.0, 8: -4.0, 9: 2.5}, presence_penalty=2.0)),
    "min_tokens": (
        9,
        SamplingParams(temperature=0, max_tokens=24, min_tokens=20, logit_bias={2: 40.0, 0: 30.0, 11: 20.0}),
    ),
    "temperature": (9, SamplingParams(**SAMPLED, seed=3)),
    "a seed beyond 32 bits": (9, SamplingParams(**SAMPLED, seed=2**63 + 5)),
    "all truncations, penalties, n": (
        70,
        SamplingParams(**SAMPLED, seed=11, n=3, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_token_follows_from_logits_parameters_and_seed(llm: LLM, name: str) -> None:
    length, params = REQUESTS[name]
    result = llm.generate(random_ids(length), params)[0]
    assert len(result.outputs) == params.n
    assert_follows(llm, result, params)


def test_a_mixed_batch_equals_its_requests_alone(llm: LLM) -> None:
    prompts = [random_ids(length) for length, _ in REQUESTS.values()]
    several = [params for _, params in REQUESTS.values()]
    together = [tokens_of(result) for result in llm.generate(prompts, several)]
    alone = [tokens_of(llm.generate(prompt, params)[0]) for prompt, params in zip(prompts, several, strict=True)]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_1_to_17_tokens_in_any_order_equal_their_solo_runs(llm: LLM, temperature: float) -> None:
    prompts = [random_ids(length) for length in range(1, 18)]
    params = [
        SamplingParams(temperature=temperature, seed=length, max_tokens=12, ignore_eos=True) for length in range(1, 18)
    ]
    alone = [tokens_of(llm.generate(prompt, own)[0]) for prompt, own in zip(prompts, params, strict=True)]
    assert len({str(tokens) for tokens in alone}) > 10
    for seed in range(3):
        order = random.Random(seed).sample(range(17), 17)
        results = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        assert [tokens_of(result) for result in results] == [alone[i] for i in order]


def test_logits_of_this_checkpoint_equal_transformers(llm: LLM, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = random_ids(100)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = llm.logits(ids)
    assert found.dtype == np.float32
    assert found.shape == (100, VOCABULARY)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_logits_refuses_what_the_model_cannot_read(llm: LLM) -> None:
    for ids, message in ([], "empty"), ([VOCABULARY], "0 to 319"), ([0] * 129, "max_position_embeddings is 128"):
        with pytest.raises(ValueError, match=message):
            llm.logits(ids)


def test_outputs_depend_on_seed_and_sample_index(llm: LLM) -> None:
    def draw(**changes: Any) -> list[list[int]]:
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, **changes})
        return tokens_of(llm.generate(random_ids(6), params)[0])

    five = draw(seed=1, n=5)
    assert len({str(tokens) for tokens in five}) == 5
    assert draw(seed=1, n=5) == five
    assert draw(seed=1, n=2) == five[:2]
    assert draw(seed=2) != five[:1]
    assert draw(n=1) != draw(n=1)


def test_draws_have_the_distribution_of_the_logits(llm: LLM) -> None:
    prompt, draws = random_ids(4), 1500
    params = SamplingParams(temperature=1.3, top_k=8, seed=20, n=draws, max_tokens=1, ignore_eos=True)
    found = [tokens[0] for tokens in tokens_of(llm.generate(prompt, params)[0])]
    expected = draws * np.exp(log_softmax(processed(llm.logits(prompt)[-1], params, prompt, [])))
    kept = np.flatnonzero(expected)
    counts = np.bincount(found, minlength=VOCABULARY)
    assert counts.sum() == counts[kept].sum()
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert len(kept) == 8
    assert chi_square < 24.3  # 7 degrees of freedom: passed by one fair sampler in a thousand


def test_logprobs_are_those_of_the_unprocessed_logits(llm: LLM) -> None:
    prompt = random_ids(70)
    params = SamplingParams(
        temperature=0.7, seed=4, max_tokens=12, logprobs=5, prompt_logprobs=2, repetition_penalty=1.5, ignore_eos=True
    )
    result = llm.generate(prompt, params)[0]
    part = result.outputs[0]
    assert part.logprobs is not None
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(prompt)
    ids = [*prompt, *part.token_ids]
    expected = log_softmax(llm.logits(ids[:-1]))
    for place, (entries, top_n) in enumerate(
        [(entries, 2) for entries in result.prompt_logprobs[1:]] + [(entries, 5) for entries in part.logprobs]
    ):
        assert entries is not None
        row, own = expected[place], ids[place + 1]
        best = np.argsort(-row, kind="stable")[:top_n].tolist()
        assert next(iter(entries)) == own
        assert list(entries) == list(dict.fromkeys([own, *best]))
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
            assert entry.rank == 1 + (row > row[token]).sum()
            assert entry.decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)
    drawn = [entries[token].logprob for entries, token in zip(part.logprobs, part.token_ids, strict=True)]
    assert part.cumulative_logprob == pytest.approx(sum(drawn))


def test_logprobs_are_none_where_not_asked_for_and_their_batch_does_not_matter(llm: LLM) -> None:
    plain, asking = greedy(9), greedy(9, logprobs=0, prompt_logprobs=0)
    first, second = llm.generate([random_ids(5)] * 2, [plain, asking])
    assert (first.prompt_logprobs, first.outputs[0].logprobs, first.outputs[0].cumulative_logprob) == (None,) * 3
    assert second.outputs[0].logprobs is not None
    assert [list(entries) for entries in second.outputs[0].logprobs] == [[t] for t in first.outputs[0].token_ids]
    assert second.prompt_logprobs is not None
    assert [entries and list(entries) for entries in second.prompt_logprobs[1:]] == [[t] for t in random_ids(5)[1:]]


PLAIN = [3 + i for i in (40, 41, 42)]  # a prompt that holds none of what the tests below force


def test_text_is_that_of_the_tokens_and_excludes_the_prompt(llm: LLM) -> None:
    ids = ids_of_bytes("né🙂!")
    part = llm.generate("abc", forced(ids))[0].outputs[0]
    assert (part.text, part.token_ids, part.finish_reason, part.stop_reason) == ("né🙂!", ids, "length", None)


def test_ids_beyond_the_tokenizers_range_decode_to_nothing(llm: LLM) -> None:
    a, b = ids_of_bytes("xy")
    assert llm.tokenizer.vocab_size < VOCABULARY - 1
    part = llm.generate(PLAIN, forced([a, VOCABULARY - 1, b]))[0].outputs[0]
    assert (part.text, part.token_ids) == ("xy", [a, VOCABULARY - 1, b])


def test_special_tokens_leave_text_only_where_asked(llm: LLM) -> None:
    ids = [1, *ids_of_bytes("x")]
    assert llm.generate(PLAIN, forced(ids))[0].outputs[0].text == "x"
    assert llm.generate(PLAIN, forced(ids, skip_special_tokens=False))[0].outputs[0].text == "<|im_start|>x"


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("cd", "ab", 4),
        (["é🙂", "zz"], "n", 7),
        ("d\u00e9", "né🙂!", 8),  # é is there, d before it is not
        (["🙂!", "🙂"], "né", 7),
        ("\u00e9", "n", 3),
    ],
)
def test_a_stop_string_ends_the_output_across_token_and_character_borders(
    llm: LLM, stop: str | list[str], text: str, tokens: int
) -> None:
    ids = ids_of_bytes("abcdefgh" if stop == "cd" else "né🙂!")
    for params in forced(ids, stop=stop), forced(ids, stop=stop, include_stop_str_in_output=True):
        result = llm.generate(PLAIN, params)[0]
        part = result.outputs[0]
        assert part.token_ids == ids[:tokens]
        ended = part.finish_reason == "stop"
        assert ended == (tokens < len(ids))
        assert part.stop_reason in (stop if isinstance(stop, list) else [stop, None])
        shown = str(part.stop_reason) if ended and params.include_stop_str_in_output else ""
        assert part.text == text + shown


def test_a_stop_string_in_the_prompt_does_not_count(llm: LLM) -> None:
    assert llm.generate("xyz", forced(ids_of_bytes("abc"), stop="za"))[0].outputs[0].text == "abc"


@pytest.mark.parametrize("eos", EOS_IDS)
def test_every_eos_of_the_generation_config_ends_the_output(llm: LLM, eos: int) -> None:
    ids = [*ids_of_bytes("ab"), eos, *ids_of_bytes("cd")]
    part = llm.generate(PLAIN, forced(ids))[0].outputs[0]
    assert (part.text, part.token_ids, part.finish_reason, part.stop_reason) == ("ab", ids[:3], "stop", None)
    part = llm.generate(PLAIN, forced(ids, ignore_eos=True))[0].outputs[0]
    assert (part.text, part.token_ids, part.finish_reason) == ("abcd", ids, "length")


def test_stop_token_ids_end_the_output_besides_eos(llm: LLM) -> None:
    ids = ids_of_bytes("abcd")
    for ignore_eos in (False, True):
        part = llm.generate(PLAIN, forced(ids, stop_token_ids=[ids[2]], ignore_eos=ignore_eos))[0].outputs[0]
        assert (part.text, part.token_ids, part.finish_reason, part.stop_reason) == ("ab", ids[:3], "stop", ids[2])
    shown = llm.generate(PLAIN, forced(ids, stop_token_ids=[ids[2]], include_stop_str_in_output=True))[0].outputs[0]
    assert shown.text == "abc"


def test_min_tokens_holds_eos_stop_ids_and_stop_strings_back(llm: LLM) -> None:
    a, b, c, d = ids_of_bytes("abcd")
    part = llm.generate(PLAIN, forced([2, 0, c, a, b, d], min_tokens=2, stop_token_ids=[c]))[0].outputs[0]
    assert (part.token_ids, part.finish_reason, part.stop_reason) == ([a, b, 2], "stop", None)
    part = llm.generate(PLAIN, forced([a, b, c, d], min_tokens=2, stop=["b", "d"]))[0].outputs[0]
    assert (part.text, part.stop_reason) == ("abc", "d")


def test_outputs_end_at_max_tokens_or_the_contexts_end(llm: LLM) -> None:
    for length, max_tokens, expected in (5, 1, 1), (5, 9, 9), (5, 123, 123), (5, None, 123), (127, None, 1):
        part = llm.generate(random_ids(length), greedy(max_tokens))[0].outputs[0]
        assert (len(part.token_ids), part.finish_reason) == (expected, "length")


def test_a_stream_grows_by_whole_characters_to_generates_result(llm: LLM) -> None:
    text = "né🙂 ax"
    prompts = [PLAIN, random_ids(80), random_ids(3)]
    params = [forced(ids_of_bytes(text), stop="x"), greedy(30), SamplingParams(temperature=1.0, seed=1, n=2)]
    shown: dict[str, list[str]] = {}
    last: dict[str, RequestOutput] = {}
    for output in llm.stream(prompts, params):
        before = last.get(output.request_id)
        for index, part in enumerate(output.outputs):
            old = before.outputs[index] if before else None
            assert part.text.startswith(old.text if old else "")
            assert part.token_ids[: len(old.token_ids) if old else 0] == (old.token_ids if old else [])
            if output.request_id.endswith("-0"):
                assert "né🙂 a".startswith(part.text)
            shown.setdefault(f"{output.request_id}.{index}", []).append(part.text[len(old.text) if old else 0 :])
        assert not (before and before.finished)
        last[output.request_id] = output
    results = llm.generate(prompts, params)
    assert [tokens_of(output) for _, output in sorted(last.items())] == [tokens_of(result) for result in results]
    texts = [part.text for result in results for part in result.outputs]
    assert ["".join(pieces) for _, pieces in sorted(shown.items())] == texts
    assert all(output.finished for output in last.values())


def test_a_stream_is_checked_and_queued_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        llm.stream("abc", greedy(4000))
    stream = llm.stream("abc", greedy(4))
    assert llm._engine.has_unfinished
    assert [len(output.outputs[0].token_ids) for output in stream] == [1, 4]


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("dropped", [False, True])
def test_closing_a_stream_frees_its_slots_and_pages(llm: LLM, taken: int, dropped: bool) -> None:
    # More outputs than slots, so that some wait, and a prompt of two chunks, so that one is half read.
    stream: Any = llm.stream([random_ids(100), *[random_ids(5)] * 3], greedy(20))
    waiting: Any = llm.stream(random_ids(7), SamplingParams(n=12, max_tokens=40, seed=1))
    for _ in range(taken):
        next(stream)
    if dropped:
        del stream, waiting
        gc.collect()
    else:
        stream.close()
        waiting.close()
    assert_all_free(llm)
    assert not llm._arrived


def test_a_slot_that_the_host_ended_writes_to_no_page_any_more(llm: LLM) -> None:
    # The third keeps the second's slot, free now and within the batch, among those that the program runs; the next
    # request has the first slot and the second's pages.
    kept, later = random_ids(9), random_ids(50)
    alone = [tokens_of(llm.generate(prompt, greedy(40))[0]) for prompt in (kept, later)]
    streams: list[Any] = [llm.stream(random_ids(5, seed), greedy(40)) for seed in (1, 2)]
    third = llm.stream(kept, greedy(40))
    for _ in range(3):
        next(third)
    for stream in streams:
        stream.close()
    assert tokens_of(llm.generate(later, greedy(40))[0]) == alone[1]
    assert tokens_of(list(third)[-1]) == alone[0]


def test_a_stream_goes_on_beside_other_calls(llm: LLM) -> None:
    # The last ends after the others, whose final results come while nobody asks for them.
    prompts, params = [random_ids(length) for length in (5, 30, 9)], [greedy(40), greedy(40), greedy(70)]
    alone = [tokens_of(llm.generate(prompt, own)[0]) for prompt, own in zip(prompts, params, strict=True)]
    first, second = (llm.stream(prompt, own) for prompt, own in zip(prompts[:2], params[:2], strict=True))
    next(first), next(second)
    assert tokens_of(llm.generate(prompts[2], params[2])[0]) == alone[2]
    assert tokens_of(list(first)[-1]) == alone[0]
    assert tokens_of(list(second)[-1]) == alone[1]


def test_prompts_may_be_text_ids_arrays_and_mixed(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello a")
    expected = tokens_of(llm.generate("hello a", greedy(4))[0])
    array = np.array(ids)
    for one in ids, tuple(ids), array, array.astype(np.int32):
        results = llm.generate(one, greedy(4))
        assert [tokens_of(result) for result in results] == [expected]
        assert results[0].prompt_token_ids == ids
        assert results[0].prompt is None
        assert {type(token) for token in results[0].prompt_token_ids} == {int}
    results = llm.generate(["hello a", ids, array], greedy(4))
    assert [tokens_of(result) for result in results] == [expected] * 3
    assert [result.prompt for result in results] == ["hello a", None, None]
    assert len(llm.generate(np.stack([array, array]), greedy(4))) == 2
    assert llm.generate([]) == []


def test_chat_renders_the_template_with_its_arguments(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for kwargs in {}, {"enable_thinking": False}:
        text = llm.tokenizer.apply_chat_template(messages, **kwargs)
        result = llm.chat(messages, greedy(4), chat_template_kwargs=kwargs)[0]
        assert result.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
        assert tokens_of(result) == tokens_of(llm.generate([result.prompt_token_ids], greedy(4))[0])
        assert ("</think>" in text) == bool(kwargs)
    results = llm.chat([messages, [*messages, {"role": "assistant", "content": "w"}, *messages]], greedy(4))
    assert len(results) == 2
    assert len(results[1].prompt_token_ids) > len(results[0].prompt_token_ids)
    for bad in [[{"content": "x", "role": "user"}], []], [[7]]:
        with pytest.raises(ValueError, match="messages"):
            llm.chat(bad, greedy(4))  # type: ignore[arg-type]


def test_text_parts_of_a_message_are_its_lines(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "w"}]
    asked = [[{"role": "user", "content": content}] for content in (parts, "hello\nw")]
    assert len({tuple(ids) for ids in llm.chat_prompts(asked)}) == 1


def test_default_parameters_are_the_checkpoints(
    llm: LLM, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert llm.get_default_sampling_params() == expected
    seeded = replace(expected, seed=5)
    assert_follows(llm, llm.generate(PLAIN, seeded)[0], seeded)
    assert len(llm.generate("abc")[0].outputs[0].token_ids) <= 16
    assert qwenjax.llm.default_sampling_params(tmp_path) == SamplingParams()
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.5, "repetition_penalty": 1.3}'
    )
    greedy_penalised = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    assert qwenjax.llm.default_sampling_params(tmp_path) == greedy_penalised
    assert not caplog.messages
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 9, "num_beams": 4, "eos_token_id": 1}')
    assert qwenjax.llm.default_sampling_params(tmp_path) == SamplingParams()
    assert caplog.messages[0].endswith("has settings that qwenjax leaves out: max_new_tokens, num_beams")
    (tmp_path / "generation_config.json").write_text('{"temperature": -0.5}')
    with pytest.raises(ValueError, match=r"generation_config.json: temperature is -0.5"):
        qwenjax.llm.default_sampling_params(tmp_path)


GOOD = greedy(4)
BAD: dict[str, tuple[Any, Any, str]] = {
    "an empty text": ("", GOOD, "prompt is empty; it has at least one token"),
    "empty ids among good prompts": ([[1], []], GOOD, "prompt is empty"),
    "an id out of range": ([[1], [VOCABULARY]], GOOD, "prompt_token_ids holds id 320; the model's ids are 0 to 319"),
    "a negative id": ([1, -1], GOOD, "prompt_token_ids holds id -1"),
    "a number that is no integer": ([[1.5]], GOOD, "prompt_token_ids holds 1.5; ids are integers"),
    "a prompt as long as the context": (random_ids(128), greedy(None), "prompt has 128 tokens; the context of 128"),
    "max_tokens beyond the context": (random_ids(100), greedy(29), "max_tokens is 29.*context of 128 holds 28 more"),
    "min_tokens beyond the context": (
        random_ids(100),
        SamplingParams(max_tokens=None, min_tokens=29),
        "min_tokens is 29; the context holds 28",
    ),
    "a stop id out of range": ("a", SamplingParams(stop_token_ids=[320]), "stop_token_ids holds id 320"),
    "a biased id out of range": ("a", SamplingParams(logit_bias={320: 1.0}), "logit_bias holds id 320"),
    "more logprobs than reported": ("a", SamplingParams(logprobs=21), "logprobs is 21; it is at most 20"),
    "parameters for another number of prompts": (["a", "b"], [GOOD], "sampling_params holds 1 items for 2 prompts"),
    "half a character": ("\ud83d", GOOD, "surrogate"),
}


def test_what_is_no_prompt_or_no_parameters_is_refused_by_its_type(llm: LLM, steps: list[str]) -> None:
    calls: list[tuple[Any, Any, str]] = [
        (None, None, "prompts is a NoneType"),
        ({"prompt": "x"}, None, "prompts is a dict"),
        ([{"prompt": "x"}], None, r"prompts\[0\] is a dict"),
        (["a", None], None, r"prompts\[1\] is a NoneType"),
        (b"abc", None, "prompts is a bytes"),  # a row of integers to Python
        (np.array(3), None, "prompts is a ndarray"),
        (["a", ""], None, r"prompts\[1\]: prompt is empty"),
        ("a", {"temperature": 0}, "sampling_params is a dict"),
        ("a", 5, "sampling_params is a int"),
    ]
    for prompts, params, message in calls:
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)
    part = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    chats: list[tuple[Any, str]] = [
        ([], r"messages is \[\]; it is a list"),
        ("hello", "messages is 'hello'; it is a list"),
        ({"role": "user", "content": "hello"}, "messages is {.*}; it is a list"),
        ([part], r"messages\[0\].content has a part of type 'image_url'"),
    ]
    for messages, message in chats:
        with pytest.raises(ValueError, match=message):
            llm.chat(messages)
    for ids, message in (([1.7], "holds 1.7; token ids are integers"), ([True], "holds True; token ids are integers")):
        with pytest.raises(ValueError, match=message):
            llm.logits(ids)  # type: ignore[arg-type]
    assert steps == []


def test_outputs_of_a_stream_do_not_change_after_they_were_given(llm: LLM) -> None:
    prompt = random_ids(100)  # two chunks
    seen = []
    for output in llm.stream(prompt, greedy(3, prompt_logprobs=1)):
        seen.append((output, len(output.prompt_logprobs or []), len(output.outputs[0].token_ids)))
        output.prompt_token_ids.clear()
    assert len(seen) > 1
    assert seen[0][1] < seen[-1][1] == 100
    assert all((len(o.prompt_logprobs or []), len(o.outputs[0].token_ids)) == (p, t) for o, p, t in seen)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_work(llm: LLM, steps: list[str], name: str) -> None:
    prompts, params, message = BAD[name]
    for call in llm.generate, llm.stream:
        with pytest.raises(ValueError, match=message):
            call(prompts, params)
        assert_all_free(llm)
    assert steps == []
    llm.generate("a", GOOD)
    assert steps == ["prefill", "decode"]


def test_a_decode_call_draws_num_steps_tokens_for_every_slot(llm: LLM, steps: list[str]) -> None:
    lengths = [len(output.outputs[0].token_ids) for output in llm.stream(PLAIN, greedy(20))]
    assert lengths == [1, 9, 17, 20]
    assert steps == ["prefill"] + ["decode"] * 3
    steps.clear()
    llm.generate([random_ids(5, seed) for seed in range(4)], greedy(17))  # four rows fit one prefill call
    assert steps == ["prefill"] + ["decode"] * 2


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, with every parameter at some value other than its default somewhere."""
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.3, 1.0, 2.0],
        "top_p": [1.0, 0.5],
        "top_k": [0, -1, 3, 1000],
        "min_p": [0.0, 0.1],
        "repetition_penalty": [1.0, 1.3],
        "presence_penalty": [0.0, 1.0],
        "frequency_penalty": [0.0, -1.0],
        "logit_bias": [None, {5: 2.0}],
        "seed": [None, 7],
        "max_tokens": [1, 9, 23],
        "min_tokens": [0, 1],
        "stop": [None, "a", ["th", "é"]],
        "stop_token_ids": [None, [9, 10]],
        "ignore_eos": [False, True],
        "logprobs": [None, 0, 20],
        "prompt_logprobs": [None, 0, 3],
        "skip_special_tokens": [True, False],
        "include_stop_str_in_output": [False, True],
        "speculation": [True, False],
    }
    rng = random.Random(0)
    prompts, several = [], []
    for seed in range(count):
        settings = {name: rng.choice(values) for name, values in choices.items()}
        several.append(SamplingParams(**settings, n=1 if settings["temperature"] == 0 else rng.choice([1, 3])))
        prompts.append(random_ids(rng.choice([1, 2, 15, 16, 17, 64, 65, 100]), seed))
    fields = asdict(SamplingParams())
    assert {name for name in fields if any(asdict(p)[name] != fields[name] for p in several)} == set(fields)
    return prompts, several


def test_nothing_compiles_after_warm_up_over_100_mixed_requests(llm: LLM) -> None:
    prompts, several = mixed_requests(100)
    compiled: list[str] = []

    def listener(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        results = llm.generate(prompts[:60], several[:60])
        for prompt, params in zip(prompts[60:], several[60:], strict=True):
            results += llm.generate(prompt, params)
        assert compiled == []
        jax.jit(lambda x: x * 3 + 17)(np.float32(1))
        assert compiled  # the listener does hear
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(results) == 100
    assert {part.finish_reason for result in results for part in result.outputs} == {"stop", "length"}


def test_the_cache_is_donated_and_updated_in_place(llm: LLM) -> None:
    engine = llm._engine
    cache = engine._slots.cache
    whole = cache.keys.nbytes + cache.values.nbytes
    layer = whole // llm.model.config.num_hidden_layers
    assert len(engine._compiled) == 3
    for name, program in engine._compiled.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= whole, name
        assert memory.temp_size_in_bytes < layer, name
    before = cache.keys.unsafe_buffer_pointer()
    llm.generate(PLAIN, greedy(9))
    assert cache.keys.is_deleted()
    assert engine._slots.cache.keys.unsafe_buffer_pointer() == before


def test_metrics_are_in_order(llm: LLM) -> None:
    metrics = llm.generate(random_ids(100), greedy(9))[0].metrics
    assert metrics is not None
    assert metrics.first_scheduled is not None
    assert metrics.first_token is not None
    assert metrics.finished is not None
    assert metrics.arrival <= metrics.first_scheduled < metrics.first_token < metrics.finished
    assert metrics.time_to_first_token == metrics.first_token - metrics.arrival
