"""One request from its arrival to its end: queue, cache, chunks, first token, gaps, preemptions.

Built from events alone; this module never sees the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from termgen.tui.dashboard.state.request_history import Doing, History, token_times
from termgen.tui.paint.formatting import count, duration, percent, plural, rate, took
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.series import bar, braille, labelled
from termgen.tui.paint.spans import Row, Span, merge, spread, wrap
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.time_spread import percentiles

LABEL = 12
KNOWN_NS = 1
"""Times up to this one predate the first event that was received."""
STATES = {
    Doing.WAITING: ("waiting", "muted"),
    Doing.PREFILL: ("prefill", "prefill"),
    Doing.DECODE: ("decode", "decode"),
    Doing.PREEMPTED: ("preempted", "warn"),
    Doing.BETWEEN: ("between steps", "muted"),
}


def inspector_page(
    history: History | None,
    steps: Sequence[StepRecord],
    now_ns: int,
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    boxed: bool,
) -> list[Row]:
    """The facts above the gaps between tokens, which fill the remaining rows."""
    if history is None:
        text = "no request yet: ask something, then choose one with ↑ and ↓"
        return Frame(width, height, boxed).draw(
            [("request", "text/b")], (), [(), ((text, "muted"),)]
        )
    edge = 2 if boxed else 1
    times = token_times(history, steps)
    facts = _facts(history, times, now_ns, width - 4, glyphs)
    top = min(height, len(facts) + edge)
    rows = Frame(width, top, boxed).draw(*_title(history, now_ns), facts)
    if height - top > edge + 1:
        rows += gaps_panel(times, Frame(width, height - top, boxed))
    return rows


def _title(history: History, now_ns: int) -> tuple[list[Span], list[Span]]:
    left: list[Span] = [("request ", "muted"), (clean_line(history.request_id), "text/b")]
    if history.finished_ns:
        state, role = f"finished: {history.reason or 'done'}", "good"
    else:
        state, role = STATES.get(history.state, ("over", "muted"))
    right: list[Span] = [(state, role)]
    if history.queued_ns > KNOWN_NS:
        alive = (history.finished_ns or now_ns) - history.queued_ns
        right.append((f" · {duration(max(0, alive) / 1e9)}", "muted"))
    return left, right


def _facts(
    history: History, times: Sequence[int], now_ns: int, width: int, glyphs: Glyphs
) -> list[Row]:
    rows: list[Row] = []
    if history.queued_ns > KNOWN_NS:
        rows += [_life(history, now_ns, width, glyphs), ()]
    rows += [
        _fact("queue", _queue_words(history)),
        *_cache_rows(history, width),
        *_wrapped("prefill", _prefill_words(history), width),
        _fact("first token", _first_words(history)),
        _fact("decode", _decode_words(history, times, now_ns)),
        *_draft_rows(history),
        *_wrapped("preempted", _preempt_words(history), width),
        _fact("finish", f"{history.reason}" if history.finished_ns else "not yet"),
        *_wrapped("parameters", history.params or _no_params_words(history), width),
    ]
    return rows + _latency_rows(history, now_ns, width)


def _fact(name: str, words: str) -> Row:
    return (name.ljust(LABEL), "muted"), (words, "text")


def _wrapped(name: str, words: str, width: int) -> list[Row]:
    lines = wrap([(words, "text")], max(10, width - LABEL))
    first = ((name.ljust(LABEL), "muted"), *lines[0])
    return [first, *(((" " * LABEL, "text"), *line) for line in lines[1:3])]


def _queue_words(history: History) -> str:
    if history.queued_ns <= KNOWN_NS:
        return "it was there before this screen"
    if not history.scheduled_ns:
        return "not seen" if history.first_token_ns else "not scheduled yet"
    return duration((history.scheduled_ns - history.queued_ns) / 1e9)


def _scheduled_ns(history: History) -> int:
    """When the request got its slot, or its first token if that event is missing; 0 before."""
    return history.scheduled_ns or history.first_token_ns


def _cache_rows(history: History, width: int) -> list[Row]:
    """How much of the prompt was found; by kind of layers if there are several; why no more."""
    cached, prompt = history.num_cached_tokens, history.num_prompt_tokens
    words = f"{count(cached)} of {count(prompt)} prompt tokens found"
    parts, _, reason = clean_line(history.found).rpartition("; ")
    rows = _wrapped("cache", f"{words} · {parts}" if parts else words, width)
    return rows + _wrapped("why no more", reason, width) if reason else rows


def _prefill_words(history: History) -> str:
    chunks = history.chunks
    if not chunks:
        return "no chunk seen"
    took_ms = sum(max(0, chunk.ended_ns - chunk.started_ns) for chunk in chunks) / 1e6
    sizes = " + ".join(str(chunk.num_tokens) for chunk in chunks[:12])
    more = f" + {len(chunks) - 12} more" if len(chunks) > 12 else ""
    span = f"step {chunks[0].step_id}"
    if len(chunks) > 1:
        span = f"steps {chunks[0].step_id} to {chunks[-1].step_id}"
    return f"{sizes}{more} tokens in {plural(len(chunks), 'chunk')}, {span}, {took(took_ms)}"


def _no_params_words(history: History) -> str:
    return "the defaults" if history.queued_ns > KNOWN_NS else "sent before this screen opened"


def _first_words(history: History) -> str:
    if history.first_token_ns <= KNOWN_NS:
        return "not yet" if not history.first_token_ns else "before this screen"
    if history.queued_ns <= KNOWN_NS:
        return "out"
    return f"{duration((history.first_token_ns - history.queued_ns) / 1e9)} after arrival"


def _decode_words(history: History, times: Sequence[int], now_ns: int) -> str:
    tokens = history.num_output_tokens if history.finished_ns else len(times)
    words = plural(tokens, "token")
    if history.first_token_ns > KNOWN_NS and tokens > 1:
        seconds = ((history.finished_ns or now_ns) - history.first_token_ns) / 1e9
        words += f" · {rate((tokens - 1) / seconds)} tok/s" if seconds > 0 else ""
    gaps = gaps_ms(times)
    if gaps:
        p50, p99 = percentiles(gaps, 50, 99)
        words += f" · gap p50 {took(p50)}, p99 {took(p99)}, longest {took(max(gaps))}"
    return words


def _draft_rows(history: History) -> list[Row]:
    """How many of its drafts stayed, and what a step gave it; nothing where it had none."""
    drafted, kept = history.num_draft_tokens, history.num_accepted_tokens
    if not drafted:
        return []
    words = f"{count(kept)} of {count(drafted)} kept, {percent(kept / drafted)}"
    num_steps = history.num_output_tokens - kept  # each gave one token more than drafts
    if num_steps > 0:
        words += f" · {history.num_output_tokens / num_steps:.1f} tokens a step"
    return [_fact("drafts", words)]


def _preempt_words(history: History) -> str:
    if not history.preemptions:
        return "never"
    reasons = ", ".join(dict.fromkeys(clean_line(why) for _, why in history.preemptions if why))
    return f"{plural(len(history.preemptions), 'time')}{': ' if reasons else ''}{reasons}"


def _life(history: History, now_ns: int, width: int, glyphs: Glyphs) -> Row:
    """The request's life on one time scale: queued, chunks, decode, and preemptions."""
    begin, end = history.queued_ns, max(history.finished_ns or now_ns, history.queued_ns + 1)
    cells = max(1, width)

    def at(time_ns: int) -> int:
        return min(cells, max(0, int((time_ns - begin) * cells / (end - begin))))

    line: list[Span] = [("·", "muted")] * cells
    _paint(line, 0, at(_scheduled_ns(history) or end), ("q", "faint"))
    if history.first_token_ns > KNOWN_NS:
        _paint(line, at(history.first_token_ns), cells, (glyphs.decode, "decode"))
    for chunk in history.chunks:
        _paint(line, at(chunk.started_ns), at(chunk.ended_ns), (glyphs.prefill, "prefill"))
    for time_ns, _ in history.preemptions:
        _paint(line, at(time_ns), at(time_ns), ("✂", "bad"))
    return merge(line)


def _paint(line: list[Span], first: int, last: int, sign: Span) -> None:
    for cell in range(first, min(len(line), max(last, first + 1))):
        line[cell] = sign


def _latency_rows(history: History, now_ns: int, width: int) -> list[Row]:
    """The phases of the request's time, as shares of the whole."""
    if history.queued_ns <= KNOWN_NS:
        return []
    end = history.finished_ns or now_ns
    scheduled = _scheduled_ns(history) or end
    first = history.first_token_ns or end
    parts = (
        ("queue", scheduled - history.queued_ns, "muted"),
        ("to first", first - scheduled, "prefill"),
        ("decode", end - first, "decode"),
    )
    total = max(1, end - history.queued_ns)
    room = max(4, width - LABEL - 12)
    rows: list[Row] = [()]
    for name, lasted, role in parts:
        value = duration(max(0, lasted) / 1e9)
        left = [(name.ljust(LABEL), "muted"), *bar(max(0, lasted) / total, room, role=role)]
        rows.append(spread(left, [(value, "text")], width))
    return rows


def gaps_ms(times: Sequence[int]) -> list[float]:
    gaps = np.diff(np.array(times, np.int64))
    found: list[float] = (gaps[gaps >= 0] / 1e6).tolist()
    return found


def gaps_panel(times: Sequence[int], frame: Frame) -> list[Row]:
    """Every gap between two tokens in the retained steps, the newest at the right."""
    gaps = gaps_ms(times)
    title: list[Span] = [
        ("gaps between tokens", "text/b"),
        (f" · the last {count(len(gaps))}", "muted"),
    ]
    if not gaps:
        return frame.draw(title, (), [(("none yet", "muted"),)])
    right: list[Span] = [("longest ", "muted"), (took(max(gaps)), "latency/b")]
    rows = braille(gaps, frame.inner_width, frame.inner_height, role="latency")
    if rows:
        rows = labelled(rows, f"max {took(max(gaps[-2 * frame.inner_width :]))}", "newest right")
    return frame.draw(title, right, rows)
