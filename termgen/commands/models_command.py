"""`termgen models` and `termgen pull`: list models, delete one, fetch one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from termgen.errors import ModelNotFoundError
from termgen.library import catalog, removal
from termgen.library.hub_names import quantization_of
from termgen.library.local_models import find_others
from termgen.library.progress import TerminalProgress
from termgen.library.stores import FoundModel


def list_models(*, as_json: bool, words: str | None = None) -> int:
    """List the models whose name, hub id, quantisation or licence contains every word."""
    wanted = (words or "").lower().split()
    entries = [e for e in catalog.list_models() if all(word in _searched(e) for word in wanted)]
    others = [m for m in find_others() if all(word in _searched_other(m) for word in wanted)]
    if as_json:
        listed = [*map(_as_json, entries), *map(_other_as_json, others)]
        print(json.dumps(listed, indent=2))
        return 0
    if not entries and not others:
        raise ModelNotFoundError(f"no known model has {words!r} in its name; see `termgen models`")
    if entries:
        _print_catalog(entries)
    if others:
        _print_others(others)
    on_disk = {entry.path: entry.size_bytes or 0 for entry in entries if entry.path is not None}
    on_disk |= {model.path: model.size_bytes for model in others}
    if on_disk:
        print(f"\n{len(on_disk)} on this machine, {_size(sum(on_disk.values()))}")
    print("\nfetch one with `termgen pull NAME`; a hub id, a folder or a .gguf file works as well")
    return 0


def _print_catalog(entries: Sequence[catalog.ModelEntry]) -> None:
    rows = [("NAME", "WEIGHTS", "DOWNLOAD", "ON DISK", "HUB ID", "LICENSE")]
    for entry in entries:
        name = entry.name + (" (default)" if entry.name == catalog.DEFAULT_MODEL else "")
        here = _size(entry.size_bytes) if entry.size_bytes is not None else "-"
        kind, size = entry.quantization or "16 bit", _size(entry.download_bytes)
        rows.append((name, kind, size, here, entry.hub_id, entry.license))
    print(_columns(rows))


def _print_others(models: Sequence[FoundModel]) -> None:
    """Models of other programs, and files without a name of the catalog."""
    rows = [("ALSO ON THIS MACHINE", "WEIGHTS", "ON DISK", "FROM")]
    for model in models:
        origin = f"{model.store}; cannot run: {model.problem}" if model.problem else model.store
        kind = quantization_of(model.path.name) or "-"
        rows.append((model.name, kind, _size(model.size_bytes), origin))
    print()
    print(_columns(rows))


def pull_model(name: str) -> int:
    with TerminalProgress() as progress:
        model = catalog.pull(name, progress)
    print(f"{model.name}: {model.path}")
    return 0


def remove_model(name: str) -> int:
    freed = removal.delete(name)
    print(f"{name}: deleted, {_size(freed)} freed")
    return 0


def _searched(entry: catalog.ModelEntry) -> str:
    on_disk = "" if entry.path is None else "on disk"
    kind = entry.quantization or "16 bit"
    return f"{entry.name} {entry.hub_id} {kind} {entry.license} {on_disk}".lower()


def _searched_other(model: FoundModel) -> str:
    return f"{model.name} {model.store} {quantization_of(model.path.name)} on disk".lower()


def _other_as_json(model: FoundModel) -> dict[str, str | int | None]:
    return {
        "name": model.name,
        "hub_id": None,
        "license": None,
        "quantization": quantization_of(model.path.name) or None,
        "download_bytes": None,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "store": model.store,
        "problem": model.problem or None,
    }


def _as_json(entry: catalog.ModelEntry) -> dict[str, str | int | None]:
    return {
        "name": entry.name,
        "hub_id": entry.hub_id,
        "license": entry.license,
        "quantization": entry.quantization or None,
        "download_bytes": entry.download_bytes,
        "path": None if entry.path is None else str(entry.path),
        "size_bytes": entry.size_bytes,
        "store": None,
        "problem": None,
    }


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = ("  ".join(f"{c:<{w}}" for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in padded)


def _size(num_bytes: int) -> str:
    if num_bytes >= 10**9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"
