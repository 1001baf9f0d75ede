"""Models on this machine that the catalog does not name, for the model picker."""

from __future__ import annotations

from pathlib import Path

from termgen.errors import ModelNotFoundError
from termgen.library.catalog import CATALOG, LocalModel, resolve_model
from termgen.library.places import hub_cache_folder
from termgen.library.stores import FoundModel, Look, find_models, folder_models

BESIDE = "beside the model in use"


def find_others(beside: Path | None = None) -> list[FoundModel]:
    """Models without a catalog name. `beside`: a model whose folder is searched too."""
    known = _known_paths()
    found = [model for model in find_models() if model.path.resolve() not in known]
    known.update(model.path.resolve() for model in found)
    return found + [model for model in _beside(beside) if model.path.resolve() not in known]


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


def _beside(model: Path | None) -> list[FoundModel]:
    """Models in the folder of this one. None for one without a name of its own, as in the hub's
    cache, where other commits lie beside it, and among Ollama's blobs."""
    if model is None or hub_cache_folder() in model.parents:
        return []
    if model.is_file() and model.suffix.lower() != ".gguf":
        return []
    return list(folder_models(model.parent, BESIDE, Look()))
