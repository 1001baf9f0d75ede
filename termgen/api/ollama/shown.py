"""What Ollama's clients are shown of the models: /api/tags, /api/show and /api/ps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from termgen.api.fields import read
from termgen.api.ollama.body import EMBED, SHOW, EmbedFields, ShowFields, served_name, with_tag
from termgen.api.ollama.options import NAMES
from termgen.api.ollama.parser import can_think
from termgen.client import ModelInfo

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients compare it with what they need."""

FOREVER = "2300-01-01T00:00:00Z"
"""When a model is unloaded that stays loaded: a time that every client can hold."""

SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class AboutModel:
    """A request about one model."""

    name: str
    ignored: tuple[str, ...]
    not_used: tuple[str, ...] = ()


def parse_show(names: Sequence[str], data: Mapping[str, Any]) -> AboutModel:
    body = read(ShowFields, data)
    name = served_name(body.model or body.name, names)
    not_used = ("verbose",) if body.verbose else ()
    return AboutModel(name, SHOW.unknown(data), not_used)


def parse_embed(names: Sequence[str], data: Mapping[str, Any]) -> AboutModel:
    body = read(EmbedFields, data)
    return AboutModel(served_name(body.model, names), EMBED.unknown(data))


def tag_list(models: Iterable[tuple[str, ModelInfo]]) -> dict[str, Any]:
    return {
        "models": [
            {**_entry(name, info), "capabilities": _capabilities(info), **_modified(info)}
            for name, info in models
        ]
    }


def process_list(models: Iterable[tuple[str, ModelInfo]]) -> dict[str, Any]:
    return {
        "models": [
            {
                **_entry(name, info),
                "expires_at": FOREVER,
                "size_vram": 0 if info.device == "cpu" else _size(info),
                "context_length": info.max_model_len,
            }
            for name, info in models
        ]
    }


def model_card(name: str, info: ModelInfo, *, chat_template: str | None) -> dict[str, Any]:
    """The answer of /api/show. chat_template: None where it is not shown."""
    family = _family(info)
    parameters = [(NAMES.get(key, key), value) for key, value in info.default_params.items()]
    modelfile = [
        f"# {name} is served by termgen; this is what it was started with.",
        f"FROM {info.root}",
    ]
    modelfile += [f"PARAMETER {key} {value}" for key, value in parameters]
    return {
        "modelfile": "\n".join(modelfile) + "\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in parameters),
        "template": chat_template or "",
        "details": _details(info),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            f"{family}.context_length": info.max_model_len,
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": _capabilities(info),
        **_modified(info),
    }


def _entry(name: str, info: ModelInfo) -> dict[str, Any]:
    tagged = with_tag(name)
    return {
        "name": tagged,
        "model": tagged,
        "size": _size(info),
        "digest": _digest(info),
        "details": _details(info),
    }


def _details(info: ModelInfo) -> dict[str, Any]:
    family = _family(info)
    return {
        "parent_model": "",
        "format": "gguf" if info.root.lower().endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": (info.quantization or DTYPES.get(info.dtype, info.dtype)).upper(),
        "context_length": info.max_model_len,
    }


def _capabilities(info: ModelInfo) -> list[str]:
    found = ["completion"]
    if info.has_chat_template:
        found.append("tools")
    is_known = info.tool_format.template_variables is not None
    if info.has_chat_template and is_known and can_think(info.tool_format):
        found.append("thinking")
    return found


def _family(info: ModelInfo) -> str:
    name = info.architecture
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name.lower() or "unknown"


def _size(info: ModelInfo) -> int:
    """Bytes of the weights in memory; 0 where the engine does not say."""
    return info.memory.weights_bytes if info.memory is not None else 0


def _digest(info: ModelInfo) -> str:
    """An identifier of the model. Not a checksum: files of many gigabytes would be read for it."""
    facts = (info.root, info.architecture, info.dtype, str(info.quantization))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _modified(info: ModelInfo) -> dict[str, Any]:
    """The time when the model was loaded."""
    return {"modified_at": datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
