"""Chat: messages in, chunks and responses out. Streamed equals not streamed."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from termgen.api.chat import ChatRequest, ChatStream, chat_response, parse_chat
from termgen.client import ChatPrompt, RequestTimings, TokenDelta, TokenLogprob, merge_deltas
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.tool_format import ToolFormat

USER = {"role": "user", "content": "hi"}
KNOWS_NO_TOOLS = ToolFormat()


def parse(messages: Any, tool_format: ToolFormat = KNOWS_NO_TOOLS, **fields: Any) -> ChatRequest:
    body = {"messages": messages, **fields}
    return parse_chat(body, model="m", defaults={}, tool_format=tool_format)


def prompt_of(messages: Any, tool_format: ToolFormat = KNOWS_NO_TOOLS, **fields: Any) -> ChatPrompt:
    prompt = parse(messages, tool_format, **fields).job.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def delta(text: str = "", **fields: Any) -> TokenDelta:
    args: dict[str, Any] = {
        "request_id": "r",
        "index": 0,
        "token_ids": (len(text) + 5,),
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "num_output_tokens": 1,
    }
    return TokenDelta(text=text, **{**args, **fields})


def logprob(text: str, value: float = -0.5, **fields: Any) -> TokenLogprob:
    top = ((1, text, text.encode(), value), (2, "other", b"other", float("-inf")))
    args: dict[str, Any] = {"token_bytes": text.encode(), "rank": 1, "top": top, **fields}
    return TokenLogprob(token_id=1, token=text, logprob=value, **args)


def test_messages_reach_the_template_in_plain_form() -> None:
    prompt = prompt_of(
        [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "name": "bot", "reasoning": "hm", "x": 1},
            USER,
        ]
    )
    assert list(prompt.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "name": "bot", "reasoning_content": "hm"},
        USER,
    ]
    assert prompt.add_generation_prompt and not prompt.continue_final_message


def test_tool_calls_in_the_history_have_parsed_arguments() -> None:
    function = {"name": "f", "arguments": '{"x": [1]}'}
    call = {"id": "1", "type": "function", "function": function}
    prompt = prompt_of(
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "ok", "tool_call_id": "1"},
        ],
        tool_format=ToolFormat(knows_tools=True),
    )
    parsed = prompt.messages[1]["tool_calls"][0]["function"]
    assert parsed == {"name": "f", "arguments": {"x": [1]}}
    assert prompt.messages[2]["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{**USER, "name": 1}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(messages)
    assert caught.value.param == param


def test_content_of_an_unknown_type_is_refused_by_that() -> None:
    content = [{"type": "hologram", "hologram": {"url": "http://x"}}]
    with pytest.raises(RequestError, match="hologram") as caught:
        parse([{"role": "user", "content": content}])
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize("arguments", [5, ["x"], True])
def test_arguments_in_the_history_are_text_or_an_object(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as caught:
        parse([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert caught.value.status == 400


def test_continuing_the_last_message() -> None:
    last = {"role": "assistant", "content": "Once upon"}
    prompt = prompt_of([USER, last], continue_final_message=True)
    assert prompt.continue_final_message and not prompt.add_generation_prompt
    prompt = prompt_of([USER], add_generation_prompt=False)
    assert not prompt.continue_final_message and not prompt.add_generation_prompt
    for messages, fields in (
        ([USER], {"continue_final_message": True}),
        ([USER, last], {"continue_final_message": True, "add_generation_prompt": True}),
    ):
        with pytest.raises(RequestError) as caught:
            parse(messages, **fields)
        assert caught.value.param == "continue_final_message"


def test_template_kwargs() -> None:
    prompt = prompt_of([USER], chat_template_kwargs={"enable_thinking": False})
    assert prompt.template_kwargs == {"enable_thinking": False}
    assert prompt_of([USER], reasoning_effort="low").template_kwargs == {"reasoning_effort": "low"}
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    for kwargs in ({"tokenize": False}, {"messages": []}, {"a": "x" * 5000}, {"a": deep}, [1]):
        with pytest.raises(RequestError) as caught:
            parse([USER], chat_template_kwargs=kwargs)
        assert caught.value.param == "chat_template_kwargs"


def test_the_role_comes_with_the_first_text_and_the_finish_apart() -> None:
    stream = ChatStream(parse([USER], stream=True))
    assert stream.feed(0, delta("")) == []
    first = stream.feed(0, delta("He", num_output_tokens=2))
    assert [c["choices"][0]["delta"] for c in first] == [
        {"role": "assistant", "content": ""},
        {"content": "He"},
    ]
    last = stream.feed(0, delta("y", finish_reason=FinishReason.STOP, stop_reason=9))
    assert [c["choices"][0]["delta"] for c in last] == [{"content": "y"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in last] == [None, "stop"]
    assert last[1]["choices"][0]["stop_reason"] == 9
    assert all("usage" not in c for c in first + last)
    assert stream.end() == []


def test_an_empty_answer_still_has_a_role_and_a_finish() -> None:
    stream = ChatStream(parse([USER], stream=True))
    chunks = stream.feed(0, delta("", finish_reason=FinishReason.LENGTH))
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {}]


def test_usage_comes_last_and_only_when_asked_for() -> None:
    options = {"include_usage": True}
    stream = ChatStream(parse([USER], stream=True, stream_options=options))
    chunks = stream.feed(0, delta("a", num_output_tokens=1))
    chunks += stream.feed(0, delta("b", num_output_tokens=2, finish_reason=FinishReason.STOP))
    assert all(c["usage"] is None for c in chunks)
    (end,) = stream.end()
    assert end["choices"] == []
    assert end["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = ChatStream(parse([USER], stream=True, n=2, stream_options=options))
    seen = []
    for index, count in ((0, 1), (1, 1), (0, 2), (1, 2)):
        chunks = stream.feed(index, delta("x", index=index, num_output_tokens=count))
        seen.append(chunks[-1]["usage"]["completion_tokens"])
    assert seen == [1, 2, 3, 4]
    assert stream.end()[0]["usage"]["prompt_tokens"] == 7, "one prompt, however many answers"


def test_include_timings() -> None:
    timings = RequestTimings(
        arrival_ns=10**9,
        first_scheduled_ns=2 * 10**9,
        first_token_ns=3 * 10**9,
        finished_ns=5 * 10**9,
    )
    last = delta("a", num_output_tokens=5, finish_reason=FinishReason.STOP, timings=timings)
    wanted = {"index": 0, "queue_s": 1.0, "ttft_s": 2.0, "e2e_s": 4.0, "tokens_per_s": 2.0}
    request = parse([USER], include_timings=True)
    assert chat_response(request, [last])["termgen"] == {"timings": [wanted]}
    assert "termgen" not in chat_response(parse([USER]), [last])
    request = parse([USER], include_timings=True, stream=True)
    stream = ChatStream(request)
    assert stream.feed(0, last)[-1]["termgen"] == {"timings": [wanted]}
    assert stream.end() == [], "never a chunk without choices unless usage was asked for"


@pytest.mark.parametrize(
    ("num_tokens", "stamps", "rate"),
    [(5, (3, 5), 2.0), (1, (3, 5), None), (0, (0, 5), None), (5, (3, 3), None), (5, (0, 5), None)],
)
def test_the_rate_is_that_after_the_first_token(
    num_tokens: int, stamps: tuple[int, int], rate: float | None
) -> None:
    first, last = (s * 10**9 for s in stamps)
    timings = RequestTimings(arrival_ns=1, first_token_ns=first, finished_ns=last)
    assert timings.tokens_per_s(num_tokens) == rate


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1e38])
def test_a_row_that_was_lost_is_still_json(value: float) -> None:
    answer = delta("a", logprobs=(logprob("a", value),), finish_reason=FinishReason.STOP)
    request = parse([USER], logprobs=True, top_logprobs=1)
    (choice,) = chat_response(request, [answer])["choices"]
    (found,) = choice["logprobs"]["content"]
    assert found["logprob"] == found["top_logprobs"][0]["logprob"] == -9999.0


def test_logprobs_in_chat_shape() -> None:
    request = parse([USER], logprobs=True, top_logprobs=2)
    answer = delta("a", logprobs=(logprob("a"),), finish_reason=FinishReason.STOP)
    (choice,) = chat_response(request, [answer])["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "other", "logprob": -9999.0, "bytes": list(b"other")},
            ],
        }
    ]
    request = parse([USER], logprobs=True, return_tokens_as_token_ids=True)
    (choice,) = chat_response(request, [answer])["choices"]
    assert choice["logprobs"]["content"][0]["token"] == "token_id:1"


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_says_exactly_what_the_response_says(seed: int) -> None:
    """Random held-back text, several completions, deltas merged at random."""
    rng = random.Random(seed)
    n = rng.choice((1, 1, 3))
    wants_ids = rng.random() < 0.5
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": wants_ids, "n": n}
    response_request, stream = (
        parse([USER], **fields),
        ChatStream(parse([USER], **fields, stream=True)),
    )
    per_choice = [_random_deltas(rng, index) for index in range(n)]
    whole = [merge_deltas(deltas) for deltas in per_choice]
    response = chat_response(response_request, whole)
    chunks = []
    for deltas in per_choice:
        while deltas:
            taken = [deltas.pop(0) for _ in range(min(len(deltas), rng.randint(1, 3)))]
            chunks += stream.feed(taken[0].index, merge_deltas(taken))
    for index, choice in enumerate(response["choices"]):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        text = "".join(p["delta"].get("content", "") for p in parts)
        assert text == choice["message"]["content"], f"seed {seed}"
        logprobs = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"], f"seed {seed}"
        token_ids = [t for p in parts for t in p.get("token_ids", ())]
        assert token_ids == list(choice.get("token_ids", ())), f"seed {seed}"
        assert [p["finish_reason"] for p in parts][-1] == choice["finish_reason"]
    carried = [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c]
    wanted = [response["prompt_token_ids"]] if wants_ids else []
    assert carried == wanted, f"seed {seed}"


def _random_deltas(rng: random.Random, index: int) -> list[TokenDelta]:
    pieces = [rng.choice(("", "", "a", "ü", " b", "👋")) for _ in range(rng.randint(1, 12))]
    deltas = []
    for i, piece in enumerate(pieces):
        deltas.append(
            delta(
                piece,
                index=index,
                token_ids=(rng.randrange(1000),),
                logprobs=(logprob(piece or "?", -rng.random()),),
                finish_reason=FinishReason.STOP if i == len(pieces) - 1 else None,
                num_output_tokens=i + 1,
                prompt_token_ids=(1, 2, 3) if i == 0 and index == 0 else None,
            )
        )
    return deltas
