"""A helper program that checks answers against JSON schemas: `python -P schema_program.py`.

Here a schema that the library cannot cope with costs a process of its own. `SchemaChecker` uses it
through `HelperProcess`. Patterns are matched in linear time, and nothing is fetched.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))  # independent of the working directory

from termgen.errors import RequestError

MAX_BYTES = 2 << 30
MAX_KEPT = 32
"""Schemas that are kept ready."""
MAX_ERRORS = 8
MAX_ERROR_CHARS = 200
STANDARD = ("http://json-schema.org/", "https://json-schema.org/")
"""Addresses of JSON Schema's own drafts; another `$schema` means the newest."""


class CheckTask(NamedTuple):
    schema: str
    answer: str | None = None
    """None: find out whether answers can be checked."""


def answer(task: CheckTask, data: bytes) -> tuple[str, ...]:
    """What the answer does not satisfy. Raises RequestError if the schema is none."""
    validator = _validator(task.schema)
    if task.answer is None:
        return ()
    try:
        value = json.loads(task.answer)
    except (ValueError, RecursionError) as error:
        return (f"is not JSON: {error}"[:MAX_ERROR_CHARS],)
    found: list[str] = []
    for fault in validator.iter_errors(value):
        place = "".join(f"[{part!r}]" for part in fault.instance_path)
        message = f"${place}: {fault.message}"
        if len(message) > MAX_ERROR_CHARS:
            message = f"{message[:MAX_ERROR_CHARS]}..."
        found.append(message)
        if len(found) == MAX_ERRORS:
            break
    return tuple(found)


@functools.lru_cache(MAX_KEPT)
def _validator(schema: str) -> Any:
    import jsonschema_rs

    wanted = json.loads(schema)
    dialect = wanted.get("$schema")
    if isinstance(dialect, str) and not dialect.startswith(STANDARD):
        del wanted["$schema"]
    try:
        return jsonschema_rs.validator_for(
            wanted, retriever=_refuse, pattern_options=jsonschema_rs.RegexOptions()
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        lines = str(error).split("\n\n")[0]
        raise RequestError(lines[:MAX_ERROR_CHARS], code="invalid_schema") from None


def _refuse(address: str) -> Any:
    raise ValueError("other documents are not fetched")


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


if __name__ == "__main__":
    from termgen.system.helper_process import answer_questions

    _limit_memory()
    answer_questions(answer)
