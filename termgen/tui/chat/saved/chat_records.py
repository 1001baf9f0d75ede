"""A chat as records: what the store keeps of it, what an export holds, and the way back.

Pure translation between `Conversation` and plain values. No files here, and no SQL.
"""

from __future__ import annotations

import html
import json
import os
import re
import stat
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from termgen.errors import ChatStoreError, RequestError
from termgen.tools.calls import ToolCall
from termgen.tools.text import escaped
from termgen.tui.chat.state.attachments import Attachment, with_name
from termgen.tui.chat.state.context_policy import ContextPolicy, Cut, Summary, cut_words
from termgen.tui.chat.state.conversation import AnswerState, AnswerStats, Conversation, Turn
from termgen.tui.chat.state.labels import Labels, labels_of
from termgen.tui.chat.state.summary import tidied
from termgen.tui.chat.state.thoughts import Thought
from termgen.tui.chat.state.tool_rounds import ToolRound, as_records, call_of
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import TABLE, SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

_DETAILS = re.compile(r"<(?=/?details\b)", re.IGNORECASE)
"""Tags that would end the fold, or begin another."""
FORMAT = "termgen-chat"
VERSION = 1
PARAM_NAMES = tuple(n for n, row in TABLE.items() if row.panel is not None or row.is_kept)
"""Sampling parameters that are kept with a chat."""
SET_BY_HAND = "set"
"""Key in `SessionRecord.params`: names of the parameters that the user set."""

POLICY = "context_policy"
"""Key in `SessionRecord.params`: what is done when the context is full."""
LEFT_OUT = "left_out_turns"
"""Key in `SessionRecord.params` of older versions: the number of oldest turns that are not sent;
there if the policy was to leave out some."""

POLICIES = tuple(policy.value for policy in ContextPolicy)

FOLDER = "folder"
"""Key in `SessionRecord.params`: the folder of a chat that a client of the protocol has begun."""

FORK_WORDS = " (fork)"
"""End of a fork's title."""

R = TypeVar("R", "SessionRecord", "TurnRecord")

_TIMES = ("created_s", "updated_s", "asked_s")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "created_s": (int, float),
    "updated_s": (int, float),
    "asked_s": (int, float),
    "system_prompt": (str, type(None)),
    "parent_id": (str, type(None)),
    "params": (dict,),
    "figures": (dict,),
    "is_chosen": (bool,),
}
"""Type of each field of an export; fields that are not listed are text."""

MAX_TIME_S = 1e11
"""No calendar goes farther."""

MAX_IMPORT_BYTES = 64 << 20
FORMS = ("md", "json")
USAGE = "/export [md|json] PATH; -f first writes over a file"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    session_id: str
    title: str
    created_s: float
    updated_s: float
    model_id: str
    system_prompt: str | None
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    turn_id: str
    session_id: str
    parent_id: str | None
    is_chosen: bool
    asked_s: float
    question: str
    answer: str
    state: str
    model_id: str
    figures: Mapping[str, Any]
    """Tokens, seconds to the first token and from there to the last, finish reason; thoughts,
    files and form of answer, where there are any."""


def session_record(
    conversation: Conversation, params: SamplingParams, *, own: SamplingParams | None = None
) -> SessionRecord:
    """The chat as it is now. own: the model's parameters; others were set by the user."""
    held: dict[str, Any] = {name: getattr(params, name) for name in PARAM_NAMES}
    if own is not None:
        held[SET_BY_HAND] = [name for name in PARAM_NAMES if held[name] != getattr(own, name)]
    held[POLICY] = conversation.policy.value
    now_s = time.time()
    turns = conversation.turns
    if conversation.folder:
        held[FOLDER] = conversation.folder
    held |= conversation.labels.as_params()
    return SessionRecord(
        session_id=conversation.session_id,
        title=conversation.title,
        created_s=turns[0].siblings[0].asked_s if turns else now_s,
        updated_s=now_s,
        model_id=turns[-1].model_id if turns else "",
        system_prompt=conversation.system_prompt,
        params=held,
    )


def turn_record(conversation: Conversation, turn: Turn) -> TurnRecord:
    stats, parent = turn.stats, turn.parent
    assert parent is not None, "the root is not kept"
    return TurnRecord(
        turn_id=turn.turn_id,
        session_id=conversation.session_id,
        parent_id=None if parent is conversation.root else parent.turn_id,
        is_chosen=parent.chosen is turn,
        asked_s=turn.asked_s,
        question=turn.question,
        answer=turn.answer,
        state=turn.state.value,
        model_id=turn.model_id,
        figures=extras_of(turn)
        | {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "output_tokens": stats.output_tokens,
            "ttft_s": stats.ttft_s,
            "output_s": stats.seconds_of_output,
            "finish_reason": stats.finish_reason.value if stats.finish_reason else None,
        },
    )


def all_turns(conversation: Conversation) -> list[Turn]:
    """Parents before their children, siblings in their order."""
    found: list[Turn] = []
    waiting = list(reversed(conversation.root.children))
    while waiting:
        turn = waiting.pop()
        found.append(turn)
        waiting += reversed(turn.children)
    return found


def conversation_of(session: SessionRecord, turns: Sequence[TurnRecord]) -> Conversation:
    """The tree again. A turn whose parent is gone comes first; nothing is left out."""
    conversation = Conversation(system_prompt=session.system_prompt, session_id=session.session_id)
    conversation.title = session.title
    conversation.labels = labels_of(session.params)
    folder = session.params.get(FOLDER)
    conversation.folder = folder if isinstance(folder, str) else ""
    left_out = session.params.get(LEFT_OUT)
    if session.params.get(POLICY) in POLICIES:
        conversation.policy = ContextPolicy(session.params[POLICY])
    elif type(left_out) is int and left_out >= 0:
        conversation.policy = ContextPolicy.DROP
    made = {
        record.turn_id: _readable_turn(record, f"turns[{index}]")
        for index, record in enumerate(turns)
    }
    for record in turns:
        turn = made[record.turn_id]
        parent = made.get(record.parent_id or "", conversation.root)
        if _is_above(turn, parent):
            parent = conversation.root
        turn.parent = parent
        parent.children.append(turn)
        if record.is_chosen or parent.chosen is None:
            parent.chosen = turn
    path = conversation.turns
    if POLICY not in session.params and type(left_out) is int and 0 < left_out < len(path):
        path[-1].cut = Cut(upto=left_out)
    return conversation


def fork_of(conversation: Conversation, upto: Turn) -> Conversation:
    """A new chat that begins with the path up to this turn. Everything in it has a new id. It keeps
    the tags, but is not pinned."""
    path = conversation.turns
    records, parent_id = [], None
    for turn in path[: path.index(upto) + 1]:
        turn_id = uuid4().hex
        record = turn_record(conversation, turn)
        records.append(replace(record, turn_id=turn_id, parent_id=parent_id, is_chosen=True))
        parent_id = turn_id
    session = session_record(conversation, SamplingParams())
    title = conversation.title.removesuffix(FORK_WORDS) + FORK_WORDS
    fork = conversation_of(replace(session, session_id=uuid4().hex, title=title), records)
    fork.labels = Labels(tags=conversation.labels.tags)
    return fork


def take_others(
    conversation: Conversation, turns: Sequence[TurnRecord], *, own: Container[str]
) -> tuple[list[Turn], list[Turn]]:
    """Put into the tree what another program has written of this chat: the turns that it has added,
    and those that have changed. `own`: ids of turns that were asked here, which it cannot change.
    """
    known = {turn.turn_id: turn for turn in all_turns(conversation)}
    added, changed = [], []
    for index, record in enumerate(turns):
        turn = known.get(record.turn_id)
        if turn is not None and turn.cut is None and conversation.policy is not ContextPolicy.ASK:
            turn.cut = _readable_turn(record, f"turns[{index}]").cut
        if turn is not None and (record.turn_id in own or _is_same(turn, record)):
            continue
        fresh = _readable_turn(record, f"turns[{index}]")
        if turn is not None:
            turn.rounds = fresh.rounds
            turn.answer, turn.state, turn.stats = fresh.answer, fresh.state, fresh.stats
            turn.thought = fresh.thought
            changed.append(turn)
            continue
        parent = fresh.parent = known.get(record.parent_id or "", conversation.root)
        parent.children.append(fresh)
        parent.chosen = parent.chosen or fresh
        known[record.turn_id] = fresh
        added.append(fresh)
    return added, changed


def _is_same(turn: Turn, record: TurnRecord) -> bool:
    rounds = record.figures.get("rounds")
    num_rounds = len(rounds) if isinstance(rounds, list) else 0
    return turn.answer == record.answer and len(turn.rounds) == num_rounds


def _is_above(turn: Turn, other: Turn | None) -> bool:
    while other is not None:
        if other is turn:
            return True
        other = other.parent
    return False


def _readable_turn(record: TurnRecord, where: str) -> Turn:
    """A turn from a record that a person, a later version or a failing disk may have written."""
    try:
        return _turn_of(record)
    except (ValueError, TypeError, OverflowError) as error:
        raise ChatStoreError(f"{where}: {error}") from None


def _turn_of(record: TurnRecord) -> Turn:
    figures = record.figures
    reason = figures.get("finish_reason")
    stats = AnswerStats(
        0.0,
        prompt_tokens=int(figures.get("prompt_tokens") or 0),
        cached_tokens=int(figures.get("cached_tokens") or 0),
        output_tokens=int(figures.get("output_tokens") or 0),
        ttft_s=seconds(figures["ttft_s"]) if figures.get("ttft_s") is not None else None,
        finish_reason=FinishReason(reason) if reason else None,
        ended_s=seconds(figures.get("output_s") or 0.0),
    )
    state = AnswerState(record.state)
    turn = Turn(
        record.question,
        record.answer,
        # the program ended before the answer did
        AnswerState.STOPPED if state is AnswerState.STREAMING else state,
        stats,
        turn_id=record.turn_id,
        asked_s=record.asked_s,
        model_id=record.model_id,
    )
    restore_extras(turn, figures)
    return turn


def restored_params(kept: Mapping[str, Any], now: SamplingParams) -> SamplingParams:
    """The parameters that were set in a chat, or all it was held with where it does not tell which
    these are; the others are as now."""
    by_hand = kept.get(SET_BY_HAND)
    names = by_hand if isinstance(by_hand, list) else PARAM_NAMES
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in kept.items()
        if name in PARAM_NAMES and name in names
    }
    try:
        return replace(now, **values)
    except (RequestError, TypeError, ValueError):  # by another version, or an import made by hand
        return now


def as_json(session: SessionRecord, turns: Sequence[TurnRecord]) -> str:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "session": asdict(session),
        "turns": [asdict(turn) for turn in turns],
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def from_json(text: str) -> tuple[SessionRecord, list[TurnRecord]]:
    """An export of ours. Raises `ChatStoreError` naming what is wrong."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ChatStoreError("it is not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ChatStoreError(f'it is no exported chat: "format" is not "{FORMAT}"')
    if document.get("version") != VERSION:
        raise ChatStoreError(f'"version" is {document.get("version")!r}; this termgen reads 1')
    session = record_of(SessionRecord, document.get("session"), "session")
    given = document.get("turns")
    if not isinstance(given, list):
        raise ChatStoreError('"turns" must be a list')
    turns = [record_of(TurnRecord, item, f"turns[{index}]") for index, item in enumerate(given)]
    if len({turn.turn_id for turn in turns}) != len(turns):
        raise ChatStoreError('"turns" has a "turn_id" twice')
    for index, turn in enumerate(turns):
        _readable_turn(turn, f"turns[{index}]")
    return session, turns


def record_of(record_class: type[R], given: Any, where: str) -> R:
    """A record from values that may be anything. Raises `ChatStoreError`."""
    if not isinstance(given, dict):
        raise ChatStoreError(f'"{where}" must be an object')
    values: dict[str, Any] = {}
    for name in record_class.__dataclass_fields__:
        if name not in given:
            raise ChatStoreError(f'"{where}" has no "{name}"')
        value = given[name]
        right = isinstance(value, _KINDS.get(name, (str,)))
        if not right or (name in _TIMES and not 0 <= value < MAX_TIME_S):
            raise ChatStoreError(f'"{where}": "{name}" is not what it must be')
        values[name] = plain_text(value) if isinstance(value, str) else value
    return record_class(**values)


def as_markdown(session: SessionRecord, conversation: Conversation) -> str:
    """The path, for people to read. Files and thoughts are folded."""
    parts = [f"# {session.title}"]
    if conversation.system_prompt:
        quoted = "\n".join(f"> {line}" for line in conversation.system_prompt.splitlines())
        parts.append(f"System prompt:\n\n{quoted}")
    cut = conversation.cut
    for index, turn in enumerate(conversation.turns):
        if cut.num_left_out and index == cut.upto:
            parts.append(_folded_cut(cut))
        parts += ["## You", *map(_folded_file, turn.attachments), turn.question.rstrip()]
        if turn.answer or turn.thought.text or turn.rounds:
            parts.append(f"## {turn.model_id or session.model_id or 'Answer'}")
        for one in turn.rounds:
            if one.thought.text:
                parts.append(_folded_thought(one.thought))
            parts += [one.said] if one.said else []
            parts += map(_folded_call, one.calls)
        if turn.thought.text:
            parts.append(_folded_thought(turn.thought))
        if turn.answer:
            parts.append(turn.answer.rstrip())
    return "\n\n".join(parts) + "\n"


def _folded_file(file: Attachment) -> str:
    """A folded block with the file as the model saw it."""
    return _folded(f"Attached: {file.name} ({file.num_bytes:,} bytes)", with_name(file))


def _folded_cut(cut: Cut) -> str:
    """A line about what is not sent, with the summary that is sent instead folded below it."""
    line = f"*{cut_words(cut)}.*"
    if cut.summary is None:
        return line
    heading, _, text = cut.summary.message.partition("\n")
    quoted = "\n".join(f"> {part}".rstrip() for part in _DETAILS.sub("&lt;", text).splitlines())
    return f"{line}\n\n{_folded(heading.rstrip(':'), quoted)}"


def _folded_call(call: ToolCall) -> str:
    """A folded block with the arguments and the result, whatever fences are in them."""
    shown = "\n".join([call.arguments, "", call.state.value, "", call.result])
    quoted = "\n".join(f"    {line}".rstrip() for line in escaped(shown).splitlines())
    return _folded(f"Called {call.name}", quoted)


def _folded_thought(thought: Thought) -> str:
    """Quoted, so that a fence it has left open ends with it."""
    text = _DETAILS.sub("&lt;", thought.text.strip())
    quoted = "\n".join(f"> {line}".rstrip() for line in text.splitlines())
    summary = f"Thought for {thought.seconds:.1f} s, {thought.num_tokens:,} tokens"
    return _folded(summary, quoted)


def _folded(summary: str, text: str) -> str:
    shown = html.escape(" ".join(summary.split()), quote=False)
    return f"<details>\n<summary>{shown}</summary>\n\n{text}\n\n</details>"


# What a turn holds beside its question and answer, as plain data for the store, and back.


def extras_of(turn: Turn) -> dict[str, Any]:
    """Thoughts, files, form, tool calls and where it was branched, those that there are."""
    extras: dict[str, Any] = {}
    thought, form = turn.thought, turn.form
    if thought.text:
        extras["thought"] = {
            "text": thought.text,
            "tokens": thought.num_tokens,
            "seconds": thought.seconds,
        }
    if turn.attachments:
        extras["files"] = [{"name": file.name, "text": file.text} for file in turn.attachments]
    if form is not None:
        extras["form"] = {form.kind: form.value}
    if turn.num_kept_tokens:
        extras["kept_tokens"] = turn.num_kept_tokens
    if turn.cut is not None:
        extras["cut"] = asdict(turn.cut)
    if turn.rounds:
        extras["rounds"] = as_records(turn.rounds)
        extras["earlier_tokens"] = turn.stats.earlier_tokens
    return extras


def restore_extras(turn: Turn, extras: Mapping[str, Any]) -> None:
    """Put extras back into a turn that has ended. Raises ValueError or TypeError for values that
    `extras_of` does not make."""
    turn.thought = _thought_of(extras.get("thought"))
    files = [dict(file) for file in extras.get("files") or ()]
    turn.attachments = tuple(
        Attachment(_text(file.get("name")), _text(file.get("text"))) for file in files
    )
    form = extras.get("form")
    if form is not None:
        values: dict[str, Any] = dict(form)
        if isinstance(values.get("choice"), list):
            values["choice"] = tuple(values["choice"])
        try:
            turn.form = StructuredOutputsParams(**values)
        except RequestError as error:
            raise ValueError(str(error)) from None
    kept = extras.get("kept_tokens", 0)
    if type(kept) is not int or kept < 0:
        raise ValueError("kept_tokens is no number of tokens")
    turn.num_kept_tokens = kept
    turn.cut = _cut_of(extras.get("cut"))
    turn.rounds = [_round_of(dict(one)) for one in extras.get("rounds") or ()]
    earlier = int(extras.get("earlier_tokens") or 0)
    turn.stats.earlier_tokens = max(0, min(earlier, turn.stats.output_tokens))


def _cut_of(record: Any) -> Cut | None:
    """Raises ValueError or TypeError."""
    if record is None:
        return None
    values = dict(record)
    given = values.get("summary")
    ends = () if given is None else (dict(given).get("first"), dict(given).get("last"))
    first, upto, pruned, *places = (
        _number_of_turns(number)
        for number in (values.get("first"), values.get("upto"), values.get("pruned"), *ends)
    )
    summary = None
    if given is not None:
        summary = Summary(tidied(_text(given.get("text"))), *places)
    return Cut(min(first, 1, upto), upto, pruned, summary)


def _number_of_turns(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("cut is no number of turns")
    return value


def _round_of(record: Mapping[str, Any]) -> ToolRound:
    calls = [call_of(dict(call)) for call in record.get("calls") or ()]
    for call in calls:
        call.name, call.arguments = plain_text(call.name), plain_text(call.arguments)
        call.result, call.call_id = plain_text(call.result), plain_text(call.call_id)
    return ToolRound(_text(record.get("said", "")), _thought_of(record.get("thought")), calls)


def _thought_of(record: Any) -> Thought:
    thought = dict(record or {})
    return Thought(
        _text(thought.get("text", "")),
        int(thought.get("tokens") or 0),
        seconds(thought.get("seconds") or 0.0),
        is_over=True,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a thought or a file is not text")
    return plain_text(value)


def plain_text(text: str) -> str:
    """Half of a pair of code units, which could not be sent, copied or written, is escaped."""
    return text.encode(errors="backslashreplace").decode()


def seconds(value: Any) -> float:
    number = float(value)
    if not 0 <= number < MAX_TIME_S:
        raise ValueError(f"{number:g} is no number of seconds")
    return number


@dataclass(frozen=True, slots=True)
class ExportWish:
    path: Path
    form: str
    may_replace: bool = False


def parse_export(argument: str) -> ExportWish:
    """`[-f] [md|json] PATH`; without a form the path's ending tells it. `ChatStoreError` else."""
    first, _, rest = argument.partition(" ")
    may_replace = first == "-f"
    if may_replace:
        first, _, rest = rest.strip().partition(" ")
    named = first in FORMS and bool(rest.strip())
    path = user_path(rest if named else f"{first} {rest}")
    form = first if named else path.suffix.lower().removeprefix(".").replace("markdown", "md")
    if not path.name or form not in FORMS:
        raise ChatStoreError(USAGE)
    return ExportWish(path, form, may_replace)


def user_path(text: str) -> Path:
    """A path as a person writes it. Raises `ChatStoreError`."""
    try:
        return Path(text.strip()).expanduser()
    except RuntimeError:  # an unknown user: ~name
        raise ChatStoreError(f"{text.strip()} is not a path") from None


def write_new(wish: ExportWish, text: str) -> bool:
    """Write the file, all of it or nothing; returns whether there was one before."""
    path = wish.path
    if "\0" in str(path):
        raise ChatStoreError("a path has no NUL in it")
    replaced = path.exists()
    if replaced and not wish.may_replace:
        raise ChatStoreError(f"{path} is there already; /export -f {wish.form} {path} replaces it")
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        # what is not UTF-8 may come from an import made by hand
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ChatStoreError(f"{path} cannot be written: {error.strerror}") from None
    return replaced


def read_chat(path: Path) -> tuple[SessionRecord, list[TurnRecord]]:
    """An export, with ids of its own so that it stands beside the chat it came from."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a device or a pipe may never end
            raise ChatStoreError(f"{path} cannot be read: it is not a file")
        with path.open("rb") as file:
            raw = file.read(MAX_IMPORT_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ChatStoreError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ChatStoreError(f"{path} cannot be imported: it is not UTF-8 text") from None
    except ValueError as error:  # a NUL
        raise ChatStoreError(f"{path} cannot be read: {error}") from None
    if len(raw) > MAX_IMPORT_BYTES:
        raise ChatStoreError(f"{path} is larger than {MAX_IMPORT_BYTES >> 20} MiB")
    try:
        session, turns = from_json(text)
    except ChatStoreError as error:
        raise ChatStoreError(f"{path} cannot be imported: {error}") from None
    fresh = {turn.turn_id: uuid4().hex for turn in turns}
    session_id = uuid4().hex
    return replace(session, session_id=session_id), [
        replace(
            turn,
            turn_id=fresh[turn.turn_id],
            session_id=session_id,
            parent_id=fresh.get(turn.parent_id or ""),
        )
        for turn in turns
    ]
