"""The tools that a chat's model may call, made from the settings."""

from __future__ import annotations

from pathlib import Path

from termgen.config import UIConfig
from termgen.tools import files
from termgen.tools.files import FileTools
from termgen.tools.toolbox import Provider, Toolbox


def make_toolbox(ui: UIConfig) -> Toolbox:
    """Nothing is started yet."""
    providers: list[Provider] = []
    if files.NAME in ui.tools:
        providers.append(FileTools(Path.cwd()))
    return Toolbox(providers)
