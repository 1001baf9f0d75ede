"""The parts of a tokenizer, and reading them from a model folder.

`TokenizerParts` is the common result of a folder (here) and of a GGUF file (gguf_tokenizer.py).
Reads tokenizer.json with the `tokenizers` library directly: importing transformers costs seconds
and is left to the one case that needs it, a folder without tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
CONVERTIBLE = ("tokenizer.model", "vocab.json", "tokenizer.tiktoken")
"""Older vocabulary files, which transformers can convert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """Everything `Tokenizer` needs, from any source."""

    backend: Backend
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and so on, as chat templates name them."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Templates by name; `default` is the usual one, `tool_use` serves requests with tools."""
    response_template: Mapping[str, Any] | None = None
    """Declaration by which transformers parses the model's responses."""
    prefix_ids: tuple[int, ...] | None = None
    """Ids put before raw text; None: the backend's own post-processor decides."""
    suffix_ids: tuple[int, ...] | None = None
    num_ids: int | None = None
    """One more than the largest id, where that is known without a look at each token."""


def read_folder(path: Path) -> TokenizerParts:
    """Read the tokenizer of a model folder. Raises ModelError naming what is missing or broken."""
    file = path / "tokenizer.json"
    if file.is_file():
        backend = _read_backend(file)
    elif any((path / name).is_file() for name in CONVERTIBLE):
        backend = _convert(path)
    else:
        raise ModelError(
            f"no tokenizer in {path}: expected tokenizer.json"
            f" (or one of {', '.join(CONVERTIBLE)} to convert)"
        )
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    named = _named_tokens({**_read_json(path / "special_tokens_map.json"), **config})
    _mark_special(backend, named)
    bos_id = _id_of(backend, named.get("bos_token"))
    eos_id = _id_of(backend, named.get("eos_token"))
    response_template = config.get("response_template")
    prefix_ids = suffix_ids = None
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        prefix_ids = _ids_if(config.get("add_bos_token"), bos_id)
        suffix_ids = _ids_if(config.get("add_eos_token"), eos_id)
    return TokenizerParts(
        backend=backend,
        named_tokens=named,
        bos_token_id=bos_id,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_templates=_chat_templates(path, config),
        response_template=response_template if isinstance(response_template, dict) else None,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )


def _read_backend(file: Path) -> Backend:
    try:
        return Backend.from_file(str(file))
    except BaseException as error:
        # The library raises bare Exception for a malformed file, and panics for some.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorruptFileError(f"{file} is not a readable tokenizer: {_line(error)}") from error


def _convert(path: Path) -> Backend:
    """Let transformers convert an older vocabulary file. Never runs code from the folder."""
    from transformers import AutoTokenizer  # seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the tokenizer in {path} cannot be converted: {_line(error)}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UnsupportedModelError(f"the tokenizer in {path} has no fast form; add tokenizer.json")
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{file} is not valid JSON: {_line(error)}") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{file} must hold a JSON object")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise CorruptFileError(f"{file} has text that is not valid Unicode") from error
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if isinstance(value, str) and value:
            named[name] = value
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= {k: v for k, v in extra.items() if isinstance(k, str) and isinstance(v, str)}
    return named


def _mark_special(backend: Backend, named: Mapping[str, str]) -> None:
    """Mark the tokens named in the config as special, even if tokenizer.json does not."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    forgotten = [
        AddedToken(content, special=True, normalized=False)
        for content in dict.fromkeys(named.values())
        if content not in special and backend.token_to_id(content) is not None
    ]
    if forgotten:
        backend.add_special_tokens(forgotten)


def _id_of(backend: Backend, content: str | None) -> int | None:
    return None if content is None else backend.token_to_id(content)


def _ids_if(wanted: object, token_id: int | None) -> tuple[int, ...]:
    return (token_id,) if wanted and token_id is not None else ()


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; chat_template.jinja precedes the field in tokenizer_config.json."""
    templates: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        for entry in listed:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = entry["template"]
    files = {"default": path / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except ValueError as error:
                raise CorruptFileError(f"{file} is not UTF-8 text: {_line(error)}") from error
    return templates


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
