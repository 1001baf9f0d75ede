"""A program of its own: parses and checks large bodies of requests. `json_process.py` asks it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # wherever this process was started

from termgen.api.fields import parse_json
from termgen.serving.json_weight import check_weight
from termgen.system.helper_process import answer_questions


def answer(take: Callable[[dict[str, Any]], object], raw: bytes) -> object:
    """What `take` makes of this JSON. Raises RequestError."""
    check_weight(raw)
    return take(parse_json(raw))


if __name__ == "__main__":
    answer_questions(answer)
