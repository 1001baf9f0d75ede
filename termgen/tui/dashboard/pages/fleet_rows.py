"""The list of several servers: a line for each, with the figures that tell how it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from termgen.client import ModelInfo
from termgen.tui.dashboard.state.limits import limit_of
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.formatting import count, model_words, percent, rate, took
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, Span, cut, fit

WIDE = 100
HEADS = (("running", 9), ("wait", 6), ("out/s", 7), ("in/s", 7), ("TTFT p95", 9), ("KV", 5))
"""Columns of numbers and their widths."""
ALERT_OF = {"wait": "waiting", "TTFT p95": "ttft_p95_ms", "KV": "kv_use"}
LIMIT_WIDTH = 11
MOST_NAME = 48


@dataclass(frozen=True, slots=True)
class ServerLine:
    """What is known of one server."""

    url: str
    model: ModelInfo | None = None
    view: DashboardView | None = None
    trouble: str = ""
    """Why nothing comes now, in a few words; empty while all is well."""


def fleet_rows(
    lines: Sequence[ServerLine], width: int, height: int, *, chosen: int, first: int
) -> list[Row]:
    """The heads and the lines from `first` on; the chosen one is marked."""
    numbers = sum(size for _, size in HEADS) + LIMIT_WIDTH
    name = max(10, min(MOST_NAME, width - numbers - 4))
    heads = "".join(head.rjust(size) for head, size in HEADS)
    rows: list[Row] = [(("    " + "server".ljust(name) + heads + "  limit", "muted"),)]
    for index, line in list(enumerate(lines))[first : first + max(0, height - 1)]:
        rows.append(fit(_line(line, name, width, is_chosen=index == chosen), width))
    return rows


def _line(line: ServerLine, name: int, width: int, *, is_chosen: bool) -> list[Span]:
    role = "text/b" if is_chosen else "text"
    url = clean_line(line.url.removeprefix("http://"))
    words = f"{url}  {clean_line(model_words(line.model))}" if line.model is not None else url
    spans: list[Span] = [("▸ " if is_chosen else "  ", "accent")]
    spans.append(("✗ ", "bad") if line.trouble else ("● ", "good"))
    spans.append((cut(words, name - 1).ljust(name), role))
    if line.trouble or line.view is None:
        trouble = clean_line(line.trouble or "connecting")
        return [*spans, (" " + cut(trouble, max(1, width - name - 5)), "bad")]
    view = line.view
    seats = f"/{count(view.max_num_seqs)}" if view.max_num_seqs else ""
    cells = (
        f"{view.num_running}{seats}",
        count(view.num_waiting),
        rate(view.decode_rate),
        rate(view.prefill_rate),
        took(view.ttft.p95),
        percent(view.kv_usage),
    )
    beyond = view.beyond
    for cell, (head, size) in zip(cells, HEADS, strict=True):
        is_beyond = ALERT_OF.get(head) in beyond
        words, how = (f"!{cell}", "bad/b") if is_beyond else (cell, role)
        spans.append((words.rjust(size), how))
    limit = limit_of(view, line.model.memory if line.model is not None else None)
    if view.snapshot is not None and view.snapshot.paused:
        words = "asleep" if view.snapshot.sleep_level else "paused"
        return [*spans, (f"  {words}", "warn/b")]
    if limit is None:
        return spans
    return [*spans, (f"  {limit.brief if width >= WIDE else limit.cause}", "text")]
