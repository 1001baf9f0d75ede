"""Every action there is: which bindings meet on a screen, and the commands made of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input, TextArea

from termgen.tui.keymap import Keymap, Scope, key_names
from termgen.tui.screens.bench import BenchEngineScreen, BenchScreen, bench_engine_keys
from termgen.tui.screens.chat import ChatScreen
from termgen.tui.screens.dashboard import DashboardScreen
from termgen.tui.screens.help import HelpScreen
from termgen.tui.screens.links import LinksPanel
from termgen.tui.screens.models import ModelScreen
from termgen.tui.screens.panels import HistoryPanel, SamplingPanel, SystemPromptPanel
from termgen.tui.screens.silent import SilentScreen
from termgen.tui.screens.theme_chooser import ThemeChooser
from termgen.tui.screens.token_lens import LensScreen
from termgen.tui.widgets.prompt import Prompt
from termgen.tui.widgets.session_panel import SessionList
from termgen.tui.widgets.transcript import Transcript

BOXES = (
    SamplingPanel,
    SystemPromptPanel,
    HistoryPanel,
    LinksPanel,
    LensScreen,
    ModelScreen,
    ThemeChooser,
    HelpScreen,
    SilentScreen,
)
"""What shows over a screen or in its place; nothing behind a box can be reached but what the app
binds with priority."""

Group = tuple[Callable[[], DOMNode], Sequence[BindingType]]
"""Who runs the actions, and their bindings."""


def scopes(app: Sequence[BindingType]) -> list[Scope]:
    """`app` are the bindings that are there on every screen."""
    every = Screen.BINDINGS
    first = [binding for binding in app if isinstance(binding, Binding) and binding.priority]
    return [
        Scope("chat", [*Prompt.BINDINGS, *ChatScreen.BINDINGS, *app], TextArea.BINDINGS + every),
        Scope("chat", [*Transcript.BINDINGS, *ChatScreen.BINDINGS, *app], every),
        Scope("chat", [*SessionList.BINDINGS, *ChatScreen.BINDINGS, *app], every),
        Scope("engine", [*DashboardScreen.BINDINGS, *app], every),
        Scope("help", [*HelpScreen.BINDINGS, *first], every),
        Scope("themes", [*ThemeChooser.BINDINGS, *first], every),
        Scope("models", [*ModelScreen.BINDINGS, *first], every),
        Scope("tokens", [*LensScreen.BINDINGS, *first], every),
        Scope("links", [*LinksPanel.BINDINGS, *first], every),
        Scope("sampling", [*SamplingPanel.BINDINGS, *first], Input.BINDINGS + every),
        Scope("system prompt", [*SystemPromptPanel.BINDINGS, *first], TextArea.BINDINGS + every),
        Scope("earlier prompts", [*HistoryPanel.BINDINGS, *first], Input.BINDINGS + every),
        Scope("engine", [*SilentScreen.BINDINGS, *app], every),
        Scope("bench", [*BenchScreen.BINDINGS, *app], every),
        Scope("bench's engine", [*bench_engine_keys(), *app], every),
    ]


def groups(screen: Screen[object]) -> list[Group]:
    """What is bound on a screen, without what the app binds."""
    if isinstance(screen, ChatScreen):
        found: list[Group] = [
            (lambda: screen, ChatScreen.BINDINGS),
            (lambda: screen.prompt, Prompt.BINDINGS),
            (lambda: screen.transcript, Transcript.BINDINGS),
        ]
        if screen.panel.display:  # nothing is to be deleted that is not seen
            found.append((lambda: screen.panel.session_list, SessionList.BINDINGS))
        return found
    if isinstance(screen, BenchScreen):
        return [(lambda: screen, BenchScreen.BINDINGS)]
    if isinstance(screen, BenchEngineScreen):
        return [(lambda: screen, bench_engine_keys())]
    if isinstance(screen, DashboardScreen):
        return [(lambda: screen, DashboardScreen.BINDINGS)]
    if isinstance(screen, BOXES):
        return [(lambda: screen, type(screen).BINDINGS)]
    return []


def commands(
    groups: Iterable[Group], keymap: Keymap, run: Callable[[str, DOMNode], Awaitable[object]]
) -> Iterator[SystemCommand]:
    """One command for each binding, with its keys."""
    for node, bindings in groups:
        for binding in keymap.applied(bindings):
            help_text = f"{binding.tooltip} ({key_names(binding)})"
            yield SystemCommand(binding.description, help_text, partial(_run, run, node, binding))


async def _run(
    run: Callable[[str, DOMNode], Awaitable[object]], node: Callable[[], DOMNode], binding: Binding
) -> None:
    await run(binding.action, node())
