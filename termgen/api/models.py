"""/v1/models, and /tokenize, /detokenize and /tokenizer_info in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from termgen.api.chat_prompt import Conversation, parse_prompt
from termgen.api.fields import Endpoint, Served, is_empty, read, wanted
from termgen.api.rows import AskingRow, TokenRow
from termgen.client import ChatPrompt, GenerationClient, ModelInfo, TokenizerInfo
from termgen.errors import RequestError
from termgen.vocabulary.sampling.row import MAX_INT
from termgen.vocabulary.tool_format import ToolFormat

MAX_IDS = 1_000_000


def model_object(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "termgen",
        "root": info.root,
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [],
        "capabilities": _capabilities(info),
    }


def _capabilities(info: ModelInfo) -> dict[str, Any]:
    """Capabilities that the model's files declare. `system_message` means that the template knows
    no tools: the system message describes them, and only enforced calls are certain to be well
    formed."""
    shown = "template" if info.tool_format.knows_tools else "system_message"
    return {
        "chat": info.has_chat_template,
        "tools": shown if info.has_chat_template else None,
        "embeddings": not info.pooling.refusal,
    }


def model_list(models: Iterable[tuple[str, ModelInfo]]) -> dict[str, Any]:
    """models: each name that is served, and its model."""
    return {"object": "list", "data": [model_object(info, name) for name, info in models]}


# -- the tokenizer -------------------------------------------------------------------------


class TokenizeFields(Struct, frozen=True):
    """The body of /tokenize, beside the `Conversation` where it has messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeFields(Struct, frozen=True, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[
        list[int], Meta(max_length=MAX_IDS), wanted(f"a list of at most {MAX_IDS} token ids")
    ]


TOKENIZE_TEXT = Endpoint(
    (TokenizeFields,), refused={"mm_processor_kwargs": is_empty, "chat_template": is_empty}
)
TOKENIZE_CHAT = Endpoint((TokenizeFields, Conversation), refused={"mm_processor_kwargs": is_empty})
DETOKENIZE = Endpoint((DetokenizeFields,))


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    prompt: str | ChatPrompt
    add_special_tokens: bool
    """Only for text; a chat template writes its own."""
    wants_texts: bool
    ignored: tuple[str, ...]
    not_used: tuple[str, ...] = ()
    """Fields that have no effect."""


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    token_ids: tuple[int, ...]
    ignored: tuple[str, ...]
    not_used: tuple[str, ...] = ()


def parse_tokenize(
    data: Mapping[str, Any],
    tool_format: ToolFormat,
    *,
    trusts_template: bool = False,
    refuses_images: bool = False,
) -> TokenizeRequest:
    body = read(TokenizeFields, data)
    has_messages = data.get("messages") is not None
    special = body.add_special_tokens
    if body.prompt is None and not has_messages:
        raise RequestError("send a prompt or messages", param="prompt")
    if body.prompt is not None and has_messages:
        raise RequestError("prompt and messages exclude each other", param="messages")
    prompt: str | ChatPrompt
    not_used: tuple[str, ...] = ()
    if body.prompt is not None:
        prompt = body.prompt
    else:
        prompt, _, not_used = parse_prompt(
            read(Conversation, data),
            tool_format,
            strict_tools=False,
            trusts_template=trusts_template,
            refuses_images=refuses_images,
        )
    if special and has_messages:
        raise RequestError(
            "add_special_tokens is for a prompt; messages get theirs from the chat template",
            param="add_special_tokens",
        )
    return TokenizeRequest(
        prompt=prompt,
        add_special_tokens=special is not False,
        wants_texts=body.return_token_strs,
        ignored=(TOKENIZE_CHAT if has_messages else TOKENIZE_TEXT).unknown(data),
        not_used=not_used,
    )


def parse_detokenize(data: Mapping[str, Any]) -> DetokenizeRequest:
    ids = read(DetokenizeFields, data).tokens
    if any(not 0 <= token_id <= MAX_INT for token_id in ids):
        raise RequestError("tokens has an id outside the vocabulary", param="tokens")
    return DetokenizeRequest(tuple(ids), DETOKENIZE.unknown(data))


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


# -- rows ----------------------------------------------------------------------------------


def _parse_tokenize(served: Served, data: Mapping[str, Any]) -> TokenizeRequest:
    return parse_tokenize(data, **served.conversing)


async def _tokenize(asked: TokenizeRequest, engine: GenerationClient) -> dict[str, Any]:
    ids = await engine.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens)
    texts = await engine.token_texts(ids) if asked.wants_texts else None
    return tokenize_response(engine.model, ids, texts)


def _parse_detokenize(served: Served, data: Mapping[str, Any]) -> DetokenizeRequest:
    return parse_detokenize(data)


async def _detokenize(asked: DetokenizeRequest, engine: GenerationClient) -> dict[str, Any]:
    return {"prompt": await engine.detokenize(asked.token_ids)}


ROWS: tuple[AskingRow[Any], ...] = (
    TokenRow(
        path="/tokenize",
        summary="tokenize",
        body=Endpoint(()),  # one of two, which the description cannot say
        parse=_parse_tokenize,
        measured=lambda asked: asked.prompt,
        work=_tokenize,
    ),
    TokenRow(
        path="/detokenize",
        summary="detokenize",
        body=DETOKENIZE,
        parse=_parse_detokenize,
        measured=lambda asked: asked.token_ids,
        work=_detokenize,
    ),
)
