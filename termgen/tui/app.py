"""The Textual app: starts an engine behind a loading screen, then shows the chat or the dashboard.

Made by the command line, which passes how to start and stop an engine. The app owns the screens,
the themes, the global keys and the command palette; it knows an engine only as `EngineClient`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import termios
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from textual import events, on, work
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import TextArea

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import TermgenError
from termgen.system.choices import FEW_COLOURS_THEME, THEME, Choices, model_choice
from termgen.system.clipboard import copy_with_program
from termgen.system.remembered import Remembered
from termgen.system.terminal_echo import show_typing
from termgen.tools.toolbox import Toolbox
from termgen.tui import actions
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.chat_keys import COPY_KEYS
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.saved.chat_store import ChatStore, Resume
from termgen.tui.chat.saved.drafts import keep_draft, take_draft
from termgen.tui.chat.state.commands import COMMANDS as SLASH_COMMANDS
from termgen.tui.chat.state.commands import SlashCommand
from termgen.tui.chat.widgets.messages import ModelsWanted
from termgen.tui.chat.widgets.prompt import Prompt
from termgen.tui.chat.widgets.session_panel import SessionList
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.dashboard_keys import Page, pages_with
from termgen.tui.dashboard.fleet import FleetScreen
from termgen.tui.help import HelpScreen, HelpSection
from termgen.tui.keys.alt_keys import drop_letter, let_alt_keys_through
from termgen.tui.keys.keymap import KeyedApp, Keymap, key_names, read_keymap
from termgen.tui.loading import LoadingScreen, StartupProgress
from termgen.tui.models import ModelScreen, bytes_words
from termgen.tui.paint.canvas_screen import CanvasScreen
from termgen.tui.paint.palette import ROLES, VARIABLE_PREFIX, Palette, has_few_colours
from termgen.tui.paint.sanitize import clean, clean_line
from termgen.tui.silent import SilentScreen
from termgen.tui.themes import theme_files as themes
from termgen.tui.themes.theme_chooser import ThemeChooser
from termgen.tui.themes.theme_shelf import ThemeShelf
from termgen.vocabulary.alerts import parse_alerts
from termgen.vocabulary.model_shelf import ModelShelf, OtherModels, Switch

MOST_QUEUED = 20
"""Writes. A start and an end take ten or so at once, and a frame two or three."""

LONGEST_CLOSE_S = 2.0

FAILED_START = 2
ID_CHARS = 8
"""Characters of the id of a chat that name it: the command line takes its beginning."""
QUIT_WINDOW_S = 2.0
PALETTE_CLOSES_S = 0.2
THEME_POLL_S = 1.0  # how often to see whether a theme file was saved
NOTICE_AT_START_S = 15.0  # what was wrong stays on while a model is loaded
REDRAW_S = 0.25  # how often to see whether a terminal that was not read is read again


# A terminal whose output is not read must not stop the engine.
#
# Textual writes to the terminal in a thread, and its loop waits once thirty writes are queued
# there. That loop is the engine's too: a window that is held with Ctrl-S, a suspended `tmux`, or a
# slow connection would hold up every answer. This driver never waits. While the queue is long it
# throws frames away, and `TermgenApp` draws the whole screen again once there is room.


class PatientDriver(LinuxDriver):
    """LinuxDriver whose `write` returns at once, and whose file descriptor is its own: standard
    error is held back while a native library may panic (`system/native_stderr.py`)."""

    has_dropped = False
    """True if frames were dropped, so that the terminal does not show what was drawn last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._file is not None:
            self._file = open(os.dup(self._file.fileno()), "w", encoding="utf-8", errors="replace")

    def start_application_mode(self) -> None:
        show_typing()  # the settings of now are put back at the end
        super().start_application_mode()  # type: ignore[no-untyped-call]

    @property
    def is_behind(self) -> bool:
        """True if the terminal does not accept output at present."""
        writer = self._writer_thread
        return writer is not None and writer._queue.qsize() >= MOST_QUEUED

    def write(self, data: str) -> None:
        if self.is_behind:
            self.has_dropped = True
        else:
            super().write(data)

    def close(self) -> None:
        """Write out what is queued, as far as that does not take long: the thread ends with us."""
        writer = self._writer_thread
        if writer is None:
            return
        if not self.is_behind:
            writer._queue.put(None)
            writer.join(LONGEST_CLOSE_S)
        if writer.is_alive() and self.attrs_before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)


StartEngine = Callable[[Callable[[str, float], None]], Awaitable[EngineClient]]
StopEngine = Callable[[], Awaitable[None]]


class TermgenApp(KeyedApp):
    TITLE = "termgen"
    CSS_PATH = sorted(Path(__file__).parent.glob("*.tcss"))
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    COMMANDS = {actions.ActionsProvider}
    slash_commands: Sequence[SlashCommand] = SLASH_COMMANDS

    BINDINGS = [
        Binding("f1", "help", "Help", id="app.help", tooltip="Every key and command"),
        Binding(
            "ctrl+p",
            "command_palette",
            "Actions",
            id="app.palette",
            tooltip="Every action of the screen by name",
            priority=True,
        ),
        Binding("ctrl+q", "quit", "Quit", id="app.quit", tooltip="Leave termgen", priority=True),
        Binding(
            "ctrl+c",
            "interrupt",
            "Copy, stop or quit",
            show=False,
            priority=True,
            id="app.interrupt",
            tooltip="Copy the selection; else stop the answer; else put the draft into the history;"
            " twice: quit",
        ),
        Binding(
            "f12",
            "screenshot",
            "Screenshot",
            show=False,
            id="app.screenshot",
            tooltip="Save the screen as an SVG picture",
        ),
        Binding(
            "f9",
            "change_theme",
            "Theme",
            show=False,
            id="app.theme",
            tooltip="Choose the colours: each shows as you move through the list",
        ),
    ]

    def __init__(
        self,
        start_engine: StartEngine,
        *,
        stop_engine: StopEngine,
        ui: UIConfig,
        start_screen: str = "chat",
        theme_folders: tuple[Path, ...] | None = None,
        models: ModelShelf | None = None,
        chats: ChatStore | None = None,
        resume: Resume | None = None,
        toolbox: Toolbox | None = None,
        found_by: Callable[[], Sequence[str]] = tuple,
        others: OtherModels | None = None,
        remembered: Remembered | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        """`models`: what may be changed to; None where the model stays. found_by: arguments of the
        command line by which another start finds the present model. notices: what is to be said at
        the start.

        Without `chats`, they are kept in memory, without `remembered`, choices are for this run
        only. toolbox: what a chat's model may call. others: models that it may be compared with.
        """
        super().__init__()
        assert start_screen in ("chat", "dashboard", "bench")
        self.ui = ui
        self.chats = chats or ChatStore()
        self.resume = resume
        self.toolbox = toolbox or Toolbox()
        self._found_by = found_by
        self.others = others
        self.choices = Choices(remembered)
        self._notices = [*notices, self.choices.fault]
        self.resume_command = ""
        """Set at the end: the command that opens the chat again; empty without one."""
        self._keymap_now = self.read_keys(ui)
        self.first_keys = {
            name: key
            for scope in actions.scopes(self.BINDINGS)
            for name, key in self._keymap_now.first_keys(scope.bindings).items()
        }
        self._start_engine = start_engine
        self._stop_engine = stop_engine
        self._start_screen = start_screen
        folders = theme_folders or (themes.shipped_folder(), themes.user_folder())
        self._themes = ThemeShelf(*folders)
        self._models = models
        self._offered = ""
        """A better model that the empty chat offers."""
        self._progress = StartupProgress()
        self._loading = LoadingScreen(
            self._progress, before_chat=start_screen == "chat", keymap=self._keymap_now
        )
        self._shown: str | None = None
        self._interrupted_s = -QUIT_WINDOW_S
        self._signals: list[signal.Signals] = []
        self._dashboard: DashboardScreen | FleetScreen | SilentScreen | None = None
        self.client: EngineClient | None = None

    @classmethod
    def check_settings(cls, ui: UIConfig) -> None:
        """Raises ConfigError: a notice on the loading screen is gone before anybody reads it."""
        themes.check_name(ui.theme, themes.shipped_folder(), themes.user_folder())
        cls.read_keys(ui)

    @classmethod
    def read_keys(cls, ui: UIConfig) -> Keymap:
        """Raises ConfigError for keys that cannot be."""
        return read_keymap(ui.keys, actions.scopes(cls.BINDINGS))

    def get_driver_class(self) -> type[Driver]:
        """Textual's choice, but on a terminal one that does not wait for it."""
        let_alt_keys_through(ANSI_SEQUENCES_KEYS)
        chosen = super().get_driver_class()
        if chosen.__name__ != "LinuxDriver":  # Windows, a browser, or a test
            return chosen
        return PatientDriver

    async def on_event(self, event: events.Event) -> None:
        drop_letter(event)
        if isinstance(event, events.Key) and isinstance(self.screen, ChatScreen):
            self.screen.note_key(event.key)
        await super().on_event(event)

    def _draw_what_was_dropped(self) -> None:
        driver = self._driver
        if getattr(driver, "has_dropped", False) and not driver.is_behind:  # type: ignore[union-attr]
            driver.has_dropped = False  # type: ignore[union-attr]
            for board in (
                screen for screen in self.screen_stack if isinstance(screen, CanvasScreen)
            ):
                board.forget_terminal()
            self.refresh(layout=True)

    def get_css_variables(self) -> dict[str, str]:
        """Textual's variables and one per role, for the style sheet."""
        variables = super().get_css_variables()
        palette = Palette(variables)
        variables |= {VARIABLE_PREFIX + role: palette.color(role).css for role in ROLES}
        self.theme_variables = variables
        return variables

    def on_mount(self) -> None:
        self.set_keymap(self._keymap_now.for_textual())
        self._load_themes()
        self._catch_signals()
        self.set_interval(REDRAW_S, self._draw_what_was_dropped)
        self.push_screen(self._loading)
        self.call_after_refresh(self._bring_back_draft)
        for notice in filter(None, self._notices):
            self.warn_at_start(notice)
        self._boot()

    def warn_at_start(self, words: str) -> None:
        self.notify(words, severity="warning", timeout=NOTICE_AT_START_S, markup=False)

    def watch_app_focus(self, focus: bool) -> None:
        """A chat that came up while another window had the keys puts them into its prompt now."""
        if focus and self._shown == "chat" and isinstance(self.screen, ChatScreen):
            if self.screen.focused is None:
                self.screen.set_focus(self.screen.prompt)  # at once: a key may follow

    async def on_unmount(self) -> None:
        for number in self._signals:
            asyncio.get_running_loop().remove_signal_handler(number)
        if self._dashboard is not None:
            self._dashboard.close()
        await self._write_choices()
        await self.toolbox.close()
        await self.chats.close()
        await self._stop_engine()

    @work(exclusive=True, group="boot")
    async def _boot(self) -> None:
        try:
            await self.open_screens(self._progress.report)
        except TermgenError as error:
            self._fail_start(str(error))
            return
        except Exception as error:  # the top of the start: whatever it is, one line says so
            self._fail_start(f"the engine could not start: {type(error).__name__}: {error}")
            return
        await self.action_show(self._start_screen)
        if isinstance(self.screen, ChatScreen):
            self._loading.hand_over(self.screen)
            self._offer_better(self.screen)

    @work(exclusive=True, group="offer")
    async def _offer_better(self, chat: ChatScreen) -> None:
        """Offer a better model in the empty chat, where there is one to be fetched."""
        if self._models is None:
            return
        try:
            choice = await self._models.offer()
        except TermgenError:
            return  # it was not asked for: nothing is said
        if choice is not None and choice.size_bytes is not None:
            self._offered = choice.name
            size = bytes_words(choice.size_bytes)
            chat.show_offer(f"fetches {choice.shown} ({size}), the best for this machine")

    async def open_screens(self, report: Callable[[str, float], None]) -> None:
        """Start the engine and make its screens."""
        client = self.client = await self._start_engine(report)
        self.add_mode("chat", lambda: self.make_chat(client))
        self.add_dashboard(self.make_dashboard(client))

    @property
    def dashboard_options(self) -> dict[str, Any]:
        """The settings of a dashboard."""
        alerts = parse_alerts(self.ui.alert)
        return {"hz": self.ui.dashboard_hz, "alerts": alerts, "bell": self.ui.alert_bell}

    @property
    def pages_now(self) -> tuple[Page, ...]:
        """The pages of a dashboard, with their present keys."""
        return pages_with(self._keymap_now)

    def add_dashboard(self, dashboard: DashboardScreen | FleetScreen | SilentScreen) -> None:
        """Made at once, so that it listens from the start and has a history when first shown."""
        self._dashboard = dashboard
        if isinstance(dashboard, DashboardScreen):
            dashboard.pages = self.pages_now
        self.add_mode("dashboard", lambda: dashboard)

    def make_chat(self, client: EngineClient) -> ChatScreen:
        return ChatScreen(
            client,
            self.ui,
            chats=self.chats,
            resume=self.resume,
            toolbox=self.toolbox,
            others=self.others,
        )

    def make_dashboard(self, client: EngineClient) -> DashboardScreen:
        return DashboardScreen(client, **self.dashboard_options)

    @on(ModelsWanted)
    def _models_wanted(self, message: ModelsWanted) -> None:
        self.action_models(message.name)

    def action_models(self, name: str = "") -> None:
        """Choose another model; `name` is tried at once."""
        chat = self.screen
        if not isinstance(chat, ChatScreen):
            return
        if self._models is None:
            self.notify("the model stays while its server runs", severity="warning")
            return

        if not name and not chat.conversation.turns:
            name, self._offered = self._offered, ""
        chat.show_offer("")

        def stop_answer() -> None:
            chat.dialogue.stop_answer()

        async def changed(switch: Switch | None) -> None:
            if switch is not None:
                await self._use_client(switch.client)
                chat.set_client(switch.client, failure=switch.failure)
                if switch.name and switch.failure is None:
                    self.remember(model_choice(switch.server), switch.name)

        self.push_screen(ModelScreen(self._models, name=name, before_switch=stop_answer), changed)

    async def _use_client(self, client: EngineClient) -> None:
        """Watch another engine from here on."""
        if client is not self.client:
            self.client = client
            assert self._dashboard is not None, "there was an engine"
            self._dashboard.close()
            await self.remove_mode("dashboard")
            self.add_dashboard(self.make_dashboard(client))

    def notify(self, message: str, *, title: str = "", **options: Any) -> None:
        """Paths and what servers say are in it, and Textual sends what it is given."""
        super().notify(clean(message), title=clean_line(title), **options)

    def _fail_start(self, reason: str) -> None:
        line = f"termgen: error: {clean_line(' '.join(reason.split()))}"
        self.exit(return_code=FAILED_START, message=Text(line))

    def exit(
        self, result: None = None, return_code: int = 0, message: RenderableType | None = None
    ) -> None:
        """Print unsent text: it would be lost with the screen."""
        if not self._exit:
            self.resume_command = self._command_to_resume()
            if unsent := self._unsent:
                words = Text("Not sent:\n\n" + clean(unsent) + "\n")
                message = words if message is None else Group(words, message)
        super().exit(result, return_code, message)

    def _command_to_resume(self) -> str:
        """The command that opens the chat of this screen again; empty if it is not kept."""
        if self.chats.path is None or self.chats.trouble:
            return ""
        words = ["termgen", "chat", *self._found_by()]
        if self.ui.chat_db:
            words += ["--chat-db", self.ui.chat_db]
        for screen in self._chat_screens():
            if screen.conversation.turns:
                return shlex.join([*words, "--session", screen.conversation.session_id[:ID_CHARS]])
        return ""

    def _chat_screens(self) -> list[ChatScreen]:
        screens = [screen for stack in self._screen_stacks.values() for screen in stack]
        return [screen for screen in screens if isinstance(screen, ChatScreen)]

    @property
    def _unsent(self) -> str:
        """Everything written that is in no chat."""
        unsent = self._loading.unsent
        for screen in self._chat_screens():
            if screen.is_mounted:
                unsent += screen.area.unsent
        return "\n\n".join(unsent)

    def _hang_up(self) -> None:
        """End without the terminal: what was not sent is kept for the next start, not printed."""
        if self.chats.path is None:
            self.exit()
            return
        if not self._exit and (unsent := self._unsent):
            keep_draft(self.chats.path, unsent)
        super().exit()

    def _bring_back_draft(self) -> None:
        """Put the draft of a terminal that was closed into the prompt."""
        area, path = self._loading.area, self.chats.path
        draft = take_draft(path) if area is not None and path is not None else ""
        if area is not None and draft:
            area.prompt.set_text(draft)
            self.notify("the draft of a terminal that was closed is back in the prompt")

    def _catch_signals(self) -> None:
        """SIGTERM and a closed terminal end the app as ctrl+q does."""
        for name in ("SIGTERM", "SIGHUP", "SIGINT"):
            number = getattr(signal, name, None)
            if number is None:
                continue
            end = self._hang_up if name == "SIGHUP" else self.exit
            try:
                asyncio.get_running_loop().add_signal_handler(number, end)
            except (NotImplementedError, RuntimeError, ValueError):
                return  # not this platform, or not the main thread
            self._signals.append(number)

    def _load_themes(self) -> None:
        self._take_themes(*self._themes.poll())
        usual = themes.SIXTEEN_COLOURS if has_few_colours(self) else themes.DEFAULT_THEME
        wanted = self.ui.theme or self.choices.text(self._theme_choice) or usual
        if wanted in self.available_themes:
            self.theme = wanted
        else:
            fallback = themes.DEFAULT_THEME
            self.theme = fallback if fallback in self.available_themes else self.theme
            self.notify(f"no theme {wanted!r}; using {self.theme}", severity="error", markup=False)
        self._follow_themes()

    @work(group="themes")
    async def _follow_themes(self) -> None:
        while True:
            await asyncio.sleep(THEME_POLL_S)
            self._take_themes(*await asyncio.to_thread(self._themes.poll))

    def _take_themes(self, fresh: Iterable[Theme], errors: Iterable[themes.ThemeError]) -> None:
        for theme in fresh:
            self.register_theme(theme)
            if theme.name == self.theme:
                self.mutate_reactive(App.theme)
        for error in errors:
            words = f"theme not loaded: {error}"
            self.notify(words, severity="error", timeout=NOTICE_AT_START_S, markup=False)

    @property
    def _theme_choice(self) -> str:
        return FEW_COLOURS_THEME if has_few_colours(self) else THEME

    def keep_theme(self) -> None:
        """Begin later runs with the present theme, or say how to: a setting counts more."""
        if self.choices.are_kept and self.ui.theme is None:
            self.remember(self._theme_choice, self.theme)
        else:
            name = f'theme = "{self.theme}"'
            self.notify(f"{name} under [chat] in the config file keeps it", markup=False)

    def remember(self, name: str, value: str | int) -> None:
        """Keep a choice for later runs. A warning says if that fails."""
        self.choices.change(name, value)
        self.run_worker(self._write_choices(), group="choices")

    async def _write_choices(self) -> None:
        if fault := await self.choices.write():
            self.notify(fault, severity="warning", markup=False)

    def action_change_theme(self) -> None:
        if not isinstance(self.screen, ThemeChooser):
            self.clear_notifications()  # which would cover it
            self.push_screen(ThemeChooser())

    async def action_show(self, name: str) -> None:
        """Show `chat` or `dashboard`, once there is an engine."""
        if self._dashboard is not None:
            self._shown = name
            await self.switch_mode(name)

    def action_help(self) -> None:
        if isinstance(self.screen, HelpScreen):
            return
        if self._dashboard is None and self._loading.area is None:
            return  # what the screens to come can do is not known yet
        sections = [(t, self._keymap_now.applied(b)) for t, b in self.help_sections()]
        self.clear_notifications()  # which would cover it
        self.push_screen(HelpScreen(sections, self.slash_commands))

    @property
    def everywhere(self) -> list[BindingType]:
        """The bindings of every screen, with their meaning here."""
        return list(self.BINDINGS)

    def help_sections(self) -> list[HelpSection]:
        """The help's sections, those of the shown screen first."""
        changed = self._keymap_now.changes
        # the first of nine similar keys stands for all, unless one of them was changed
        alike = () if any(key.id in changed for key in COPY_KEYS) else COPY_KEYS[1:]
        chat_keys = [key for key in ChatScreen.BINDINGS if key not in alike]
        here: list[HelpSection] = [
            ("Chat", [*Prompt.BINDINGS, *chat_keys]),
            ("Engine", DashboardScreen.BINDINGS),
        ]
        if self._shown == "dashboard":
            here.reverse()
        return [
            *here,
            ("Transcript", Transcript.BINDINGS),
            ("List of chats", SessionList.BINDINGS),
            ("Everywhere", self.everywhere),
            ("Lists and notices", [binding for one in actions.BOXES for binding in one.BINDINGS]),
        ]

    def action_interrupt(self) -> None:
        """ctrl+c: copy a selection, else stop an answer, else put the draft away and, pressed
        twice, quit."""
        selected = self._selected_text()
        if selected:
            self.screen.clear_selection()
            self.copy(selected, "selection")
            return
        now, has_draft = time.monotonic(), False
        if isinstance(self.screen, ChatScreen):
            if self.screen.is_streaming:
                self.screen.dialogue.stop_by_hand()
                return
            has_draft = self.screen.put_draft_away()
        elif isinstance(self.screen, ApprovalPanel):
            self.screen.action_stop()
            return
        elif isinstance(self.screen, LoadingScreen):
            has_draft = self.screen.put_draft_away()
        if not has_draft and now - self._interrupted_s < QUIT_WINDOW_S:
            self.exit()
            return
        self._interrupted_s = now
        key = self.first_keys["app.interrupt"]
        kept = "the draft is in the history (↑); " if has_draft else ""
        self.notify(f"{kept}press {key} again to quit", timeout=QUIT_WINDOW_S)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy without a notice, as Textual's fields do when they cut."""
        self.copy(text, "")

    def copy(self, text: str, what: str) -> None:
        text = text.encode(errors="replace").decode()  # a remote answer may hold lone surrogates
        self._clipboard = text  # at once: a field may paste it next
        self.run_worker(self._copy(text, what), group="copy")

    async def _copy(self, text: str, what: str) -> None:
        """Copy with a program, else by the terminal. A notice says what has become of `what`."""
        effect = None
        if not self.is_web:  # the clipboard is the browser's then
            effect = await asyncio.to_thread(copy_with_program, text, os.environ)
        if effect is None:
            super().copy_to_clipboard(text)
            effect = "sent to the terminal; it may refuse"
        if what:
            self.notify(f"{what} {effect}", markup=False)

    def _selected_text(self) -> str | None:
        if isinstance(self.focused, TextArea) and self.focused.selected_text:
            return self.focused.selected_text
        return self.screen.get_selected_text()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every action, for the command palette."""
        groups: list[actions.Group] = [(lambda: self, self.everywhere)]
        if self._dashboard is not None:
            groups = [*actions.groups(screen), *groups]
        for command in actions.commands(groups, self._keymap_now, self._run_command):
            if not command.title.endswith("Actions"):  # it is open
                yield command

    async def _run_command(self, action: str, node: DOMNode) -> None:
        if action == "screenshot":
            self.set_timer(PALETTE_CLOSES_S, self.action_screenshot)
        else:
            await self.run_action(action, node)


def list_keys(ui: UIConfig) -> None:
    """Print every action with its keys, as the config file changes them (`termgen keys`)."""
    keymap = TermgenApp.read_keys(ui)
    rows: dict[str, tuple[str, str]] = {}
    for scope in actions.scopes(TermgenApp.BINDINGS):
        for binding in keymap.applied(scope.bindings):
            assert isinstance(binding, Binding) and binding.id
            sign = "*" if binding.id in keymap.changes else " "
            rows.setdefault(binding.id, (sign + key_names(binding), binding.tooltip))
    width = max(len(keys) for keys, _ in rows.values())
    for name, (keys, words) in rows.items():
        print(f"{name:26}{keys:{width}}  {words}")
    print('\nchange one in the config file: [keys], then for example chat.stop = "ctrl+g"')
