"""Tools with real engines: one of a tiny model, and a server of termgen with the remote client."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_samples import QWEN
from fake_engine import FakeEngine, Script, make_model_info
from fake_script import GenerateCall
from remote_harness import connected
from server_harness import serving
from tool_samples import KNOWS_TOOLS, Words, box_of, hermes, make_tool, runner_of
from tui_harness import pieces

from termgen.api.tools import constrain
from termgen.client import ChatPrompt, EngineClient
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.tools.calls import CallState, ToolCall, arguments_of, take_pieces
from termgen.tools.request import ToolRequest, tool_request
from termgen.tui.chat.state.conversation import Conversation
from termgen.tui.chat.state.thoughts import AnswerNews, read_answer
from termgen.vocabulary.sampling_params import SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"enum": ["one", "two"]}},
    "required": ["text"],
    "additionalProperties": False,
}


@pytest.fixture
async def engine(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_llama_dir, folder)
    settings = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").write_text(QWEN)
    given = json.loads(settings.read_text())
    given.pop("chat_template", None)
    settings.write_text(json.dumps(given))
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_gib=0.02, threads=1)
    started = await AsyncEngine.start(config)
    yield started
    await started.shutdown()


async def answer(client: EngineClient, asked: ToolRequest, chat: Conversation) -> list[ToolCall]:
    calls: list[ToolCall] = []
    prompt, params = asked.prompt(chat.prompt()), SamplingParams(seed=3, max_tokens=300)
    news: list[AnswerNews] = [
        each async for each in read_answer(client, prompt, params, request_id="r", tools=asked)
    ]
    for each in news:
        take_pieces(calls, each.calls)
    return calls


async def test_a_model_here_calls_and_reads_its_result(engine: AsyncEngine) -> None:
    box = box_of(make_tool(schema=SCHEMA))
    offered = tool_request(box.offered, engine.model)
    assert offered.grammar is not None and engine.model.tool_format.knows_tools
    # a random model calls nothing by itself
    must = replace(offered.tools, choice="required")
    asked = replace(offered, tools=must, grammar=constrain(must, None))
    chat = Conversation()
    turn = chat.ask("call", now_s=0)
    turn.calls = await answer(engine, asked, chat)
    assert turn.calls and {call.name for call in turn.calls} == {"s_echo"}
    assert (arguments_of(turn.calls[0].arguments) or {}).get("text") in ("one", "two")
    await runner_of(box, Words()).run(turn.end_round())
    assert turn.rounds[0].calls[0].state is CallState.DONE
    prompt = offered.prompt(chat.prompt())
    text = await engine.detokenize(await engine.tokenize(prompt))
    assert (
        '"name": "s_echo"' in text and f"<tool_response>\n{turn.rounds[0].calls[0].result}" in text
    )
    deltas = [
        d async for d in engine.generate(prompt, offered.params(SamplingParams(max_tokens=8)))
    ]
    assert deltas[-1].finish_reason is not None, "the grammar lets text be free"


async def test_a_server_of_ours_takes_tools_and_sends_calls() -> None:
    call = hermes("s_echo", '{"text": "hi"}')
    texts = ["<think>\nhm\n</think>\nLet me see.\n" + call, "It says hi."]

    def script(_: GenerateCall) -> Script:
        return Script(pieces=pieces(texts.pop(0)))

    behind = FakeEngine(script=script, model=make_model_info(tool_format=KNOWS_TOOLS))
    box = box_of()
    async with serving(behind) as server, connected(server.url) as client:
        asked = tool_request(box.offered, client.model)
        assert not asked.reads_text and asked.is_enforced
        chat = Conversation()
        turn = chat.ask("call", now_s=0)
        turn.calls = await answer(client, asked, chat)
        assert [(one.name, one.arguments) for one in turn.calls] == [("s_echo", '{"text": "hi"}')]
        await runner_of(box, Words()).run(turn.end_round())
        assert await answer(client, asked, chat) == []
    held = behind.calls[0].params.structured_outputs
    assert held is not None and "s_echo" in str(held.grammar), "the server enforces arguments"
    prompt = behind.calls[1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool"]
    assert prompt.messages[2]["content"] == "echo hi"
    assert prompt.template_kwargs["tools"][0]["function"]["name"] == "s_echo"
