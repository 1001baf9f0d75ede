"""The log page: the engine's health, the cost of watching it, and the log with level and search."""

from __future__ import annotations

from termgen.tui.dashboard.pages.timeline import list_panel
from termgen.tui.dashboard.state.log import Level, LogBook, LogScroll
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.formatting import count, duration, percent, plural, took
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, Span, cut
from termgen.vocabulary.time_spread import percentile

STALL_S = 2.0
"""An engine with work that makes no progress for this long is stalled."""
LAST_STEPS = 8
CHARS_PER_CELL = 4
"""Longer lines, such as letters under stacks of combining marks, are cut before their width is
measured."""
_SIGNS = {
    Level.DEBUG: ("·", "faint"),
    Level.INFO: ("•", "good"),
    Level.WARNING: ("!", "warn"),
    Level.ERROR: ("✗", "bad"),
}


def log_page(
    view: DashboardView,
    log: LogBook,
    width: int,
    height: int,
    *,
    boxed: bool,
    trouble: str,
    observer_share: float | None,
    level: Level,
    words: str,
    scroll: LogScroll,
) -> list[Row]:
    """`trouble`: the known fault; empty while there is none."""
    edge = 2 if boxed else 1
    stalled_s = stalled_for_s(view)
    top = min(height, 2 + edge)
    rows = watch_panel(
        view, Frame(width, top, boxed), trouble=trouble, observer_share=observer_share
    )
    rest = height - top
    last = LAST_STEPS + 1 + edge
    if (trouble or stalled_s) and rest > last + edge:
        rows += list_panel(view.steps, Frame(width, last, boxed), on_cpu=view.on_cpu)
        rest -= last
    if rest > 0:
        frame = Frame(width, rest, boxed)
        rows += lines_panel(view, log, frame, level=level, words=words, scroll=scroll)
    return rows


def stalled_for_s(view: DashboardView) -> float:
    """Seconds without progress although there is work; 0 while the engine makes progress."""
    snapshot, step = view.snapshot, view.last_step
    if view.is_idle or snapshot is None or snapshot.paused:
        return 0.0
    last = max(snapshot.last_progress_ns, step.applied_ns if step else 0)
    waited = (view.now_ns - last) / 1e9
    return waited if waited >= STALL_S else 0.0


def watch_panel(
    view: DashboardView, frame: Frame, *, trouble: str, observer_share: float | None
) -> list[Row]:
    """The watchdog's verdict, and what observing costs both threads."""
    stalled_s, step = stalled_for_s(view), view.last_step
    if trouble:
        state: list[Span] = [(f"✗ {clean_line(trouble)}", "bad/b")]
    elif stalled_s:
        words = f"! no step for {duration(stalled_s)} with {view.num_running} running"
        state = [(f"{words} and {view.num_waiting} waiting", "warn/b")]
    elif view.is_idle:
        state = [("● idle", "good")]
    else:
        state = [("● at work", "good")]
    if step is not None:
        ago = duration(max(0, view.now_ns - step.applied_ns) / 1e9)
        state.append((f"  last step {step.step_id}, {ago} ago", "muted"))
    tax: list[Span] = [
        ("observer  ", "muted"),
        (percent(observer_share), "text"),
        (" of a core to draw, ", "muted"),
    ]
    recent = view.steps[-256:]
    published_us = percentile((s.publish_us for s in recent), 50)
    lasted = percentile((max(0, s.ended_ns - s.started_ns) / 1e3 for s in recent), 50)
    share = published_us / lasted if published_us is not None and lasted else None
    tax += [
        (took(published_us / 1e3 if published_us is not None else None), "text"),
        (" of the engine's time a step (", "muted"),
        (percent(share), "text"),
        (")", "muted"),
    ]
    return frame.draw([("engine", "text/b")], (), [tuple(state), tuple(tax)])


def lines_panel(
    view: DashboardView,
    log: LogBook,
    frame: Frame,
    *,
    level: Level,
    words: str,
    scroll: LogScroll,
) -> list[Row]:
    """The newest lines that match, or those scrolled to, with their age."""
    found = log.matching(level, words, view.now_ns)
    end = scroll.end(found, frame.inner_height)
    title: list[Span] = [("log", "text/b"), (f" · {level.name.lower()} and above", "muted")]
    if words:
        title.append((f" · “{clean_line(words)}”", "accent"))
    right: list[Span] = [(plural(len(found), "line"), "muted")]
    if end < len(found):
        right.insert(0, (f"↓ {count(len(found) - end)} newer of ", "accent"))
    body: list[Row] = []
    shown = found[max(0, end - frame.inner_height) : end]
    for line in shown:
        sign, role = _SIGNS[line.level]
        ago = duration(max(0, view.now_ns - line.time_ns) / 1e9)
        text = _shown(line.text, max(1, frame.inner_width - 11))
        quiet = line.level is Level.DEBUG
        body.append(
            ((f"{ago:>8} ", "muted"), (f"{sign} ", role), (text, "muted" if quiet else "text"))
        )
    if not body:
        body = [(("nothing matches" if words else "nothing yet", "muted"),)]
    return frame.draw(title, right, body)


def _shown(text: str, width: int) -> str:
    """A long line is cut first, so that only its visible part is cleaned and measured."""
    room = CHARS_PER_CELL * width
    return cut(clean_line(text if len(text) <= room else text[:room] + "…"), width)
