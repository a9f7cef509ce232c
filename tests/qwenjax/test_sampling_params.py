"""Which options are refused, and what the refusal says."""

import dataclasses

import numpy as np
import pytest

from qwenjax.sampling_params import MAX_END_IDS, MAX_LOGIT_BIAS, SamplingParams, validate_for


def test_defaults_are_vllms():
    defaults = dataclasses.asdict(SamplingParams())
    assert defaults.pop("speculation") is True  # ours alone
    assert defaults == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, r"temperature is nan; it is in \[0, 3.4"),
        ({"temperature": float("inf")}, r"temperature is inf"),
        ({"temperature": -0.1}, r"temperature is -0.1; it is in \[0"),
        ({"temperature": "1"}, r"temperature is '1'; it is a number in"),
        ({"temperature": None}, r"temperature is None; it is a number in"),
        ({"temperature": True}, r"temperature is True; it is a number in"),
        ({"top_p": 0.0}, r"top_p is 0.0; it is in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p is 1.01; it is in \(0, 1\]"),
        ({"top_p": float("nan")}, r"top_p is nan"),
        ({"top_k": -2}, r"top_k is -2; it is at least -1"),
        ({"top_k": 2.0}, r"top_k is 2.0; it is an integer at least -1"),
        ({"min_p": -0.01}, r"min_p is -0.01; it is in \[0, 1\]"),
        ({"min_p": 1.5}, r"min_p is 1.5; it is in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0.0; it is in \[1e-06, 1e\+06\]"),
        ({"repetition_penalty": -1.0}, r"repetition_penalty is -1.0"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2.5; it is in \[-2, 2\]"),
        ({"frequency_penalty": -2.5}, r"frequency_penalty is -2.5; it is in \[-2, 2\]"),
        ({"n": 0}, r"n is 0; it is in \[1, 16384\]"),
        ({"n": 20_000}, r"n is 20000; it is in \[1, 16384\]"),
        ({"n": True}, r"n is True; it is an integer in \[1, 16384\]"),
        ({"n": 2, "temperature": 0}, r"n is 2; it is 1 at temperature 0"),
        ({"seed": -1}, r"seed is -1; it is in \[0, 18446744073709551615\] or None"),
        ({"seed": 2**64}, r"seed is 18446744073709551616; it is in"),
        ({"max_tokens": 0}, r"max_tokens is 0; it is at least 1 or None"),
        ({"min_tokens": -1}, r"min_tokens is -1; it is at least 0"),
        ({"min_tokens": 17}, r"min_tokens is 17; it is at most max_tokens, 16"),
        ({"logprobs": -1}, r"logprobs is -1; it is at least 0 or None"),
        ({"prompt_logprobs": 1.5}, r"prompt_logprobs is 1.5; it is an integer"),
        ({"ignore_eos": 1}, r"ignore_eos is 1; it is True or False"),
        ({"skip_special_tokens": None}, r"skip_special_tokens is None; it is True or False"),
        ({"include_stop_str_in_output": "yes"}, r"include_stop_str_in_output is 'yes'"),
        ({"stop": ""}, r"stop is ''; a stop string has at least one character"),
        ({"stop": ["a", ""]}, r"stop is \['a', ''\]"),
        ({"stop": [1]}, r"stop is \[1\]; it is a string or a list of strings"),
        ({"stop": 3}, r"stop is 3; it is a string or a list of strings"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids holds -1; ids are integers of at least 0"),
        ({"stop_token_ids": [1.0]}, r"stop_token_ids holds 1.0"),
        ({"stop_token_ids": "12"}, r"stop_token_ids is '12'; it is a list of ids"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias holds id -1"),
        ({"logit_bias": {"5": 1.0}}, r"logit_bias holds id '5'; ids are integers"),
        ({"logit_bias": {5: float("nan")}}, r"logit_bias\[5\] is nan; it is a number within 1e\+30 of 0"),
        ({"logit_bias": {5: float("inf")}}, r"logit_bias\[5\] is inf"),
        ({"logit_bias": {5: None}}, r"logit_bias\[5\] is None"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; it is a dict of id to bias"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)},
            r"logit_bias holds 1025 ids; it holds at most 1024",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_bad_value_is_refused_with_field_value_and_limit(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_limits_themselves_are_accepted():
    SamplingParams(top_p=1.0, top_k=-1, min_p=1.0, presence_penalty=-2, seed=2**64 - 1, max_tokens=None, min_tokens=9)
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), -1e30))


def test_numpy_numbers_become_pythons():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=[np.int32(4)])
    assert (type(params.temperature), type(params.top_k), type(params.stop_token_ids[0])) == (float, int, int)


def test_stops_are_kept_as_tuples_without_repeats():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c", "ab"]).stop == ("ab", "c")
    assert SamplingParams(stop=None, stop_token_ids=None).stop_token_ids == ()


def test_params_cannot_be_changed_and_do_not_share_the_callers_bias():
    bias = {1: 1}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 2
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_end_ids_are_stop_ids_and_every_eos():
    assert SamplingParams(stop_token_ids=[5, 7]).end_ids([7, 8]) == (5, 7, 8)
    assert SamplingParams(stop_token_ids=[5, 7], ignore_eos=True).end_ids([7, 8]) == (5, 7)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_asks_for_counts(name):
    assert SamplingParams(**{name: 1.5}).has_penalties
    assert not SamplingParams().has_penalties


MODEL = {"prompt_token_ids": [1, 2, 3], "vocab_size": 100, "max_model_len": 32, "eos_ids": (99,)}


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({}, {"prompt_token_ids": []}, r"prompt is empty; it has at least one token"),
        ({}, {"prompt_token_ids": [1, 100]}, r"prompt_token_ids holds id 100; the model's ids are 0 to 99"),
        ({}, {"prompt_token_ids": [-1]}, r"prompt_token_ids holds id -1"),
        ({}, {"prompt_token_ids": [1.0]}, r"prompt_token_ids holds 1.0; ids are integers"),
        ({}, {"prompt_token_ids": ["a"]}, r"prompt_token_ids holds 'a'; ids are integers"),
        ({"logit_bias": {100: 1.0}}, {}, r"logit_bias holds id 100; the model's ids are 0 to 99"),
        ({"stop_token_ids": [100]}, {}, r"stop_token_ids holds id 100; the model's ids are 0 to 99"),
        ({"max_tokens": 30}, {}, r"max_tokens is 30; after a prompt of 3 tokens the context of 32 holds 29 more"),
        (
            {"max_tokens": None},
            {"prompt_token_ids": [1] * 32},
            r"prompt has 32 tokens; the context of 32 holds at most 31",
        ),
        ({"max_tokens": None, "min_tokens": 30}, {}, r"min_tokens is 30; the context holds 29 after the prompt"),
        ({"logprobs": 21}, {}, r"logprobs is 21; it is at most 20"),
        ({"prompt_logprobs": 11}, {"vocab_size": 10, "eos_ids": ()}, r"prompt_logprobs is 11; it is at most 10"),
        (
            {"stop_token_ids": list(range(MAX_END_IDS))},
            {"vocab_size": 200, "eos_ids": (199,)},
            r"stop_token_ids and EOS make 129 ids; together at most 128",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_does_not_fit_the_model_is_refused(options, model, message):
    with pytest.raises(ValueError, match=message):
        validate_for(SamplingParams(**options), **(MODEL | model))


def test_what_just_fits_is_accepted():
    validate_for(SamplingParams(max_tokens=29, logprobs=20, logit_bias={99: 1.0}, stop_token_ids=[0]), **MODEL)
    validate_for(SamplingParams(max_tokens=None, min_tokens=29), **MODEL)
    validate_for(SamplingParams(max_tokens=1), **(MODEL | {"prompt_token_ids": np.arange(31)}))


def test_max_tokens_none_is_what_the_context_holds():
    assert SamplingParams(max_tokens=None).resolve_max_tokens(prompt_len=3, max_model_len=32) == 29
    assert SamplingParams(max_tokens=5).resolve_max_tokens(prompt_len=3, max_model_len=32) == 5
