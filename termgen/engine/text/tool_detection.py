"""Detects a model's tool-call syntax from its tokenizer.

Called once at start. A declaration for transformers' response parser in the model's files takes
precedence over hints in its chat template, of which some mean a declaration of `answer_formats`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from termgen.engine.text.answer_formats import format_of
from termgen.vocabulary.tool_format import NewParser, ResponseParser, ToolFormat, ToolStyle

if TYPE_CHECKING:
    from termgen.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FIRST_LOOK_TOKENS = 64
"""Tokens at the end of a prompt that are searched first for the beginning of the answer."""

_TOOL_ROLE = re.compile(r"==\s*(['\"])tool\1")
"""A comparison with the role of messages that are results."""
WORDS = {
    ToolStyle.HERMES: ("<tool_call>", "</tool_call>"),
    ToolStyle.LLAMA: (),
    ToolStyle.MISTRAL: ("[TOOL_CALLS]",),
    ToolStyle.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]"),
}


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """The model's tool-call syntax; Hermes style if the template gives no hint."""
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
        joins_results="tool_responses" in source and _TOOL_ROLE.search(source) is None,
        special_tokens=special,
        new_parser=_declared(tokenizer, source),
        template_variables=tuple(sorted(tokenizer.template_variables)),
    )


def _style(source: str) -> ToolStyle:
    if "[TOOL_CALLS]" in source:
        return ToolStyle.MISTRAL_ARGS if "[ARGS]" in source else ToolStyle.MISTRAL
    if "<tool_call>" not in source and '"parameters":' in source:
        return ToolStyle.LLAMA
    return ToolStyle.HERMES


def _declared(tokenizer: Tokenizer, source: str) -> NewParser | None:
    """source: the chat template."""
    declared = tokenizer.response_template
    if declared is None and (known := format_of(source)) is not None:
        declared = known.declaration
    if declared is None:
        return None
    try:
        from transformers.utils.chat_parsing import ResponseParser as Parser  # a second
        from transformers.utils.chat_parsing.response_templates import load_response_template

        template = load_response_template(dict(declared))
    except (ImportError, ValueError) as error:
        logger.warning("the model's response_template is not used: %s", error)
        return None
    for field in template.fields.values():  # truncated or malformed answers must parse too
        field.optional = True
        if field.content == "json":
            field.content_args = {**field.content_args, "allow_non_json": True}

    def new_parser(
        prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ResponseParser:
        prefix = _begun_answer(template.start_anchor_re, tokenizer, prompt_ids)
        parser: ResponseParser = Parser(template, prefix=prefix, tools=[dict(one) for one in tools])
        return parser

    return new_parser


def _begun_answer(anchor: Any, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """The part of the answer in the prompt: the text after the last place where one begins."""
    num_tokens = FIRST_LOOK_TOKENS
    while True:
        text = tokenizer.decode(prompt_ids[-num_tokens:], skip_special_tokens=False)
        ends = [match.end() for match in anchor.finditer(text)]
        if ends:
            return text[ends[-1] :]
        if num_tokens >= len(prompt_ids):
            return ""
        num_tokens *= 8
