"""Chats to prompts: the text that transformers renders, and errors that name the message."""

from __future__ import annotations

import random
from typing import Any

import pytest
from chat_samples import (
    LLAMA3,
    NOT_SPECIAL,
    QWEN,
    SPECIAL,
    TEMPLATES,
    TOOL_CHAT,
    TOOLS,
    chat,
    control_ids,
    make_backend,
    make_tokenizer,
)
from sample_texts import sample_texts

from termgen.engine.text.tokenizer import Tokenizer
from termgen.engine.text.tokenizer_files import TokenizerParts
from termgen.errors import RequestError

SEED = 5_150


# -- equal to transformers ------------------------------------------------------------------------


class TestEqualsTransformers:
    @pytest.fixture(scope="class")
    def pairs(self) -> dict[str, tuple[Tokenizer, Any]]:
        from transformers import PreTrainedTokenizerFast

        return {
            name: (
                make_tokenizer(source),
                PreTrainedTokenizerFast(
                    tokenizer_object=make_backend(),
                    chat_template=source,
                    bos_token="<|begin_of_text|>",
                    eos_token="</s>",
                ),
            )
            for name, source in TEMPLATES.items()
        }

    def check(
        self, pair: tuple[Tokenizer, Any], messages: list[dict[str, Any]], **options: Any
    ) -> None:
        ours, theirs = pair
        options = {"add_generation_prompt": True} | options
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.render_chat(messages, **options) == expected
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        assert ours.apply_chat_template(messages, **options) == ids

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_on_texts_of_many_scripts(self, pairs: dict[str, Any], name: str) -> None:
        known = (*SPECIAL, *NOT_SPECIAL)
        texts = [t for t in sample_texts(SEED, 250) if not any(k in t for k in known)]
        for a, b, c in zip(texts[::3], texts[1::3], texts[2::3], strict=False):
            self.check(pairs[name], chat(a, b, c))
            self.check(pairs[name], chat(a, system=b), add_generation_prompt=False)

    @pytest.mark.parametrize("name", ["llama3", "qwen"])
    def test_with_tools(self, pairs: dict[str, Any], name: str) -> None:
        self.check(pairs[name], TOOL_CHAT, tools=TOOLS)
        self.check(pairs[name], TOOL_CHAT)

    def test_with_reasoning_and_template_variables(self, pairs: dict[str, Any]) -> None:
        thought = "<think>\nlet me see\n</think>\n\nIt is 4."
        self.check(pairs["qwen"], chat("2+2?", thought))
        self.check(pairs["qwen"], chat("2+2?", thought, "sure?"), enable_thinking=False)
        messages = chat("2+2?", "4", "sure?", "yes")
        messages[3]["reasoning_content"] = "think again"
        self.check(pairs["qwen"], messages)

    @pytest.mark.parametrize("name", TEMPLATES)
    @pytest.mark.parametrize("tail", ["The answer is", "The answer is ", "ends with newline\n"])
    def test_continuing_the_final_message(
        self, pairs: dict[str, Any], name: str, tail: str
    ) -> None:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        self.check(pairs[name], chat("2+2?", tail), **options)

    def test_parse_errors_and_undefined_names(self) -> None:
        from transformers import PreTrainedTokenizerFast

        source = "{{ messages[0].nothing }}{{ unknown_name }}{{ messages | length }}{{ eos_token }}"
        theirs = PreTrainedTokenizerFast(
            tokenizer_object=make_backend(), chat_template=source, eos_token="</s>"
        )
        ours = make_tokenizer(source)
        expected = theirs.apply_chat_template(chat("x"), tokenize=False)
        assert ours.render_chat(chat("x"), add_generation_prompt=False) == expected == "1</s>"


# -- message shapes -----------------------------------------------------------------------------


class TestMessages:
    tokenizer = make_tokenizer(TEMPLATES["chatml"])

    def test_developer_speaks_as_system(self) -> None:
        messages = [{"role": "developer", "content": "Be kind."}, *chat("hi")]
        assert self.tokenizer.apply_chat_template(messages) == self.tokenizer.apply_chat_template(
            chat("hi", system="Be kind.")
        )

    def test_text_parts_are_joined(self) -> None:
        parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        messages = [{"role": "user", "content": parts}]
        assert self.tokenizer.render_chat(messages) == self.tokenizer.render_chat(chat("one two"))

    def test_assistant_may_call_tools_without_content(self) -> None:
        messages = [dict(m) for m in TOOL_CHAT]
        messages[1]["content"] = None
        ids = make_tokenizer(QWEN).apply_chat_template(messages)
        del messages[1]["content"]
        assert make_tokenizer(QWEN).apply_chat_template(messages) == ids
        assert "None" not in make_tokenizer(QWEN).render_chat(messages)

    def test_arguments_may_be_json_text(self) -> None:
        messages = [dict(m) for m in TOOL_CHAT]
        call = messages[1]["tool_calls"][0]
        as_text = {"name": "get_weather", "arguments": '{"place": "Bonn"}'}
        messages[1] = {**messages[1], "tool_calls": [{**call, "function": as_text}]}
        tokenizer = make_tokenizer(LLAMA3)
        assert tokenizer.render_chat(messages) == tokenizer.render_chat(TOOL_CHAT)

    def test_messages_are_not_changed(self) -> None:
        messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
        self.tokenizer.apply_chat_template(messages)
        assert messages == [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]

    def test_bos_is_not_doubled(self) -> None:
        tokenizer = make_tokenizer(LLAMA3)
        ids = tokenizer.apply_chat_template(chat("hi"))
        assert ids.count(tokenizer.bos_token_id or -1) == 1 and ids[0] == tokenizer.bos_token_id

    @pytest.mark.parametrize(
        ("messages", "words"),
        [
            ([], "empty"),
            ("hello", "list"),
            (["hello"], "messages[0]"),
            ([{"content": "x"}], "role"),
            ([{"role": "robot", "content": "x"}], "'robot'"),
            ([{"role": ["user"], "content": "x"}], "role"),
            ([{"role": "user"}], "messages[0].content is missing"),
            ([{"role": "user", "content": None}], "content is missing"),
            ([{"role": "assistant", "content": None}], "content is missing"),
            ([{"role": "user", "content": 5}], "content"),
            ([{"role": "user", "content": {"text": "x"}}], "content"),
            ([{"role": "user", "content": ["x"]}], "content[0]"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                "'image_url'",
            ),
            ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "text"),
            ([{"role": "user", "content": "x", "tool_calls": [{}]}], "tool_calls"),
            ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "function"),
            (
                [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}],
                    }
                ],
                "arguments",
            ),
            ([{"role": "user", "content": "half a pair: \ud83d"}], "surrogate"),
            ([{"role": "user", "content": "x", "extra": {1: 2}}], "keys"),
            ([{"role": "user", "content": "x", "extra": object()}], "object"),
        ],
    )
    def test_faults_name_the_place(self, messages: Any, words: str) -> None:
        with pytest.raises(RequestError) as raised:
            self.tokenizer.apply_chat_template(messages)
        assert words in str(raised.value) and "\n" not in str(raised.value)
        assert (raised.value.param, raised.value.status) == ("messages", 400)

    def test_deep_nesting_is_refused(self) -> None:
        value: Any = "x"
        for _ in range(5000):
            value = [value]
        with pytest.raises(RequestError, match="nested"):
            self.tokenizer.apply_chat_template([{"role": "user", "content": "x", "extra": value}])

    def test_continue_and_generation_prompt_exclude_each_other(self) -> None:
        with pytest.raises(RequestError) as raised:
            self.tokenizer.apply_chat_template(
                chat("a", "b"), add_generation_prompt=True, continue_final_message=True
            )
        assert raised.value.param == "continue_final_message"

    def test_only_an_assistant_message_can_be_continued(self) -> None:
        with pytest.raises(RequestError, match="assistant"):
            self.tokenizer.apply_chat_template(
                chat("a"), add_generation_prompt=False, continue_final_message=True
            )

    def test_continued_message_is_left_open_and_still_guarded(self) -> None:
        ids = self.tokenizer.apply_chat_template(
            chat("a", "b<|im_end|>c"), add_generation_prompt=False, continue_final_message=True
        )
        assert self.tokenizer.decode(ids, skip_special_tokens=False).endswith("b<|im_end|>c")
        assert control_ids(self.tokenizer, ids).count("<|im_end|>") == 2

    @pytest.mark.parametrize("name", ["messages", "tokenize"])
    def test_reserved_variables_are_refused(self, name: str) -> None:
        with pytest.raises(RequestError) as raised:
            self.tokenizer.apply_chat_template(chat("a"), **{name: "x"})
        assert raised.value.param == "chat_template_kwargs"


# -- templates that fail or misbehave --------------------------------------------------------------


class TestTemplates:
    @pytest.mark.parametrize(
        ("template", "words"),
        [
            ("{{ raise_exception('No thanks') }}", "No thanks"),
            ("{{ messages[5].content }}", "messages"),
            ("{{ messages[0].content + 1 }}", "str"),
            ("{{ 1 / 0 }}", "zero"),
            ("{% for %}", "broken"),
            ("{% unknown_tag %}", "broken"),
            ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "unsafe"),
            ("{{ 'a' * 300000000 }}", "too long"),
            ("{{ [0] * 300000000 }}", "too long"),
            ("{{ 2 ** 100000 }}", "too large"),
            ("{{ range(10 ** 9) | list }}", "ange too"),
            ("{% for i in range(90000) %}aaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}", "more than"),
            ("{% set ns = namespace(__init__=1) %}", "namespace"),
            ("{% set ns = namespace() %}{% set ns._x = 1 %}", "namespace"),
        ],
    )
    def test_template_errors_are_request_errors(self, template: str, words: str) -> None:
        tokenizer = make_tokenizer(template)
        with pytest.raises(RequestError) as raised:
            tokenizer.apply_chat_template(chat("hi"))
        assert words in str(raised.value) and "\n" not in str(raised.value)
        assert (raised.value.param, raised.value.status) == ("messages", 400)

    def test_mistral_roles_must_alternate(self) -> None:
        tokenizer = make_tokenizer(TEMPLATES["mistral"])
        with pytest.raises(RequestError, match="alternate"):
            tokenizer.apply_chat_template([*chat("a"), *chat("b")])

    def test_without_a_template(self) -> None:
        tokenizer = Tokenizer(TokenizerParts(backend=make_backend()))
        assert not tokenizer.has_chat_template
        with pytest.raises(RequestError, match="no chat template"):
            tokenizer.apply_chat_template(chat("hi"))

    def test_helpers_of_the_sandbox(self) -> None:
        template = (
            "{{ strftime_now('%Y') | length }}{% for i in [1,2,3] %}{% if i == 2 %}{% break %}"
            "{% endif %}{{ i }}{% endfor %}{{ dict(a=1) | tojson }}"
            "{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}"
            "{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}"
        )
        rendered = make_tokenizer(template).render_chat(chat("hi"))
        assert rendered == '41{"a": 1}2{"a": 1, "b": "<é>"}'

    def test_long_chats_are_encoded_whole(self) -> None:
        rng = random.Random(SEED)
        contents = ["".join(rng.choices("he er\n", k=3000)) for _ in range(41)]
        tokenizer = make_tokenizer(TEMPLATES["chatml"])
        ids = tokenizer.apply_chat_template(chat(*contents))
        rendered = tokenizer.render_chat(chat(*contents))
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
