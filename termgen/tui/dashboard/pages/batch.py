"""The batch of each step as a share of the token budget: prefill over decode over padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, zip_longest
from operator import attrgetter

from termgen.tui.dashboard.state.store import (
    STEP_TOKENS,
    DashboardView,
    mode_letter,
    mode_shares,
    padding_share,
    step_ms,
)
from termgen.tui.paint.formatting import count, percent, plural, took
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.series import BARS
from termgen.tui.paint.spans import Row, Span, merge
from termgen.vocabulary.events import StepRecord

AXIS = 7
"""Cells of the vertical scale on the left."""
LEGEND_NEEDS, ROOMY_LEGEND = 78, 100
_MODE = attrgetter("graph_mode")
MODE_ROLES = {"F": "mode-full", "P": "mode-piecewise", "N": "mode-none"}
MODE_NAMES = {"F": "full", "P": "pieces", "N": "none"}


def batch_panel(
    view: DashboardView,
    frame: Frame,
    glyphs: Glyphs,
    *,
    cursor: int | None = None,
    has_drafts: bool = True,
) -> list[Row]:
    """`cursor` counts steps back from the newest; None follows the newest. has_drafts: the words
    about the marked step say what drafts gave. The full height is the token budget of a step. A row
    of letters shows the CUDA graph mode of each step, on a GPU."""
    width, height = frame.inner_width, frame.inner_height
    steps = view.steps
    shown, marked = steps_in_view(steps, width - AXIS, cursor)
    title: list[Span] = [("batch", "text/b")]
    gap = "  " if frame.width >= ROOMY_LEGEND else " "
    legend: list[Span] = [
        (glyphs.prefill, "prefill"),
        (f" prefill{gap}", "muted"),
        (glyphs.decode, "decode"),
        (f" decode{gap}", "muted"),
        (glyphs.padding, "padding"),
        (" padding", "muted"),
    ]
    if frame.width < LEGEND_NEEDS:
        legend = []
    if not shown:
        words = no_step_words(view.has_run)
        return frame.draw(title, legend, [(), ((words, "muted"),)])
    step = shown[marked]
    budget = view.max_num_batched_tokens or max(1, *(sum(STEP_TOKENS(s)) for s in shown))
    total = sum(STEP_TOKENS(step))
    title += [
        (" tokens ", "muted"),
        (f"{total:,}".replace(",", " "), "text/b"),
        (f" / {budget:,}".replace(",", " "), "muted"),
        (f" · {plural(len(shown), 'step')} in {took(_lasted_ms(shown))}", "muted"),
    ]
    lines = height - (1 if view.on_cpu else 2)
    chart = _columns(shown, lines, budget, glyphs)
    body = [
        (_axis(level, lines, budget), *_right(row, width - AXIS))
        for level, row in zip(range(lines, 0, -1), chart, strict=True)
    ]
    if not view.on_cpu:
        modes = _modes(shown, None if cursor is None else marked)
        body.append((("graph".ljust(AXIS), "faint"), *_right(modes, width - AXIS)))
    elif cursor is not None and body:
        body[-1] = _marked(body[-1], width - len(shown) + marked)
    line = step_line(step, shown, width, on_cpu=view.on_cpu, has_drafts=has_drafts)
    body.append(line)
    return frame.draw(title, legend, body)


def _lasted_ms(steps: Sequence[StepRecord]) -> float:
    return max(0, steps[-1].ended_ns - steps[0].started_ns) / 1e6


def _axis(level: int, lines: int, budget: int) -> Span:
    """The scale: the budget at the top, 0 at the bottom; a quarter at half the height if a row is
    free."""
    if level == lines:
        name = count(budget)
    elif level == 1:
        name = "0"
    else:
        name = count(budget / 4) if lines % 2 and level == lines // 2 + 1 else ""
    return f"{name:>{AXIS - 2}} │" if name else " " * (AXIS - 1) + "│", "faint"


def _marked(row: Row, column: int) -> Row:
    """The row with the column of the marked step in reverse."""
    spans: list[Span] = []
    at = 0
    for text, role in row:
        inside = column - at
        if 0 <= inside < len(text):
            spans += [
                (text[:inside], role),
                (text[inside], role.partition("@")[0] + "/r" if text[inside] == " " else "text/r"),
                (text[inside + 1 :], role),
            ]
        else:
            spans.append((text, role))
        at += len(text)
    return merge(spans)


def no_step_words(has_run: bool) -> str:
    """The text shown while no step is known."""
    if has_run:
        return "no step since this screen began to listen"
    return "no step yet: the engine is waiting for its first request"


def steps_in_view(
    steps: Sequence[StepRecord], width: int, cursor: int | None
) -> tuple[list[StepRecord], int]:
    """The steps in view and the index of the marked one among them."""
    back = min(cursor or 0, max(0, len(steps) - 1))
    end = len(steps)
    if back >= width:  # scroll so that the marked step is the first in view
        end = len(steps) - (back - width + 1)
    shown = list(steps[max(0, end - width) : end])
    return shown, max(0, len(shown) - 1 - (back - (len(steps) - end)))


def _right(row: Row, width: int) -> Row:
    used = sum(len(text) for text, _ in row)
    return ((" " * (width - used), "text"), *row) if used < width else row


def column_levels(tokens: tuple[int, int, int], height: int, budget: int) -> tuple[int, int, int]:
    """Heights of decode, prefill and padding in a column, in eighths of a cell.

    Heights are square roots of the share of the budget: on a linear scale a few decodes would be a
    flat line. A part above zero gets at least one eighth; what exceeds the budget is cut off.
    """
    prefill, decode, padding = tokens
    top, upto, reached = height * 8, 0, 0
    ends = []
    for part in (decode, prefill, padding):
        reached += part
        upto = min(top, max(round(top * math.sqrt(reached / budget)), upto + (1 if part else 0)))
        ends.append(upto)
    return ends[0], ends[1], ends[2]


def _cell(levels: tuple[int, int, int], base: int, glyphs: Glyphs) -> Span:
    """One cell of a column, whose bottom is at `base`. Where two parts meet, the lower one is the
    foreground and the upper one the background; of three, the middle one is left out."""
    signs = (glyphs.decode, glyphs.prefill, glyphs.padding)
    roles = ("decode", "prefill", "padding")
    parts: list[tuple[int, int]] = []
    below = base
    for index, end in enumerate(levels):
        reach = min(end, base + 8)
        if reach > below:
            parts.append((index, reach - below))
            below = reach
    if not parts:
        return " ", "text"
    first, eighths = parts[0]
    if glyphs.is_lettered or (eighths == 8 and len(parts) == 1):
        most = max(parts, key=lambda part: part[1])[0]
        return signs[most], roles[most]
    last = parts[-1][0]
    if len(parts) == 1:
        return (BARS[eighths] if first < 2 else signs[2]), roles[first]
    if below == base + 8 and last < 2:
        return BARS[eighths], f"{roles[first]}@{roles[last]}"
    most = max(parts, key=lambda part: part[1])[0]
    return (BARS[below - base] if most < 2 else signs[2]), roles[most]


def _columns(steps: Sequence[StepRecord], height: int, budget: int, glyphs: Glyphs) -> list[Row]:
    """Draw neighbouring columns that are equal, as most are on a busy engine, only once."""
    alike = [
        (column_levels(parts, height, budget), len(list(group)))
        for parts, group in groupby(map(STEP_TOKENS, steps))
    ]
    rows: list[Row] = []
    for base in range(8 * (height - 1), -1, -8):
        spans: list[Span] = []
        for levels, num_steps in alike:
            sign, role = (" ", "text") if levels[2] <= base else _cell(levels, base, glyphs)
            spans.append((sign * num_steps, role))
        rows.append(merge(spans))
    return rows


def _modes(steps: Sequence[StepRecord], marked: int | None) -> Row:
    spans: list[Span] = []
    index = 0
    for mode, alike in groupby(map(_MODE, steps)):
        num_steps, letter = len(list(alike)), mode_letter(mode)
        role = MODE_ROLES.get(letter, "mode-none")
        if marked is not None and index <= marked < index + num_steps:
            before = marked - index
            spans += [(letter * before, role), (letter, role + "/r")]
            spans.append((letter * (num_steps - before - 1), role))
        else:
            spans.append((letter * num_steps, role))
        index += num_steps
    return merge(spans)


def step_line(
    step: StepRecord,
    steps: Sequence[StepRecord],
    width: int,
    *,
    on_cpu: bool,
    has_drafts: bool = True,
) -> Row:
    """A sentence about the marked step, and the graph modes of the steps in view."""
    parts: list[Span] = [
        ("step ", "muted"),
        (f"{step.step_id:,}".replace(",", " "), "text"),
        ("  ", "muted"),
        (f"{step.num_decode_rows} decode", "decode"),
    ]
    if step.num_prefill_rows:
        tokens = count(step.num_prefill_tokens)
        parts += [
            (" + ", "muted"),
            (f"{step.num_prefill_rows} prefill ({tokens} tok)", "prefill"),
        ]
    if step.num_padded_tokens:
        parts.append((f"  pad {step.num_padded_tokens}", "muted"))
    parts.append((f"  {took(step_ms(step))}", "latency"))
    host_us = step.schedule_us + step.apply_us
    tail: list[list[Span]] = []
    if step.queue_depth:
        pause = f" for pauses of {took(step.covered_us / 1e3)}" if step.covered_us else ""
        tail.append([(f"  queued {step.queue_depth}{pause}", "muted")])
    if not on_cpu:
        tail.append(_mode_words(steps))
    tail.append([(f"  host {took(host_us / 1000)}", "muted")])
    if not on_cpu:
        tail.append([(f"  padding {percent(padding_share(steps))}", "muted")])
    if step.graph_reason and not on_cpu:
        missed = "no graph" if step.graph_mode == "NONE" else "no full graph"
        tail.append([(f"  {missed}: {step.graph_reason}", "muted")])
    if has_drafts:
        tail[:0] = _draft_pieces(steps)
    if step.num_late_masks:
        tail.insert(0, [(f"  late masks {count(step.num_late_masks)}", "muted")])
    if step.num_late_compiles:
        tail.insert(0, [(f"  compiled while serving: {step.num_late_compiles}", "bad")])
    if step.num_corrupted:
        tail.insert(0, [(f"  logits NaN: {step.num_corrupted}", "bad")])
    used = sum(len(text) for text, _ in parts)
    for piece in tail:
        cells = sum(len(text) for text, _ in piece)
        if used + cells <= width:
            parts += piece
            used += cells
    return tuple(parts)


def _draft_pieces(steps: Sequence[StepRecord]) -> list[list[Span]]:
    """How many drafts of the steps in view stayed, what a row of them got, and a bar for each
    position; empty: there were none."""
    first, last = steps[0], steps[-1]
    drafted = last.num_draft_tokens - first.num_draft_tokens
    if drafted <= 0:
        return []
    kept = last.num_accepted_tokens - first.num_accepted_tokens
    num_rows = sum(step.num_decode_rows for step in steps[1:])
    gained = 1 + kept / max(1, num_rows)
    words = f"  drafts kept {percent(kept / drafted)}, {gained:.1f} tokens a step"
    pieces: list[list[Span]] = [[(words, "muted")]]
    if bars := position_bars(first, last):
        pieces.append([("  by position ", "muted"), (bars, "decode")])
    return pieces


def position_bars(first: StepRecord, last: StepRecord) -> str:
    """The share of the drafts at each position that stayed, in eighths: `·` for none of them, a
    blank where there were none."""
    bars = []
    ends = zip(last.drafted_per_pos, last.accepted_per_pos, strict=False)
    begins = zip(first.drafted_per_pos, first.accepted_per_pos, strict=False)
    for end, begin in zip_longest(ends, begins, fillvalue=(0, 0)):
        drafted, kept = end[0] - begin[0], end[1] - begin[1]
        share = min(1.0, kept / drafted) if drafted > 0 else 0.0
        bar = BARS[max(1, round(8 * share))] if share > 0 else "·"
        bars.append(bar if drafted > 0 else " ")
    return "".join(bars).rstrip()


def _mode_words(steps: Sequence[StepRecord]) -> list[Span]:
    """The mode letters of the steps in view, with their meanings and counts."""
    shares = mode_shares(steps)
    spans: list[Span] = []
    for mode in sorted(shares, key=lambda mode: "FPN".find(mode)):
        spans += [
            (f"  {mode}", MODE_ROLES.get(mode, "mode-none")),
            (f" {MODE_NAMES.get(mode, 'other')} {percent(shares[mode])}", "muted"),
        ]
    return spans
