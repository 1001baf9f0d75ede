"""How a model writes calls, found out from what its files hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from termgen.engine.tokenizer import Tokenizer
from termgen.engine.tool_detection import tool_format
from termgen.engine.tool_format import ToolStyle

QWEN = "{% if tools %}<tools>{% endif %}<tool_call>\n{name}</tool_call>"
LLAMA = "{% if tools %}{{ '{\"name\": ' }}{{ '\"parameters\": ' }}{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["


def made_of(templates: dict[str, str], special: dict[str, int], declared: Any = None) -> Any:
    return SimpleNamespace(
        chat_templates=templates,
        response_template=declared,
        special_token_id=special.get,
    )


@pytest.mark.parametrize(
    ("source", "style", "knows_tools"),
    [
        (QWEN, ToolStyle.HERMES, True),
        (LLAMA, ToolStyle.LLAMA, True),
        (MISTRAL, ToolStyle.MISTRAL, True),
        (MISTRAL + "[ARGS]", ToolStyle.MISTRAL_ARGS, True),
        ("{{ messages }}", ToolStyle.HERMES, False),
    ],
)
def test_the_template_tells_the_style(source: str, style: ToolStyle, knows_tools: bool) -> None:
    found = tool_format(made_of({"default": source}, {}))
    assert (found.style, found.knows_tools, found.special_tokens) == (style, knows_tools, {})
    assert found.new_parser is None


def test_a_template_of_its_own_for_tools_comes_first_and_special_words_are_known() -> None:
    special = {"[TOOL_CALLS]": 9, "[ARGS]": 32, "<tool_call>": 5}
    found = tool_format(made_of({"default": "hi", "tool_use": MISTRAL}, special))
    assert (found.style, found.special_tokens) == (ToolStyle.MISTRAL, {"[TOOL_CALLS]": 9})


def test_a_declared_parser() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    declared = {"start_anchor": "<a>", "fields": {"content": {}}}
    parser = tool_format(made_of({"default": QWEN}, {}, declared)).new_parser
    assert parser is not None
    assert parser().feed("hi")[-1]["text"] == "hi"
    assert tool_format(made_of({"default": QWEN}, {}, {"fields": 5})).new_parser is None


def test_the_real_tokenizer(smollm2: Tokenizer) -> None:
    found = tool_format(smollm2)
    assert (found.style, found.knows_tools, found.new_parser) == (ToolStyle.HERMES, False, None)
    assert smollm2.special_token_id("<|im_end|>") == 2
    assert smollm2.special_token_id("the") is None
