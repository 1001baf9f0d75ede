"""Request fields to SamplingParams: names, defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from termgen.api.chat import ChatRequest, parse_chat
from termgen.api.completions import CompletionRequest, parse_completion
from termgen.client import FillPrompt
from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(defaults: dict[str, Any] | None = None, **fields: Any) -> ChatRequest:
    return parse_chat({"messages": MESSAGES, **fields}, model="m", defaults=defaults or {})


def chat_params(defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    return chat(defaults, **fields).job.params


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"prompt": "hi", **fields}, model="m", defaults={})


ALL_FIELDS: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": -7,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "stop": ["a", "b"],
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "max_tokens": 20,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 2,
    "logit_bias": {"7": -100, "3": 1.5},
    "allowed_token_ids": [9, 3, 7],
    "bad_words": ["no", "never"],
    "truncate_prompt_tokens": 30,
}


def test_every_field_arrives_on_both_endpoints() -> None:
    wanted = SamplingParams(**{**ALL_FIELDS, "logit_bias": {3: 1.5, 7: -100.0}})
    assert chat_params(**ALL_FIELDS) == wanted
    assert completion(**ALL_FIELDS).jobs[0].params == wanted
    assert chat(**ALL_FIELDS).ignored == completion(**ALL_FIELDS).ignored == ()


def test_defaults() -> None:
    assert chat_params() == SamplingParams(max_tokens=None)
    assert completion().jobs[0].params == SamplingParams(max_tokens=16)


def test_the_models_own_defaults_fill_in_what_the_client_leaves_open() -> None:
    own = {"temperature": 0.2, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    params = chat_params(own, top_p=0.5, top_k=None)
    assert params == SamplingParams(
        temperature=0.2, top_k=20, top_p=0.5, repetition_penalty=1.05, max_tokens=None
    )
    assert chat_params(own, temperature=0).temperature == 0
    assert chat_params(own, top_k=0).top_k == 0
    assert chat_params(own, top_k=-1).top_k == 0


def test_the_newer_max_tokens_wins() -> None:
    assert chat_params(max_completion_tokens=3, max_tokens=9).max_tokens == 3
    assert chat_params(max_tokens=9).max_tokens == 9


def test_minus_one_is_no_limit() -> None:
    assert chat_params(max_tokens=-1).max_tokens is None
    assert chat_params(max_completion_tokens=-1, max_tokens=5).max_tokens is None
    (job,) = completion(max_tokens=-1).jobs
    assert job.params.max_tokens is None and job.generates
    with pytest.raises(RequestError, match="-1 for no limit") as caught:
        chat_params(max_completion_tokens=0)
    assert caught.value.param == "max_completion_tokens"


def test_a_prediction_is_a_hint_without_effect() -> None:
    part = {"type": "text", "text": "x"}
    for content in ("x", [part]):
        hint = {"type": "content", "content": content}
        assert chat(prediction=hint).not_used == ("prediction",)
    assert chat(prediction=None).not_used == ()
    for bad, param in (
        ({"type": "tokens"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
    ):
        with pytest.raises(RequestError) as caught:
            chat(prediction=bad)
        assert caught.value.param == param


@pytest.mark.parametrize(("value", "stop"), [("x", ("x",)), (["x", "y"], ("x", "y")), ([], ())])
def test_stop_is_a_string_or_a_list(value: Any, stop: tuple[str, ...]) -> None:
    assert chat_params(stop=value).stop == stop
    assert chat_params(stop=None).stop == ()


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat_params(**fields).logprobs == logprobs


def test_completion_logprobs_are_a_number() -> None:
    assert completion(logprobs=0).jobs[0].params.logprobs == 0
    assert completion(logprobs=20).jobs[0].params.logprobs == 20
    with pytest.raises(RequestError) as caught:
        completion(logprobs=True)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1e-300}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"cache_salt": "a\n"}, "cache_salt"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"include_timings": 1}, "include_timings"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "2"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [1]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"bad_words": "x" * 257}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
    ],
)
def test_bad_values_name_their_field_on_both_endpoints(fields: dict[str, Any], param: str) -> None:
    for parse in (chat, completion):
        with pytest.raises(RequestError) as caught:
            parse(**fields)
        assert (caught.value.status, caught.value.code) == (400, "invalid_value")
        assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag"}},
        {"structured_outputs": {"structural_tag": "a"}},
        {"use_beam_search": True},
        {"best_of": 2},
        {"truncation_side": "right"},
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(fields: dict[str, Any]) -> None:
    for parse in (chat, completion):
        with pytest.raises(RequestError) as caught:
            parse(**fields)
        assert caught.value.code == "unsupported_parameter"
        assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "hammer"}]},
        {"functions": [{}]},
        {"audio": {}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {}},
        {"chat_template": "{{ messages }}"},
    ],
)
def test_chat_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "k", "verbosity": "low"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": None, "response_format": {"type": "text"}, "logit_bias": {}},
        {"modalities": ["text"], "functions": None, "best_of": 1},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).ignored == ()


def test_biases_are_cut_to_the_documented_range() -> None:
    params = chat_params(logit_bias={"5": 1e9, "2": -101})
    assert params.bias_pairs == ((2, -100.0), (5, 100.0))
    assert chat_params(logit_bias={}) == chat_params(logit_bias=None) == chat_params()


def test_unknown_fields_are_named() -> None:
    assert chat(foo=1, bar=None).ignored == ("foo", "bar")
    options = {"include_usage": True, "include_obfuscation": False, "more": 1}
    assert chat(stream=True, stream_options=options).ignored == ("stream_options.more",)
    assert completion(messages=[]).ignored == ("messages",)


def test_a_suffix_goes_with_the_prompt_and_an_empty_one_is_none() -> None:
    assert [job.prompt for job in completion(suffix="x").jobs] == [FillPrompt("hi", "x")]
    without = completion(suffix="")
    assert [job.prompt for job in without.jobs] == ["hi"] and without.ignored == ()


@pytest.mark.parametrize(
    ("fields", "of_prompt"),
    [
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 2}, 2),
        ({"echo": True, "logprobs": 1, "stream": True}, 1),
    ],
)
def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(
    fields: dict[str, Any], of_prompt: int | None
) -> None:
    request = completion(**fields)
    assert request.jobs[0].params.prompt_logprobs == of_prompt
    assert request.jobs[0].params.logprobs == fields.get("logprobs")


def test_priority_and_salt_go_to_every_engine_request() -> None:
    request = completion(prompt=["a", "b"], priority=-3, cache_salt="team_1-x")
    assert [(j.priority, j.cache_salt) for j in request.jobs] == [(-3, "team_1-x")] * 2
    assert len({j.request_id for j in request.jobs}) == 2
