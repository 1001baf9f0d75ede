"""The batch page: the step's token budget, a lane for each request, and the waiting queue."""

from __future__ import annotations

from collections.abc import Sequence

from termgen.tui.dashboard.pages.batch import batch_panel, steps_in_view
from termgen.tui.dashboard.pages.drafts import drafts_panel, drafts_rows
from termgen.tui.dashboard.state.draft_figures import draft_figures
from termgen.tui.dashboard.state.request_history import Doing, History, RequestHistory
from termgen.tui.dashboard.state.store import DashboardView, RequestRow, step_tokens
from termgen.tui.paint.formatting import age, brief_id, count
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, Span, cut, fit, merge, row_width
from termgen.vocabulary.events import StepRecord

ID_WIDTH = 18
TOKENS_WIDTH = 7
MAX_WAITING = 8
LEAST_COLUMNS, ROOMY = 4, 32
"""Rows that the steps keep beside the drafts, on a page that is not as high as this."""


def batch_page(
    view: DashboardView,
    lanes: RequestHistory,
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    boxed: bool,
    cursor: int | None = None,
    selected: str | None = None,
) -> list[Row]:
    """The panels of the batch page, all of the same steps; the last step is marked unless `cursor`
    selects another."""
    edge = 2 if boxed else 1
    waiting = [row for row in view.requests if row.state in ("waiting", "preempted")]
    budget = min(height, 1 + edge)
    columns = max(0, min(8, height // 4) + edge) if height > 12 else 0
    queue = min(len(waiting), MAX_WAITING, height // 5) + edge if height > 9 else 0
    upto = view.steps[: len(view.steps) - (cursor or 0)]
    figures = draft_figures(upto) if height > 9 else None
    drafts = drafts_rows(height) + edge if figures is not None else 0
    if drafts and columns and height < ROOMY:
        columns -= min(drafts // 2, max(0, columns - edge - LEAST_COLUMNS))
    rest = height - budget - drafts - columns - queue
    rows = budget_panel(view, Frame(width, budget, boxed), glyphs, cursor=cursor)
    if figures is not None:
        rows += drafts_panel(figures, upto, Frame(width, drafts, boxed))
    if columns:
        frame = Frame(width, columns, boxed)
        rows += batch_panel(view, frame, glyphs, cursor=cursor, has_drafts=figures is None)
    frame = Frame(width, max(0, rest), boxed)
    rows += lanes_panel(view.steps, lanes, frame, glyphs, cursor=cursor, selected=selected)
    if queue:
        rows += waiting_panel(view, waiting, Frame(width, queue, boxed))
    return rows[:height]


def budget_panel(
    view: DashboardView, frame: Frame, glyphs: Glyphs, *, cursor: int | None = None
) -> list[Row]:
    """Tokens of the marked step beside the token budget."""
    title: list[Span] = [("token budget", "text/b")]
    limit = view.max_num_batched_tokens
    if not view.steps or not limit:
        return frame.draw(title, (), [(("no step to show", "muted"),)])
    step = view.steps[-1 - min(cursor or 0, len(view.steps) - 1)]
    prefill, decode, padding = step_tokens(step)
    right: list[Span] = [
        (f"{count(decode)} decode", "decode"),
        (" + ", "muted"),
        (f"{count(prefill)} prefill", "prefill"),
        (f" of {count(limit)}", "text"),
        (f"  pad {count(padding)}", "muted"),
    ]
    width = frame.inner_width
    ends = [round(width * min(1.0, tokens / limit)) for tokens in (decode, decode + prefill)]
    ends[0] = min(width, max(ends[0], 1 if decode else 0))
    ends[1] = min(width, max(ends[1], ends[0] + (1 if prefill else 0)))
    bar = (
        (glyphs.decode * ends[0], "decode"),
        (glyphs.prefill * (ends[1] - ends[0]), "prefill"),
        ("─" * (width - ends[1]), "border"),
    )
    return frame.draw(title, right, [merge(bar)])


def lanes_panel(
    steps: Sequence[StepRecord],
    lanes: RequestHistory,
    frame: Frame,
    glyphs: Glyphs,
    *,
    cursor: int | None = None,
    selected: str | None = None,
) -> list[Row]:
    """One row a request, one column a step; scrolled so that the selected request is in view."""
    width = max(1, frame.inner_width - ID_WIDTH - TOKENS_WIDTH)
    shown, marked = steps_in_view(steps, width, cursor)
    title: list[Span] = [("requests", "text/b"), (f" · {len(shown)} steps", "muted")]
    if not shown:
        return frame.draw(title, (), [(("no step to show", "muted"),)])
    room = frame.inner_height
    present = [h for h in lanes if _was_there(h, shown[0].step_id, shown[-1].step_id)]
    present.sort(key=lambda h: (h.doing(shown[marked].step_id) is Doing.OVER, h.run_starts[0]))
    at = next((i for i, h in enumerate(present) if h.request_id == selected), 0)
    first = max(0, min(at - room + 1, len(present) - room))
    if len(present) > room:
        title[1] = (f" · {first + 1}–{first + room} of {len(present)}", "muted")
    body = [
        _lane_row(h, shown, marked, width, glyphs, is_selected=h.request_id == selected)
        for h in present[first : first + room]
    ]
    if not body:
        body = [(("no request in these steps", "muted"),)]
    return frame.draw(title, _legend(glyphs), body)


def _was_there(history: History, first_id: int, last_id: int) -> bool:
    """True if the request had a slot in one of these steps."""
    starts, kinds = history.run_starts, history.run_kinds
    if not starts or (kinds[-1] is Doing.OVER and starts[-1] <= first_id):
        return False
    begun = next((s for s, k in zip(starts, kinds, strict=True) if k is not Doing.WAITING), None)
    return begun is not None and begun <= last_id


def _lane_row(
    history: History,
    steps: Sequence[StepRecord],
    marked: int,
    width: int,
    glyphs: Glyphs,
    *,
    is_selected: bool,
) -> Row:
    signs = _signs(glyphs)
    name = cut(clean_line(brief_id(history.request_id)), ID_WIDTH - 3)
    spans: list[Span] = [
        ("▸ " if is_selected else "  ", "accent"),
        (name.ljust(ID_WIDTH - 2), "text/b" if is_selected else "text"),
        (" " * (width - len(steps)), "text"),
    ]
    for doing, num_steps in history.lane([step.step_id for step in steps]):
        sign, role = signs[doing]
        spans.append((sign * num_steps, role))
    spans.append(_tokens(history, steps[marked].step_id))
    return merge(spans)


def _tokens(history: History, step_id: int) -> Span:
    """The request's tokens in the marked step."""
    doing = history.doing(step_id)
    if doing is Doing.DECODE:
        return "+1".rjust(TOKENS_WIDTH), "decode"
    if doing is Doing.PREFILL:
        tokens = sum(chunk.num_tokens for chunk in history.chunks if chunk.step_id == step_id)
        return f"+{count(tokens)}".rjust(TOKENS_WIDTH), "prefill"
    return "·".rjust(TOKENS_WIDTH), "faint"


def _signs(glyphs: Glyphs) -> dict[Doing, Span]:
    return {
        Doing.WAITING: (" ", "text"),
        Doing.OVER: (" ", "text"),
        Doing.PREFILL: (glyphs.prefill, "prefill"),
        Doing.DECODE: (glyphs.decode, "decode"),
        Doing.PREEMPTED: ("✂", "bad"),
        Doing.BETWEEN: ("·", "muted"),
    }


def _legend(glyphs: Glyphs) -> list[Span]:
    names = (
        (Doing.PREFILL, "prefill"),
        (Doing.DECODE, "decode"),
        (Doing.PREEMPTED, "preempted"),
        (Doing.BETWEEN, "no token"),
    )
    signs = _signs(glyphs)
    spans: list[Span] = []
    for kind, name in names:
        spans += [signs[kind], (f" {name}  ", "muted")]
    return spans[:-1] + [(f" {names[-1][1]}", "muted")]


def waiting_panel(view: DashboardView, waiting: Sequence[RequestRow], frame: Frame) -> list[Row]:
    """The waiting queue in order, and the reason why its first request does not run."""
    title: list[Span] = [("waiting", "text/b"), (f" · {len(waiting)}", "muted")]
    reason = view.snapshot.waiting_reason if view.snapshot else ""
    right: list[Span] = [(reason, "warn")] if reason else []
    body: list[Row] = []
    for place, row in enumerate(waiting[: frame.inner_height]):
        preempted = row.state == "preempted"
        why = reason if place == 0 and reason else f"behind {place}" if place else ""
        left: list[Span] = [
            ("↺ " if preempted else "○ ", "warn" if preempted else "muted"),
            (cut(clean_line(brief_id(row.request_id)), 28).ljust(29), "text"),
            (f"{count(row.prompt + row.output):>6} tokens  ", "muted"),
            (f"{age(row.age_s):>6}  ", "text"),
            ("preempted, " if preempted else "", "warn"),
            (why, "muted"),
        ]
        body.append(fit(left, frame.inner_width))
    if not body:
        body = [(("no request waits", "muted"),)]
    assert all(row_width(row) <= frame.inner_width for row in body)
    return frame.draw(title, right, body)
