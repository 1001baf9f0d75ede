"""Models on this machine: in termgen's folder, the hub's cache, and the folders of other programs.

A store knows where one program keeps its models and what it calls them. Everything here only reads:
GGUF files of other programs are run where they lie. What cannot be read, is not complete or is not
a model is passed over; what is a model that termgen cannot read is found with the reason. Folders
may hold anything, so a look through one is bounded, in entries and in depth.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from termgen.library.hub_names import is_model_file, part_of
from termgen.library.places import (
    hub_cache_folder,
    models_folder,
    set_folder,
    user_cache,
    user_data,
)

MAX_ENTRIES = 20_000
"""Entries of folders that a look through one store reads."""
MAX_FOUND = 200
"""Models that are taken from one store."""
MAX_DEPTH = 5
MAX_JSON_BYTES = 1 << 20
MAGIC = b"GGUF"
HUB_PREFIX = "models--"
OLLAMA_MODEL = "application/vnd.ollama.image.model"
OLLAMA_ADAPTER = "application/vnd.ollama.image.adapter"
OLLAMA_HOST, OLLAMA_OWNER = "registry.ollama.ai", "library"
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama keeps them if it runs as a service."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model in a store."""

    name: str
    """What `--model` takes."""
    path: Path
    """The GGUF file, or the folder with config.json."""
    store: str
    """The program that keeps it: `Ollama`."""
    size_bytes: int
    problem: str = ""
    """Why termgen cannot run it; empty if nothing is known against it."""


class Look:
    """One look through folders, with a limit to the entries that it reads."""

    def __init__(self, entries: int = MAX_ENTRIES) -> None:
        self._left = entries

    def into(self, folder: Path) -> list[Path]:
        """Entries of a folder, sorted; none where it cannot be read."""
        found: list[Path] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._left <= 0:
                        break
                    self._left -= 1
                    found.append(Path(entry.path))
        except OSError:
            pass
        return sorted(found)

    def through(self, folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
        """Files below a folder, those of one folder together. Links to folders may form a loop:
        the depth ends it."""
        folders = []
        for path in self.into(folder):
            if os.path.isdir(path):
                folders.append(path)
            else:
                yield path
        if depth > 1:
            for path in folders:
                yield from self.through(path, depth - 1)


class Store(Protocol):
    """The models of one program."""

    label: str
    """The program's name."""
    prefix: str
    """Before the colon of its models' names; empty: hub ids and paths."""

    def find(self, look: Look) -> Iterator[FoundModel]: ...


class HubCache:
    """The cache that the hub's client, transformers and llama.cpp share."""

    label, prefix = "hub cache", ""

    def find(self, look: Look) -> Iterator[FoundModel]:
        for root in _distinct(hub_cache_folder(), set_folder("LLAMA_CACHE")):
            for repository in look.into(root):
                if not repository.name.startswith(HUB_PREFIX):
                    continue
                # a folder `models--org--name` is org/name
                hub_id = repository.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)
                if (snapshot := hub_snapshot(repository)) is not None:
                    yield from self._in(snapshot, hub_id, look)

    def _in(self, snapshot: Path, hub_id: str, look: Look) -> Iterator[FoundModel]:
        if has_weights(snapshot):
            size = _weights_size(snapshot, look)
            yield FoundModel(hub_id, snapshot, self.label, size)
        for found in gguf_models(look.through(snapshot, 2), self.label):
            file = found.path.relative_to(snapshot).as_posix()
            yield replace(found, name=f"{hub_id}:{file}")


class OwnFolder:
    """Files that termgen fetched."""

    label, prefix = "termgen", ""

    def find(self, look: Look) -> Iterator[FoundModel]:
        yield from folder_models(models_folder(), self.label, look)


class Ollama:
    """Ollama's blobs, by the names of its manifests."""

    label, prefix = "Ollama", "ollama"

    def find(self, look: Look) -> Iterator[FoundModel]:
        own = Path(os.path.expanduser("~/.ollama/models"))
        for root in _distinct(set_folder("OLLAMA_MODELS"), own, OLLAMA_SERVICE):
            manifests = root / "manifests"
            for path in look.through(manifests, 4):
                parts = path.relative_to(manifests).parts
                if len(parts) == 4:  # host, owner, model, tag
                    found = self._read(path, root / "blobs", _ollama_name(*parts))
                    if found is not None:
                        yield found

    def _read(self, manifest: Path, blobs: Path, name: str) -> FoundModel | None:
        layers = _json(manifest).get("layers")
        if not isinstance(layers, list) or not layers:
            return None
        kinds: dict[str, list[Path]] = {}
        for layer in layers:
            digest = (
                _DIGEST.fullmatch(str(layer.get("digest"))) if isinstance(layer, dict) else None
            )
            if digest is None:
                return None
            blob = blobs / f"sha256-{digest[1]}"
            kinds.setdefault(str(layer.get("mediaType")), []).append(blob)
        files = kinds.get(OLLAMA_MODEL, [])
        if not files:
            problem = "its weights are not a GGUF file"
            return FoundModel(f"ollama:{name}", manifest, self.label, 0, problem)
        if not all(map(is_gguf, files)):
            return None  # not complete, or not readable
        problem = ""
        if len(files) > 1:
            problem = f"its weights are in {len(files)} files, and termgen reads one"
        elif OLLAMA_ADAPTER in kinds:
            problem = "it has an adapter, which termgen does not read"
        size = sum(map(_size, files))
        return FoundModel(f"ollama:{name}", files[0], self.label, size, problem)


class LMStudio:
    """LM Studio's folder: publisher/model/file.gguf."""

    label, prefix = "LM Studio", "lmstudio"

    def find(self, look: Look) -> Iterator[FoundModel]:
        yield from _below(self._folder(), self, look, depth=3)

    def _folder(self) -> Path:
        pointer = Path(os.path.expanduser("~/.lmstudio-home-pointer"))
        home = Path(os.path.expanduser("~/.cache/lm-studio"))
        if named := _text(pointer).strip():
            home = Path(named)
        elif not os.path.isdir(home):
            home = Path(os.path.expanduser("~/.lmstudio"))
        folder = _json(home / "settings.json").get("downloadsFolder")
        return Path(folder) if isinstance(folder, str) and folder else home / "models"


class LlamaCpp:
    """The flat cache of older llama.cpp: owner_repository_file.gguf."""

    label, prefix = "llama.cpp", "llamacpp"

    def find(self, look: Look) -> Iterator[FoundModel]:
        mac = Path(os.path.expanduser("~/Library/Caches/llama.cpp"))
        for root in _distinct(set_folder("LLAMA_CACHE"), user_cache() / "llama.cpp", mac):
            yield from _below(root, self, look, depth=1)


class GPT4All:
    label, prefix = "GPT4All", "gpt4all"

    def find(self, look: Look) -> Iterator[FoundModel]:
        for root in _app_folders("nomic.ai/GPT4All"):
            yield from _below(root, self, look, depth=1)


class Jan:
    label, prefix = "Jan", "jan"

    def find(self, look: Look) -> Iterator[FoundModel]:
        for root in _app_folders("Jan/data/llamacpp/models"):
            yield from _below(root, self, look, depth=MAX_DEPTH)


STORES: tuple[Store, ...] = (
    HubCache(),
    OwnFolder(),
    Ollama(),
    LMStudio(),
    LlamaCpp(),
    GPT4All(),
    Jan(),
)


def find_models(stores: Sequence[Store] = STORES) -> list[FoundModel]:
    """Models of all stores, each file once."""
    found: dict[tuple[Path, str], FoundModel] = {}
    for store in stores:
        for number, model in enumerate(store.find(Look())):
            if number == MAX_FOUND:
                break
            # a file in two stores is shown by the first; two of Ollama's names may share a blob
            name = model.name if store.prefix == "ollama" else ""
            found.setdefault((model.path.resolve(), name), model)
    return list(found.values())


def store_of(name: str) -> Store | None:
    """The store whose prefix a name has: `ollama:qwen3`."""
    prefix, colon, _ = name.partition(":")
    return next((s for s in STORES if colon and s.prefix and s.prefix == prefix.lower()), None)


def look_up(name: str) -> FoundModel | None:
    """A model by its name with a store's prefix. Ollama's tag may be left out if it is `latest`."""
    store = store_of(name)
    if store is None:
        return None
    prefix, _, rest = name.partition(":")
    wanted = {f"{prefix.lower()}:{rest.removesuffix('.gguf')}"}
    if store.prefix == "ollama" and ":" not in rest:
        wanted.add(f"ollama:{rest}:latest")
    return next((model for model in store.find(Look()) if model.name in wanted), None)


def folder_models(folder: Path, label: str, look: Look) -> Iterator[FoundModel]:
    """Models directly in a folder: GGUF files, and folders with config.json. Their names are
    paths."""
    entries = look.into(folder)
    yield from gguf_models(entries, label)
    for path in entries:
        if os.path.isfile(path / "config.json") and has_weights(path):
            yield FoundModel(str(path), path, label, _weights_size(path, look))


def gguf_models(paths: Sequence[Path] | Iterator[Path], label: str) -> Iterator[FoundModel]:
    """The GGUF models among these files, the parts of one together. Their names are paths."""
    parts: dict[tuple[Path, str, int], dict[int, Path]] = {}
    for path in paths:
        if not is_model_file(path.name) or not is_gguf(path):
            continue
        part = part_of(path.name)
        if part is None:
            yield FoundModel(str(path), path, label, _size(path))
        else:
            stem, number, total = part
            parts.setdefault((path.parent, stem, total), {})[number] = path
    for (_, _, total), files in parts.items():
        first = files[min(files)]
        size = sum(map(_size, files.values()))
        yield FoundModel(str(first), first, label, size, _split_problem(total, len(files)))


def _split_problem(total: int, present: int) -> str:
    if present < total:
        return f"{present} of its {total} parts are here"
    return f"it is in {total} parts: join them with `llama-gguf-split --merge FIRST-PART NEW.gguf`"


def is_gguf(path: Path) -> bool:
    """True for a readable file that begins as GGUF does."""
    if not os.path.isfile(path):  # a pipe would block
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def hub_snapshot(repository: Path) -> Path | None:
    """The folder of the newest commit: refs/main names it, snapshots/<commit> is the folder."""
    commit = _text(repository / "refs" / "main").strip()
    return repository / "snapshots" / commit if re.fullmatch(r"\w+", commit) else None


def has_weights(folder: Path) -> bool:
    """False for a snapshot whose download was interrupted."""
    if not os.path.isfile(folder / "config.json"):
        return False
    if os.path.isfile(folder / "model.safetensors"):
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        shards = set(index["weight_map"].values())
        return bool(shards) and all(os.path.isfile(folder / shard) for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _below(root: Path, store: Store, look: Look, *, depth: int) -> Iterator[FoundModel]:
    """GGUF models below a folder, named by their place in it."""
    for found in gguf_models(look.through(root, depth), store.label):
        name = found.path.relative_to(root).as_posix()
        if part := part_of(name):
            name = part[0]
        name = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
        if store.prefix == "jan":
            name = name.removesuffix("/model")
        yield replace(found, name=f"{store.prefix}:{name}")


def _ollama_name(host: str, owner: str, model: str, tag: str) -> str:
    """The name that `ollama list` shows."""
    names = [model] if owner == OLLAMA_OWNER else [owner, model]
    if host != OLLAMA_HOST:
        names = [host, owner, model]
    return f"{'/'.join(names)}:{tag}"


def _app_folders(name: str) -> list[Path]:
    mac = Path(os.path.expanduser("~/Library/Application Support"))
    return _distinct(user_data() / name, mac / name)


def _distinct(*folders: Path | None) -> list[Path]:
    return list(dict.fromkeys(folder for folder in folders if folder is not None))


def _weights_size(folder: Path, look: Look) -> int:
    return sum(_size(path) for path in look.into(folder) if path.suffix == ".safetensors")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # it has gone meanwhile, or its link leads nowhere


def _text(path: Path) -> str:
    """A small text file; empty if it is not one."""
    try:
        if not os.path.isfile(path) or path.stat().st_size > MAX_JSON_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _json(path: Path) -> dict[str, Any]:
    """A small JSON object; an empty one if the file holds none."""
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
