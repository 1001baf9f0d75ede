"""`termgen models` and `termgen pull`: list the catalog and the models on disk, fetch a model."""

from __future__ import annotations

import json
from collections.abc import Sequence

from termgen.errors import ModelNotFoundError
from termgen.library import catalog
from termgen.library.progress import TerminalProgress


def list_models(*, as_json: bool, words: str | None = None) -> int:
    """List the models whose name, hub id, quantisation or licence contains every word."""
    wanted = (words or "").lower().split()
    entries = [e for e in catalog.list_models() if all(word in _searched(e) for word in wanted)]
    if not entries and not as_json:
        raise ModelNotFoundError(f"no known model has {words!r} in its name; see `termgen models`")
    if as_json:
        print(json.dumps([_as_json(entry) for entry in entries], indent=2))
        return 0
    rows = [("NAME", "WEIGHTS", "DOWNLOAD", "ON DISK", "HUB ID", "LICENSE")]
    for entry in entries:
        name = entry.name + (" (default)" if entry.name == catalog.DEFAULT_MODEL else "")
        here = _size(entry.size_bytes) if entry.size_bytes is not None else "-"
        kind, size = entry.quantization or "16 bit", _size(entry.download_bytes)
        rows.append((name, kind, size, here, entry.hub_id, entry.license))
    print(_columns(rows))
    print("\nfetch one with `termgen pull NAME`; a hub id, a folder or a .gguf file works as well")
    return 0


def pull_model(name: str) -> int:
    with TerminalProgress() as progress:
        model = catalog.pull(name, progress)
    print(f"{model.name}: {model.path}")
    return 0


def _searched(entry: catalog.ModelEntry) -> str:
    on_disk = "" if entry.path is None else "on disk"
    kind = entry.quantization or "16 bit"
    return f"{entry.name} {entry.hub_id} {kind} {entry.license} {on_disk}".lower()


def _as_json(entry: catalog.ModelEntry) -> dict[str, str | int | None]:
    return {
        "name": entry.name,
        "hub_id": entry.hub_id,
        "license": entry.license,
        "quantization": entry.quantization or None,
        "download_bytes": entry.download_bytes,
        "path": None if entry.path is None else str(entry.path),
        "size_bytes": entry.size_bytes,
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
