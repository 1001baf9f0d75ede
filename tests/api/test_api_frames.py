"""The fast path to a frame gives the same bytes as the general one."""

from __future__ import annotations

import random
import time
import uuid
from typing import Any

import pytest
from fake_engine import make_model_info

from termgen.api import sse
from termgen.api.anthropic import MessageStream, parse_messages
from termgen.api.chat import ChatStream, parse_chat
from termgen.api.completions import CompletionStream, parse_completion
from termgen.api.fields import Served
from termgen.api.ollama import answers as ollama
from termgen.api.ollama import parser as ollama_parser
from termgen.api.responses.answer import ResponseStream
from termgen.api.responses.body import parse_responses
from termgen.client import TokenDelta
from termgen.vocabulary.request import FinishReason

TEXTS = ("a", " wörd", "", "\n", '"q"', "\\", "👋🏽", "\x00\x1f", "\u2028</script>", "你", "}{")


def make_streams(kind: str, fields: dict[str, Any]) -> list[Any]:
    """Two streams of one request."""
    model = make_model_info()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    if kind in OLLAMAS:
        path, given = OLLAMAS[kind]
        served = Served(
            model="m",
            defaults={},
            tool_format=model.tool_format,
            trusts_template=False,
            refuses_images=False,
            force_include_usage=False,
            max_model_len=64,
            has_chat_template=True,
        )
        asked = path(served, {"model": "m", **given, **fields})
        return [ollama.AnswerLines(asked), ollama.AnswerLines(asked)]
    if kind == "messages":
        asked = parse_messages({"max_tokens": 9, **body}, model=model.model_id, defaults={})
        return [MessageStream(asked), MessageStream(asked)]
    if kind == "responses":
        wanted = parse_responses({"input": "x", **fields}, model=model.model_id, defaults={})
        return [ResponseStream(wanted), ResponseStream(wanted)]
    if kind == "chat":
        request = parse_chat(body, model=model.model_id, defaults={})
        return [ChatStream(request), ChatStream(request)]
    completion = parse_completion(
        {"prompt": ["x", "y"], "stream": True, **fields}, model=model.model_id, defaults={}
    )
    return [CompletionStream(completion, ["", "e"]), CompletionStream(completion, ["", "e"])]


OLLAMAS: dict[str, Any] = {
    "api/chat": (ollama_parser.parse_chat, {"messages": [{"role": "user", "content": "x"}]}),
    "api/generate": (ollama_parser.parse_generate, {"prompt": "x"}),
}
"""Its endpoints: the parser, and the fields that a body needs."""

FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"include_timings": True},
]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
WITH_TOOLS: dict[str, Any] = {
    "messages": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "responses": {"tools": [{"type": "function", **FUNCTION}]},
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *(("chat", fields) for fields in FIELDS),
        *(("completions", fields) for fields in FIELDS),
        *((kind, fields) for kind in OLLAMAS for fields in ({}, {"logprobs": True})),
        ("api/chat", {"tools": [{"type": "function", "function": FUNCTION}]}),
        *((kind, fields) for kind, tools in WITH_TOOLS.items() for fields in ({}, tools)),
    ],
)
def test_both_ways_say_the_same(
    kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=5))  # both streams get the same ids
    monkeypatch.setattr(time, "time", lambda: 7.0)
    monkeypatch.setattr(ollama, "now", lambda: "2026-01-01T00:00:00.000000Z")
    encode = sse.named_frame if kind in WITH_TOOLS else sse.frame
    if kind in OLLAMAS:
        encode = ollama.AnswerLines.wire.frame
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    long_way, short_way = make_streams(kind, fields)
    num_choices = fields.get("n", 1) * (2 if kind == "completions" else 1)
    counts = [0] * num_choices
    num_short = 0
    for i in range(200):
        index = rng.randrange(num_choices)
        counts[index] += 1
        is_last = i == 199
        delta = TokenDelta(
            request_id="r",
            index=0,
            text=rng.choice(TEXTS),
            token_ids=(i,),
            logprobs=None,
            finish_reason=FinishReason.STOP if is_last else None,
            stop_reason=None,
            num_prompt_tokens=3,
            num_cached_tokens=1,
            num_output_tokens=counts[index],
            prompt_token_ids=(1, 2, 3) if counts[index] == 1 else None,
        )
        expected = b"".join(encode(chunk) for chunk in long_way.feed(index, delta))
        found = short_way.frame(index, delta)
        num_short += found is not None
        if found is None:
            found = b"".join(encode(chunk) for chunk in short_way.feed(index, delta))
        assert found == expected
    assert long_way.end() == short_way.end()
    is_plain = not (
        {"return_token_ids", "tools", "logprobs"} & fields.keys() or "continuous" in str(fields)
    )
    assert (num_short > 150) == is_plain
