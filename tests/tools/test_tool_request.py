"""What a request with tools sends, and how calls are read out of an answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fake_engine import FakeEngine, Script, make_model_info
from tool_samples import KNOWS_TOOLS, box_of, hermes, make_tool

from termgen.client import ChatPrompt, ModelInfo
from termgen.tools.calls import ToolCall, take_pieces
from termgen.tools.request import ToolRequest, tool_request
from termgen.tui.chat.state.thoughts import AnswerNews, read_answer
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.tool_format import ToolFormat, ToolStyle

HERE = make_model_info(tool_format=KNOWS_TOOLS)
AWAY = make_model_info(reads_calls=True)
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
]


def request(model: ModelInfo = HERE, **options: Any) -> ToolRequest:
    return tool_request(box_of(make_tool(), make_tool("other")).offered, model, **options)


def test_a_model_here_is_shown_tools_by_its_template_and_held_to_their_schemas() -> None:
    asked = request()
    prompt = asked.prompt(ChatPrompt(HISTORY))
    assert [tool["function"]["name"] for tool in prompt.template_kwargs["tools"]] == [
        "s_echo",
        "s_other",
    ]
    assert prompt.messages == tuple(HISTORY)
    params = asked.params(SamplingParams(temperature=0.3))
    assert params.temperature == 0.3 and params.structured_outputs is not None
    assert "%json" in str(params.structured_outputs.grammar)
    free = request(enforces=False)
    assert free.params(SamplingParams()).structured_outputs is None and free.may_call


def test_results_go_where_the_template_takes_them() -> None:
    joins = make_model_info(tool_format=ToolFormat(knows_tools=True, joins_results=True))
    messages = request(joins).prompt(ChatPrompt(HISTORY)).messages
    assert messages[-1]["tool_responses"] == [{"name": "f", "response": "r"}]
    plain = tool_request((), make_model_info())
    assert not plain.may_call
    texts = plain.prompt(ChatPrompt(HISTORY)).messages
    assert [m["role"] for m in texts] == ["user", "assistant", "user"]
    assert "tools" not in plain.prompt(ChatPrompt(HISTORY)).template_kwargs


def call_message(*names: str, said: str = "") -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
        for name in names
    ]
    return {"role": "assistant", "content": said, "tool_calls": calls}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "name": name, "content": f"r{name}"}


USER = {"role": "user", "content": "q"}
STOPPED = [USER, call_message("a", "b", said="hm"), result("a"), result("b"), USER]


def sent(tool_format: ToolFormat) -> list[dict[str, Any]]:
    model = make_model_info(tool_format=tool_format)
    return list(tool_request((), model).prompt(ChatPrompt(STOPPED)).messages)


def test_a_template_that_takes_one_call_gets_one_in_each_message() -> None:
    llama = ToolFormat(ToolStyle.LLAMA, knows_tools=True)
    one, two = call_message("a", said="hm"), call_message("b")
    assert sent(llama) == [USER, one, result("a"), two, result("b"), USER]
    request = tool_request(box_of().offered, make_model_info(tool_format=llama))
    assert not request.tools.parallel and request.grammar is not None


def test_a_template_whose_roles_alternate_gets_an_answer_that_never_came() -> None:
    mistral = ToolFormat(ToolStyle.MISTRAL, knows_tools=True)
    *before, answer, last = sent(mistral)
    assert before == STOPPED[:-1] and last == USER
    assert answer["role"] == "assistant" and "stopped" in answer["content"]


def test_a_template_without_tools_gets_the_roles_in_turn() -> None:
    assert [m["role"] for m in sent(ToolFormat())] == ["user", "assistant", "user"]
    assert "ra" in sent(ToolFormat())[2]["content"] and "rb" in sent(ToolFormat())[2]["content"]


def test_other_templates_get_everything_as_it_is() -> None:
    assert sent(KNOWS_TOOLS) == STOPPED


def test_a_server_gets_the_tools_as_they_are() -> None:
    asked = request(AWAY)
    prompt = asked.prompt(ChatPrompt(HISTORY))
    assert len(prompt.template_kwargs["tools"]) == 2 and prompt.messages == tuple(HISTORY)
    params = SamplingParams()
    assert asked.params(params) == params and not asked.reads_text


def test_special_tokens_are_asked_for_where_they_mark_calls() -> None:
    mistral = ToolFormat(ToolStyle.MISTRAL, knows_tools=True, special_tokens={"[TOOL_CALLS]": 5})
    asked = request(make_model_info(tool_format=mistral), enforces=False)
    assert not asked.params(SamplingParams()).skip_special_tokens


async def read(text: str, pieces: Sequence[str], model: ModelInfo = HERE) -> tuple[str, str, Any]:
    engine = FakeEngine(script=Script(pieces=pieces), model=model)
    asked = request(model)
    prompt = asked.prompt(ChatPrompt([{"role": "user", "content": "q"}]))
    found: list[AnswerNews] = [
        news
        async for news in read_answer(engine, prompt, SamplingParams(), request_id="r", tools=asked)
    ]
    calls: list[ToolCall] = []
    for news in found:
        take_pieces(calls, news.calls)
    thought, answer = ("".join(news.pieces[i] for news in found) for i in (0, 1))
    return thought, answer, [(call.name, call.arguments) for call in calls]


async def test_calls_are_read_however_the_text_is_cut() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    calls = [hermes("s_echo", '{"text": "a</tool_call>b"}'), hermes("s_other", "{}")]
    text = "<think>\nhm <tool_call>\n</think>\nLet me see.\n" + "\n".join(calls)
    for longest in (1, 3, 10, 1000):
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, longest)
            pieces.append(text[at : at + size])
            at += size
        thought, answer, called = await read(text, pieces)
        assert thought.strip() == "hm <tool_call>" and answer == "Let me see."
        assert called == [("s_echo", '{"text": "a</tool_call>b"}'), ("s_other", "{}")]


async def test_an_answer_without_calls_stays_what_it_is() -> None:
    assert await read("", ["a <tool", "_call is", " a tag"]) == ("", "a <tool_call is a tag", [])
