"""The form answers are asked for in: read from a command, checked and shown when they are there.

The engine's grammar enforces it; what is checked here is that the answer was not cut off. Used by
the chat. No Textual.
"""

from __future__ import annotations

import json

from termgen.errors import RequestError
from termgen.tui.chat.state.attachments import read_file
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

KINDS = {"schema": "json", "regex": "regex", "choice": "choice"}
"""Command -> the field of `StructuredOutputsParams`."""


def parse_form(command: str, argument: str) -> StructuredOutputsParams:
    """`/schema FILE` or `/schema {...}`, `/regex TEXT`, `/choice a|b|c`. Raises RequestError."""
    value: str | tuple[str, ...] = argument
    if command == "schema" and not argument.startswith("{"):
        value = read_file(argument.strip("\"'")).text
    elif command == "choice":
        value = tuple(word.strip() for word in argument.split("|"))
    try:
        return StructuredOutputsParams(**{KINDS[command]: value}, param=f"/{command}")  # type: ignore[arg-type]
    except RequestError as error:
        raise RequestError(str(error), param=command) from None


def form_words(form: StructuredOutputsParams) -> str:
    """The form in a word or two."""
    if form.choice is not None:
        return f"one of {len(form.choice)}"
    return {"json": "JSON schema", "json_object": "JSON"}.get(form.kind, form.kind)


def fits(form: StructuredOutputsParams, answer: str, finish_reason: FinishReason | None) -> bool:
    """The grammar lets nothing else end by itself."""
    if form.choice is not None:
        return answer in form.choice
    if form.kind in ("json", "json_object"):
        return _json(answer) is not None
    return finish_reason is FinishReason.STOP


def as_markdown(form: StructuredOutputsParams | None, answer: str) -> str:
    """How an answer is shown: JSON as a code block with indents, all else as it is."""
    if form is None or form.kind not in ("json", "json_object"):
        return answer
    return f"{json_opening(form)}{_json(answer) or answer}\n```\n"


def json_opening(form: StructuredOutputsParams | None) -> str:
    """The opening of the fence before a JSON answer that is still streaming."""
    return "```json\n" if form is not None and form.kind in ("json", "json_object") else ""


def _json(answer: str) -> str | None:
    """The JSON text with indents; None if it is not complete."""
    try:
        return json.dumps(json.loads(answer), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
