"""Batch composition: one column per step, prefill over decode, padding on top, and its mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from termgen.engine.events import StepRecord
from termgen.tui.formatting import count, milliseconds, percent
from termgen.tui.palette import Glyphs
from termgen.tui.render.frame import Frame
from termgen.tui.spans import Row, Span, merge
from termgen.tui.store import STEP_TOKENS, mode_letter, mode_shares, padding_share, step_ms

MIN_PEAK_TOKENS = 16
_MODE = attrgetter("graph_mode")
MODE_ROLES = {"F": "mode-full", "P": "mode-piecewise", "N": "mode-none"}


def batch_panel(
    steps: Sequence[StepRecord],
    frame: Frame,
    glyphs: Glyphs,
    *,
    cursor: int | None = None,
    has_run: bool = False,
) -> list[Row]:
    """`cursor` counts steps back from the newest; None follows the newest. `has_run`: there were
    steps before those that are known."""
    width, height = frame.inner_width, frame.inner_height
    shown, marked = steps_in_view(steps, width, cursor)
    step = shown[marked] if shown else None
    title: list[Span] = [
        ("batch", "text/b"),
        (f" · {len(shown)} steps" if shown else "", "muted"),
    ]
    legend: list[Span] = [
        (glyphs.prefill, "prefill"),
        (" prefill  ", "muted"),
        (glyphs.decode, "decode"),
        (" decode  ", "muted"),
        (glyphs.padding, "padding"),
        (" padding", "muted"),
    ]
    if frame.width < 60:
        legend = []
    if not shown:
        return frame.draw(title, legend, [(), ((no_step_words(has_run), "muted"),)])
    chart = _columns(shown, height - 2, glyphs)
    body = [_right(row, width) for row in chart]
    body.append(_right(_modes(shown, None if cursor is None else marked), width))
    body.append(step_line(step, shown, width))
    return frame.draw(title, legend, body)


def no_step_words(has_run: bool) -> str:
    """In place of steps, where none is known."""
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


def column_cells(tokens: tuple[int, int, int], height: int, peak: int) -> tuple[int, int, int]:
    """Cells of prefill, decode and padding for one step.

    The whole column's height is the log of its tokens; the parts share it, each with at least one
    cell while there is room: decode first, then prefill, then padding.
    """
    prefill, decode, padding = tokens
    total = sum(tokens)
    if total <= 0 or height <= 0:
        return 0, 0, 0
    wanted = round(height * math.log2(1 + total) / math.log2(1 + peak))
    parts = (decode, prefill, padding)
    cells = min(height, max(wanted, sum(1 for part in parts if part)))
    shares = [0, 0, 0]
    for index, part in enumerate(parts):
        if part and sum(shares) < cells:
            shares[index] = 1
    free = cells - sum(shares)
    extra = [free * part // total for part in parts]
    extra[parts.index(max(parts))] += free - sum(extra)
    return shares[1] + extra[1], shares[0] + extra[0], shares[2] + extra[2]


def _columns(steps: Sequence[StepRecord], height: int, glyphs: Glyphs) -> list[Row]:
    """Neighbours that are alike, as most steps of a busy engine are, are drawn at once."""
    alike = [(parts, len(list(group))) for parts, group in groupby(map(STEP_TOKENS, steps))]
    peak = max(MIN_PEAK_TOKENS, *[sum(parts) for parts, _ in alike])
    columns = [(column_cells(parts, height, peak), number) for parts, number in alike]
    kinds = {
        "prefill": (glyphs.prefill, "prefill"),
        "decode": (glyphs.decode, "decode"),
        "padding": (glyphs.padding, "padding"),
        "": (" ", "text"),
    }
    rows: list[Row] = []
    for level in range(height, 0, -1):
        spans: list[Span] = []
        for (prefill, decode, padding), num_steps in columns:
            if level <= decode:
                kind = "decode"
            elif level <= decode + prefill:
                kind = "prefill"
            elif level <= decode + prefill + padding:
                kind = "padding"
            else:
                kind = ""
            sign, role = kinds[kind]
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


def step_line(step: StepRecord | None, steps: Sequence[StepRecord], width: int) -> Row:
    """What the marked step did, in words, and how the steps in view ran."""
    if step is None:
        return ()
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
    parts.append((f"  {milliseconds(step_ms(step))} ms", "latency"))
    host_us = step.schedule_us + step.apply_us
    tail: list[list[Span]] = [
        [(f"  host {milliseconds(host_us / 1000)} ms", "muted")],
        *([[(f"  queued {step.queue_depth}", "muted")]] if step.queue_depth else []),
        [(f"  {_mode_text(steps)}", "muted")],
        [(f"  pad {percent(padding_share(steps))}", "muted")],
    ]
    if step.graph_reason:
        missed = "no graph" if step.graph_mode == "NONE" else "no full graph"
        tail.append([(f"  {missed}: {step.graph_reason}", "muted")])
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


def _mode_text(steps: Sequence[StepRecord]) -> str:
    shares = mode_shares(steps)
    order = sorted(shares, key=lambda mode: "FPN".find(mode))
    return " ".join(f"{percent(shares[mode])} {mode}" for mode in order)
