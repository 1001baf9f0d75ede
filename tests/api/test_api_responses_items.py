"""Input items of /v1/responses: every kind that OpenAI's clients and Codex send."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from bridge_harness import HI, ask, prompt_of
from openai.types.responses import response_input_item_param

from termgen.errors import RequestError

FUNCTION = {"type": "function", "name": "find", "parameters": {"type": "object"}}
MCP = {"type": "mcp_call", "id": "mcp_1", "server_label": "docs", "name": "find"}
SHELL = {"type": "shell_call", "call_id": "s1", "action": {"commands": ["ls", "pwd"]}}
LOCAL = {
    "type": "local_shell_call",
    "id": "lsh_1",
    "call_id": "l1",
    "status": "completed",
    "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None},
}
PATCH = {
    "type": "apply_patch_call",
    "call_id": "p1",
    "status": "completed",
    "operation": {"type": "delete_file", "path": "a.txt"},
}
CHUNKS = [
    {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
    {"stdout": "", "stderr": "no b", "outcome": {"type": "exit", "exit_code": 2}},
    {"stdout": "c", "stderr": "", "outcome": {"type": "timeout"}},
]
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 16_000}
REFERENCE = {"type": "item_reference", "id": "msg_1"}

SHOWN: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "message", "role": "assistant", "content": [], "phase": "commentary"},
    {"type": "agent_message", "author": "a", "recipient": "b", "content": "x"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": None},
    {"type": "function_call_output", "call_id": "c", "output": "x", "status": None},
    {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "y"},
    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c", "name": "f", "output": [PICTURE]},
    {"type": "custom_tool_call_output", "name": "f", "output": "x"},
    SHELL,
    LOCAL,
    PATCH,
    {**LOCAL, "call_id": None},
    {"type": "shell_call_output", "call_id": "s1", "output": CHUNKS},
    {"type": "local_shell_call_output", "id": "l1", "output": '{"output": "x"}'},
    {"type": "apply_patch_call_output", "call_id": "p1", "status": "failed", "output": None},
    {**MCP, "arguments": "{}", "output": "x", "error": None},
]
"""Items that become a turn."""

ABSORBED: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "x"},
    {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]},
    {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [FUNCTION]},
    {"type": "configuration_update", "reasoning": {"effort": "low"}},
]
"""Items that change the request without a turn of their own."""

LEFT_OUT: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws", "status": "completed"},
    {"type": "file_search_call", "id": "fs", "queries": [], "status": "completed"},
    {"type": "code_interpreter_call", "id": "ci", "code": "1", "outputs": None},
    {"type": "image_generation_call", "id": "ig", "status": "completed", "result": "A"},
    {"type": "computer_call", "call_id": "c", "action": {}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
    {"type": "mcp_list_tools", "id": "l", "server_label": "docs", "tools": []},
    {"type": "mcp_approval_request", "id": "a", "server_label": "d", "name": "f", "arguments": ""},
    {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
    {"type": "program", "id": "p", "call_id": "p", "code": "1", "fingerprint": "x"},
    {"type": "program_output", "id": "p", "call_id": "p", "result": "1"},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "compaction_summary", "encrypted_content": "x"},
    {"type": "context_compaction", "encrypted_content": None},
    {"type": "compaction_trigger"},
    {"type": "ghost_snapshot", "ghost_commit": {}},
    REFERENCE,
]
CODEX = {
    *("additional_tools", "message", "agent_message", "reasoning", "local_shell_call"),
    *("function_call", "tool_search_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "tool_search_output", "web_search_call", "ghost_snapshot"),
    *("image_generation_call", "compaction", "compaction_summary", "compaction_trigger"),
    "context_compaction",
}
"""The kinds of `ResponseItem` and `ResponseInputItem` in codex-rs/protocol/src/models.rs."""


def turns(*items: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in prompt_of(ask(input=[*HI, *items]).chat).messages]


def test_every_kind_of_a_client_has_a_case() -> None:
    kinds = set(CODEX)
    for item in typing.get_args(response_input_item_param.ResponseInputItemParam):
        hints = typing.get_type_hints(item)
        kinds |= {kind for kind in _literals(hints["type"]) if isinstance(kind, str)}
    assert {"mcp_call", "apply_patch_call_output", "item_reference"} < kinds
    assert kinds - {item["type"] for item in [*SHOWN, *ABSORBED, *LEFT_OUT]} == set()


def _literals(hint: Any) -> list[Any]:
    """The values of every Literal in a type."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for inner in typing.get_args(hint) for value in _literals(inner)]


@pytest.mark.parametrize("item", SHOWN, ids=lambda item: item["type"])
def test_what_a_client_ran_is_shown(item: dict[str, Any]) -> None:
    asked = ask(input=[*HI, {**item, "internal_chat_message_metadata_passthrough": None}, *HI])
    assert not asked.ignored
    messages = prompt_of(asked.chat).messages
    assert len(messages) > 1 or "x" in messages[0]["content"]


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda item: item["type"])
def test_what_only_another_server_reads_is_left_out_and_named(item: dict[str, Any]) -> None:
    asked = ask(input=[*HI, item])
    assert asked.chat.not_used == (f"input.{item['type']}",)
    assert len(prompt_of(asked.chat).messages) == 1


@pytest.mark.parametrize("item", ABSORBED, ids=lambda item: item["type"])
def test_items_without_a_turn_are_taken(item: dict[str, Any]) -> None:
    assert len(turns(item)) == 1


def test_a_reference_may_leave_its_type_out() -> None:
    assert ask(input=[*HI, {"id": "msg_1"}]).chat.not_used == ("input.item_reference",)


def test_a_result_without_an_id_belongs_to_the_call_of_its_tool() -> None:
    calls = [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "namespace": "n", "name": "g", "arguments": "{}"},
    ]
    g = {"type": "function_call_output", "name": "g", "namespace": "n", "output": "1"}
    any_ = {"type": "function_call_output", "call_id": None, "output": "2"}
    history = turns(*calls, g, any_)
    assert [(m["tool_call_id"], m["content"]) for m in history[2:]] == [("b", "1"), ("a", "2")]


def test_a_result_that_no_call_asked_for_gets_one() -> None:
    made = {"type": "function_call", "call_id": "a", "name": "create_goal", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "a", "output": "ok"}
    goal = {
        "type": "function_call_output",
        "name": "goal_objective",
        "namespace": "agent",
        "output": "y",
    }
    history = turns(made, done, goal, goal)
    assert [m["role"] for m in history] == ["user", *["assistant", "tool"] * 3]
    (call,) = history[3]["tool_calls"]
    assert call["function"] == {"name": "agent__goal_objective", "arguments": {}}
    assert call["id"] == history[4]["tool_call_id"] and history[4]["content"] == "y"
    assert history[5]["tool_calls"][0]["id"] != call["id"]


def test_calls_of_other_tools_become_functions_with_results() -> None:
    local = {"type": "local_shell_call_output", "id": "l1", "output": "one"}
    patched = {"type": "apply_patch_call_output", "call_id": "p1", "status": "failed"}
    history = turns(
        LOCAL,
        local,
        SHELL,
        {"type": "shell_call_output", "call_id": "s1", "output": CHUNKS},
        PATCH,
        patched,
        {**MCP, "arguments": '{"q": 1}', "output": None, "error": {"type": "http_error"}},
    )
    functions = [m["tool_calls"][0]["function"] for m in history if m["role"] == "assistant"]
    assert functions == [
        {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"], "env": {}}},
        {"name": "shell", "arguments": {"commands": ["ls", "pwd"]}},
        {"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a.txt"}},
        {"name": "docs__find", "arguments": {"q": 1}},
    ]
    results = [m["content"] for m in history if m["role"] == "tool"]
    assert results == [
        "one",
        "a\n\nno b\n[exit code 2]\nc\n[timed out]",
        "failed",
        'Error: {"type": "http_error"}',
    ]
    ids = [m["tool_calls"][0]["id"] for m in history if m["role"] == "assistant"]
    assert ids == [m["tool_call_id"] for m in history if m["role"] == "tool"]


def test_thoughts_stay_with_the_call_that_follows() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    history = turns(thought, {**MCP, "arguments": "", "output": "x"})
    assert history[1]["reasoning_content"] == "hm" and history[2]["role"] == "tool"


def test_an_agents_message_names_its_author() -> None:
    parts = [
        {"type": "input_text", "text": "done"},
        {"type": "encrypted_content", "encrypted_content": "AAAA"},
    ]
    item = {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": parts}
    asked = ask(input=[item])
    (message,) = prompt_of(asked.chat).messages
    assert message["role"] == "user"
    assert message["content"] == (
        "Message from /root/a:\ndone\n[encrypted text, not read by this model]"
    )
    assert asked.chat.not_used == ("input.encrypted_content",)


def test_tools_among_the_items_are_offered() -> None:
    space = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
    late = {**FUNCTION, "description": "newer"}
    custom = {"type": "custom", "name": "run"}
    asked = ask(
        tools=[FUNCTION, {"type": "web_search"}],
        input=[
            {"type": "additional_tools", "role": "developer", "tools": [space, custom]},
            *HI,
            {"type": "tool_search_output", "tools": [late, {"type": "programmatic_tool_calling"}]},
        ],
    )
    assert [f.name for f in asked.chat.tools.functions] == ["find", "n__find", "run"]
    assert asked.chat.tools.shown[0]["function"]["description"] == "newer"
    assert asked.tool_names["n__find"].namespace == "n" and asked.tool_names["run"].is_custom
    assert asked.chat.not_used == ("tools.web_search", "tools.programmatic_tool_calling")
    bad = {"type": "additional_tools", "tools": [FUNCTION, {"type": "function", "name": "a b"}]}
    with pytest.raises(RequestError) as caught:
        ask(tools=[{"type": "web_search"}, FUNCTION], input=[*HI, bad])
    assert caught.value.param == "input[1].tools[1].name"


def test_settings_among_the_items_win() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    update = {"type": "configuration_update", "text": {"format": schema}}
    first = {"type": "configuration_update", "reasoning": {"effort": "high"}}
    asked = ask(
        input=[first, *HI, update, {**first, "reasoning": {"effort": "low"}}],
        reasoning={"effort": "max", "summary": "auto"},
    )
    assert asked.chat.job.params.structured_outputs is not None
    assert asked.echo["reasoning"]["effort"] == "low"
    assert "reasoning.summary" in asked.chat.not_used


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"type": "function_call_output", "call_id": 5, "output": "x"}, "call_id"),
        ({"type": "function_call_output", "name": 5, "output": "x"}, "name"),
        ({"type": "function_call_output", "name": "f", "namespace": 5}, "namespace"),
        ({"type": "function_call_output", "call_id": "c", "output": 5}, "output"),
        ({"type": "shell_call", "call_id": "c", "action": "ls"}, "action"),
        ({"type": "shell_call", "action": {}}, "call_id"),
        ({"type": "shell_call_output", "call_id": "c", "output": ["x"]}, "output[0]"),
        ({"type": "shell_call_output", "call_id": "c", "output": [{}]}, "output[0].stdout"),
        ({"type": "apply_patch_call", "call_id": "c"}, "operation"),
        ({"type": "mcp_call", "id": "c", "name": "f"}, "server_label"),
        ({"type": "agent_message", "content": "x"}, "author"),
        ({"type": "additional_tools", "tools": {}}, "tools"),
        ({"type": "configuration_update", "reasoning": 5}, "reasoning"),
        ({"type": "hammer_call"}, "type"),
    ],
)
def test_items_that_cannot_be_read_are_errors(item: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(input=[*HI, item])
    assert caught.value.param == f"input[1].{param}", caught.value


def test_allowed_tools_go_by_their_names_here() -> None:
    space = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
    custom = {"type": "custom", "name": "run"}
    named = {"type": "function", "name": "find", "namespace": "n"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named, custom]}
    asked = ask(tools=[FUNCTION, space, custom], tool_choice=choice)
    assert [f.name for f in asked.chat.tools.functions] == ["n__find", "run"]
    assert asked.chat.tools.must_call and asked.echo["tool_choice"] == choice
    for bad, param in (
        ({"mode": "none"}, "tool_choice.mode"),
        ({"tools": {}}, "tool_choice.tools"),
        ({"tools": [5]}, "tool_choice.tools[0]"),
        ({"tools": [{"type": "function"}]}, "tool_choice.tools[0].name"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tool_choice"),
    ):
        with pytest.raises(RequestError) as caught:
            ask(tools=[space], tool_choice={**choice, **bad})
        assert caught.value.param == param
