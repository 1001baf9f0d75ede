"""What a request asks for, as the text that llguidance compiles, within which limits, and what is
said between `GrammarCompiler` and the program that proves grammars first.

Pure. Used by the compiler's threads and by `grammar_prover`.
"""

from __future__ import annotations

import enum
import json
from typing import Any, NamedTuple

from termgen.errors import RequestError
from termgen.vocabulary.structured_outputs import is_gbnf

MAX_LEXER_STATES = 50_000
"""A kilobyte or two each."""
MAX_ITEMS_IN_ROW = 6000
"""Ways in which an answer may go on at one place: 5000 choices and 1000 properties, the most that
are taken, have as many."""
MAX_ITEMS_IN_GRAMMAR_ROW = 2000
"""The same where the client wrote the rules: then all of them may be about the same text. Taking in
a token holds Python's lock, and takes the longer the more there are of those."""
MAX_ITEMS_IN_MASK = 8000
"""Items of all rows that a mask goes through, usually the next one among them: too many are then
found without the lock."""
LIMITS: dict[str, Any] = {
    "verbose_errors": False,
    "max_lexer_states": MAX_LEXER_STATES,
    "max_items_in_row": MAX_ITEMS_IN_ROW,
    "step_max_items": MAX_ITEMS_IN_MASK,
}
MAX_ERROR_CHARS = 300
WITHOUT_FORCING = '\n%llguidance {"no_forcing": true}'
"""Behind a client's grammar, so that it is the last word. Else llguidance collects the text that
must follow, and in a grammar like `start: /ab*/ never` with `never: never` that has no end: the
mask behind an `a` would fill memory for ever, and no thread can be stopped in there."""

COMPILE_STACK_BYTES = 64 << 20
"""Stack of the threads that compile: llguidance goes down it once for each rule that refers to the
next. Pages that are not reached cost nothing."""
PROOF_STACK_BYTES = COMPILE_STACK_BYTES // 2
"""What fits here fits there."""
MAX_PROOF_BYTES = 2 << 30
MAX_PROOF_WALL_S = 20.0
"""Wall-clock limit: a worker may be given no core. What a grammar may need is counted in CPU
time."""
QUICK_CPU_S = 0.2
"""CPU time of the first try. What needs more is tried once more behind everything that does not."""
SLOW_CPU_S = 2.0
"""CPU time of the second try; what needs more is refused."""


class VocabularyTask(NamedTuple):
    """Asks the prover to read a vocabulary, whose JSON is sent along."""

    num_tokens: int
    eos_token_ids: tuple[int, ...]


class ProofTask(NamedTuple):
    """Asks the prover to try a grammar."""

    kind: str
    """One of `structured_outputs.KINDS`."""
    value: str | tuple[str, ...] | bool
    max_cpu_s: float
    is_own_grammar: bool = False
    """See `StructuredOutputsParams`."""


class Verdict(enum.Enum):
    PROVEN = "proven"
    SLOW = "slow"
    """It needed more CPU time than allowed."""
    UNDECIDED = "undecided"
    """The worker was ended by something else than the grammar."""
    NO_VOCABULARY = "no vocabulary"
    """The prover is new and must be sent one."""


class Proof(NamedTuple):
    """What the prover found out. What llguidance refuses is raised instead."""

    verdict: Verdict
    source: str = ""
    """What llguidance compiles, if proven."""


def source_of(kind: str, value: Any, *, is_own_grammar: bool = False) -> str:
    """The text that llguidance compiles. Raises RequestError, and what llguidance raises."""
    from llguidance import LLMatcher

    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if kind == "choice":
        choices = " | ".join(json.dumps(c, ensure_ascii=False) for c in value)
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    if kind == "grammar":
        lark = from_gbnf(value) if is_gbnf(value) else value
        return str(LLMatcher.grammar_from_lark(lark if is_own_grammar else lark + WITHOUT_FORCING))
    schema = '{"type":"object"}' if kind == "json_object" else str(value)
    # Where any white space is allowed, small models write nothing else.
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))


def read_vocabulary(task: VocabularyTask, tokenizer_json: str) -> Any:
    """llguidance's own form of the vocabulary, an `LLTokenizer`. Raises RequestError."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(
            tokenizer_json, n_vocab=task.num_tokens, eos_token=list(task.eos_token_ids) or None
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(
            f"this model's tokenizer cannot be constrained: {brief(str(error))}",
            code="unsupported_parameter",
        ) from error


def compile_source(source: str, kind: str, vocabulary: Any) -> Any:
    """An `LLMatcher` at the beginning of an answer. Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**limits_of(kind))
    matcher = LLMatcher(vocabulary, source, limits=limits, log_level=0)
    error = matcher.get_error()
    if error:
        raise RequestError(brief(error), code="invalid_schema")
    return matcher


def limits_of(kind: str) -> dict[str, Any]:
    """Those of llguidance's `LLParserLimits`."""
    if kind != "grammar":
        return LIMITS
    return {**LIMITS, "max_items_in_row": MAX_ITEMS_IN_GRAMMAR_ROW}


def brief(error: str) -> str:
    """Without the listing of the whole grammar, and where in the library it panicked."""
    text = " ".join(error.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


def from_gbnf(grammar: str) -> str:
    """The same grammar in Lark. Takes Python many milliseconds."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises bare Exception
        raise RequestError(brief(str(error)), code="invalid_schema") from error
