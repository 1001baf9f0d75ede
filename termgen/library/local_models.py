"""Models on this machine that the catalog does not name: what the model picker lists besides it.

Looked for where they usually are: the hub's cache, the folder of fetched files, and beside the
model in use. Reads names and sizes only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from termgen.errors import ModelNotFoundError
from termgen.library.catalog import (
    CATALOG,
    LocalModel,
    hub_cache_folder,
    models_folder,
    resolve_model,
)

MAX_FOUND = 100
PREFIX = "models--"


def find_others(beside: Path | None = None) -> list[LocalModel]:
    """Those that the catalog has no name for. `beside`: a model next to which others may lie."""
    known = _known_paths()
    found: dict[Path, LocalModel] = {}
    for name in (*_hub_names(), *_names_in(models_folder()), *_names_beside(beside)):
        if len(found) == MAX_FOUND:
            break
        try:
            model = resolve_model(name)
        except ModelNotFoundError:
            continue  # half fetched, or a folder of something else
        path = model.path.resolve()
        if path not in known:
            found.setdefault(path, model)
    return list(found.values())


def size_of(model: LocalModel) -> int:
    """Bytes of its weights."""
    folder = model.path.parent if model.path.suffix == ".json" else model.path
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    # a snapshot of the hub may have links to nothing
    return sum(file.stat().st_size for file in files if file.is_file())


def _known_paths() -> set[Path]:
    paths = set()
    for name in CATALOG:
        try:
            paths.add(resolve_model(name).path.resolve())
        except ModelNotFoundError:
            continue  # not fetched
    return paths


def _hub_names() -> Iterator[str]:
    """`models--org--name` is org/name."""
    for folder in _listed(hub_cache_folder()):
        if folder.name.startswith(PREFIX):
            yield folder.name.removeprefix(PREFIX).replace("--", "/", 1)


def _names_in(folder: Path) -> Iterator[str]:
    for path in _listed(folder):
        # of a folder that may not be read `os` says that there is no such file; `Path` raises
        if path.suffix.lower() == ".gguf" or os.path.isfile(path / "config.json"):
            yield str(path)


def _names_beside(model: Path | None) -> Iterator[str]:
    """Not beside a snapshot in the hub's cache: there is nothing but other commits of the same."""
    if model is not None and hub_cache_folder() not in model.parents:
        yield from _names_in(model.parent)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
