"""A program of its own: parses large bodies of requests. `json_process.py` runs it.

    python -P json_program.py

Reads each as its size and its bytes; writes the size and the `marshal` form of (value, None) or
(None, fault). Ends with its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # wherever this process was started

from termgen.api.fields import parse_json
from termgen.errors import RequestError
from termgen.serving.json_weight import check_weight

SIZE_BYTES = 8


def parsed(raw: bytes) -> tuple[Any, Any]:
    try:
        check_weight(raw)
        return parse_json(raw), None
    except RequestError as error:
        return None, (str(error), error.param, error.code, error.status)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; whoever started it ends it
    with contextlib.suppress(AttributeError, OSError):  # not every system can
        os.nice(5)  # the engine goes first
    gc.disable()  # JSON has no cycles
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(SIZE_BYTES):
        answer = marshal.dumps(parsed(source.read(int.from_bytes(head, "little"))))
        target.write(len(answer).to_bytes(SIZE_BYTES, "little") + answer)
        target.flush()


if __name__ == "__main__":
    main()
