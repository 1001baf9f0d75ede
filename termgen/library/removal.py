"""Deleting models that termgen fetched, and nothing else.

In termgen's own folder that is every file. In the hub's cache, which other programs share, it is
the blobs that were noted when termgen fetched them, with the links to them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from termgen.errors import CacheError
from termgen.library import catalog
from termgen.library.catalog import LocalModel
from termgen.library.hub_files import PART_SUFFIX, forget, noted
from termgen.library.places import models_folder
from termgen.library.stores import HUB_PREFIX, store_of


def is_own(path: Path) -> bool:
    """True if termgen fetched a model, all of what `delete` would delete."""
    if _is_in_own_folder(path):
        return True
    folder = _repository_of(path)
    return folder is not None and bool(_own_blobs(path, folder))


def delete(name: str) -> int:
    """Delete a model that termgen fetched; returns the bytes freed. Raises ModelNotFoundError if
    it is not here, and CacheError if another program fetched it."""
    model = catalog.resolve_model(name)
    try:
        return _delete(model)
    except OSError as error:
        raise CacheError(f"{name} cannot be deleted: {error.strerror or error}") from error


def _delete(model: LocalModel) -> int:
    if _is_in_own_folder(model.path):
        size = model.path.stat().st_size
        model.path.unlink()
        return size
    folder = _repository_of(model.path)
    own = set() if folder is None else _own_blobs(model.path, folder)
    if folder is None or not own:
        raise CacheError(_refusal(model, folder))
    size = 0
    for link in _links(folder):
        if link.is_symlink() and os.path.basename(os.readlink(link)) in own:
            link.unlink()
    for blob in own:
        path = folder / "blobs" / blob
        with suppress(FileNotFoundError):
            size += path.stat().st_size
            path.unlink()
        Path(f"{path}{PART_SUFFIX}").unlink(missing_ok=True)
    forget(folder, own)
    _remove_empty(folder)
    return size


def _refusal(model: LocalModel, folder: Path | None) -> str:
    if folder is not None:
        hub_id = folder.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)
        return (
            f"{model.name} was not fetched by this termgen, so it is left where it is: "
            f"`hf cache rm model/{hub_id}` deletes it"
        )
    store = store_of(model.name)
    if store is not None:
        return f"{model.name} belongs to {store.label}: delete it there"
    return f"{model.path} was not fetched by termgen, so it is left where it is"


def _is_in_own_folder(path: Path) -> bool:
    return path.parent == models_folder() and path.is_file()


def _repository_of(path: Path) -> Path | None:
    """The folder of the repository in the hub's cache that a model lies in."""
    return next((p for p in path.parents if p.name.startswith(HUB_PREFIX)), None)


def _own_blobs(path: Path, folder: Path) -> set[str]:
    """The blobs of a model that termgen fetched: of a file that one, of a folder all but those of
    GGUF files, which are models of their own."""
    own = noted(folder)
    if path.is_dir():
        used = [link for link in _links(path) if link.suffix.lower() != ".gguf"]
    else:
        used = [path]
    names = {os.path.basename(os.readlink(link)) for link in used if link.is_symlink()}
    return names & own


def _links(folder: Path) -> list[Path]:
    """Links below a folder; links to folders are not followed."""
    return [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]


def _remove_empty(folder: Path) -> None:
    """Remove a repository of which no blob is left, with the notes of its commits."""
    if any((folder / "blobs").iterdir()):
        return
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            if Path(parent).relative_to(folder).parts[:1] in (("refs",), ("trees",)):
                (Path(parent) / name).unlink()
        with suppress(OSError):  # something of another program is left in it
            os.rmdir(parent)
