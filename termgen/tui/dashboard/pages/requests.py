"""The request table: running, waiting and recently finished requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from termgen.tui.dashboard.pages.kv_map import missing_words, off_words
from termgen.tui.dashboard.state.store import DashboardView, RequestRow
from termgen.tui.paint.formatting import age, brief_id, count, rate
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import COLOUR_GLYPHS, Glyphs
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, Span, cut, merge, row_width

_STATES = {
    "decode": ("●", "decode"),
    "unread": ("●", "warn"),
    "prefill": ("▶", "prefill"),
    "waiting": ("○", "muted"),
    "preempted": ("↺", "warn"),
    "stop": ("✓", "good"),
    "length": ("✓", "good"),
    "abort": ("–", "muted"),
    "error": ("✗", "bad"),
}
BAR_WIDTH = 16
MIN_ID_WIDTH, MAX_ID_WIDTH = 19, 44
MIN_PARAMS = 8


@dataclass(frozen=True, slots=True)
class Column:
    """`width` includes two leading blanks; the column shows from a table width of `needs`."""

    title: str
    width: int
    needs: int = 0


_COLUMNS = (
    Column("state", 13),
    Column("prompt", 8),
    Column("cached", 8, needs=70),
    Column("output", 8),
    Column("step", 7),
    Column("tok/s", 8, needs=90),
    Column("blocks", 8, needs=64),
    Column("pre", 5, needs=110),
    Column("age", 11),
)


def requests_panel(
    view: DashboardView,
    frame: Frame,
    glyphs: Glyphs = COLOUR_GLYPHS,
    *,
    selected: str | None = None,
    first: int = 0,
    has_chat: bool = True,
) -> list[Row]:
    """`first` is the row the table is scrolled to. `has_chat`: this program also sends requests."""
    title: list[Span] = [
        ("requests", "text/b"),
        (f" · {view.num_running} running  {view.num_waiting} waiting", "muted"),
    ]
    title += off_words(view)
    right: list[Span] = [(f"{count(view.num_finished)} finished", "muted")]
    if view.is_past and view.snapshot is None:
        return frame.draw(title, (), [(), ((missing_words(view), "muted"),)])
    if not view.requests:
        return frame.draw(title, right, _empty(view, frame.inner_width, has_chat=has_chat))
    width = frame.inner_width
    columns = [c for c in _COLUMNS if width >= c.needs]
    id_width = _id_width(columns, width)
    peak = max((row.prompt + row.output for row in view.requests if not row.finished), default=1)
    body: list[Row] = [_header(columns, id_width, width)]
    has_bar = _has_bar(columns, id_width, width)
    room = min(40, width - 5 - id_width - _fixed(columns))
    for row in _rows_in_view(view, frame, first):
        marked = row.request_id == selected
        spans = _row(row, columns, id_width, marked=marked)
        if has_bar and not row.finished:
            spans = (*spans, ("   ", "text"), *_lengths(row, room, peak, glyphs))
        body.append(spans)
    return frame.draw(title, right, body)


def _rows_in_view(view: DashboardView, frame: Frame, first: int) -> Sequence[RequestRow]:
    shown = max(0, frame.inner_height - 1)
    first = max(0, min(first, len(view.requests) - shown))
    return view.requests[first : first + shown]


def row_at(y: int, view: DashboardView, frame: Frame, *, first: int = 0) -> RequestRow | None:
    """The request in a line of the panel, whose frame and header precede the first request."""
    rows = _rows_in_view(view, frame, first)
    return rows[y - 2] if 0 <= y - 2 < len(rows) else None


def _empty(view: DashboardView, width: int, *, has_chat: bool) -> list[Row]:
    text = "no requests yet: send one to /v1/chat/completions"
    if view.has_run or view.num_finished:
        text = "no request since this screen began to listen"
    elif has_chat:
        more = ", or send a request to /v1/chat/completions" if width >= 90 else ""
        text = f"no requests yet: ask something in the chat (1){more}"
    return [(), ((cut(text, width), "muted"),)]


def _fixed(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns)


def _id_width(columns: Sequence[Column], width: int) -> int:
    spare = width - 2 - _fixed(columns)
    return max(6, min(MAX_ID_WIDTH, spare, max(MIN_ID_WIDTH, (spare - 3) * 2 // 3)))


def _has_bar(columns: Sequence[Column], id_width: int, width: int) -> bool:
    return width - 2 - id_width - _fixed(columns) >= BAR_WIDTH + 3


def _header(columns: Sequence[Column], id_width: int, width: int) -> Row:
    spans: list[Span] = [("  " + "request".ljust(id_width), "muted")]
    for column in columns:
        if column.title == "state":
            spans.append(("  " + column.title.ljust(column.width - 2), "muted"))
        else:
            spans.append((column.title.rjust(column.width), "muted"))
    if _has_bar(columns, id_width, width):
        spans.append(("   tokens", "muted"))
    return tuple(spans)


def _row(
    row: RequestRow,
    columns: Sequence[Column],
    id_width: int,
    *,
    marked: bool,
) -> Row:
    sign, role = _STATES.get(row.state, ("·", "muted"))
    quiet = row.finished or row.state == "waiting"
    text = "muted" if quiet else "text"
    name = cut(clean_line(brief_id(row.request_id)), id_width)
    pointer = ("▸ ", "accent") if marked else ("  ", "text")
    spans: list[Span] = [pointer, (name, text + "/b" if marked else text)]
    spans.append((_params(row, id_width - row_width((spans[1],))), "muted"))
    cells = {
        "prompt": count(row.prompt),
        "cached": count(row.cached) if row.cached else "·",
        "output": count(row.output) if row.output else "·",
        "step": f"+{count(row.step_tokens)}" if row.step_tokens else "·",
        "tok/s": rate(row.rate) if row.rate is not None else "·",
        "blocks": count(row.blocks) if row.blocks else "·",
        "pre": count(row.preemptions) if row.preemptions else "·",
        "age": age(row.age_s) + (" ago" if row.finished else ""),
    }
    for column in columns:
        if column.title == "state":
            state = f"  {sign} {row.state}"
            spans.append((cut(state, column.width).ljust(column.width), role))
            continue
        value = cells[column.title]
        cell_role = "faint" if value == "·" else text
        if column.title == "step" and row.step_tokens:
            cell_role = "prefill" if row.state == "prefill" else "decode"
        spans.append((value.rjust(column.width), cell_role))
    return tuple(spans)


def _params(row: RequestRow, room: int) -> str:
    """The parameters that tell the request apart, as far as the column has room."""
    words = cut(clean_line(row.params), room - 2) if row.params and room > MIN_PARAMS else ""
    return f"  {words}".ljust(room) if words else " " * room


def _lengths(row: RequestRow, width: int, peak: int, glyphs: Glyphs) -> Row:
    """Cached prompt, computed prompt, output and remaining prompt, to one scale.

    `peak` is the length in tokens that fills the bar.
    """
    total = max(row.prompt + row.output, 1)
    cells = max(1, round(width * total / max(peak, 1)))
    output = min(row.output, row.computed)
    prompt_done = max(0, min(row.computed, row.prompt))
    cached = min(row.cached, prompt_done)
    ends = (cached, prompt_done, prompt_done + output, total)
    signs = (*glyphs.lengths, "·")
    roles = zip(signs, ("kv-cached", "prefill", "decode", "faint"), strict=True)
    spans: list[Span] = []
    used = 0
    for end, (sign, role) in zip(ends, roles, strict=True):
        stop = round(cells * end / total)
        spans.append((sign * (stop - used), role))
        used = max(used, stop)
    return merge(spans)
