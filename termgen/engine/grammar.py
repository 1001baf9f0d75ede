"""Compiles what answers must look like, with llguidance, in threads of its own.

`GrammarCompiler` belongs to an engine; the input processor asks it for grammars, which are cached.
What a client sends is compiled neither on the engine's thread nor on an event loop: it can take
long, though the limits below keep that to a fraction of a second. A matcher is used by the engine's
thread and, while it fills a mask, by the thread that fills masks, never by both at once.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

import numpy as np

from termgen.engine.grammar_times import GrammarTimes
from termgen.engine.structured_outputs import StructuredOutputsParams
from termgen.engine.token_mask import IntArray, TokenMatcher
from termgen.errors import RequestError

if TYPE_CHECKING:
    from termgen.engine.tokenizer import Tokenizer

MAX_CACHED = 64
MAX_WAITING = 64
"""Compilations that may wait for a thread; more are refused."""
NUM_THREADS = 2
COMPILE_TIMEOUT_S = 10.0
MAX_LEXER_STATES = 50_000
"""A kilobyte or two each."""
MAX_ERROR_CHARS = 300


class Grammar:
    """A `TokenGrammar`."""

    def __init__(self, prototype: Any, num_words: int, eos_token_ids: Sequence[int]) -> None:
        self._prototype = prototype
        self._num_words = num_words
        self._eos_bits = np.zeros(num_words, np.int32)
        for token_id in eos_token_ids:
            self._eos_bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def start(self, *, ends_at_eos: bool) -> Matcher:
        withheld = None if ends_at_eos else self._eos_bits
        return Matcher(self._prototype.deep_copy(), self._num_words, withheld)


class Matcher:
    """A `TokenMatcher`."""

    __slots__ = ("_withheld", "llmatcher", "num_words")

    def __init__(self, llmatcher: Any, num_words: int, withheld: IntArray | None) -> None:
        """withheld: bits to clear as long as others are left."""
        self.llmatcher = llmatcher
        self.num_words = num_words
        self._withheld = withheld

    def accept(self, token_id: int) -> bool:
        return bool(self.llmatcher.consume_token(token_id))

    @property
    def is_ended(self) -> bool:
        return bool(self.llmatcher.is_stopped())

    def fill(self, bits: IntArray) -> None:
        self.llmatcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self.withhold(bits)

    def withhold(self, bits: IntArray) -> None:
        if self._withheld is not None:
            rest = bits & ~self._withheld
            if rest.any():
                bits[:] = rest


class MaskFiller:
    """Fills the masks of a step at once, on several cores where there are several rows."""

    def __init__(self) -> None:
        self._executor: Any = None

    def __call__(self, matchers: Sequence[TokenMatcher], bits: IntArray) -> None:
        """bits [num_matchers, num_words]."""
        ours = [(m, i) for i, m in enumerate(matchers) if isinstance(m, Matcher)]
        if len(ours) < 2:
            for matcher, row in zip(matchers, bits, strict=True):
                matcher.fill(row)
            return
        assert len(ours) == len(matchers), "an engine has matchers of one kind"
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        rows = [(matcher.llmatcher, i) for matcher, i in ours]
        self._executor.unsafe_compute_mask_ptr(
            rows, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(rows)
        )
        for matcher, i in ours:
            matcher.withhold(bits[i])


class GrammarCompiler:
    """Compiles for one model. Any thread may use it."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.times = GrammarTimes()
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, object], Future[Grammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        self._vocabulary: Any = None
        self._vocabulary_lock = threading.Lock()

    def submit(self, wanted: StructuredOutputsParams) -> Future[Grammar]:
        """The grammar, or the `RequestError` it ends in. Do not cancel it: others may wait too."""
        key = (wanted.kind, wanted.value)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
            if self._num_waiting >= MAX_WAITING:
                raise RequestError(
                    "too many grammars wait to be compiled; try again soon",
                    param=wanted.param,
                    code="queue_full",
                    status=429,
                    type="rate_limit_error",
                )
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, "termgen-grammar")
            self._num_waiting += 1
            future = self._pool.submit(self.times.measure, self._compile, wanted)
            self._cache[key] = future
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        future.add_done_callback(self._done)
        return future

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """The same for a caller that can wait. Raises `RequestError` naming its field."""
        try:
            return self.submit(wanted).result(COMPILE_TIMEOUT_S)
        except FutureTimeoutError:
            raise too_slow(wanted) from None
        except RequestError as error:
            raise named(error, wanted) from None

    def _done(self, future: Future[Grammar]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        prototype = LLMatcher(self._vocabulary_of_model(), _source(wanted), limits=limits)
        error = prototype.get_error()
        if error:
            raise RequestError(_brief(error), code="invalid_schema")
        return Grammar(prototype, -(-self._num_tokens // 32), self._eos_token_ids)

    def _vocabulary_of_model(self) -> Any:
        """llguidance's own form of the vocabulary, made once: it takes up to a second."""
        from llguidance import LLTokenizer

        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer.to_json(),
                        n_vocab=self._num_tokens,
                        eos_token=self._eos_token_ids or None,
                    )
                except (ValueError, TypeError, RuntimeError) as error:
                    raise RequestError(
                        f"this model's tokenizer cannot be constrained: {_brief(str(error))}",
                        code="unsupported_parameter",
                    ) from error
        return self._vocabulary


def too_slow(wanted: StructuredOutputsParams) -> RequestError:
    return RequestError(
        f"{wanted.param}: not compiled within {COMPILE_TIMEOUT_S:.0f} s; make it simpler",
        param=wanted.param,
        code="invalid_schema",
    )


def named(error: RequestError, wanted: StructuredOutputsParams) -> RequestError:
    """The error of a shared compilation, for the field of one request."""
    if error.param is not None:
        return error
    return RequestError(f"{wanted.param}: {error}", param=wanted.param, code=error.code)


def _source(wanted: StructuredOutputsParams) -> str:
    """What llguidance compiles."""
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return str(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        choices = " | ".join(json.dumps(c, ensure_ascii=False) for c in wanted.choice)
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    if wanted.grammar is not None:
        return str(LLMatcher.grammar_from_lark(_as_lark(wanted.grammar)))
    schema = '{"type":"object"}' if wanted.json_object else str(wanted.json)
    # Where any white space is allowed, small models write nothing else.
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))


def _as_lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the converter raises bare Exception
        raise RequestError(_brief(str(error)), code="invalid_schema") from error


def _brief(error: str) -> str:
    """Without the listing of the whole grammar."""
    text = " ".join(error.split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
