"""The model picker over the chat: a list, then the progress of fetching and starting one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option
from textual.worker import Worker

from termgen.errors import TermgenError
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.loading import POLL_S, StartupProgress, phase_row
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.sanitize import clean, clean_line
from termgen.tui.paint.spans import Row, Span, fit, row_width, wrap
from termgen.vocabulary.model_shelf import Group, ModelChoice, ModelShelf, Needs, Switch

NAME_WIDTH = 26
REPOSITORY_WIDTH = 42
QUANTIZATION_WIDTH = 9
"""The type of the weights is left out of a list narrower than `WIDE`."""
WIDE = 74
DETAIL_WIDTH = 12
"""The detail column is left out below this width."""

TITLE = "models"
HEADERS: dict[Group, str] = {
    "here": "on this machine",
    "fetch": "to fetch",
    "hub": "repositories of the hub",
}
AROUND_ROWS = 11
"""Rows beside the list: the filter, its message, the frame, and a margin."""
MAX_FILTER_CHARS = 80


def choice_row(choice: ModelChoice, width: int) -> Row:
    """The model's name, its size, type and needs, and where it is."""
    mark: Span = ("  ", "text")
    if choice.is_current:
        mark = ("● ", "accent")
    elif choice.is_best:
        mark = ("★ ", "good")
    name: Span = (clean_line(choice.shown), "text/b" if choice.is_current else "text")
    if choice.is_repository:
        words = f"cannot run: {choice.problem}" if choice.problem else choice.detail
        note: Span = (clean_line(words), "bad" if choice.problem else "muted")
        return fit((mark, *fit((name,), REPOSITORY_WIDTH), (" ", "text"), note), width)
    spans: list[Span] = [mark, *fit((name,), NAME_WIDTH)]
    size = "" if choice.size_bytes is None else bytes_words(choice.size_bytes)
    spans.append((f" {size:>8} ", "text" if choice.is_here else "muted"))
    if width >= WIDE:
        kind = clean_line(choice.quantization)
        spans += fit(((kind, "muted"),), QUANTIZATION_WIDTH)
    if choice.problem:
        spans.append((f"cannot run: {clean_line(choice.problem)}", "bad"))
        return fit(spans, width)
    spans += _needs(choice.needs)
    if width - row_width(tuple(spans)) >= DETAIL_WIDTH:
        spans = [*fit(spans, row_width(tuple(spans)) + 1), (clean_line(choice.detail), "muted")]
    return fit(spans, width)


def _needs(needs: Needs | None) -> list[Span]:
    """Memory, whether it fits, and the rate."""
    if needs is None:
        return []
    total = f"≈{bytes_words(needs.weights_bytes + needs.working_bytes)}"
    verdict: Span = ("", "muted")
    if needs.fits is not None:
        verdict = ("fits", "good") if needs.fits else ("too large", "bad")
    spans: list[Span] = [(f"{total:<10}", "muted"), (f"{verdict[0]:<9}", verdict[1])]
    if needs.tokens_per_s is not None:
        spans.append((f" {f'≤{rate_words(needs.tokens_per_s)}/s':<7}", "muted"))
    return spans


def header_row(group: Group, choices: Sequence[ModelChoice]) -> Row:
    """The line over a group: how many there are, and what those on the disk take together."""
    words = HEADERS[group]
    if group == "here":
        disk = bytes_words(sum(choice.size_bytes or 0 for choice in choices))
        words = f"{words} · {len(choices)} models, {disk}"
    return ((words, "accent"),)


def needs_words(choice: ModelChoice) -> str:
    """How much memory a model takes and why, and how fast it may be; empty where nothing is
    known."""
    if choice.problem:
        return f"cannot run: {choice.problem}"
    needs = choice.needs
    if needs is None:
        return ""
    held = f" ({needs.held_as})" if needs.held_as else ""
    parts = [f"weights {bytes_words(needs.weights_bytes)}{held}"]
    if needs.kv_bytes:
        parts.append(f"KV cache {bytes_words(needs.kv_bytes)} for {needs.context:,} tokens")
    parts.append(f"steps {bytes_words(needs.working_bytes)}")
    words = f"{' + '.join(parts)} = {bytes_words(needs.total_bytes)}"
    if needs.room_bytes is not None:
        words += f" of {bytes_words(needs.room_bytes)} free"
        if needs.main_bytes:
            words += f", {bytes_words(needs.main_bytes)} of experts in main memory"
        elif needs.fits and needs.total_bytes > needs.room_bytes:
            words += ", with a shorter context"
    if needs.tokens_per_s is not None:
        words += f" · at most {rate_words(needs.tokens_per_s)} tokens/s"
    return words + (" · ★ best for this machine" if choice.is_best else "")


def rate_words(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def bytes_words(num_bytes: int) -> str:
    """A size in the format of `termgen models`."""
    if num_bytes >= 10**9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"


def caution(choice: ModelChoice) -> str:
    """A warning to show before the model is loaded; empty where none applies."""
    parts = []
    if not choice.is_here:
        size = "" if choice.size_bytes is None else f" {bytes_words(choice.size_bytes)}"
        parts.append(f"⏎ again fetches{size}")
    if choice.needs is not None and choice.needs.fits is False:
        parts.append("it seems too large for the memory" + ("" if parts else "; ⏎ again tries"))
    return "; ".join(parts)


class ModelScreen(ModalScreen[Switch | None]):
    """Ends with how the change went, or None where there was none."""

    BINDINGS = [
        Binding(
            "ctrl+f",
            "search",
            "Search the hub",
            id="models.search",
            tooltip="Search the hub for the words typed",
        ),
        Binding(
            "delete",
            "delete",
            "Delete",
            id="models.delete",
            tooltip="Delete a model that termgen fetched; asks first",
        ),
        Binding("escape", "leave", "Close", id="models.close", tooltip="Close; stop fetching"),
    ]

    def __init__(
        self, shelf: ModelShelf, *, name: str = "", before_switch: Callable[[], None]
    ) -> None:
        """`name` is tried at once. `before_switch` is called when the engine is about to end."""
        super().__init__()
        self._shelf = shelf
        self._name = name
        self._before_switch = before_switch
        self._choices: list[ModelChoice] = []
        self._shown: list[ModelChoice | None] = []
        """Choices that contain every word of the filter, line by line; None: a group's header."""
        self._before: list[list[ModelChoice]] = []
        """Lists to go back to from what the hub has."""
        self._asked: ModelChoice | None = None
        """Chosen once, with something against it."""
        self._deleting: ModelChoice | None = None
        """Deleted when the key is pressed again."""
        self._kept: ModelChoice | None = None
        """Marked when something good was said: that stays until another one is marked."""
        self._message: tuple[str, str] = ("looking for models", "muted")
        self._progress: StartupProgress | None = None
        self._fetching: Worker[None] | None = None
        self._palette = Palette({})

    def compose(self) -> ComposeResult:
        with Vertical(id="models-box") as box:
            box.border_title = TITLE
            close = f"{brief_key_of(self, 'models.close')} close"
            if self._shelf.can_search:
                close = f"{brief_key_of(self, 'models.search')} search the hub  {close}"
            box.border_subtitle = f"type to filter  ⏎ choose  {close}"
            words = Input(
                placeholder="type to filter",
                id="models-filter",
                compact=True,
                max_length=MAX_FILTER_CHARS,
            )
            words.can_focus = False  # the keys are the list's
            yield words
            yield OptionList(id="models", markup=False)
            yield Canvas(self._paint, id="models-message")

    def on_mount(self) -> None:
        self._palette = Palette.of(self.app)
        self._canvas = self.query_one(Canvas)
        self._canvas.set_palette(self._palette)
        self._timer = self.set_interval(POLL_S, self._canvas.repaint, pause=True)
        self._look()

    @work(exclusive=True, group="look")
    async def _look(self) -> None:
        try:
            self._choices = await self._shelf.choices()
            self._say("")
        except TermgenError as error:
            self._say(str(error), "bad")
        here = next((i for i, choice in enumerate(self._choices) if choice.is_current), 0)
        self._fill(here)
        if self._name:
            try:
                found = await self._shelf.look_up(self._name)
                listed = [choice for choice in self._choices if choice.name == found.name]
                self._choose(listed[0] if listed else found)
            except TermgenError as error:
                self._say(str(error), "bad")

    def on_resize(self) -> None:
        models = self.query_one(OptionList)
        models.styles.max_height = max(3, self.size.height - AROUND_ROWS)
        if self._choices:
            marked = self._marked()
            at = self._choices.index(marked) if marked is not None else 0
            self.call_after_refresh(self._fill, at)

    def _marked(self) -> ModelChoice | None:
        at = self.query_one(OptionList).highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    def _fill(self, marked: int) -> None:
        """Show the choices that the filter leaves, `marked` being one of all."""
        models = self.query_one(OptionList)
        width = max(40, models.size.width - 2)
        wanted = self._choices[marked] if marked < len(self._choices) else None
        words = self.query_one("#models-filter", Input).value.casefold().split()
        found = [
            choice for choice in self._choices if all(word in _searched(choice) for word in words)
        ]
        models.clear_options()
        self._shown = []
        for group in HEADERS:
            lines = [choice for choice in found if choice.group == group]
            if lines:
                self._shown += [None, *lines]
                models.add_option(Option(self._text(header_row(group, lines)), disabled=True))
                models.add_options(Option(self._text(choice_row(c, width))) for c in lines)
        first = min(1, len(self._shown) - 1)
        at = self._shown.index(wanted) if wanted is not None and wanted in self._shown else first
        models.highlighted = at if self._shown else None
        models.focus()

    def on_key(self, event: events.Key) -> None:
        """Type into the filter; the list keeps the focus."""
        words = self.query_one("#models-filter", Input)
        if event.key in self.active_bindings:  # a letter, if the user's settings bind one
            return
        if event.is_printable and event.character:
            words.insert_text_at_cursor(event.character)
        elif event.key == "backspace":
            words.action_delete_left()
        elif event.key == "ctrl+u":
            words.value = ""
        else:
            return
        event.stop()

    def on_paste(self, event: events.Paste) -> None:
        self.query_one("#models-filter", Input).insert_text_at_cursor(event.text.split("\n")[0])

    @on(Input.Changed)
    def _filter(self) -> None:
        self._fill(0)
        if self._choices and self._progress is None:
            self._say("" if self._shown else self._nothing_words())

    def _nothing_words(self) -> str:
        if not self._shelf.can_search:
            return "no model has these words"
        key = brief_key_of(self, "models.search")
        return f"no model has these words; {key} searches the hub, /model NAME takes any name"

    def action_search(self) -> None:
        words = self.query_one("#models-filter", Input).value.strip()
        if self._progress is not None:
            return
        if not self._shelf.can_search:
            self._say("the list is the server's", "warn")
        elif not words:
            self._say("type words to search the hub for", "warn")
        else:
            self._say(f"searching the hub for {clean_line(words)}")
            self._ask_hub(self._shelf.search(words), "the hub has no GGUF models with these words")

    @work(exclusive=True, group="look")
    async def _ask_hub(self, answer: Awaitable[list[ModelChoice]], nothing: str) -> None:
        try:
            found = await answer
        except TermgenError as error:
            self._say(str(error), "bad")
            return
        if not found:
            self._say(nothing, "warn")
            return
        self._before.append(self._choices)
        self._list(found)

    def _list(self, choices: list[ModelChoice]) -> None:
        """Show other choices, all of them."""
        self._choices = choices
        self._asked = self._deleting = None
        with self.prevent(Input.Changed):
            self.query_one("#models-filter", Input).value = ""
        self._say("")
        best = next((i for i, choice in enumerate(choices) if choice.is_best), 0)
        self._fill(best)

    def action_delete(self) -> None:
        choice = self._marked()
        if choice is None or self._progress is not None:
            return
        name = clean_line(choice.shown)
        if choice.is_current:
            self._say(f"{name} is in use: choose another model first", "warn")
        elif not choice.is_own:
            self._say(f"{name} was not fetched by termgen, so it is not deleted here", "warn")
        elif self._deleting != choice:
            self._deleting = choice
            key = brief_key_of(self, "models.delete")
            self._say(f"{name}: {key} again deletes {bytes_words(choice.size_bytes or 0)}", "warn")
        else:
            self._deleting = None
            self._delete(choice)

    @work(exclusive=True, group="look")
    async def _delete(self, choice: ModelChoice) -> None:
        try:
            freed = await self._shelf.remove(choice.name)
            self._choices, self._before = await self._shelf.choices(), []
        except TermgenError as error:
            self._say(str(error), "bad")
            return
        self._fill(0)
        self._kept = self._marked()
        self._say(f"{clean_line(choice.shown)} was deleted: {bytes_words(freed)} freed", "good")

    def _text(self, row: Row) -> Text:
        """The text without backgrounds: the marked line has a background of its own."""
        styles = [(text, self._palette.style(role)) for text, role in row]
        return Text.assemble(
            *(
                (text, style.without_color + style.from_color(style.color))
                for text, style in styles
            ),
            no_wrap=True,
        )

    @on(OptionList.OptionHighlighted)
    def _explain(self, event: OptionList.OptionHighlighted) -> None:
        """Explain the sizes of the marked model, unless an error or a question is shown."""
        choice = self._marked()
        if choice is None or self._progress is not None:
            return
        if choice != self._deleting:
            self._deleting = None
        if self._message[1] == "good" and choice == self._kept:
            return
        if self._message[1] != "bad" and choice not in (self._asked, self._deleting):
            self._asked = None
            self._say(needs_words(choice))

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        choice = self._shown[event.option_index]
        if choice is not None:
            self._choose(choice)

    def _choose(self, choice: ModelChoice) -> None:
        if self._progress is not None:
            return
        if choice.is_current:
            self.dismiss(None)
            return
        if choice.problem:
            self._say(f"{clean_line(choice.shown)} {needs_words(choice)}", "bad")
            return
        if choice.is_repository:
            self._say(f"listing the files of {clean_line(choice.name)}")
            files = self._shelf.files(choice.name)
            self._ask_hub(files, f"{clean_line(choice.name)} has no GGUF models")
            return
        warning = caution(choice)
        if warning and self._asked != choice:
            self._asked = choice
            self._say(f"{clean_line(choice.shown)}: {warning}", "warn")
            if choice not in self._choices:
                self._choices.insert(0, choice)
            if self._marked() != choice:  # typed by its name: enter must find it
                self._fill(self._choices.index(choice))
            return
        self._fetching = self._change(choice)

    @work(exclusive=True, group="change")
    async def _change(self, choice: ModelChoice) -> None:
        progress = self._progress = StartupProgress()
        self._timer.resume()
        self.query_one(OptionList).disabled = True
        try:
            if not choice.is_here:
                await self._shelf.fetch(choice.name, progress.report)
            self._fetching = None  # from here on there is no way back
            self._before_switch()
            switch = await self._shelf.switch(choice.name, progress.report)
        except TermgenError as error:
            self._say(str(error), "bad")
        else:
            self.dismiss(switch)
        finally:
            self._rest()

    def _rest(self) -> None:
        """Choosing is possible again."""
        self._progress = self._fetching = self._asked = None
        self._timer.pause()
        if self.is_mounted:
            models = self.query_one(OptionList)
            models.disabled = False
            models.focus()
            self._canvas.repaint()

    def action_leave(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._say("fetching was stopped; the next try goes on from there if it can", "warn")
        elif self._progress is not None:
            self.notify("the model is being started")
        elif self.query_one("#models-filter", Input).value:
            self.query_one("#models-filter", Input).value = ""
        elif self._before:
            self._list(self._before.pop())
        else:
            self.dismiss(None)

    def _say(self, text: str, role: str = "muted") -> None:
        self._message = (text, role)
        self._canvas.repaint()

    def _paint(self, width: int, height: int) -> Sequence[Row]:
        if self._progress is not None:
            phases = self._progress.phases()
            rows = [phase_row(n, s, last=i == len(phases) - 1) for i, (n, s) in enumerate(phases)]
            return rows[-height:]
        text, role = self._message
        return wrap([(clean(text), role)], width)[:height]


def _searched(choice: ModelChoice) -> str:
    kind = "on disk" if choice.is_here else ""
    words = (choice.name, choice.title, choice.quantization, choice.detail, kind)
    return " ".join(words).casefold()
