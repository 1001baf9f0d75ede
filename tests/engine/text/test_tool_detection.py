"""Detecting from its files how a model writes calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chat_samples import make_backend

from termgen.engine.text.tokenizer import Tokenizer
from termgen.engine.text.tokenizer_files import TokenizerParts
from termgen.engine.text.tool_detection import tool_format
from termgen.vocabulary.tool_format import ToolStyle

QWEN = "{% if tools %}<tools>{% endif %}<tool_call>\n{name}</tool_call>"
LLAMA = "{% if tools %}{{ '{\"name\": ' }}{{ '\"parameters\": ' }}{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["


def made_of(templates: dict[str, str], special: dict[str, int], declared: Any = None) -> Any:
    return SimpleNamespace(
        chat_templates=templates,
        response_template=declared,
        special_token_id=special.get,
        template_variables=frozenset({"messages"}),
        decode=lambda ids, **_: "",
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
    assert parser(()).feed("hi")[-1]["text"] == "hi"
    assert tool_format(made_of({"default": QWEN}, {}, {"fields": 5})).new_parser is None


def test_the_real_tokenizer(smollm2: Tokenizer) -> None:
    found = tool_format(smollm2)
    assert (found.style, found.knows_tools, found.new_parser) == (ToolStyle.HERMES, False, None)
    assert smollm2.special_token_id("<|im_end|>") == 2
    assert smollm2.special_token_id("the") is None


THINKS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENS = THINKS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
DECLARES = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
        "content": {"optional": False},
    },
}


def thinking_tokenizer() -> Tokenizer:
    return Tokenizer(
        TokenizerParts(
            backend=make_backend(),
            chat_templates={"default": OPENS},
            response_template=DECLARES,
        )
    )


def fields_of(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(e["field"], e["text"]) for e in events if e["type"] == "region_chunk"]


def test_a_declared_parser_knows_what_the_prompt_has_begun() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    tokenizer = thinking_tokenizer()
    new_parser = tool_format(tokenizer).new_parser
    assert new_parser is not None
    for text in ("hi", "what is <think>? " * 200):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        assert fields_of(new_parser(ids).feed("Hm")) == [("thinking", "Hm")]
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}, {"role": "assistant", "content": "<think>a" * 90}],
            continue_final_message=True,
            add_generation_prompt=False,
        )
        assert fields_of(new_parser(ids).feed("Hm")) == [("thinking", "Hm")]
    for prompt in ((), tokenizer.encode("<think>\nno answer begins here")):
        assert fields_of(new_parser(prompt).feed("Hm")) == [("content", "Hm")]


def test_an_answer_that_is_not_as_declared_is_read_all_the_same() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    new_parser = tool_format(thinking_tokenizer()).new_parser
    assert new_parser is not None
    parser = new_parser(())
    assert parser.feed("<call>{not json</call>")[-1]["value"] == "{not json"
    cut = new_parser(())
    cut.feed("<think>cut short")
    assert cut.finalize()[1][-1]["type"] == "region_close"
