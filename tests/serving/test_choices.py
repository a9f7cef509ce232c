"""Choices as outputs grow: whatever a backend joins or leaves out, the parts are the whole."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from qwenjax.outputs import CompletionOutput, RequestOutput
from qwenjax.tokenizer import IncrementalDetokenizer
from qwenjax_serving.api.choices import ChatWriter, CompletionWriter, Writer
from qwenjax_serving.api.requests import ChatRequest, CompletionRequest
from qwenjax_serving.api.responses import ChatChoice, Choice, CompletionChoice
from tests.serving.fake_backend import entries, tokenizer

PROMPT = [263, 264]


def snapshots(ids: list[int], with_logprobs: bool) -> list[CompletionOutput]:
    """The output after each of its tokens, none first."""
    detokenizer, text = IncrementalDetokenizer(tokenizer(), PROMPT), ""
    found = [CompletionOutput(0, logprobs=[] if with_logprobs else None)]
    for count, token in enumerate(ids, 1):
        text += detokenizer.feed(token) + (detokenizer.finish() if count == len(ids) else "")
        logprobs = [entries(t, 2) for t in ids[:count]] if with_logprobs else None
        found.append(CompletionOutput(0, text, ids[:count], logprobs))
    found[-1].finish_reason = "length"
    return found


def write(writer: Writer, outputs: list[CompletionOutput], streaming: bool) -> list[Choice]:
    of_prompt = [None, entries(PROMPT[1], 2)]
    results = [RequestOutput("a", None, PROMPT, [replace(output)], of_prompt) for output in outputs]
    found = [writer.write(result, result.outputs[0], streaming) for result in results]
    assert writer.write(results[-1], results[-1].outputs[0], streaming) is None  # what has ended ends once
    return [choice for choice in found if choice is not None]


@given(
    ids=st.lists(st.integers(3, 264), min_size=1, max_size=12),
    data=st.data(),
    logprobs=st.booleans(),
    with_ids=st.booleans(),
    echo=st.booleans(),
)
def test_the_parts_of_a_stream_are_the_whole(
    ids: list[int], data: st.DataObject, logprobs: bool, with_ids: bool, echo: bool
) -> None:
    every = snapshots(ids, logprobs)
    seen = [*(output for output in every[:-1] if data.draw(st.booleans())), every[-1]]
    completion = CompletionRequest(prompt=[], logprobs=2 if logprobs else None, return_token_ids=with_ids, echo=echo)
    chat = ChatRequest(messages=[], logprobs=logprobs, top_logprobs=2 if logprobs else None, return_token_ids=with_ids)

    [whole] = write(CompletionWriter(tokenizer(), completion, 0), every[-1:], streaming=False)
    parts = write(CompletionWriter(tokenizer(), completion, 0), seen, streaming=True)
    assert isinstance(whole, CompletionChoice)
    assert whole.text == ("th a" if echo else "") + every[-1].text
    assert "".join(part.text for part in parts if isinstance(part, CompletionChoice)) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if logprobs else ():
        assert [x for part in parts for x in getattr(part.logprobs, name)] == getattr(whole.logprobs, name)

    [message] = write(ChatWriter(tokenizer(), chat, 0), every[-1:], streaming=False)
    deltas = write(ChatWriter(tokenizer(), chat, 0), seen, streaming=True)
    assert isinstance(message, ChatChoice)
    assert message.message.content == every[-1].text  # type: ignore[union-attr]
    assert "".join(part.delta.content for part in deltas) == every[-1].text  # type: ignore[union-attr, misc]
    for found in parts, deltas:
        assert [part.finish_reason for part in found] == [None] * (len(found) - 1) + ["length"]
        if with_ids:
            assert [token for part in found for token in part.token_ids] == ids  # type: ignore[union-attr]
