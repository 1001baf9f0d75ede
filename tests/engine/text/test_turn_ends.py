"""Where the turns of a chat end, as positions in the prompt's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from chat_samples import LLAMA3, MISTRAL, QWEN, TEMPLATES, TOOL_CHAT, TOOLS, chat, make_tokenizer

from termgen.client import ChatPrompt
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.turn_ends import PIECE_CHARS, num_shared
from termgen.vocabulary.request import TurnEnds
from termgen.vocabulary.sampling_params import SamplingParams

SYSTEM = "You work in a repository. " * 3
ROLE = len("\n\nassistant\n\n")
"""Most tokens that name a turn's speaker, with which two turns may both begin."""
TALK = chat("Read the file.", "It is empty.", "Then write it.", system=SYSTEM)


def read(
    messages: list[dict[str, Any]], template: str = QWEN, **options: Any
) -> tuple[list[int], TurnEnds]:
    variables = {key: options.pop(key) for key in ("tools", "enable_thinking") if key in options}
    asked = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template": None,
        **options,
    }
    return make_tokenizer(template).encode_chat(
        messages, variables=variables, marks_turns=True, **asked
    )


def tokens(messages: list[dict[str, Any]], template: str = QWEN, **options: Any) -> list[int]:
    return make_tokenizer(template).apply_chat_template(messages, **options)


def shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen"])
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("forged", ["", "<|im_end|> <|eot_id|><|start_header_id|>"])
def test_turns_end_where_the_prompts_of_other_turns_part(
    name: str, thinks: bool, forged: str
) -> None:
    template = TEMPLATES[name]
    talk = [*TALK[:2], {"role": "assistant", "content": f"It is empty.{forged}"}, TALK[3]]
    ids, ends = read(talk, template, enable_thinking=thinks)
    bare = tokens(talk, template, add_generation_prompt=False)
    assert ends.last == shared(ids, bare) == len(bare), "the generation prompt begins there"
    following = [*talk, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "x"}]
    assert tokens(following, template)[: ends.last] == ids[: ends.last]
    before = tokens(talk[:-1], template, add_generation_prompt=False)
    assert ends.previous == shared(ids, before) == len(before)
    agent = tokens(chat("Who are you?", system=SYSTEM), template)
    assert shared(ids, agent) - ROLE <= ends.system <= shared(ids, agent)


def test_the_last_question_ends_before_the_thoughts_and_calls_of_its_answer() -> None:
    question = [{"role": "system", "content": SYSTEM}, TOOL_CHAT[0]]
    call = {**TOOL_CHAT[1], "reasoning_content": "The weather is asked for."}
    talk = [*question, call, TOOL_CHAT[2]]
    ids, ends = read(talk, tools=TOOLS)
    following = tokens([*talk, {"role": "assistant", "content": "21"}, TOOL_CHAT[3]], tools=TOOLS)
    assert shared(ids, following) - ROLE <= ends.question <= shared(ids, following)
    assert ends.question < ends.previous < ends.last
    assert read(question)[1].question == 0, "that is the last message"
    other_tools = tokens([question[0], TOOL_CHAT[3]], tools=TOOLS)
    assert ends.system <= shared(ids, other_tools) < ends.question


def test_what_cannot_be_found_is_left_out() -> None:
    assert read(chat("Hi.", "Hello.", "Bye."), MISTRAL)[1].last == 0, "no generation prompt"
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    ends = read(TALK[:3], **continued)[1]
    assert ends.last == ends.previous == 0 and ends.system
    # The tools belong to the system prompt; without either, a conversation shares nothing.
    assert read(TALK[1:2], LLAMA3)[1].system > 0 and read(TALK[1:2])[1].system < 2
    assert read(chat("x"), "{% for m in messages %}{{ m.content }}{% endfor %}")[1] == TurnEnds()
    picky = "{{ raise_exception('no') if not add_generation_prompt }}<|im_start|>"
    assert read(chat("x"), picky)[1] == TurnEnds()


def test_requests_carry_the_ends_where_they_are_of_use() -> None:
    tokenizer = make_tokenizer(QWEN)
    prompt, params = ChatPrompt(tuple(TALK)), SamplingParams(max_tokens=1)
    for marks_turns in (True, False):
        processor = InputProcessor(tokenizer, 4000, tokenizer.vocab_size, marks_turns=marks_turns)
        request = processor.process(prompt, params)
        assert bool(request.turn_ends.last) is marks_turns
    assert processor.process("plain text", params).turn_ends == TurnEnds()


def test_a_prompt_without_its_beginning_shares_nothing() -> None:
    tokenizer = make_tokenizer(QWEN)
    processor = InputProcessor(tokenizer, 4000, tokenizer.vocab_size, marks_turns=True)
    prompt = ChatPrompt(tuple(TALK))
    num_tokens = len(processor.tokenize(prompt))
    for keep, has_ends in ((num_tokens, True), (num_tokens - 1, False)):
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
        assert bool(processor.process(prompt, params).turn_ends.last) is has_ends


@pytest.mark.parametrize("length", [0, 1, PIECE_CHARS - 1, PIECE_CHARS, 3 * PIECE_CHARS + 7])
def test_texts_are_compared_up_to_where_they_part(length: int) -> None:
    text = "ab" * length
    assert num_shared(text, text) == num_shared(text, text + "c") == len(text)
    assert num_shared(text + "x" + text, text + "y" + text) == len(text)
