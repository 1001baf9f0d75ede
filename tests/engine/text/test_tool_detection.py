"""Detecting from its files how a model writes calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chat_samples import make_backend

from termgen.api.tool_calls import CallArguments, CallStart, Content, DeclaredParser
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


# The words of gpt-oss's own template, which has no <|constrain|>.
WRITES_HARMONY = (
    "{% for m in messages %}{% if m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>Is it <b>? to=functions.f<|end|><|start|>assistant"
ANSWERS: dict[str, dict[str, Any]] = {
    THOUGHT + "<|channel|>final<|message|>Hi <|there|>": {
        "reasoning_content": "Is it <b>? to=functions.f",
        "content": "Hi <|there|>",
    },
    THOUGHT + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|x|>"}': {
        "reasoning_content": "Is it <b>? to=functions.f",
        "calls": [("f", '{"a": "<|x|>"}')],
    },
    ' to=functions.f<|channel|>commentary json<|message|>{"b": 2}<|call|>': {
        "calls": [("f", '{"b": 2}')],
    },
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.f<|message|>{"n": 1}': {
        "content": "I look.",
        "calls": [("f", '{"n": 1}')],
    },
    '<|channel|>final <|constrain|>json<|message|>{"x": 1}': {"content": '{"x": 1}'},
    "<|channel|>analysis to=python code<|message|>print(1)": {"reasoning_content": "print(1)"},
    "<|channel|>analysis<|message|>cut sho": {"reasoning_content": "cut sho"},
    "no channel at all": {"content": "no channel at all"},
}


def parts_of(source: str, text: str, size: int, begun: str = "", tools: Any = ()) -> dict[str, Any]:
    """What an answer has, read so many characters at a time. begun: the end of the prompt."""
    tokenizer = made_of({"default": source}, {})
    tokenizer.decode = lambda ids, **_: begun
    new_parser = tool_format(tokenizer).new_parser
    assert new_parser is not None
    parser = DeclaredParser(new_parser((1,), tools), reads_calls=True)
    parts = [part for at in range(0, len(text), size) for part in parser.feed(text[at : at + size])]
    found: dict[str, Any] = {}
    calls: list[list[str]] = []
    for part in [*parts, *parser.finish()]:
        if isinstance(part, CallStart):
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[part.index][1] += part.text
        else:
            name = "content" if isinstance(part, Content) else "reasoning_content"
            found[name] = found.get(name, "") + part.text
    if calls:
        found["calls"] = [tuple(call) for call in calls]
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("text", ANSWERS)
def test_harmony_is_known_without_a_declaration(text: str, size: int) -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    assert parts_of(WRITES_HARMONY, text, size) == ANSWERS[text]


# Shows calls and begins answers in the words of Qwen3.5's own template.
WRITES_XML = (
    "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>\n1\n</parameter>\n</function>\n"
    "</tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "s": {"type": "string"},
                    "list": {"type": "array"},
                    "maybe": {"type": ["boolean", "null"]},
                },
            },
        },
    }
]
XML_CALL = (
    "<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n<parameter=s>\n12\n</parameter>\n"
    '<parameter=list>\n[1, {"a": "<b>"}]\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n'
    "</function>\n</tool_call>"
)
XML_ARGUMENTS = '{"n": 12, "s": "12", "list": [1, {"a": "<b>"}], "maybe": null}'
XML_ANSWERS: dict[str, dict[str, Any]] = {
    f"Let me see\n</think>\n\nI look.{XML_CALL}": {
        "reasoning_content": "Let me see",
        "content": "I look.",
        "calls": [("f", XML_ARGUMENTS)],
    },
    # Without the first tag, twice; code of several lines keeps its spaces.
    "</think>" + XML_CALL.removeprefix("<tool_call>\n") + "<tool_call><function=g>\n<parameter=c>\n"
    "  if a < 3:\n    <b>\n</parameter></function></tool_call>": {
        "calls": [("f", XML_ARGUMENTS), ("g", '{"c": "  if a < 3:\\n    <b>"}')],
    },
    "</think><tool_call>\n<function=g>\n</function>\n</tool_call>": {"calls": [("g", "{}")]},
    "cut sho": {"reasoning_content": "cut sho"},
    "</think>a < b, <i> and <tool> are text": {"content": "a < b, <i> and <tool> are text"},
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", XML_ANSWERS)
def test_calls_between_tags_are_known_without_a_declaration(text: str, size: int) -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    begun = "<|im_start|>assistant\nold<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert parts_of(WRITES_XML, text, size, begun, TOOLS) == XML_ANSWERS[text]


def test_an_answer_without_thoughts_begins_as_the_prompt_says() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    begun = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parts_of(WRITES_XML, "Hi", 1, begun) == {"content": "Hi"}


WRITES_GEMMA4 = (
    "{% if tools %}<|tool>{% endif %}{{ '<|turn>user\n' }}{{ '<|tool_call>call:' }}"
    "{{ '<|channel>thought\n' }}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
GEMMA4_ANSWERS: dict[str, dict[str, Any]] = {
    "<|channel>thought\nIs it {a}?\n<channel|>Hi.": {
        "reasoning_content": "Is it {a}?",
        "content": "Hi.",
    },
    '<|tool_call>call:f{n:1,s:<|"|>say "a:1", <b><|"|>}<tool_call|>'
    "<|tool_call>call:g{}<tool_call|>": {
        "calls": [("f", '{"n": 1, "s": "say \\"a:1\\", <b>"}'), ("g", "{}")],
    },
    'I look.<|tool_call>call:get.it{deep:{list:[<|"|>x<|"|>,true,null]}}<tool_call|>': {
        "content": "I look.",
        "calls": [("get.it", '{"deep": {"list": ["x", true, null]}}')],
    },
    "plain {text}: call:f{}": {"content": "plain {text}: call:f{}"},
    "<|channel>thought\ncut sho": {"reasoning_content": "cut sho"},
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", GEMMA4_ANSWERS)
def test_gemma_4_is_known_without_a_declaration(text: str, size: int) -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    for begun in (
        "<|turn>model\n",
        "<|turn>model\n<|channel>thought\n<channel|>",
        # The results of a call are part of the same turn.
        "<|turn>model\n<|tool_call>call:f{n:1}<tool_call|>"
        '<|tool_response>response:f{r:<|"|>x<|"|>}<tool_response|>',
    ):
        assert parts_of(WRITES_GEMMA4, text, size, begun, TOOLS) == GEMMA4_ANSWERS[text]


WRITES_MUSE = (
    '{% if tools %}<atem:function_calls>\n<atem:invoke name="$FUNCTION_NAME">{% endif %}'
    "<|start|>user<|message|>{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MUSE_ANSWERS: dict[str, dict[str, Any]] = {
    " to=self<|message|>To whom?<|eom|><|start|>assistant to=user<|message|>Hi <b>.<|eot|>": {
        "reasoning_content": "To whom?",
        "content": "Hi <b>.",
    },
    " to=self<|message|>I look.<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n"
    '<atem:invoke name="f">\n<atem:parameter name="n">3</atem:parameter>\n'
    '<atem:parameter name="s">a < "b" & c\n</atem:parameter>\n</atem:invoke>\n'
    '<atem:invoke name="g">\n</atem:invoke>\n</atem:function_calls><|eot|>': {
        "reasoning_content": "I look.",
        "calls": [("f", '{"n": 3, "s": "a < \\"b\\" & c\\n"}'), ("g", "{}")],
    },
    " to=user<|message|>cut sho": {"content": "cut sho"},
    "no recipient": {"content": "no recipient"},
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", MUSE_ANSWERS)
def test_muse_glimmer_is_known_without_a_declaration(text: str, size: int) -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    found = parts_of(WRITES_MUSE, text, size, "<|start|>assistant", TOOLS)
    assert found == MUSE_ANSWERS[text]


@pytest.mark.parametrize(
    ("source", "joins"),
    [
        ("{{ tools }}{{ message['tool_responses'] }}", True),
        ("{{ tools }}{{ message['tool_responses'] }}{% if m.role == 'tool' %}{% endif %}", False),
        (QWEN, False),
    ],
)
def test_the_template_says_where_results_of_calls_belong(source: str, joins: bool) -> None:
    assert tool_format(made_of({"default": source}, {})).joins_results is joins


def test_other_templates_are_not_taken_for_these() -> None:
    for source in (
        WRITES_HARMONY.replace("final", "text"),
        WRITES_XML.replace("<parameter=", ""),
        WRITES_GEMMA4.replace("<|tool_call>", ""),
        WRITES_MUSE.replace("atem:", ""),
        QWEN,
        THINKS,
    ):
        assert tool_format(made_of({"default": source}, {})).new_parser is None
