"""Folders that model files lie in: termgen's own, and the hub's cache."""

from __future__ import annotations

import os
from pathlib import Path

from termgen.library.user_cache import cache_root


def models_folder() -> Path:
    """Folder for fetched model files."""
    return cache_root() / "models"


def hub_cache_folder() -> Path:
    """The hub client's cache folder, found by its rules without importing it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := set_folder(variable):
            return folder
    if home := set_folder("HF_HOME"):
        return home / "hub"
    return user_cache() / "huggingface" / "hub"


def user_cache() -> Path:
    return set_folder("XDG_CACHE_HOME") or _home("~/.cache")


def user_data() -> Path:
    return set_folder("XDG_DATA_HOME") or _home("~/.local/share")


def set_folder(variable: str) -> Path | None:
    """The folder that an environment variable names; None if it is not set."""
    folder = os.environ.get(variable)
    return _home(os.path.expandvars(folder)) if folder else None


def _home(path: str) -> Path:
    # unlike `Path.expanduser`, this leaves the `~` of a user without a home folder
    return Path(os.path.expanduser(path))
