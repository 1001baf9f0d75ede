"""Third-party clients against the real server with a real model, over a socket.

Each must get the text that a plain request gets. litellm and instructor cannot be installed beside
the newest of the others; they run in `.venv-clients`, or in CLIENTS_PYTHON, and openai-node runs
where Node and its package are. The README says how to install these three.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from other_clients import printed_by_others

NODE = Path(__file__).parents[1] / "node"
QUESTION = "Name the capital of France."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
TOKENS = 5


@pytest.fixture(scope="module")
def told(smollm2_url: str) -> str:
    """The answer's first tokens."""
    body = {"messages": MESSAGES, "max_tokens": TOKENS, **GREEDY}
    answer = httpx.post(f"{smollm2_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    assert len(text) > 10
    return text


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Their results. They share the engine's steps, and a step of many costs as much as one of
    few."""
    with ThreadPoolExecutor() as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def test_anthropic(smollm2_url: str, told: str) -> None:
    with anthropic.Anthropic(base_url=smollm2_url, api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "smollm2", "max_tokens": TOKENS, "messages": MESSAGES}
        answer = client.messages.create(**ask, extra_body=GREEDY)
        assert answer.content[0].type == "text" and answer.content[0].text == told
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", TOKENS)
        count = client.messages.count_tokens(model="smollm2", messages=MESSAGES)
        usage = answer.usage
        assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with client.messages.stream(**ask, extra_body=GREEDY) as stream:
            assert "".join(stream.text_stream) == told
            final = stream.get_final_message()
        assert final.stop_reason == "max_tokens" and final.usage.output_tokens == TOKENS
        word = told.split()[1]
        stopped = client.messages.create(**ask, stop_sequences=[word], extra_body=GREEDY)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
        assert stopped.content[0].text == told[: told.index(word)]  # type: ignore[union-attr]
        begun = [*MESSAGES, {"role": "assistant", "content": told[:12].rstrip()}]
        on = client.messages.create(**{**ask, "messages": begun}, extra_body=GREEDY)
        assert on.content[0].text.split()[0] in told  # type: ignore[union-attr]


TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def test_calls_that_must_come(smollm2_url: str) -> None:
    """A small model would not call by itself: the grammar makes it."""
    ask: Any = [{"role": "user", "content": "What is the weather in Paris for 2 days?"}]

    def anthropic_calls() -> tuple[Any, Any]:
        options: dict[str, Any] = {
            "model": "smollm2",
            "max_tokens": 80,
            "messages": ask,
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "get_weather"},
            "extra_body": GREEDY,
        }
        with anthropic.Anthropic(base_url=smollm2_url, api_key="none", max_retries=0) as client:

            def streamed() -> Any:
                with client.messages.stream(**options) as stream:
                    return stream.get_final_message()

            whole, last = together(lambda: client.messages.create(**options), streamed)
            return whole, last

    def openai_call() -> Any:
        tool: Any = {
            "type": "function",
            "name": "get_weather",
            "parameters": TOOL["input_schema"],
            "strict": True,
        }
        with openai.OpenAI(base_url=f"{smollm2_url}/v1", api_key="none", max_retries=0) as client:
            return client.responses.create(
                model="smollm2", input=ask, tools=[tool], tool_choice="required", temperature=0
            )

    def openai_format() -> Any:
        formatted: Any = {
            "format": {
                "type": "json_schema",
                "name": "place",
                "schema": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 12}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
                "strict": True,
            }
        }
        with openai.OpenAI(base_url=f"{smollm2_url}/v1", api_key="none", max_retries=0) as client:
            return client.responses.create(
                model="smollm2", input=ask, text=formatted, temperature=0
            )

    (answer, streamed), response, place = together(anthropic_calls, openai_call, openai_format)
    use = answer.content[-1]
    assert (answer.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "get_weather")
    assert set(use.input) == {"city", "days"} and isinstance(use.input["days"], int)
    assert streamed.content[-1].input == use.input
    call = response.output[-1]
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city", "days"}
    assert json.loads(place.output_text).keys() == {"city"}


def test_openai_responses(smollm2_url: str, told: str) -> None:
    with openai.OpenAI(base_url=f"{smollm2_url}/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "smollm2", "max_output_tokens": TOKENS, "temperature": 0}
        answer = client.responses.create(input=QUESTION, **ask)
        assert answer.output_text == told and answer.status == "incomplete"
        parts: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        ]
        assert client.responses.create(input=parts, **ask).output_text == told
        stream = client.responses.create(input=QUESTION, stream=True, **ask)
        events = list(stream)
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == told
        last = events[-1]
        assert last.type == "response.incomplete" and last.response.output_text == told
        history: Any = [*parts, *answer.output, {"role": "user", "content": "And of Spain?"}]
        assert client.responses.create(input=history, **ask).output_text


def test_langchain(smollm2_url: str, told: str) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {
        "model": "smollm2",
        "base_url": f"{smollm2_url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**options, max_tokens=TOKENS)
    answer = chat.invoke([HumanMessage(QUESTION)])
    assert answer.content == told
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == TOKENS
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == told
    assert [a.content for a in chat.batch([QUESTION, QUESTION])] == [told, told]
    assert chat.invoke([SystemMessage("You are a poet."), HumanMessage(QUESTION)]).content
    responses = ChatOpenAI(**options, max_tokens=TOKENS, use_responses_api=True)
    assert responses.invoke(QUESTION).text == told
    assert "".join(chunk.text for chunk in responses.stream(QUESTION)) == told


def test_llm(smollm2_url: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: termgen\n  model_name: smollm2\n  api_base: {smollm2_url}/v1\n"
    )
    import llm

    model = llm.get_model("termgen")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "key": "none"}
    assert model.prompt(QUESTION, stream=False, **options).text() == told
    assert "".join(model.prompt(QUESTION, stream=True, **options)) == told
    talk = model.conversation()
    assert talk.prompt(QUESTION, **options).text() == told
    assert talk.prompt("And of Spain?", **options).text()


def test_openai_node(smollm2_url: str, told: str) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules" / "openai").is_dir():
        pytest.skip("needs Node, and `npm install --prefix tests/node`")
    asked = subprocess.run(
        [node, str(NODE / "ask.mjs"), smollm2_url, QUESTION],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 0, asked.stderr
    answers = json.loads(asked.stdout)
    assert answers["chat"] == answers["stream"] == answers["response"] == told
    assert answers["usage"] == TOKENS
    assert answers["events"][0] == "response.created"
    assert answers["events"][-1] == "response.incomplete"
    assert answers["error"] == ["NotFoundError", 404, "model_not_found"]


LITELLM = """
import json, sys, litellm
from concurrent.futures import ThreadPoolExecutor
url, question = sys.argv[1:]
messages = [{"role": "user", "content": question}]
ask = dict(api_key="none", messages=messages, max_tokens=5, temperature=0)

def say(model, base, stream):
    answer = litellm.completion(model=model, api_base=base, stream=stream, **ask)
    if stream:
        return "".join(part.choices[0].delta.content or "" for part in answer)
    return answer.choices[0].message.content

cases = [(model, base, stream) for stream in (False, True) for model, base in (
    ("openai/smollm2", url + "/v1"),
    ("hosted_vllm/smollm2", url + "/v1"),
    ("anthropic/smollm2", url),
)]
with ThreadPoolExecutor() as threads:
    told = list(threads.map(lambda case: say(*case), cases))
try:
    litellm.completion(model="openai/smollm2", api_base=url + "/v1", api_key="none",
                       messages=[{"role": "user", "content": "word " * 5000}])
except litellm.ContextWindowExceededError:
    print(json.dumps(told))
"""


INSTRUCTOR = """
import json, sys, instructor, openai
from concurrent.futures import ThreadPoolExecutor
from typing import Literal
from pydantic import BaseModel, Field

class Cat(BaseModel):
    name: str = Field(max_length=12)
    colour: Literal["black", "white", "red"]
    age: int = Field(ge=0, le=30)

url, question = sys.argv[1:]
ask = dict(model="smollm2", response_model=Cat, max_tokens=90, max_retries=0,
           messages=[{"role": "user", "content": question}], temperature=1.3, seed=1)
plain = openai.OpenAI(base_url=url + "/v1", api_key="none")

def say(mode):
    client = instructor.from_openai(plain, mode=mode)
    return str(mode), client.chat.completions.create(**ask).model_dump()

modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT)
with ThreadPoolExecutor() as threads:
    print(json.dumps(dict(threads.map(say, modes))))
"""


def test_litellm(smollm2_url: str, told: str) -> None:
    assert printed_by_others(LITELLM, smollm2_url, QUESTION) == [told] * 6


def test_instructor(smollm2_url: str) -> None:
    """A call by name, and schemas: the answers are what the grammar enforced."""
    answers = printed_by_others(INSTRUCTOR, smollm2_url, "Invent a cat. Answer as JSON.")
    assert len(answers) == 3
    for mode, cat in answers.items():
        assert cat.keys() == {"name", "colour", "age"} and 0 <= cat["age"] <= 30, mode
