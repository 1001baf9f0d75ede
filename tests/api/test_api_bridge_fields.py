"""Every field of /v1/messages and /v1/responses is accepted, or an error names it as sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import scaled

from termgen.api import anthropic
from termgen.api.chat import CHAT
from termgen.api.chat_bridge import CHAT_WORDS, SHARED_FIELDS, renamed
from termgen.api.errors import reply_for
from termgen.api.responses import body as responses_body
from termgen.errors import OverloadedError, RequestError
from termgen.vocabulary.sampling_params import COLUMNS
from termgen.vocabulary.tool_format import ToolFormat

CONTEXT: dict[str, Any] = {
    "model": "m",
    "defaults": {},
    "tool_format": ToolFormat(knows_tools=True),
}
PARSERS: dict[str, Any] = {
    "messages": anthropic.parse_messages,
    "responses": responses_body.parse_responses,
}
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
}
ENDPOINTS = {"messages": anthropic.MESSAGES, "responses": responses_body.RESPONSES}
NAMES = {
    name: sorted({*body.fields, *body.harmless, *body.refused} - {"model"})
    for name, body in ENDPOINTS.items()
}
OTHERS: dict[str, tuple[str, ...]] = {
    "min_tokens": ("max_tokens", "max_output_tokens"),
    "stream": ("sse_ping_interval",),
}
"""Fields that an error about another field may name, because the two are incompatible."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 140)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9)
    | st.sampled_from(["x" * 300, "\x00", "1", "none", "auto", "function", "json_schema"])
)
keys = st.text(max_size=6) | st.sampled_from(["type", "role", "content", "name", "text", "schema"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("endpoint", list(PARSERS))
@given(data=st.data())
@settings(max_examples=scaled(100), deadline=None, print_blob=True)
def test_one_odd_field_is_taken_or_named(endpoint: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES[endpoint]))
    value = data.draw(values)
    body = json.loads(json.dumps({**BODIES[endpoint], name: value}))
    try:
        PARSERS[endpoint](body, **CONTEXT)
    except RequestError as error:
        reply = reply_for(error)
        assert reply.status == 400
        named = (error.param or "").split(".")[0].split("[")[0]
        assert named in {name, *OTHERS.get(name, ())}, (error, error.param)
        message = reply.body["error"]["message"]
        assert message and "\n" not in message and len(message) < 500


NUMBERS = dict.fromkeys(COLUMNS.keys() - {"temperature", "top_k", "top_p"}, 0.5)
"""Those that are no field of either API itself."""
SHARED: dict[str, Any] = {
    **NUMBERS,
    "logit_bias": {"7": 3},
    "allowed_token_ids": [5, 7],
    "bad_words": ["never"],
    "seed": 11,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "structured_outputs": {"regex": "a+"},
    "chat_template_kwargs": {"enable_thinking": False},
    "chat_template": "{{ messages }}{{ enable_thinking }}",
    "enable_thinking": True,
    "think": True,
    "thinking_budget": 5,
    "priority": 4,
    "cache_salt": "mine",
    "sse_ping_interval": 30,
}


@pytest.mark.parametrize("endpoint", list(PARSERS))
def test_fields_of_chats_mean_the_same_here(endpoint: str) -> None:
    assert SHARED.keys() == set(SHARED_FIELDS)
    body = {**BODIES[endpoint], "stream": True, **SHARED}
    request = PARSERS[endpoint](body, trusts_template=True, **CONTEXT)
    assert request.ignored == ()
    job, params = request.chat.job, request.chat.job.params
    for name in (*NUMBERS, "seed"):
        assert getattr(params, name) == SHARED[name]
    assert params.bias_pairs == ((7, 3.0),) and params.allowed_token_ids == (5, 7)
    assert (params.bad_words, params.stop_token_ids) == (("never",), (3,))
    assert (params.min_tokens, params.ignore_eos) == (2, True)
    assert params.structured_outputs.regex == "a+"
    assert job.prompt.template_kwargs["enable_thinking"] is False
    assert job.prompt.chat_template == "{{ messages }}{{ enable_thinking }}"
    assert request.chat.not_used == ("thinking_budget",)
    assert (job.priority, job.cache_salt) == (4, "mine")
    assert request.chat.options.ping_interval_s == 30.0


def test_an_error_with_a_time_to_wait_keeps_it_under_its_other_name() -> None:
    names = responses_body.NAMES
    error = OverloadedError(
        "response_format: wait", code="grammar_queue_full", retry_after_s=2, param="response_format"
    )
    again = renamed(error, names)
    assert (str(again), again.param) == ("text.format: wait", "text.format")
    assert reply_for(again).headers["retry-after"] == "2"


def test_responses_take_stop_and_top_k_too() -> None:
    body = {**BODIES["responses"], "stop": ["x"], "top_k": 3}
    params = responses_body.parse_responses(body, **CONTEXT).chat.job.params
    assert (params.stop, params.top_k) == (("x",), 3)


@pytest.mark.parametrize("endpoint", list(PARSERS))
def test_a_field_of_chats_is_taken_or_refused(endpoint: str) -> None:
    """`stream_options` adds nothing: these streams always include their usage."""
    others = {*CHAT.fields, *CHAT.refused, "n"} - {*NAMES[endpoint], "model", "stream_options"}
    assert others <= CHAT_WORDS.keys(), "say which of their values ask for nothing"
    for name in others:
        with pytest.raises(RequestError) as caught:
            PARSERS[endpoint]({**BODIES[endpoint], name: {"x": 1}}, **CONTEXT)
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    asks_for_nothing = {"n": 1, "logprobs": False, "stop": None, "modalities": ["text"]}
    assert PARSERS[endpoint]({**BODIES[endpoint], **asks_for_nothing}, **CONTEXT)


def test_a_field_of_another_name_is_told_that_name() -> None:
    for name, value in (("max_tokens", 5), ("response_format", {"type": "json_object"})):
        with pytest.raises(RequestError, match=responses_body.NAMES[name]):
            PARSERS["responses"]({"input": "x", name: value}, **CONTEXT)
    with pytest.raises(RequestError, match="stop_sequences"):
        PARSERS["messages"]({**BODIES["messages"], "stop": ["x"]}, **CONTEXT)


def test_a_response_repeats_the_effort_it_was_asked_for() -> None:
    asked = responses_body.parse_responses(
        {"input": "x", "reasoning": {"effort": "low"}}, **CONTEXT
    )
    assert asked.echo["reasoning"] == {"effort": "low", "summary": None}


def test_a_forced_call_wins_over_a_format_under_each_endpoints_name() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    f = {"type": "function", "name": "f", "parameters": schema}
    asked = responses_body.parse_responses(
        {
            "input": "hi",
            "tools": [f],
            "tool_choice": "required",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        },
        **CONTEXT,
    )
    assert asked.chat.not_used == ("text.format",) and asked.chat.tools.must_call
    assert asked.echo["text"]["format"]["name"] == "n"
    parsed = anthropic.parse_messages(
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        **CONTEXT,
    )
    assert parsed.chat.not_used == ("output_config.format",) and parsed.chat.tools.must_call
