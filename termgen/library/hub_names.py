"""Names of models and files on the hub, and what the name of a file says of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from termgen.errors import ModelNotFoundError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)
_QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32|FP16))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)


def quiet_client() -> None:
    """Keep the hub's client from writing to a screen: it warns of each try on standard error."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def is_hub_id(name: str) -> bool:
    return (
        _HUB_ID.fullmatch(name) is not None
        and ".." not in name
        and not name.lower().endswith((".gguf", ".json", ".safetensors"))
    )


def split_hub_file(name: str) -> tuple[str, str]:
    """(hub id, file or quantisation) of a name such as org/name:Q4_K_M."""
    hub_id, _, file = name.partition(":")
    return hub_id, file


def is_hub_file(name: str) -> bool:
    """True for the name of a file of a repository: org/name:FILE or org/name:QUANTISATION."""
    hub_id, file = split_hub_file(name)
    return is_hub_id(hub_id) and _FILE.fullmatch(file) is not None and ".." not in file


def choose_file(hub_id: str, files: Iterable[str], wanted: str, *, where: str) -> str | None:
    """The GGUF file of that name, or the only one of that quantisation.

    Raises ModelNotFoundError if several are meant.
    """
    ggufs = sorted(name for name in files if is_model_file(name))
    if wanted in ggufs:
        return wanted
    if wanted.lower().endswith(".gguf"):
        return None
    meant = [name for name in ggufs if quantization_of(name).lower() == wanted.lower()]
    if len(meant) > 1:
        raise ModelNotFoundError(
            f"{hub_id}: {', '.join(meant[:4])} {where} are all {wanted}: name one of them"
        )
    return meant[0] if meant else None


def is_model_file(name: str) -> bool:
    """True for the name of a GGUF file with a model: not of its vision part, nor one that is still
    being written."""
    file = name.rsplit("/", 1)[-1].lower()
    return file.endswith(".gguf") and not file.startswith(".") and "mmproj" not in file


def part_of(name: str) -> tuple[str, int, int] | None:
    """(name without the number, number, number of all) of a part of a split GGUF file."""
    part = _PART.fullmatch(name)
    if part is None or int(part["total"]) <= 1:
        return None
    return part["stem"], int(part["number"]), int(part["total"])


def quantization_of(name: str) -> str:
    """The quantisation in the name of a GGUF file, in capitals; empty if there is none."""
    part = part_of(name)
    stem = part[0] if part else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    found = _QUANTIZATION.findall(stem.rsplit("/", 1)[-1])
    return found[-1].upper() if found else ""
