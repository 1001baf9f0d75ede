"""Finds out from a tokenizer how its model writes tool calls.

Called once at start. What the model's files declare for transformers' response parser comes first,
then what its chat template contains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from termgen.vocabulary.tool_format import ResponseParser, ToolFormat, ToolStyle

if TYPE_CHECKING:
    from termgen.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FIRST_LOOK_TOKENS = 64
"""The end of a prompt in which the beginning of the answer is looked for first."""

WORDS = {
    ToolStyle.HERMES: ("<tool_call>", "</tool_call>"),
    ToolStyle.LLAMA: (),
    ToolStyle.MISTRAL: ("[TOOL_CALLS]",),
    ToolStyle.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]"),
}


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """Where the template gives no hint, calls are to be written in the style of Hermes."""
    templates = tokenizer.chat_templates
    source = templates.get("tool_use") or templates.get("default", "")
    style = _style(source)
    special = {
        word: token_id
        for word in WORDS[style]
        if (token_id := tokenizer.special_token_id(word)) is not None
    }
    return ToolFormat(
        style=style,
        knows_tools="tools" in source,
        special_tokens=special,
        new_parser=_declared(tokenizer),
        template_variables=tuple(sorted(tokenizer.template_variables)),
    )


def _style(source: str) -> ToolStyle:
    if "[TOOL_CALLS]" in source:
        return ToolStyle.MISTRAL_ARGS if "[ARGS]" in source else ToolStyle.MISTRAL
    if "<tool_call>" not in source and '"parameters":' in source:
        return ToolStyle.LLAMA
    return ToolStyle.HERMES


def _declared(tokenizer: Tokenizer) -> Callable[[Sequence[int]], ResponseParser] | None:
    declared = tokenizer.response_template
    if declared is None:
        return None
    try:
        from transformers.utils.chat_parsing import ResponseParser as Parser  # a second
        from transformers.utils.chat_parsing.response_templates import load_response_template

        template = load_response_template(dict(declared))
    except (ImportError, ValueError) as error:
        logger.warning("the model's response_template is not used: %s", error)
        return None
    for field in template.fields.values():  # an answer that is cut short or malformed is one too
        field.optional = True
        if field.content == "json":
            field.content_args = {**field.content_args, "allow_non_json": True}

    def new_parser(prompt_ids: Sequence[int]) -> ResponseParser:
        prefix = _begun_answer(template.start_anchor_re, tokenizer, prompt_ids)
        parser: ResponseParser = Parser(template, prefix=prefix)
        return parser

    return new_parser


def _begun_answer(anchor: Any, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """What the prompt has of the answer: the text behind the last place where one begins."""
    num_tokens = FIRST_LOOK_TOKENS
    while True:
        text = tokenizer.decode(prompt_ids[-num_tokens:], skip_special_tokens=False)
        ends = [match.end() for match in anchor.finditer(text)]
        if ends:
            return text[ends[-1] :]
        if num_tokens >= len(prompt_ids):
            return ""
        num_tokens *= 8
