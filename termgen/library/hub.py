"""The hub's search, and the files of its repositories. Nothing is fetched here.

Called in threads: the hub's client blocks. Its settings count (HF_ENDPOINT, HF_TOKEN, `hf auth
login`, HF_HUB_OFFLINE).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from termgen.errors import DownloadError, ModelNotFoundError
from termgen.library.hub_names import is_model_file, part_of, quantization_of, quiet_client

TIMEOUT_S = 10.0
MAX_RESULTS = 20
MAX_FILES = 200


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository with GGUF files."""

    hub_id: str
    downloads: int
    architecture: str
    """The architecture in the metadata of its GGUF files; empty if the hub does not say."""
    num_parameters: int
    """0 if the hub does not say."""
    is_gated: bool


@dataclass(frozen=True, slots=True)
class HubFile:
    """A GGUF model in a repository."""

    name: str
    """Its first part, if it is split."""
    size_bytes: int
    parts: int = 1

    @property
    def quantization(self) -> str:
        return quantization_of(self.name)


def search(words: str) -> list[HubRepository]:
    """Repositories with GGUF files, the most fetched first."""
    from huggingface_hub import HfApi  # 0.3 s

    quiet_client()
    with _plain_faults("search the hub"):
        found = HfApi().list_models(
            search=words,
            filter="gguf",
            sort="downloads",
            limit=MAX_RESULTS,
            expand=["downloads", "gguf", "gated"],
        )
        return [_repository(info) for info in found]


def model_files(hub_id: str) -> list[HubFile]:
    """The GGUF models of a repository, the smallest first. The parts of a split one are one."""
    from huggingface_hub import HfApi

    quiet_client()
    with _plain_faults(f"list the files of {hub_id}", hub_id):
        info = HfApi().model_info(hub_id, files_metadata=True, timeout=TIMEOUT_S)
    sizes: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, int], str] = {}
    for file in info.siblings or ():
        if not is_model_file(file.rfilename):
            continue
        part = part_of(file.rfilename)
        key = (file.rfilename, 1) if part is None else (part[0], part[2])
        sizes[key] = sizes.get(key, 0) + (file.size or 0)
        first[key] = min(first.get(key, file.rfilename), file.rfilename)
    files = [HubFile(first[key], size, key[1]) for key, size in sizes.items()]
    return sorted(files, key=lambda file: (file.size_bytes, file.name))[:MAX_FILES]


def can_reach() -> bool:
    """True if the hub answers."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return False
    quiet_client()
    try:
        with _plain_faults("reach the hub"):
            return bool(list(HfApi().list_models(limit=1, expand=["downloads"])))
    except (DownloadError, ModelNotFoundError):
        return False


def _repository(info: Any) -> HubRepository:
    gguf = info.gguf if isinstance(info.gguf, dict) else {}
    architecture, total = gguf.get("architecture"), gguf.get("total")
    return HubRepository(
        hub_id=str(info.id),
        downloads=info.downloads or 0,
        architecture=architecture if isinstance(architecture, str) else "",
        num_parameters=total if type(total) is int else 0,
        is_gated=bool(info.gated),
    )


@contextmanager
def _plain_faults(what: str, hub_id: str = "") -> Iterator[None]:
    """Errors of the hub's client in a line."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{hub_id} does not exist on the hub, or it is private and needs `hf auth login`"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{hub_id!r} is not a valid hub id") from error
    except Exception as error:  # the exceptions of its HTTP library depend on the version
        if constants.HF_HUB_OFFLINE:
            raise DownloadError(f"cannot {what}: HF_HUB_OFFLINE is set") from error
        reason = (str(error).strip().splitlines() or [""])[0][:160] or type(error).__name__
        raise DownloadError(f"cannot {what}: {reason}") from error
