"""What a request asks for, as the text that llguidance compiles; and what is tried out before that.

Pure but for `try_out`, which starts a process. Used by the grammar compiler, in its threads.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from termgen.engine.structured_outputs import StructuredOutputsParams, is_gbnf
from termgen.errors import RequestError
from termgen.helper_process import no_process

MAX_LEXER_STATES = 50_000
"""A kilobyte or two each."""
MAX_ITEMS_IN_ROW = 6000
"""Ways in which an answer may go on at one place: 5000 choices and 1000 properties, the most that
are taken, have as many."""
MAX_ITEMS_IN_GRAMMAR_ROW = 2000
"""The same where the client wrote the rules: then all of them may be about the same text. Taking in
a token holds Python's lock, and takes the longer the more there are of those."""
MAX_ITEMS_IN_MASK = 8000
"""Of all rows that a mask goes through, the next one among them as a rule: that there are too many
is found out without the lock then."""
LIMITS: dict[str, Any] = {
    "verbose_errors": False,
    "max_lexer_states": MAX_LEXER_STATES,
    "max_items_in_row": MAX_ITEMS_IN_ROW,
    "step_max_items": MAX_ITEMS_IN_MASK,
}
TRIAL_CPU_S = 2
TRIAL_TIMEOUT_S = 6.0
"""By the clock: other programs may run meanwhile."""
TRIAL_BYTES = 2 << 30
MAX_ERROR_CHARS = 300


def source_of(wanted: StructuredOutputsParams, gbnf_to_lark: Callable[[str], str]) -> str:
    """What llguidance compiles. gbnf_to_lark: `from_gbnf`, wherever it runs."""
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return str(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        choices = " | ".join(json.dumps(c, ensure_ascii=False) for c in wanted.choice)
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    if wanted.grammar is not None:
        is_lark = not is_gbnf(wanted.grammar)
        lark = wanted.grammar if is_lark else gbnf_to_lark(wanted.grammar)
        return str(LLMatcher.grammar_from_lark(lark))
    schema = '{"type":"object"}' if wanted.json_object else str(wanted.json)
    # Where any white space is allowed, small models write nothing else.
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))


def limits_of(wanted: StructuredOutputsParams) -> dict[str, Any]:
    """Of llguidance."""
    if wanted.grammar is None:
        return LIMITS
    return {**LIMITS, "max_items_in_row": MAX_ITEMS_IN_GRAMMAR_ROW}


def needs_trial(wanted: StructuredOutputsParams) -> bool:
    """Whether it may ask for several patterns at once: twenty of them can take for ever."""
    if wanted.grammar is not None:
        return "&" in wanted.grammar or "%json" in wanted.grammar
    if wanted.json is None:
        return False
    schema = str(wanted.json)
    has_patterns = '"pattern"' in schema or '"format"' in schema
    joins_schemas = '"allOf"' in schema or '"$ref"' in schema
    return '"patternProperties"' in schema or (has_patterns and joins_schemas)


def try_out(source: str) -> None:
    """Compile it in a process that can be stopped. RequestError where it has to be."""
    program = [sys.executable, "-P", str(Path(__file__).with_name("grammar_trial.py"))]
    task = json.dumps([source, LIMITS, TRIAL_CPU_S, TRIAL_BYTES])
    try:
        done = subprocess.run(
            program, input=task.encode(), capture_output=True, timeout=TRIAL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        done = None
    except OSError:
        raise no_process("grammar", "tried out") from None
    if done is not None and done.returncode == -signal.SIGKILL:  # as a system short of memory does
        raise no_process("grammar", "tried out")
    if done is None or done.returncode:
        raise RequestError(
            "too complex to be compiled: fewer patterns may hold for the same text",
            code="invalid_schema",
        )


def brief(error: str) -> str:
    """Without the listing of the whole grammar."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


def from_gbnf(grammar: str) -> str:
    """In Python: whoever else runs it meanwhile is slowed down."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises bare Exception
        raise RequestError(brief(str(error)), code="invalid_schema") from error
