"""/tokenize, /detokenize and /tokenizer_info, in the shapes that vLLM's clients know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from termgen.api.chat_prompt import format_for, parse_prompt, parse_template
from termgen.api.fields import Fields, is_empty, is_int, wrong_type
from termgen.api.sampling import MAX_INT
from termgen.api.tools import parse_tools
from termgen.client import ChatPrompt, ModelInfo, TokenizerInfo
from termgen.errors import RequestError
from termgen.vocabulary.tool_format import ToolFormat

MAX_IDS = 1_000_000

REFUSED = {"mm_processor_kwargs": is_empty, "chat_template": is_empty}
"""The latter beside a prompt; messages may bring one."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    prompt: str | ChatPrompt
    add_special_tokens: bool
    """For text; a chat template writes its own."""
    wants_texts: bool
    ignored: tuple[str, ...]
    not_used: tuple[str, ...] = ()
    """Fields that have no effect."""


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    token_ids: tuple[int, ...]
    ignored: tuple[str, ...]


def parse_tokenize(
    data: Mapping[str, Any], tool_format: ToolFormat, *, trusts_template: bool = False
) -> TokenizeRequest:
    body = Fields(data)
    body.take("model")  # resolved by the caller
    text = body.string("prompt")
    special = body.take("add_special_tokens")
    if special is not None and not isinstance(special, bool):
        raise wrong_type("add_special_tokens", "true or false", special)
    if text is None and data.get("messages") is None:
        raise RequestError("send a prompt or messages", param="prompt")
    if text is not None and data.get("messages") is not None:
        raise RequestError("prompt and messages exclude each other", param="messages")
    prompt: str | ChatPrompt
    not_used: tuple[str, ...] = ()
    if text is not None:
        prompt = text
    else:
        prompt, not_used = _parse_chat(body, tool_format, trusts_template=trusts_template)
    if special and not isinstance(prompt, str):
        raise RequestError(
            "add_special_tokens is for a prompt; messages get theirs from the chat template",
            param="add_special_tokens",
        )
    return TokenizeRequest(
        prompt=prompt,
        add_special_tokens=special is not False,
        wants_texts=body.boolean("return_token_strs"),
        ignored=body.finish(harmless=frozenset(), refused=REFUSED),
        not_used=not_used,
    )


def _parse_chat(
    body: Fields, tool_format: ToolFormat, *, trusts_template: bool
) -> tuple[ChatPrompt, tuple[str, ...]]:
    """The prompt that a chat with these messages and tools would have; fields without effect."""
    chat_template = parse_template(body, is_trusted=trusts_template)
    tool_format = format_for(tool_format, chat_template)
    tools = parse_tools(body, tool_format)
    prompt, unread = parse_prompt(body, tools, tool_format, chat_template)
    return prompt, (*unread, *tools.left_out)


def parse_detokenize(data: Mapping[str, Any]) -> DetokenizeRequest:
    body = Fields(data)
    body.take("model")
    ids = body.take("tokens")
    if not isinstance(ids, list) or len(ids) > MAX_IDS or not all(map(is_int, ids)):
        raise wrong_type("tokens", f"a list of at most {MAX_IDS} token ids", ids)
    if any(not 0 <= token_id <= MAX_INT for token_id in ids):
        raise RequestError("tokens has an id outside the vocabulary", param="tokens")
    return DetokenizeRequest(tuple(ids), body.finish(harmless=frozenset(), refused={}))


def tokenize_response(
    model: ModelInfo, token_ids: Sequence[int], texts: Sequence[str] | None
) -> dict[str, Any]:
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": list(token_ids),
        "token_strs": None if texts is None else list(texts),
    }


def tokenizer_object(model: ModelInfo, info: TokenizerInfo) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **info.named_tokens,
        "model_max_length": model.max_model_len,
        "vocab_size": model.vocab_size,
        "chat_template": info.chat_template,
    }
