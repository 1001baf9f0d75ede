"""The anthropic and openai packages against /v1/messages and /v1/responses, scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import ANSWER, eventually, serving

from termgen.client import ChatPrompt
from termgen.errors import EngineError
from termgen.vocabulary.tool_format import ToolFormat

USER: Any = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "fake/model-1", "max_tokens": 50, "messages": USER}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}


@asynccontextmanager
async def anthropic_client(
    engine: FakeEngine, *, key: str = "none", **config: Any
) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with serving(engine, **config) as server:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key=key, max_retries=0, timeout=20
        ) as client:
            yield client


@asynccontextmanager
async def openai_client(engine: FakeEngine) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with serving(engine) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20
        ) as client:
            yield client


async def test_messages() -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=3))
    async with anthropic_client(engine, api_key=("k",), key="k") as client:
        answer = await client.messages.create(
            **ASK,
            system="Be brief.",
            stop_sequences=["never"],
            extra_body={"top_k": 3, "temperature": 0.2},
        )
        assert answer.content[0].type == "text" and answer.content[0].text == ANSWER
        assert (answer.stop_reason, answer.role, answer.model) == (
            "end_turn",
            "assistant",
            "fake/model-1",
        )
        assert answer.usage.cache_read_input_tokens == 3 and answer.usage.output_tokens == 11
        count = await client.messages.count_tokens(
            model="fake/model-1", messages=USER, system="Be brief."
        )
        assert count.input_tokens == answer.usage.input_tokens + 3
        stopped = await client.messages.create(**ASK, stop_sequences=["world"])
        assert (stopped.content[0].text, stopped.stop_sequence) == ("Hello, ", "world")  # type: ignore[union-attr]
        assert stopped.stop_reason == "stop_sequence"
        cut = await client.messages.create(**{**ASK, "max_tokens": 2})
        assert cut.stop_reason == "max_tokens"
        assert answer._request_id
    assert engine.calls[0].params.top_k == 3
    assert engine.calls[0].request_id == answer.id


async def test_the_messages_stream_equals_the_message() -> None:
    async with anthropic_client(FakeEngine(script=Script(delay_s=0.002))) as client:
        async with client.messages.stream(**ASK) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        whole = await client.messages.create(**ASK)
    assert final.content[0].type == "text" and final.content[0].text == ANSWER
    assert final.usage == whole.usage and final.stop_reason == whole.stop_reason == "end_turn"
    kinds = [e.type for e in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_pings_and_a_client_that_leaves() -> None:
    engine = FakeEngine(script=Script(pieces=("a", "b"), first_delay_s=0.1, delay_s=0.1))
    async with anthropic_client(engine, sse_ping_interval=0.02) as client:
        async with client.messages.stream(**ASK) as stream:
            assert await stream.get_final_text() == "ab"
    engine = FakeEngine(script=Script(hold_after=2))
    async with anthropic_client(engine) as client:
        async with client.messages.stream(**ASK) as stream:
            async for _ in stream.text_stream:
                break
        await eventually(lambda: not engine.live)
        assert len(engine.aborted) == 1


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"system": "x" * 9999}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropics_shape(
    fields: dict[str, Any], error: type[anthropic.APIStatusError], kind: str
) -> None:
    engine = FakeEngine(model=make_model_info(max_model_len=100))
    async with anthropic_client(engine) as client:
        for stream in (False, True):
            with pytest.raises(error) as caught:
                await client.messages.create(**{**ASK, **fields}, stream=stream)
            body: Any = caught.value.body
            assert body["type"] == "error" and body["error"]["type"] == kind
            assert body["request_id"] == caught.value.request_id


async def test_keys_limits_and_the_router_speak_anthropic_too() -> None:
    async with serving(FakeEngine(), api_key=("k",), max_body_bytes=1024) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            good = {"x-api-key": "k"}
            for status, kind, answer in (
                (401, "authentication_error", await client.post("/v1/messages", json=ASK)),
                (
                    413,
                    "request_too_large",
                    await client.post("/v1/messages", headers=good, content=b"x" * 2000),
                ),
                (405, "invalid_request_error", await client.get("/v1/messages", headers=good)),
                (404, "not_found_error", await client.get("/v1/messages/batches", headers=good)),
            ):
                assert answer.status_code == status, answer.text
                assert answer.json()["error"]["type"] == kind


async def test_a_failure_in_mid_stream() -> None:
    engine = FakeEngine(script=Script(fail_after=2, error=EngineError("the step failed")))
    async with anthropic_client(engine) as client:
        with pytest.raises(anthropic.APIStatusError, match="the step failed"):
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()
    async with openai_client(engine) as client:
        stream = await client.responses.create(model="fake/model-1", input="hi", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert error is not None and "the step failed" in error.message


CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln", "n": 2}}\n</tool_call>'
CALLING = Script(pieces=("I ", "look.", *(CALL[i : i + 7] for i in range(0, len(CALL), 7))))


async def test_messages_with_tools() -> None:
    engine = FakeEngine(script=CALLING)
    async with anthropic_client(engine) as client:
        answer = await client.messages.create(**ASK, tools=[TOOL])
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        assert answer.stop_reason == "tool_use"
        use = answer.content[1]
        assert use.type == "tool_use" and (use.name, use.input) == ("f", {"city": "Köln", "n": 2})
        async with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            final = await stream.get_final_message()
        assert final.stop_reason == "tool_use" and final.usage == answer.usage
        streamed = final.content[1]
        assert streamed.type == "tool_use" and streamed.input == use.input
        assert final.content[0].text == answer.content[0].text  # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
        history: Any = [
            *USER,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**{**ASK, "messages": history}, tools=[TOOL])
        alone: Any = {"type": "none"}
        text = await client.messages.create(**ASK, tools=[TOOL], tool_choice=alone)
        assert [block.type for block in text.content] == ["text"]
        forced: Any = {"type": "tool", "name": "f"}
        await client.messages.create(**ASK, tools=[TOOL], tool_choice=forced)
        with pytest.raises(anthropic.BadRequestError, match="no tool 'g'"):
            wrong: Any = {"type": "tool", "name": "g"}
            await client.messages.create(**ASK, tools=[TOOL], tool_choice=wrong)
    assert engine.calls[-1].params.structured_outputs is not None, "enforced"


async def test_responses_with_tools() -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": TOOL["input_schema"]}
    async with openai_client(FakeEngine(script=CALLING)) as client:
        ask: dict[str, Any] = {"model": "fake/model-1", "input": "hi", "tools": [tool]}
        answer = await client.responses.create(**ask)
        assert [item.type for item in answer.output] == ["message", "function_call"]
        call: Any = answer.output[1]
        assert call.name == "f" and json.loads(call.arguments) == {"city": "Köln", "n": 2}
        async with client.responses.stream(**ask) as stream:
            events = [event async for event in stream]
            final: Any = await stream.get_final_response()
        assert final.output[1].arguments == call.arguments
        assert final.output_text == answer.output_text
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        history: Any = [*USER, *answer.output, result]
        assert (await client.responses.create(**{**ask, "input": history})).output_text


async def test_thoughts_come_to_clients_as_such() -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    fields = {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {}}
    template = {"start_anchor": "<assistant>", "fields": fields}
    declared = ToolFormat(new_parser=lambda *_: parsing.ResponseParser(template, prefix=""))
    script = Script(pieces=("<think>", "A ", "river?", "</think>", "The ", "Rhine."))
    model = make_model_info(tool_format=declared)
    async with anthropic_client(FakeEngine(model=model, script=script)) as client:
        answer = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            final = await stream.get_final_message()
        assert final.usage == answer.usage
        for thought, text in (answer.content, final.content):
            assert thought.type == "thinking" and thought.thinking == "A river?"
            assert text.type == "text" and text.text == "The Rhine."
        history: Any = [*USER, {"role": "assistant", "content": answer.content}, *USER]
        await client.messages.create(**{**ASK, "messages": history})
    engine = FakeEngine(model=model, script=script)
    async with openai_client(engine) as openai_:
        ask: dict[str, Any] = {"model": "fake/model-1", "input": "hi"}
        response = await openai_.responses.create(**ask)
        async with openai_.responses.stream(**ask) as stream_:
            events = [event async for event in stream_]
            whole: Any = await stream_.get_final_response()
        for output in (response.output, whole.output):
            assert [item.type for item in output] == ["reasoning", "message"]
            assert output[0].content[0].text == "A river?"
        assert response.output_text == whole.output_text == "The Rhine."
        pieces = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(pieces) == "A river?"
        again: Any = [*USER, *response.output, *USER]
        await openai_.responses.create(**{**ask, "input": again})
    prompt = engine.calls[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1]["reasoning_content"] == "A river?"


# -- Responses -----------------------------------------------------------------------------


async def test_responses() -> None:
    def script(call: GenerateCall) -> Script:
        return Script(num_cached_tokens=3)

    engine = FakeEngine(script=script)
    async with openai_client(engine) as client:
        answer = await client.responses.create(
            model="fake/model-1",
            instructions="Be brief.",
            input="hi",
            temperature=0.3,
            max_output_tokens=60,
            metadata={"a": "b"},
        )
        assert answer.output_text == ANSWER and answer.status == "completed"
        assert answer.error is None and answer.metadata == {"a": "b"}
        assert (answer.temperature, answer.max_output_tokens) == (0.3, 60)
        usage = answer.usage
        assert usage is not None and usage.output_tokens == 11
        assert usage.input_tokens_details.cached_tokens == 3
        cut = await client.responses.create(
            model="fake/model-1", input="hi", max_output_tokens=2, store=False
        )
        assert cut.status == "incomplete"
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        # the conversation goes on with what came back
        again = await client.responses.create(
            model="fake/model-1",
            input=[*USER, *answer.output, {"role": "user", "content": "and?"}],  # type: ignore[list-item]
        )
        assert again.output_text == ANSWER
    roles = [m["role"] for m in engine.calls[-1].prompt.messages]  # type: ignore[union-attr]
    assert roles == ["user", "assistant", "user"]


async def test_the_responses_stream_equals_the_response() -> None:
    async with openai_client(FakeEngine(script=Script(delay_s=0.002))) as client:
        async with client.responses.stream(model="fake/model-1", input="hi") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    assert final.output_text == ANSWER and final.status == "completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER and len(deltas) > 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"instructions": "x" * 9999}, "input"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine(model=make_model_info(max_model_len=100))
    async with openai_client(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake/model-1", input="hi", **fields)
        assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")


async def test_what_has_no_effect_is_named_and_too_long_an_answer_is_cut() -> None:
    format_ = ToolFormat(knows_tools=True, template_variables=("messages",))
    engine = FakeEngine(model=make_model_info(tool_format=format_, max_model_len=500))
    thinking = {"type": "enabled", "budget_tokens": 31999}
    tool = {"type": "web_search_20250305", "name": "web_search"}
    message = {**ASK, "max_tokens": 32000, "thinking": thinking, "tools": [tool]}
    count = {key: value for key, value in message.items() if key != "max_tokens"}
    response = {"input": "hi", "max_output_tokens": 32000, "tools": [{"type": "web_search"}]}
    chat = {"messages": USER, "reasoning_effort": "low", "enable_thinking": True}
    long_chat = {**chat, "max_tokens": 32000}
    names = "thinking, thinking.budget_tokens, tools.web_search_20250305"
    async with serving(engine) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            for path, body, told in (
                ("/v1/messages?beta=true", message, names),
                ("/v1/messages?beta=true", {**message, "stream": True}, names),
                ("/v1/messages/count_tokens?beta=true", count, names),
                ("/v1/responses", response, "tools.web_search"),
                ("/v1/responses", {**response, "stream": True}, "tools.web_search"),
                ("/v1/chat/completions", long_chat, "reasoning_effort, enable_thinking"),
                ("/tokenize", chat, "reasoning_effort, enable_thinking"),
            ):
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-termgen-not-used"] == told, path
                assert "x-termgen-ignored" not in answer.headers, path
                if "32000" in str(body):
                    assert 400 < int(answer.headers["x-termgen-max-tokens"]) < 500
