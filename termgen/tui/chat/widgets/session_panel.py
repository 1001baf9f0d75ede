"""The panel of chats: a search field, the list, and a field for a new name.

The screen hands it the chats and talks to the store; the panel posts the user's wishes
(`SessionWish`, and `Input.Changed` from its search field). The list is a canvas, so a change costs
only its changed rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual import events, getters, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.widgets import Input

from termgen.tui.chat.saved.chat_db import SessionSummary
from termgen.tui.chat.state.conversation import MAX_TITLE_CHARS
from termgen.tui.chat.state.labels import tag_words
from termgen.tui.chat.widgets.messages import SessionWish
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.formatting import count
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, Span, cut, fit, row_width, spread

DAY_S = 86_400.0
ROOMY_WIDTH = 60
"""Width at which a row also shows the model."""

COLUMNS_STEP = 4
"""How much wider or narrower a key makes the list."""
LEAST_COLUMNS, MOST_SHARE = 28, 0.6
"""The list beside the chat takes at least so many columns, and at most this part of them."""

MAX_SEARCH_CHARS = 200
PINNED_GROUP = "pinned"


@dataclass(frozen=True, slots=True)
class ListedRow:
    row: Row
    index: int | None = None
    """Index of the row's chat in the list; None for a heading."""


def session_rows(
    sessions: Sequence[SessionSummary],
    width: int,
    *,
    selected: int,
    open_id: str,
    now_s: float,
    has_focus: bool,
) -> list[ListedRow]:
    rows: list[ListedRow] = []
    group = ""
    for index, session in enumerate(sessions):
        name = PINNED_GROUP if session.is_pinned else age_group(session.updated_s, now_s)
        if name != group:
            rows += [ListedRow(())] if rows else []
            rows.append(ListedRow(((name, "muted"),)))
            group = name
        is_marked = index == selected and has_focus
        background = "@select" if is_marked else ""
        sign = f"{'▸' if is_marked else ' '}{'●' if session.session_id == open_id else ' '} "
        rows.append(ListedRow(_row(session, width, sign, now_s, background), index))
        below = [(tag_words(session.tags), "accent"), (session.excerpt, "muted")]
        for words, role in below:
            if words:
                said: Span = (cut(f"     {clean_line(words)}", width), f"{role}{background}")
                rows.append(ListedRow(fit([said], width, f"text{background}"), index))
    return rows


def _row(session: SessionSummary, width: int, sign: str, now_s: float, background: str) -> Row:
    used = used_words(session.updated_s, now_s)
    model = f"{cut(clean_line(session.model_id), 24)}  " if width >= ROOMY_WIDTH else ""
    right: list[Span] = [(f"{model}{used}  ", f"muted{background}")]
    right.append((f"{count(session.num_turns)} ", f"faint{background}"))
    number = f" ({session.number})" if session.number else ""
    room = width - row_width(tuple(right)) - len(sign) - len(number) - 1
    left: list[Span] = [
        (sign, f"accent{background}"),
        (cut(clean_line(session.title) or "untitled", max(1, room)), f"text{background}"),
        (number, f"muted{background}"),
    ]
    return spread(left, right, width, f"text{background}")


def used_words(then_s: float, now_s: float) -> str:
    """A time for today, weekday and time for this week, otherwise the date."""
    forms = {"today": "%H:%M", "yesterday": "%H:%M", "this week": "%a %H:%M"}
    then, now = time.localtime(then_s), time.localtime(now_s)
    other_days = "%-d %b" if then.tm_year == now.tm_year else "%-d %b %Y"
    return time.strftime(forms.get(age_group(then_s, now_s), other_days), then)


def age_group(then_s: float, now_s: float) -> str:
    """The heading for a time, by calendar days."""
    now = time.localtime(now_s)
    midnight_s = time.mktime((now.tm_year, now.tm_mon, now.tm_mday, 0, 0, 0, 0, 0, -1))
    for name, days in (("today", 0), ("yesterday", 1), ("this week", 6), ("this month", 29)):
        if then_s >= midnight_s - days * DAY_S:
            return name
    return "earlier"


def empty_list_rows(words: str, width: int) -> list[Row]:
    said = f"No chat has {words!r}." if words else "No chats yet: ask something."
    return [(), ((cut(clean_line(said), width), "muted"),)]


class SessionList(Canvas, can_focus=True):
    BINDINGS = [
        Binding(
            "enter",
            "wish('open')",
            "Open chat",
            show=False,
            id="sessions.open",
            tooltip="Open the marked chat",
        ),
        Binding(
            "f6",
            "wish('rename')",
            "Rename chat",
            show=False,
            id="sessions.rename",
            tooltip="Give the marked chat another name",
        ),
        Binding(
            "delete,ctrl+d",
            "wish('delete')",
            "Delete chat",
            show=False,
            id="sessions.delete",
            tooltip="Delete the marked chat, until it is brought back",
        ),
        Binding(
            "f7",
            "wish('pin')",
            "Pin chat",
            show=False,
            id="sessions.pin",
            tooltip="Keep the marked chat at the top of the list, or no longer (/pin)",
        ),
        Binding(
            "ctrl+z",
            "wish('undo')",
            "Bring chat back",
            show=False,
            id="sessions.undo",
            tooltip="Bring back the chat that was deleted last",
        ),
        Binding(
            "ctrl+f",
            "wish('search')",
            "Search chats",
            show=False,
            id="sessions.search",
            tooltip="Search titles, questions, answers and #tags of all chats (or type)",
        ),
        Binding(
            "up",
            "move(-1)",
            "Chat above",
            show=False,
            id="sessions.up",
            tooltip="To the chat above",
        ),
        Binding(
            "down",
            "move(1)",
            "Chat below",
            show=False,
            id="sessions.down",
            tooltip="To the chat below",
        ),
        Binding(
            "pageup",
            "move(-10)",
            "Chats up",
            show=False,
            id="sessions.page_up",
            tooltip="Ten chats up",
        ),
        Binding(
            "pagedown",
            "move(10)",
            "Chats down",
            show=False,
            id="sessions.page_down",
            tooltip="Ten chats down",
        ),
        Binding(
            "home",
            "move(-1000)",
            "First chat",
            show=False,
            id="sessions.first",
            tooltip="To the first chat of the list",
        ),
        Binding(
            "end",
            "move(1000)",
            "Last chat",
            show=False,
            id="sessions.last",
            tooltip="To the last chat of the list",
        ),
        Binding(
            "shift+right",
            "wish('wider')",
            "Wider list",
            show=False,
            id="sessions.wider",
            tooltip="Make the list beside the chat wider (or pull its edge)",
        ),
        Binding(
            "shift+left",
            "wish('narrower')",
            "Narrower list",
            show=False,
            id="sessions.narrower",
            tooltip="Make the list beside the chat narrower",
        ),
    ]

    def __init__(self, wall_clock: Callable[[], float], *, id: str) -> None:
        super().__init__(self._paint, id=id)
        self._wall_clock = wall_clock
        self._sessions: Sequence[SessionSummary] = ()
        self._words = ""
        self._open_id = ""
        self._at = 0
        self._top = 0
        self._listed: Sequence[ListedRow] = ()

    @property
    def selected(self) -> SessionSummary | None:
        return self._sessions[self._at] if self._sessions else None

    def show(self, sessions: Sequence[SessionSummary], *, words: str, open_id: str) -> None:
        """Show a new list; the selected chat stays selected."""
        before = self.selected
        self._sessions, self._words, self._open_id = sessions, words, open_id
        ids = [session.session_id for session in sessions]
        if before is not None and before.session_id in ids:
            self._at = ids.index(before.session_id)
        self._at = max(0, min(self._at, len(sessions) - 1))
        self.repaint()

    def select(self, session_id: str) -> None:
        ids = [session.session_id for session in self._sessions]
        if session_id in ids:
            self._at = ids.index(session_id)
            self.repaint()

    def action_move(self, by: int) -> None:
        self._at = max(0, min(self._at + by, len(self._sessions) - 1))
        self.repaint()

    def action_wish(self, what: str) -> None:
        self.post_message(SessionWish(what, self.selected))

    def watch_has_focus(self, _has_focus: bool) -> None:
        """Focus events arrive before `has_focus` changes."""
        super().watch_has_focus(_has_focus)
        self.repaint()

    def on_click(self, event: events.Click) -> None:
        line = self._top + event.y
        index = self._listed[line].index if line < len(self._listed) else None
        if index is not None:
            self._at = index
            self.repaint()
            self.action_wish("open")

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1)

    def _paint(self, width: int, height: int) -> Sequence[Row]:
        """The part of the list around the selected chat."""
        if not self._sessions:
            return empty_list_rows(self._words, width)
        self._listed = session_rows(
            self._sessions,
            width,
            selected=self._at,
            open_id=self._open_id,
            now_s=self._wall_clock(),
            has_focus=self.has_focus,
        )
        lines = [line for line, listed in enumerate(self._listed) if listed.index == self._at]
        first = 0 if self._at == 0 else lines[0]
        self._top = min(first, max(self._top, lines[-1] - height + 1))
        self._top = max(0, min(self._top, len(self._listed) - height))
        return [listed.row for listed in self._listed[self._top :]]


class SessionPanel(Container):
    search = getters.query_one("#session-search", Input)
    name_field = getters.query_one("#session-name", Input)
    session_list = getters.query_one(SessionList)

    def __init__(self, wall_clock: Callable[[], float], *, id: str) -> None:
        super().__init__(id=id)
        self._wall_clock = wall_clock
        self._renamed: SessionSummary | None = None
        self.columns = 0
        """Its width beside the chat, if it is not that of the style sheet; otherwise 0."""
        self._is_pulled = False
        """The mouse holds its edge."""

    def compose(self) -> ComposeResult:
        yield Input(
            placeholder="search in all chats, #tag",
            id="session-search",
            compact=True,
            max_length=MAX_SEARCH_CHARS,
            select_on_focus=False,
        )
        yield SessionList(self._wall_clock, id="session-list")
        yield Input(id="session-name", compact=True, max_length=MAX_TITLE_CHARS)

    def on_mount(self) -> None:
        self.border_title = "chats"
        open_, rename, delete = (
            brief_key_of(self, f"sessions.{name}") for name in ("open", "rename", "delete")
        )
        delete = "del" if delete == "delete" else delete
        self.border_subtitle = f"{open_} open  {rename} rename  {delete} delete"

    def type(self, text: str) -> None:
        """Text typed in the list goes to the search field. A leading slash only opens the field."""
        self.screen.set_focus(self.search)  # synchronous, since another key may follow
        if text != "/" or self.search.value:
            self.search.insert_text_at_cursor(" ".join(text.split()) if len(text) > 1 else text)

    def begin_rename(self, session: SessionSummary) -> None:
        self._renamed = session
        self.name_field.value = clean_line(session.title)
        self.name_field.display = True
        self.name_field.focus()

    def end_rename(self) -> None:
        self._renamed = None
        self.name_field.display = False
        self.session_list.focus()

    @property
    def is_renaming(self) -> bool:
        return self._renamed is not None

    @on(Input.Submitted, "#session-name")
    def _named(self, event: Input.Submitted) -> None:
        event.stop()
        session, title = self._renamed, " ".join(event.value.split())
        self.end_rename()
        if session is not None and title:
            self.post_message(SessionWish("name", session, title))

    @on(Input.Submitted, "#session-search")
    def _search_done(self, event: Input.Submitted) -> None:
        event.stop()
        # posted from here: a message that the list posts while its parent handles one stops at the
        # parent
        self.post_message(SessionWish("open", self.session_list.selected))

    def set_columns(self, columns: int) -> None:
        """Take a width, as far as the screen has room for it; 0: that of the style sheet."""
        if columns:
            most = max(LEAST_COLUMNS, int(self.app.size.width * MOST_SHARE))
            columns = min(most, max(LEAST_COLUMNS, columns))
            self.styles.width = self.styles.min_width = self.styles.max_width = columns
        else:
            for rule in ("width", "min_width", "max_width"):
                self.styles.clear_rule(rule)
        self.columns = columns

    def change_columns(self, by: int) -> None:
        self.set_columns((self.columns or self.outer_size.width) + by)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """A pull at its right edge changes its width, until the button is let go."""
        if event.screen_x == self.region.right - 1:
            self._is_pulled = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._is_pulled:
            self.set_columns(max(1, event.screen_x - self.region.x + 1))

    def on_mouse_up(self) -> None:
        if self._is_pulled:
            self._is_pulled = False
            self.release_mouse()
            self.post_message(SessionWish("pulled", None))

    def on_key(self, event: events.Key) -> None:
        """The down key leaves the search field for the list."""
        if event.key == "down" and self.search.has_focus:
            event.stop()
            self.session_list.focus()
