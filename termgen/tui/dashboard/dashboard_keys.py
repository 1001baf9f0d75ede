"""Pages and keys of the dashboard: bindings, tab line and palette entries come from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from textual.binding import Binding

from termgen.tui.keys.keymap import Keymap, key_names
from termgen.tui.paint.spans import Row, Span

_FOOTERS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "overview": (
        ("step_back step_on", "Step", "step_back"),
        ("select_up select_down", "Mark", "select_up"),
        ("window", "Span", "window"),
    ),
    "timeline": (
        ("step_back step_on", "Step", "step_back"),
        ("zoom_in zoom_out", "Zoom", "zoom_in"),
    ),
    "batch": (
        ("step_back step_on", "Step", "step_back"),
        ("select_up select_down", "Request", "select_up"),
    ),
    "blocks": (
        ("step_back step_on select_up select_down", "Move", "step_back"),
        ("zoom_in zoom_out", "Zoom", "zoom_in"),
    ),
    "request": (("select_up select_down", "Request", "select_up"),),
    "graphs": (),
    "log": (
        ("select_up select_down", "Scroll", "select_up"),
        ("log_level", "Level", "log_level"),
        ("search", "Find", "search"),
    ),
}
_OF_REPLAYS = (
    ("seek_back seek_on", "10 s", "seek_back"),
    ("slower faster", "Speed", "slower"),
)


class Page(NamedTuple):
    name: str
    key: str
    help: str
    on_cpu: str = ""
    """The page's name without a GPU, if that differs."""

    def title(self, *, on_cpu: bool) -> str:
        return self.on_cpu if on_cpu and self.on_cpu else self.name


PAGES = (
    Page("overview", "o", "Throughput, batch, blocks and requests at a glance"),
    Page("timeline", "t", "What host and device did when, step by step"),
    Page("batch", "b", "Who is in each step, the token budget, and who waits and why"),
    Page("blocks", "k", "Every KV block: its state, its owner, and a cursor to ask with"),
    Page("request", "i", "The marked request from its arrival to its end"),
    Page(
        "graphs",
        "g",
        "CUDA graphs (or the processor, without a GPU), memory and the start",
        on_cpu="processor",
    ),
    Page(
        "log", "l", "Is the engine alive, what does watching cost, and its log (↑ and ↓ scroll it)"
    ),
)

KEYS = [
    Binding("space", "pause", "Pause", id="dashboard.pause", tooltip="Freeze or go on live"),
    Binding(
        "left",
        "step(1)",
        "Step",
        id="dashboard.step_back",
        key_display="←→",
        tooltip="Freeze and look at the step before (shift: 10 steps)",
    ),
    Binding(
        "right", "step(-1)", "Step on", show=False, id="dashboard.step_on", tooltip="Next step"
    ),
    Binding(
        "shift+left",
        "step(10)",
        "10 steps back",
        show=False,
        id="dashboard.step_back_10",
        tooltip="Freeze and look at the tenth step before",
    ),
    Binding(
        "shift+right",
        "step(-10)",
        "10 steps on",
        show=False,
        id="dashboard.step_on_10",
        tooltip="The tenth step after",
    ),
    Binding(
        "home",
        "step(1000000)",
        "Oldest step",
        show=False,
        id="dashboard.step_first",
        tooltip="Freeze at the oldest step kept",
    ),
    Binding(
        "end",
        "step(-1000000)",
        "Newest step",
        show=False,
        id="dashboard.step_last",
        tooltip="Freeze at the newest step",
    ),
    Binding(
        "up",
        "select(-1)",
        "Request",
        id="dashboard.select_up",
        key_display="↑↓",
        tooltip="Mark a request: its blocks light up in the map",
    ),
    Binding(
        "down",
        "select(1)",
        "Next request",
        show=False,
        id="dashboard.select_down",
        tooltip="Mark the next request",
    ),
    Binding(
        "pageup",
        "select(-10)",
        "10 requests up",
        show=False,
        id="dashboard.select_up_10",
        tooltip="Mark the tenth request before",
    ),
    Binding(
        "pagedown",
        "select(10)",
        "10 requests down",
        show=False,
        id="dashboard.select_down_10",
        tooltip="Mark the tenth request after",
    ),
    *(
        Binding(
            "i,enter" if page.name == "request" else page.key,
            f"page('{page.name}')",
            page.name.capitalize(),
            show=False,
            id=f"dashboard.{page.name}",
            tooltip=page.help,
        )
        for page in PAGES
    ),
    Binding(
        "w",
        "window",
        "Time window",
        show=False,
        id="dashboard.window",
        tooltip="How far back the series go: what fits, 30 s to 120 s, 10 min, 1 h",
    ),
    Binding(
        "x",
        "export_trace",
        "Trace",
        show=False,
        id="dashboard.trace",
        tooltip="Write what is shown, or the last 8,192 events, as a trace for Perfetto",
    ),
    Binding(
        "v",
        "log_level",
        "Log level",
        show=False,
        id="dashboard.log_level",
        tooltip="Show more or fewer lines of the log: debug, info, warning, error",
    ),
    Binding(
        "slash",
        "search",
        "Search the log",
        show=False,
        id="dashboard.search",
        tooltip="Show the lines of the log with these words (enter keeps, esc ends it)",
    ),
    Binding(
        "plus,equals_sign",
        "zoom(1)",
        "Zoom in",
        show=False,
        id="dashboard.zoom_in",
        tooltip="Fewer steps in the timeline, fewer blocks in a cell",
    ),
    Binding(
        "minus",
        "zoom(-1)",
        "Zoom out",
        show=False,
        id="dashboard.zoom_out",
        tooltip="More steps in the timeline, more blocks in a cell",
    ),
    Binding(
        "left_square_bracket",
        "seek(-10)",
        "10 s back",
        show=False,
        id="dashboard.seek_back",
        tooltip="Turn a recording ten seconds back",
    ),
    Binding(
        "right_square_bracket",
        "seek(10)",
        "10 s on",
        show=False,
        id="dashboard.seek_on",
        tooltip="Turn a recording ten seconds on",
    ),
    Binding(
        "less_than_sign",
        "speed(-1)",
        "Slower",
        show=False,
        id="dashboard.slower",
        tooltip="Play a recording at half the speed",
    ),
    Binding(
        "greater_than_sign",
        "speed(1)",
        "Faster",
        show=False,
        id="dashboard.faster",
        tooltip="Play a recording at twice the speed",
    ),
    Binding(
        "escape",
        "live",
        "Live",
        show=False,
        id="dashboard.live",
        tooltip="Unmark and follow the engine again",
    ),
    Binding(
        "q",
        "leave",
        "Quit",
        show=False,
        id="dashboard.leave",
        tooltip="Leave a dashboard that has no engine of its own",
    ),
    Binding("f2,1", "app.show('chat')", "Chat", id="dashboard.chat", tooltip="Go to the chat"),
]


def footer_keys(
    page: str, first_keys: Mapping[str, str], *, is_replay: bool, leaves: bool
) -> dict[str, tuple[str, str]]:
    """The footer of a page: by the name of a binding, the keys that stand for it and its
    neighbours, and their effect there. first_keys: the actions' present keys. leaves: q quits."""
    groups = _FOOTERS[page]
    if is_replay:  # 80 columns have room for one group beside these
        groups = (*groups[:1], *_OF_REPLAYS)
    shown = {"dashboard.pause": (first_keys["dashboard.pause"], "Pause")}
    for names, words, shown_as in groups:
        keys = "".join(first_keys[f"dashboard.{name}"] for name in names.split())
        shown[f"dashboard.{shown_as}"] = (keys, words)
    if leaves:
        shown["dashboard.leave"] = (first_keys["dashboard.leave"], "Quit")
    return shown


def pages_with(keymap: Keymap) -> tuple[Page, ...]:
    """The pages with the first of the keys they have now."""
    keys = {b.id: key_names(b).split()[0] for b in keymap.applied(KEYS)}
    return tuple(page._replace(key=keys[f"dashboard.{page.name}"]) for page in PAGES)


def tab_line(shown: str, pages: Sequence[Page] = PAGES, *, on_cpu: bool = False) -> Row:
    """Every page with its key; the one that is shown stands out."""
    spans: list[Span] = [(" ", "text")]
    for page in pages:
        chosen = page.name == shown
        spans.append((f" {page.key} ", "accent"))
        spans.append((f"{page.title(on_cpu=on_cpu)} ", "text/br" if chosen else "muted"))
    return tuple(spans)


def page_at(x: int, pages: Sequence[Page] = PAGES, *, on_cpu: bool = False) -> str | None:
    """The page whose tab covers a cell of the tab line."""
    first = 1
    for page in pages:
        width = len(page.key) + 2 + len(page.title(on_cpu=on_cpu)) + 1
        if first <= x < first + width:
            return page.name
        first += width
    return None
