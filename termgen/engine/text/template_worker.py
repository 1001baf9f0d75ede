"""The process that renders untrusted chat templates.

`request_template` starts it and talks to it: one line of JSON in, one line out. It has the sandbox
of the model's own template, plus limits that no template can escape: the system limits its CPU time
and its memory. Of termgen it imports the templates only.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from termgen.engine.text.chat_template import TEMPLATE_ERRORS, ChatTemplate
from termgen.errors import RequestError

try:
    import resource
except ImportError:  # Windows: only the time limit of the parent process applies
    resource = None  # type: ignore[assignment]

CPU_LIMIT_S = 2
MEMORY_LIMIT_BYTES = 512 * 2**20
MAX_FAULT_CHARS = 300
READY = b'{"ready": true}\n'


def main() -> None:
    _limit_memory()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        _limit_time()
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """The names a template reads and its literal text; with `variables`, the rendered text."""
    try:
        template = ChatTemplate(asked["source"], whose=asked["whose"])
        if "variables" not in asked:
            variables = sorted(template.variables)
            return {"literal_text": template.literal_text, "variables": variables}
        num_chars = asked["num_input_chars"]
        return {"text": template.render(asked["variables"], num_input_chars=num_chars)}
    except (RequestError, SyntaxError, SystemError, *TEMPLATE_ERRORS) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0][:MAX_FAULT_CHARS]}


def _limit_memory() -> None:
    if resource is not None:
        _lower(resource.RLIMIT_AS, MEMORY_LIMIT_BYTES)
        _lower(resource.RLIMIT_CORE, 0)


def _limit_time() -> None:
    """Limit the CPU time from now on: only the soft limit, which can be raised again."""
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + CPU_LIMIT_S)


def _lower(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    try:
        resource.setrlimit(kind, (limit, hard))
    except (OSError, ValueError):
        return  # a system that does not enforce it; the time limit applies in any case


if __name__ == "__main__":
    main()
