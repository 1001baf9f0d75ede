"""Real clients with structured outputs, over a socket, from the real small model.

A model of 135M parameters seldom writes JSON or a call by itself: the grammar enforced what
arrives. One engine serves all of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from server_harness import serving

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine

MODEL = "smollm2"
USER: Any = [{"role": "user", "content": "Invent a cat. Answer as JSON."}]


class Cat(BaseModel):
    name: str = Field(max_length=12)
    colour: Literal["black", "white", "red"]
    age: int = Field(ge=0, le=30)


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 10},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["place", "unit"],
            "additionalProperties": False,
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/Digit"}, "b": {"$ref": "#/$defs/Digit"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"Digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}


@asynccontextmanager
async def real_server(gguf: Path) -> AsyncGenerator[str, None]:
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "async_scheduling": True}
    config = EngineConfig(model=str(gguf), max_num_seqs=8, num_gpu_blocks_override=300, **settings)
    engine = await AsyncEngine.start(config)
    try:
        async with serving(engine, served_model_name=(MODEL,)) as server:
            yield server.url
        assert (await engine.snapshot()).num_used_blocks == 0
    finally:
        await engine.shutdown()


async def test_clients_get_the_structure_they_ask_for(smollm2_gguf: Path) -> None:
    """One test, and all of it at once: a step of many requests costs as much as that of one."""
    async with real_server(smollm2_gguf) as url:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            await asyncio.gather(
                parse_helper(client),
                streamed_helper(client),
                kinds_of_vllm(client),
                bad_ones_are_refused(client),
                tools(client),
                the_result_of_a_call(client),
                pydantic_ai(url),
            )


async def parse_helper(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Cat, temperature=1.5, seed=1, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Cat)
    assert answer.choices[0].finish_reason == "stop"


async def streamed_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=MODEL, messages=USER, response_format=Cat, max_tokens=60, seed=1
    ) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Cat)


async def kinds_of_vllm(client: openai.AsyncOpenAI) -> None:
    async def ask(**extra: Any) -> str:
        answer = await client.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=40, seed=3, temperature=1.2, extra_body=extra
        )
        return answer.choices[0].message.content or ""

    choice, date, grammar, text = await asyncio.gather(
        ask(structured_outputs={"choice": ["tabby", "calico"]}),
        ask(guided_regex=r"\d{4}-\d{2}"),
        ask(structured_outputs={"grammar": 'root ::= "x" [0-9] | "y"'}),
        client.completions.create(
            model=MODEL, prompt="1+1=", max_tokens=9, extra_body={"guided_choice": ["2", "11"]}
        ),
    )
    assert choice in ("tabby", "calico")
    assert len(date) == 7 and date[4] == "-"
    assert grammar in ("y", *(f"x{digit}" for digit in range(10)))
    assert text.choices[0].text in ("2", "11")


async def bad_ones_are_refused(client: openai.AsyncOpenAI) -> None:
    for field, value in (
        ("structured_outputs", {"regex": "(["}),
        ("response_format", {"type": "json_object", "schema": {"type": "strung"}}),
        ("guided_grammar", "start: nothing"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.chat.completions.create(
                    model=MODEL, messages=USER, stream=stream, extra_body={field: value}
                )
            assert (refusal.value.param, refusal.value.code) == (field, "invalid_schema")
    broken = {"name": "f", "parameters": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError, match="tools: .*not"):
        await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=[{"type": "function", "function": broken}],  # type: ignore[list-item]
            tool_choice="required",
        )


def check_call(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        assert set(arguments) == {"a", "b"} and all(0 <= n <= 9 for n in arguments.values())
    else:
        assert call.function.name == "get_weather" and arguments["unit"] in "CF"
        assert len(arguments["place"]) <= 10 and len(arguments) == 2


async def tools(client: openai.AsyncOpenAI) -> None:
    async def ask(**fields: Any) -> Any:
        answer = await client.chat.completions.create(
            **{"model": MODEL, "messages": USER, "tools": [WEATHER, ADD], "max_tokens": 80}
            | {"temperature": 1.3, "seed": 5, **fields}
        )
        return answer.choices

    named = {"type": "function", "function": {"name": "add"}}
    required, by_name = await asyncio.gather(
        ask(tool_choice="required", parallel_tool_calls=False), ask(tool_choice=named)
    )
    for choice in required:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check_call(call)
    for choice in by_name:
        assert choice.finish_reason == "stop"
        (call,) = choice.message.tool_calls
        assert call.function.name == "add"
        check_call(call)


async def the_result_of_a_call(client: openai.AsyncOpenAI) -> None:
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "add", "arguments": '{"a": 1, "b": 2}'}  # type: ignore[assignment]
    messages: Any = [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=[ADD], max_tokens=12, temperature=0
    )
    assert "3" in (answer.choices[0].message.content or "")


async def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=Cat)
    result = await agent.run("Invent a cat.", model_settings={"seed": 4, "max_tokens": 90})
    assert isinstance(result.output, Cat)
