"""Rows of the transcript and the status line: pure functions of the chat state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from termgen.client import ModelInfo
from termgen.tui.chat.state.answer_form import fits, form_words
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.conversation import AnswerState, AnswerStats, Turn
from termgen.tui.keys.keymap import KeyOf
from termgen.tui.paint.formatting import count, duration, model_words, rate
from termgen.tui.paint.sanitize import clean, clean_line
from termgen.tui.paint.series import bar
from termgen.tui.paint.spans import Row, Span, cut, fit, row_width, spread, wrap
from termgen.vocabulary.request import FinishReason

CURSOR = "▍"
BEFORE_ROLE, AFTER_ROLE = "accent branch-before", "accent branch-after"
"""The two halves of `‹2/3›`, which can be clicked."""
CONTEXT_BAR = 10
NEARLY_FULL = 0.85

_MARKED: Row = (("◂", "accent"),)

_EMPTY_KEYS = (
    ("prompt.send", "send", "prompt.newline", "new line"),
    ("chat.stop", "stop, keep the text", "↑ ↓", "earlier prompts"),
    ("chat.engine", "watch the engine", "/system", "instructions"),
    ("app.palette", "every action", "app.help", "every key"),
)
"""Actions by the names of their bindings; a string that is no binding is shown as it is."""


@dataclass(frozen=True, slots=True)
class ChatStatus:
    """The figures of the status line."""

    stats: AnswerStats | None
    streaming: bool
    context_tokens: int
    temperature: float
    now_s: float
    changes: tuple[str, ...] = ()
    """The user's sampling settings and form of answers: `top_p 0.5`, `JSON schema`."""
    behind: bool = False
    """The user has scrolled up and the tail is out of sight."""
    meter: str = ""
    """What the context holds, in words: in place of the speed where both have no room."""


def question_header(width: int, *, marked: str | None = None) -> Row:
    """`marked`: the keys that act on the question under the cursor."""
    header: Row = (("you", "user/b"),)
    if marked is None:
        return header
    with_keys: Row = (("◂ ", "accent"), (marked, "muted"))
    has_room = row_width((*header, *with_keys)) + 2 <= width
    return spread(header, with_keys if has_room else _MARKED, width)


def question_rows(text: str, attachments: Sequence[Attachment], width: int) -> list[Row]:
    """The question's text and attachments, below its header."""
    rows = wrap([(clean(text), "text")], width - 2)
    words = (attachment_words(file.name, file.num_bytes) for file in attachments)
    rows += [((cut(each, width - 2), "muted"),) for each in words]
    return [(("▎ ", "user"), *row) for row in rows]


def attachment_words(name: str, num_bytes: int, num_tokens: int = 0) -> str:
    """`▤ scheduler.py 1.2k tok`: a file's name and tokens, or `4.1kB`, its bytes, where those are
    not known."""
    size = f"{count(num_tokens)} tok" if num_tokens else f"{count(num_bytes)}B"
    return f"▤ {clean_line(name)} {size}"


def answer_header(name: str, turn: Turn, width: int) -> Row:
    """The model's name and, if this place has several answers or questions, which one is shown."""
    header: Row = ((clean_line(name), "accent/b"),)
    if len(turn.siblings) < 2:
        return header
    number, last = str(turn.place + 1), str(len(turn.siblings))
    place: Row = ((f"‹{number}", BEFORE_ROLE), ("/", "accent"), (f"{last}›", AFTER_ROLE))
    how = "edited" if turn.is_edited else "branched" if turn.num_kept_tokens else ""
    edited: Row = (*place, (f"  {how}", "muted")) if how else place
    fits = row_width(header) + row_width(edited) < width
    return spread(header, edited if fits else place, width)


def with_cursor(rows: Sequence[Row]) -> list[Row]:
    """Append a text cursor after the last word of an unfinished answer."""
    if not rows:
        return [((CURSOR, "accent"),)]
    if rows[-1] and rows[-1][-1][1].startswith("text@code"):  # inside a code block
        return list(rows)
    return [*rows[:-1], (*rows[-1], (CURSOR, "accent"))]


def waiting_row(turn: Turn, now_s: float) -> Row:
    """How long the answer has been waiting for its first token."""
    waited = max(0.0, now_s - turn.stats.sent_s)
    return (("reading the prompt ", "muted"), (f"{waited:.1f} s", "muted"))


def answer_footer(turn: Turn, width: int) -> Row:
    """Tokens, speed, time to first token and cached tokens, as far as they fit."""
    stats = turn.stats
    parts: list[list[Span]] = []
    if turn.state is AnswerState.STOPPED:
        parts.append([("■ stopped", "warn")])
    elif turn.state is AnswerState.FAILED:
        parts.append([("✗ failed", "bad")])
    elif stats.finish_reason is FinishReason.LENGTH:
        parts.append([("■ length limit", "warn")])
    if turn.form is not None and turn.state is AnswerState.DONE:
        right = fits(turn.form, turn.answer, stats.finish_reason)
        sign = ("✓ ", "good") if right else ("✗ not complete: ", "warn")
        parts.append([sign, (form_words(turn.form), sign[1])])
    parts.append([(f"{count(stats.output_tokens)} tok", "muted")])
    if stats.decode_rate is not None:
        parts.append([(f"{rate(stats.decode_rate)} tok/s", "muted")])
    if stats.ttft_s is not None:
        parts.append([(f"TTFT {duration(stats.ttft_s)}", "muted")])
    if stats.cached_tokens:
        cached, prompt = count(stats.cached_tokens), count(stats.prompt_tokens)
        parts.append([(f"{cached} of {prompt} prompt tok cached", "muted")])
    spans: list[Span] = []
    for part in parts:
        separator: list[Span] = [(" · ", "faint")] if spans else []
        if row_width((*spans, *separator, *part)) > width:
            break
        spans += separator + part
    return tuple(spans)


def notice_rows(text: str, width: int, *, role: str, sign: str, hint: str = "") -> list[Row]:
    """A message from termgen in the transcript: an error, or the result of a command."""
    body = wrap([(clean(text), "text" if role == "bad" else "muted")], width - 2)
    rows: list[Row] = [
        ((f"{sign} " if index == 0 else "  ", role + "/b"), *row) for index, row in enumerate(body)
    ]
    rows += [(("  ", "text"), *row) for row in (wrap([(hint, "muted")], width - 2) if hint else ())]
    return rows


def marked_keys(key_of: KeyOf) -> str:
    """The keys that act on a marked question."""
    before, after = key_of("chat.sibling_before"), key_of("chat.sibling_after")
    both = "alt+←→" if (before, after) == ("alt+←", "alt+→") else f"{before} {after}"
    return f"{key_of('chat.edit')} edit · {key_of('chat.retry')} again · {both}"


def empty_rows(
    model: ModelInfo, key_of: KeyOf, width: int, height: int, *, offer: str = ""
) -> list[Row]:
    """Explain an empty chat, in the middle of the screen. offer: words on a better model."""
    ready: list[Span] = [(model_words(model), "text"), (" is ready", "muted")]
    where = clean_line(model.device_name)
    if model.max_model_len:  # a remote server may not report it
        where += f" · {count(model.max_model_len)} tokens of context"
    keys = [
        [key_of(word) if "." in word else word for word in (line[0], line[2])]
        for line in _EMPTY_KEYS
    ]
    first, second = (max(7, *(len(pair[side]) for pair in keys)) + 2 for side in (0, 1))
    table: list[Row] = [
        (
            (key.ljust(first), "accent"),
            (what.ljust(22), "muted"),
            (other_key.ljust(second), "accent"),
            (other_what.ljust(16), "muted"),
        )
        for (key, other_key), (_, what, _, other_what) in zip(keys, _EMPTY_KEYS, strict=True)
    ]
    if row_width(table[0]) > width:  # one below the other
        table = [half for row in table for half in (row[:2], row[2:])]
    title: Row = (("▍", "accent"), ("termgen", "accent/b"))
    ask: Row = (("Ask anything.", "text"),)
    rows = [title, (), tuple(ready), ((where, "muted"),), (), ask, (), *table]
    if offer:
        rows[4:4] = [((key_of("chat.models"), "accent"), (f" {clean_line(offer)}", "muted"))]
    if len(rows) > height:
        rows = [tuple(ready), ask, *table][: max(1, height)]
    block = max(row_width(row) for row in rows)
    left = " " * max(0, (width - block) // 2)
    above: list[Row] = [()] * max(0, (height - len(rows)) // 2 - 1)
    shown = [((left, "text"), *row) if row else () for row in rows]
    return [*above, *(fit(row, width) if row_width(row) > width else row for row in shown)]


def status_row(model: ModelInfo, status: ChatStatus, width: int) -> Row:
    left: list[Span] = [
        (" termgen", "accent/b"),
        (" ▸ ", "faint"),
        ("chat  ", "text/b"),
        (model_words(model), "text"),
    ]
    room = width - row_width(tuple(left)) - 2
    changed = _changed_words(status.changes, 1)
    right = _right_end(model, status, room - len(changed))
    temperature = f" · T {status.temperature:g}"
    details = [(f" · {clean_line(model.device_name)}", "muted"), (temperature, "muted")]
    if changed:  # settings changed by hand outrank everything but the context
        for shown in range(1, len(status.changes) + 1):
            words = _changed_words(status.changes, shown)
            if row_width(((words, ""), *right)) <= room:
                changed = words
        left.append((changed, "accent"))
        details.pop()
    for detail in details:
        if row_width((*left, detail, *right)) + 2 <= width:
            left.append(detail)
    return spread(left, right, width)


def _changed_words(changes: Sequence[str], shown: int) -> str:
    """The first `shown` changes, and the number of the others."""
    if not changes:
        return ""
    more = f" +{len(changes) - shown}" if shown < len(changes) else ""
    return " · " + "  ".join(changes[:shown]) + more


def _right_end(model: ModelInfo, status: ChatStatus, room: int) -> list[Span]:
    """The figures that fit; the share of the context in use is dropped last."""
    behind: list[Span] = [("↓ more below  ", "warn")] if status.behind else []
    speed, ttft = _speed(status), _ttft(status)
    context = _context(status, model.max_model_len)
    long_context = _context(status, model.max_model_len, with_bar=True)
    choices = [
        [*behind, *speed, *ttft, *long_context],
        [*behind, *speed, *ttft, *context],
        [*behind, *speed, *context],
        [*behind, *context],
    ]
    if status.meter:
        meter: Span = (f"{status.meter} ", "muted")
        with_meter = ([*speed, *ttft, meter, *long_context], [meter, *context], [meter])
        choices = [*([*behind, *one] for one in with_meter), *choices]
    return next((c for c in choices if row_width(tuple(c)) <= room), context)


def _speed(status: ChatStatus) -> list[Span]:
    stats = status.stats
    if stats is None:
        return []
    speed = stats.live_rate(status.now_s) if status.streaming else stats.decode_rate
    if speed is None:
        return []
    return [(rate(speed), "decode/b" if status.streaming else "text"), (" tok/s  ", "muted")]


def _ttft(status: ChatStatus) -> list[Span]:
    stats = status.stats
    if stats is None or stats.ttft_s is None:
        return []
    return [("TTFT ", "muted"), (duration(stats.ttft_s), "text"), ("  ", "text")]


def _context(status: ChatStatus, limit: int, *, with_bar: bool = False) -> list[Span]:
    share = status.context_tokens / limit if limit else 0.0
    full = share > NEARLY_FULL
    spans: list[Span] = [("ctx ", "muted")]
    if not limit:
        return [*spans, (f"{count(status.context_tokens)} ", "text")]
    if with_bar:
        spans += [*bar(share, CONTEXT_BAR, role="warn" if full else "accent"), (" ", "text")]
    spans.append((f"{count(status.context_tokens)}", "warn" if full else "text"))
    spans.append((f"/{count(limit)} ", "muted"))
    return spans
