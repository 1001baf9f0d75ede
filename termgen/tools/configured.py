"""The tools that a chat's model may call, made from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from termgen.config import UIConfig
from termgen.tools import files
from termgen.tools.files import FileTools
from termgen.tools.server_config import McpServer
from termgen.tools.server_tools import McpTools
from termgen.tools.toolbox import Provider, Toolbox


def make_toolbox(ui: UIConfig, servers: Sequence[McpServer], folder: Path | None = None) -> Toolbox:
    """Nothing is started yet. servers: those of the config file. folder: the working folder; None:
    that of this program."""
    providers: list[Provider] = []
    if files.NAME in ui.tools:
        providers.append(FileTools(folder or Path.cwd()))
    providers += map(McpTools, servers)
    return Toolbox(providers)
