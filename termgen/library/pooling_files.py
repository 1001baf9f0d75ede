"""How a model's files say that texts become vectors, as sentence-transformers writes them.

`modules.json` lists the steps: the transformer, a pooling with a config of its own, a
normalisation. `config_sentence_transformers.json` has texts to put in front. A model without these
files gets the last token's hidden state, with length 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from termgen.errors import CorruptFileError
from termgen.vocabulary.device.pooling import PoolingInfo, PoolingKind

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
MODE = "pooling_mode_"
KINDS = {
    f"{MODE}lasttoken": PoolingKind.LAST,
    f"{MODE}mean_tokens": PoolingKind.MEAN,
    f"{MODE}cls_token": PoolingKind.CLS,
}
LONG = {"mean": "mean_tokens", "cls": "cls_token"}
"""Modes as newer files name them."""


def read_pooling(path: Path, hidden_size: int) -> PoolingInfo:
    """Read the files of a model folder; other models have none. Raises CorruptFileError for a file
    that cannot be read; what is understood and not supported is a refusal in the result."""
    if not path.is_dir() or not (path / MODULES).is_file():
        return PoolingInfo(size=hidden_size)
    kind, normalize, refusal = PoolingKind.LAST, False, ""
    modules = _read(path / MODULES)
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise CorruptFileError(f"{path / MODULES}: not a list of modules")
    has_pooling = False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            folder = path / str(module.get("path", ""))
            if not folder.resolve().is_relative_to(path.resolve()):
                raise CorruptFileError(f"{path / MODULES}: {module.get('path')} leads elsewhere")
            kind, why = _kind(folder / "config.json")
            has_pooling, refusal = True, refusal or why
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            refusal = refusal or f"{MODULES} has a module {name!r}, which is not supported"
    if not has_pooling:
        refusal = refusal or f"{MODULES} has no Pooling"
    prompts, default = _prompts(path / PROMPTS)
    return PoolingInfo(
        kind=kind,
        normalize=normalize,
        size=hidden_size,
        prompts=prompts,
        default_prompt=default,
        refusal=refusal,
        is_declared=True,
    )


def _kind(file: Path) -> tuple[PoolingKind, str]:
    """The kind, and why it cannot be used."""
    config = _read(file)
    if not isinstance(config, dict):
        raise CorruptFileError(f"{file}: not an object")
    named = config.get("pooling_mode")
    if isinstance(named, str):
        wanted = [f"{MODE}{LONG.get(named, named)}"]
    else:
        wanted = sorted(name for name, on in config.items() if name.startswith(MODE) and on is True)
    if len(wanted) != 1 or wanted[0] not in KINDS:
        modes = " and ".join(wanted) or "no mode"
        return PoolingKind.LAST, f"{file.parent.name}/config.json asks for {modes}"
    if config.get("include_prompt") is False:
        return KINDS[wanted[0]], "its pooling leaves out the tokens of prompts"
    return KINDS[wanted[0]], ""


def _prompts(file: Path) -> tuple[dict[str, str], str | None]:
    if not file.is_file():
        return {}, None
    config = _read(file)
    prompts = config.get("prompts") if isinstance(config, dict) else None
    if not isinstance(prompts, dict):
        return {}, None
    texts = {name: text for name, text in prompts.items() if isinstance(text, str)}
    default = config.get("default_prompt_name")
    return texts, default if default in texts else None


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"{file}: {error}") from None
