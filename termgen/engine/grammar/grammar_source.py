"""Translation of structured outputs to the text that llguidance compiles, its limits, and the
messages between `GrammarCompiler` and `grammar_prover`.

Pure. Used by the compiler's threads and by `grammar_prover`.
"""

from __future__ import annotations

import enum
import json
from typing import Any, NamedTuple

from termgen.errors import RequestError
from termgen.vocabulary.schemas.enforced import enforced
from termgen.vocabulary.structured_outputs import is_gbnf

MAX_LEXER_STATES = 50_000
"""Limit of lexer states, of 1 to 2 KB each."""
MAX_ITEMS_IN_ROW = 6000
"""Limit of Earley items at one position; 5000 choices plus 1000 properties, the most accepted, need
this many."""
MAX_ITEMS_IN_GRAMMAR_ROW = 2000
"""The same for a client's own rules, which may all match the same text: accepting a token holds the
GIL, for longer the more items there are."""
MAX_ITEMS_IN_MASK = 8000
"""Limit of items in all rows visited for a mask, usually including the next row: an excess is then
detected without the GIL."""
LIMITS: dict[str, Any] = {
    "verbose_errors": False,
    "max_lexer_states": MAX_LEXER_STATES,
    "max_items_in_row": MAX_ITEMS_IN_ROW,
    "step_max_items": MAX_ITEMS_IN_MASK,
}
MAX_ERROR_CHARS = 300
WITHOUT_FORCING = '\n%llguidance {"no_forcing": true}'
"""Appended to a client's grammar, so that it takes precedence. Otherwise llguidance collects forced
text, which in a grammar like `start: /ab*/ never` with `never: never` has no end: the mask after an
`a` would fill memory in a thread that cannot be stopped."""

COMPILE_STACK_BYTES = 64 << 20
"""Stack of the compile threads: llguidance recurses once per rule that refers to the next.
Untouched pages cost nothing."""
PROOF_STACK_BYTES = COMPILE_STACK_BYTES // 2
"""Stack of the prover: a grammar that fits here fits in `COMPILE_STACK_BYTES`."""
MAX_PROOF_BYTES = 2 << 30
MAX_PROOF_WALL_S = 20.0
"""Wall-clock limit, for a worker that gets no core. Grammars are limited in CPU time."""
QUICK_CPU_S = 0.2
"""CPU limit of the first attempt. A grammar that exceeds it is tried again behind all others."""
SLOW_CPU_S = 2.0
"""CPU limit of the second attempt; a grammar that exceeds it is refused."""


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
    """See `StructuredOutputsParams`, as for the next."""
    is_strict: bool = True


class Verdict(enum.Enum):
    PROVEN = "proven"
    SLOW = "slow"
    """The grammar exceeded the CPU limit."""
    UNDECIDED = "undecided"
    """The worker ended for a reason other than the grammar."""
    NO_VOCABULARY = "no vocabulary"
    """The prover is new and needs the vocabulary first."""


class Proof(NamedTuple):
    """The prover's result. A grammar that llguidance refuses raises instead."""

    verdict: Verdict
    source: str = ""
    """The text that llguidance compiles, if proven."""


def source_of(
    kind: str, value: Any, *, is_own_grammar: bool = False, is_strict: bool = True
) -> str:
    """The text that llguidance compiles. Raises RequestError, or llguidance's exceptions."""
    from llguidance import LLMatcher

    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if kind == "choice":
        choices = " | ".join(json.dumps(c, ensure_ascii=False) for c in value)
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    if kind == "grammar":
        lark = from_gbnf(value) if is_gbnf(value) else value
        return str(LLMatcher.grammar_from_lark(lark if is_own_grammar else lark + WITHOUT_FORCING))
    schema = '{"type":"object"}'
    if kind == "json":
        wanted = enforced(json.loads(value), relaxed=not is_strict).schema
        schema = json.dumps(wanted, ensure_ascii=False)
    # Small models fall into endless white space if it is allowed everywhere.
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))


def read_vocabulary(task: VocabularyTask, tokenizer_json: str) -> Any:
    """llguidance's form of the vocabulary, an `LLTokenizer`. Raises RequestError."""
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
    """A new `LLMatcher`. Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**limits_of(kind))
    matcher = LLMatcher(vocabulary, source, limits=limits, log_level=0)
    error = matcher.get_error()
    if error:
        raise RequestError(brief(error), code="invalid_schema")
    return matcher


def limits_of(kind: str) -> dict[str, Any]:
    """Arguments of llguidance's `LLParserLimits`."""
    if kind != "grammar":
        return LIMITS
    return {**LIMITS, "max_items_in_row": MAX_ITEMS_IN_GRAMMAR_ROW}


def brief(error: str) -> str:
    """The message without llguidance's listing of the grammar and its source location."""
    text = " ".join(error.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


def from_gbnf(grammar: str) -> str:
    """The same grammar in Lark. Takes many milliseconds."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises bare Exception
        raise RequestError(brief(str(error)), code="invalid_schema") from error
