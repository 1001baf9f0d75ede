"""What a turn holds beside its question and answer, as plain data for the store, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from termgen.errors import RequestError
from termgen.tui.attachments import Attachment
from termgen.tui.conversation import Turn
from termgen.tui.thoughts import Thought
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

MAX_TIME_S = 1e11
"""No calendar goes farther."""


def extras_of(turn: Turn) -> dict[str, Any]:
    """Thoughts, files, form and where it was branched, those that there are."""
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
    return extras


def restore_extras(turn: Turn, extras: Mapping[str, Any]) -> None:
    """Of a turn that has ended. Raises ValueError or TypeError for what `extras_of` never gave."""
    thought = dict(extras.get("thought") or {})
    turn.thought = Thought(
        _text(thought.get("text", "")),
        int(thought.get("tokens") or 0),
        seconds(thought.get("seconds") or 0.0),
        is_over=True,
    )
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
