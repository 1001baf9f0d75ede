"""Every action there is: which bindings meet on a screen, and the commands made of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input, TextArea

from termgen.tui.bench.bench_screen import BenchEngineScreen, BenchScreen, bench_engine_keys
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.beside_screen import BesideScreen
from termgen.tui.chat.chat_keys import COPY_KEYS
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.context_panel import ContextPanel
from termgen.tui.chat.links_panel import LinksPanel
from termgen.tui.chat.lists.find_panel import FindPanel
from termgen.tui.chat.lists.tree_panel import TreePanel
from termgen.tui.chat.panels import HistoryPanel, SamplingPanel, SystemPromptPanel
from termgen.tui.chat.prompts_panel import PromptsPanel
from termgen.tui.chat.token_lens import LensScreen
from termgen.tui.chat.widgets.prompt import Prompt
from termgen.tui.chat.widgets.session_panel import SessionList
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.fleet import FleetScreen
from termgen.tui.help import HelpScreen
from termgen.tui.keys.keymap import Keymap, Scope, key_names
from termgen.tui.models import ModelScreen
from termgen.tui.silent import SilentScreen
from termgen.tui.themes.theme_chooser import ThemeChooser

BOXES = (
    SamplingPanel,
    SystemPromptPanel,
    HistoryPanel,
    LinksPanel,
    FindPanel,
    TreePanel,
    BesideScreen,
    PromptsPanel,
    ContextPanel,
    ApprovalPanel,
    LensScreen,
    ModelScreen,
    ThemeChooser,
    HelpScreen,
    SilentScreen,
)
"""Screens shown over or instead of another; keys of a screen behind such a box do not act, except
the app's priority bindings."""

SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "Answer": (
        "chat.retry",
        "chat.beside",
        "chat.copy",
        "chat.copy_block_1",
        "chat.save",
        "chat.edit",
        "chat.stop",
        "chat.sibling_before",
        "chat.sibling_after",
        "chat.tree",
        "chat.tokens",
        "chat.guessed",
        "chat.links",
        "chat.thoughts",
    ),
    "Chat": (
        "chat.new",
        "chat.sessions",
        "chat.clear",
        "chat.fit",
        "chat.compact",
        "chat.context",
        "chat.rename",
        "chat.tag",
        "chat.fork",
        "chat.export",
        "chat.import",
    ),
    "Model": ("chat.models", "chat.sampling", "chat.system", "chat.mcp", "chat.engine"),
    "Message": (
        "chat.attach",
        "chat.history",
        "chat.prompts",
        "chat.take_back",
        "chat.schema",
        "chat.regex",
        "chat.choice",
        "prompt.send",
        "prompt.newline",
    ),
    "Screen": ("app.theme", "app.help", "app.screenshot", "app.interrupt", "app.quit"),
    "Move": (
        "chat.mark_earlier",
        "chat.mark_later",
        "chat.find",
        "chat.page_up",
        "chat.page_down",
        "chat.write",
        "transcript.up",
        "transcript.down",
        "transcript.page_up",
        "transcript.page_down",
        "transcript.start",
        "transcript.end",
    ),
}
"""Actions of the chat as the palette lists them, the most used subjects and actions first."""
_PLACES = {
    name: (place, f"{subject}: ")
    for place, (subject, name) in enumerate(
        (subject, name) for subject, names in SUBJECTS.items() for name in names
    )
}

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
        Scope("kept prompts", [*PromptsPanel.BINDINGS, *first], Input.BINDINGS + every),
        Scope("find", [*FindPanel.BINDINGS, *first], Input.BINDINGS + every),
        Scope("tree", [*TreePanel.BINDINGS, *first], Input.BINDINGS + every),
        Scope("beside", [*BesideScreen.BINDINGS, *first], every),
        Scope("context", [*ContextPanel.BINDINGS, *first], every),
        Scope("approval", [*ApprovalPanel.BINDINGS, *first], every),
        Scope("engine", [*SilentScreen.BINDINGS, *app], every),
        Scope("bench", [*BenchScreen.BINDINGS, *app], every),
        Scope("bench's engine", [*bench_engine_keys(), *app], every),
        Scope("servers", [*FleetScreen.BINDINGS, *app], every),
    ]


def groups(screen: Screen[object]) -> list[Group]:
    """The bindings of a screen, without those of the app."""
    if isinstance(screen, ChatScreen):
        found: list[Group] = [
            (lambda: screen, ChatScreen.BINDINGS),
            (lambda: screen.transcript, Transcript.BINDINGS),
            (lambda: screen.prompt, Prompt.BINDINGS),
        ]
        if screen.panel.display:  # nothing is to be deleted that is not seen
            found.append((lambda: screen.panel.session_list, SessionList.BINDINGS))
        return found
    if isinstance(screen, BenchScreen):
        return [(lambda: screen, BenchScreen.BINDINGS)]
    if isinstance(screen, BenchEngineScreen):
        return [(lambda: screen, bench_engine_keys())]
    if isinstance(screen, FleetScreen):
        return [(lambda: screen, FleetScreen.BINDINGS)]
    if isinstance(screen, DashboardScreen):
        return [(lambda: screen, DashboardScreen.BINDINGS)]
    if isinstance(screen, BOXES):
        return [(lambda: screen, type(screen).BINDINGS)]
    return []


def commands(
    groups: Iterable[Group], keymap: Keymap, run: Callable[[str, DOMNode], Awaitable[object]]
) -> Iterator[SystemCommand]:
    """One command for each binding, with its keys; in a chat by subject, elsewhere in the order of
    the groups. Nine keys that copy one code block each are one command, unless they were changed.
    """
    found = list(_commands(groups, keymap, run))
    if any(name.startswith("chat.") for name, _ in found):
        found.sort(key=lambda one: _PLACES.get(one[0], (len(_PLACES), ""))[0])
        for name, command in found:
            yield command._replace(title=_PLACES.get(name, (0, ""))[1] + command.title)
    else:
        yield from (command for _, command in found)


def _commands(
    groups: Iterable[Group], keymap: Keymap, run: Callable[[str, DOMNode], Awaitable[object]]
) -> Iterator[tuple[str, SystemCommand]]:
    """The palette's commands, with the names of their bindings."""
    for node, bindings in groups:
        applied = keymap.applied(bindings)
        copies = [binding for binding in applied if binding in COPY_KEYS]
        for binding in applied:
            if binding in copies[1:]:
                continue
            action, keys = binding.action, key_names(binding)
            if len(copies) > 1 and binding is copies[0]:
                action, keys = "choose_block", f"{keys} to {key_names(copies[-1])}"
            help_text = f"{binding.tooltip} ({keys})"
            command = partial(_run, run, node, action)
            yield binding.id or "", SystemCommand(binding.description, help_text, command)


class ActionsProvider(Provider):
    """The palette: actions in the order of their subjects, which `SystemCommandsProvider` would
    sort by name."""

    async def discover(self) -> Hits:
        for title, help_text, callback, _ in self.app.get_system_commands(self.screen):
            yield DiscoveryHit(title, callback, help=help_text)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for title, help_text, callback, _ in self.app.get_system_commands(self.screen):
            subject, _, name = title.rpartition(": ")
            is_of_subject = subject.casefold().startswith(query.casefold())
            if (score := max(matcher.match(name), 0.1 * is_of_subject)) > 0:
                yield Hit(score, matcher.highlight(title), callback, help=help_text)


async def _run(
    run: Callable[[str, DOMNode], Awaitable[object]], node: Callable[[], DOMNode], action: str
) -> None:
    await run(action, node())
