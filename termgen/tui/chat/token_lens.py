"""The token lens over the chat: walks an answer's tokens and gives back where to branch.

A panel below the transcript where there is room, else a whole screen. It is opened with a way to
get the scores, which it waits for; closing it gives that up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.events import Click
from textual.screen import ModalScreen
from textual.theme import Theme
from textual.widgets import Footer

from termgen.errors import TermgenError
from termgen.tui.chat.lens_rows import LensView, TokenText, lens_rows, text_height
from termgen.tui.chat.state.token_scores import Alternative, TokenScores
from termgen.tui.keys.keymap import brief_key_of, key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, wrap
from termgen.vocabulary.sampling_params import SamplingParams

Choice = tuple[TokenScores, int, Alternative]
"""An answer, the place of one of its tokens, and what is to stand there."""


class LensCanvas(Canvas):
    def __init__(self, lens: LensScreen) -> None:
        super().__init__(lens.paint)
        self._lens = lens

    def on_click(self, event: Click) -> None:
        self._lens.click(event.x, event.y)


class LensScreen(ModalScreen[Choice | None]):
    BINDINGS = [
        Binding(
            "left,h",
            "move(-1)",
            "Token before",
            show=False,
            id="tokens.before",
            tooltip="The token before",
        ),
        Binding(
            "right,l",
            "move(1)",
            "Token after",
            show=False,
            id="tokens.after",
            tooltip="The token after",
        ),
        Binding(
            "shift+left,H",
            "surprise(-1)",
            "Surprise before",
            show=False,
            id="tokens.surprise_before",
            tooltip="The unlikely token before",
        ),
        Binding(
            "shift+right,L",
            "surprise(1)",
            "Next surprise",
            id="tokens.surprise_after",
            tooltip="The next unlikely token",
        ),
        Binding(
            "home,g",
            "move_to(0)",
            "First token",
            show=False,
            id="tokens.first",
            tooltip="To the first token",
        ),
        Binding(
            "end,G",
            "move_to(-1)",
            "Last token",
            show=False,
            id="tokens.last",
            tooltip="To the last token",
        ),
        Binding(
            "pageup",
            "page(-1)",
            "Page up",
            show=False,
            id="tokens.page_up",
            tooltip="A page of text back",
        ),
        Binding(
            "pagedown",
            "page(1)",
            "Page down",
            show=False,
            id="tokens.page_down",
            tooltip="A page of text on",
        ),
        Binding(
            "up,k",
            "choose(-1)",
            "Likelier alternative",
            show=False,
            id="tokens.likelier",
            tooltip="Choose a likelier token to put there",
        ),
        Binding(
            "down,j",
            "choose(1)",
            "Less likely alternative",
            show=False,
            id="tokens.less_likely",
            tooltip="Choose a less likely token to put there",
        ),
        Binding(
            "enter,b",
            "branch",
            "Branch",
            id="tokens.branch",
            tooltip="Keep the text before the token, put the alternative there, and go on",
        ),
        Binding(
            "escape,alt+l,q", "dismiss", "Close", id="tokens.close", tooltip="Back to the chat"
        ),
    ]
    HORIZONTAL_BREAKPOINTS = ThemedScreen.HORIZONTAL_BREAKPOINTS
    VERTICAL_BREAKPOINTS = ThemedScreen.VERTICAL_BREAKPOINTS

    def __init__(
        self,
        get_scores: Callable[[], Awaitable[TokenScores]],
        *,
        params: SamplingParams,
        vocab_size: int,
    ) -> None:
        """params: those that the next answers are drawn with."""
        super().__init__()
        self._get_scores = get_scores
        self._params = params
        self._vocab_size = vocab_size
        self._view: LensView | None = None
        self._text: TokenText | None = None
        self._message: tuple[str, str] = ("reading the answer once more", "muted")

    def compose(self) -> ComposeResult:
        with Container(id="lens"):
            yield LensCanvas(self)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._canvas = self.query_one(LensCanvas)
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self._follow_theme()
        self._score()

    def _follow_theme(self, _theme: Theme | None = None) -> None:
        self._canvas.set_palette(Palette.of(self.app))

    @work(exclusive=True)
    async def _score(self) -> None:
        try:
            scores = await self._get_scores()
        except TermgenError as error:
            self._message = (clean_line(str(error)), "bad")
        else:
            self._view = LensView(scores, self._params, self._vocab_size, self._keys())
            first = 0 if scores.surprise(0) >= 2 else scores.next_surprise(0, 1)
            self._view.move(first or 0)
        self._canvas.repaint()

    def paint(self, width: int, height: int) -> Sequence[Row]:
        view = self._view
        if view is None:
            words, role = self._message
            closes = f"{key_of(self, 'tokens.close')} closes"
            return [*wrap([(words, role)], width), (), ((closes, "muted"),)]
        return lens_rows(view, self._wrapped(view, width), width, height)

    def _keys(self) -> str:
        names = {
            "before": "",
            "after": " token  ",
            "surprise_before": " ",
            "surprise_after": " surprise  ",
            "likelier": "",
            "less_likely": " alternative  ",
            "branch": " branch  ",
            "close": " close",
        }
        return "".join(brief_key_of(self, f"tokens.{n}") + words for n, words in names.items())

    def _wrapped(self, view: LensView, width: int) -> TokenText:
        if self._text is None or self._text.width != width:
            self._text = TokenText(view.scores.pieces, width)
        return self._text

    def click(self, x: int, y: int) -> None:
        """Move to the token under the pointer."""
        view, text = self._view, self._text
        row = y - 1
        if view is None or text is None or not 0 <= row < text_height(self._canvas.size.height):
            return
        found = text.token_at(view.top + row, x)
        if found is not None:
            self._move_to(found)

    def _move_to(self, token: int) -> None:
        if self._view is not None:
            self._view.move(token)
            self._canvas.repaint()

    def action_move(self, by: int) -> None:
        if self._view is not None:
            self._move_to(self._view.cursor + by)

    def action_move_to(self, token: int) -> None:
        if self._view is not None:
            self._move_to(token % len(self._view.scores))

    def action_page(self, by: int) -> None:
        view, text = self._view, self._text
        if view is None or text is None:
            return
        rows = max(1, text_height(self._canvas.size.height) - 1)
        row = text.row_of(view.cursor) + by * rows
        self._move_to(text.first_of(max(0, min(len(text) - 1, row))))

    def action_surprise(self, by: int) -> None:
        if self._view is None:
            return
        found = self._view.scores.next_surprise(self._view.cursor, by)
        if found is None:
            self.notify("no unlikely token " + ("after" if by > 0 else "before") + " this one")
        else:
            self._move_to(found)

    def action_choose(self, by: int) -> None:
        view = self._view
        if view is not None:
            view.chosen = max(0, min(len(view.choices) - 1, view.chosen + by))
            self._canvas.repaint()

    def action_branch(self) -> None:
        view = self._view
        if view is None:
            return
        choice = view.choices[view.chosen]
        if choice.is_taken:
            self.notify("this token stands there already; ↑↓ choose another", severity="warning")
        else:
            self.dismiss((view.scores, view.cursor, choice))
