"""Models on this machine that the catalog does not name, for the model picker.

Looks in the hub's cache, in the folder of fetched files, and beside the model in use. Reads names
and sizes only.
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
    """Models without a catalog name. `beside`: a model whose folder is searched too."""
    known = _known_paths()
    found: dict[Path, LocalModel] = {}
    for name in (*_hub_names(), *_names_in(models_folder()), *_names_beside(beside)):
        if len(found) == MAX_FOUND:
            break
        try:
            model = resolve_model(name)
        except ModelNotFoundError:
            continue  # an incomplete download, or not a model
        path = model.path.resolve()
        if path not in known:
            found.setdefault(path, model)
    return list(found.values())


def size_of(model: LocalModel) -> int:
    """Bytes of the model's weights."""
    folder = model.path.parent if model.path.suffix == ".json" else model.path
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    # a hub snapshot may have dangling links
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
    """Hub ids in the cache: a folder `models--org--name` is org/name."""
    for folder in _listed(hub_cache_folder()):
        if folder.name.startswith(PREFIX):
            yield folder.name.removeprefix(PREFIX).replace("--", "/", 1)


def _names_in(folder: Path) -> Iterator[str]:
    for path in _listed(folder):
        # os.path: `Path.is_file` raises for a folder without read permission
        if path.suffix.lower() == ".gguf" or os.path.isfile(path / "config.json"):
            yield str(path)


def _names_beside(model: Path | None) -> Iterator[str]:
    """Models beside this one; none in the hub's cache, where only other commits lie beside it."""
    if model is not None and hub_cache_folder() not in model.parents:
        yield from _names_in(model.parent)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
