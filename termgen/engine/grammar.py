"""Compiles what answers must look like, with llguidance, in threads of its own.

`GrammarCompiler` belongs to an engine; the input processor asks it for grammars, which are cached.
What a client sends is compiled neither on the engine's thread nor on an event loop. It takes a
fraction of a second; what might take for ever is tried out in a process of its own before, and has
a thread of its own, so it can be stopped and holds up nobody else. A matcher is used by the
engine's thread and, while it fills a mask, by a thread that fills masks, never by both at once.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from termgen.engine.daemon_threads import DaemonThreads, spare_threads
from termgen.engine.grammar_source import brief, limits_of, needs_trial, source_of, try_out
from termgen.engine.grammar_times import GrammarTimes
from termgen.engine.mask_filler import SLOW_S
from termgen.engine.structured_outputs import StructuredOutputsParams
from termgen.engine.token_mask import IntArray, faults_of
from termgen.errors import EngineDeadError, OverloadedError, RequestError
from termgen.helper_process import (
    HelperClosed,
    HelperFault,
    HelperProcess,
    HelperTooSlow,
    no_process,
)
from termgen.turns import long_turns

if TYPE_CHECKING:
    from termgen.engine.tokenizer import Tokenizer

MAX_CACHED = 64
MAX_WAITING = 64
"""Compilations of one lane that may wait for a thread or be under way; more are refused."""
NUM_THREADS = 2
COMPILE_TIMEOUT_S = 10.0
GBNF_LIMIT_S = 5.0
"""The worst that is taken needs a tenth of a second where a core is free."""
PROGRAM = Path(__file__).with_name("grammar_program.py")


class Grammar:
    """A `TokenGrammar`."""

    def __init__(
        self, prototype: Any, executor: Any, num_words: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Fills the first mask, which is that of every answer. Raises RequestError."""
        self._prototype = prototype
        self._executor = executor
        self._num_words = num_words
        stays: dict[int, int] = {}
        for token_id in eos_token_ids:
            bit = int(np.uint32(1 << token_id % 32).view(np.int32))
            stays[token_id // 32] = stays.get(token_id // 32, -1) & ~bit
        self._without_eos = list(stays.items())
        self._first_mask = np.zeros(num_words, np.int32)
        began = time.perf_counter()
        with long_turns():
            Matcher(prototype, executor, num_words, None).fill(self._first_mask)
        self.is_slow = time.perf_counter() - began > SLOW_S

    def start(self, *, ends_at_eos: bool) -> Matcher:
        withheld = None if ends_at_eos else self._without_eos
        first = None if self.is_slow else self._first_mask  # or the next would be taken for quick
        matcher = self._prototype.deep_copy()
        return Matcher(matcher, self._executor, self._num_words, withheld, first)


class Matcher:
    """A `TokenMatcher`."""

    __slots__ = ("_address", "_bits", "_executor", "_first", "_matcher", "_withheld", "num_words")

    def __init__(
        self,
        matcher: Any,
        executor: Any,
        num_words: int,
        withheld: Sequence[tuple[int, int]] | None,
        first: IntArray | None = None,
    ) -> None:
        """executor: runs what several matchers have to do at once.
        withheld: what to clear as long as other bits are left: words, and the bits that stay.
        first: the first mask, where it is known."""
        self._matcher = matcher
        self._executor = executor
        self.num_words = num_words
        self._withheld = withheld
        self._first = first
        self._bits: IntArray | None = None
        self._address = 0  # asking an array for it takes as long as a short mask

    def accept(self, token_id: int) -> bool:
        self._first = None
        # A matcher that has failed takes end tokens all the same.
        return bool(self._matcher.consume_token(token_id)) and not self._matcher.is_error()

    @property
    def is_ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fill(self, bits: IntArray) -> None:
        if self._first is not None:
            bits[:] = self._first
        else:
            if bits is not self._bits:
                self._bits, self._address = bits, bits.ctypes.data
            self._matcher.unsafe_compute_mask_ptr(self._address, bits.nbytes)
        self._finish(bits)

    @staticmethod
    def fill_all(matchers: Sequence[Matcher], bits: IntArray) -> list[BaseException | None]:
        jobs = [(matcher._matcher, i) for i, matcher in enumerate(matchers)]
        executor = matchers[0]._executor
        executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits.strides[0], len(bits))
        return faults_of(Matcher._finish, matchers, bits)

    def _finish(self, bits: IntArray) -> None:
        if self._matcher.is_error():  # the mask then has the end tokens, as if the answer were done
            raise RequestError(
                f"the grammar is too complex: {brief(self._matcher.get_error())}",
                code="invalid_schema",
            )
        if self._withheld is not None:
            self._withhold(bits, self._withheld)

    def _withhold(self, bits: IntArray, withheld: Sequence[tuple[int, int]]) -> None:
        before = []
        for word, stays in withheld:  # scalars: arrays so short take longer
            old = int(bits[word])
            if old & ~stays:
                before.append((word, old))
                bits[word] = old & stays
        if before and not bits.any():
            for word, old in before:
                bits[word] = old


class _Lane:
    """Threads that compile, and how much they have to do."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.threads = DaemonThreads(num_threads, name)
        self.num_waiting = 0


class Compilation(Future[Grammar]):
    """A grammar that is compiled, or is to be. Do not cancel it: several may wait for it."""

    num_waiting = 0
    took_s = math.inf
    """Once it is over, well or not."""


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
        self._cache: OrderedDict[tuple[str, object], Compilation] = OrderedDict()
        self._lane = _Lane(NUM_THREADS, "termgen-grammar")
        self._trial_lane = _Lane(1, "termgen-grammar-trial")
        self._computing = threading.Semaphore(spare_threads(NUM_THREADS))
        """For what takes a whole core: the rest of a compilation waits for others, if at all."""
        self._vocabulary: Any = None
        self._executor: Any = None
        self._vocabulary_lock = threading.Lock()
        self._gbnf = HelperProcess(PROGRAM)

    def prepare_for_strangers(self) -> None:
        """Read the vocabulary now; if it cannot be, whoever asks for a grammar is told."""
        with contextlib.suppress(RequestError):
            self._vocabulary_of_model()

    def close(self) -> None:
        """No grammar comes any more."""
        self._gbnf.close()

    def submit(self, wanted: StructuredOutputsParams) -> Compilation:
        """The grammar, or the `RequestError` it ends in. Whoever asks says `leave` in the end."""
        key = _key(wanted)
        lane = self._trial_lane if needs_trial(wanted) else self._lane
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                found.num_waiting += 1
                return found
            if lane.num_waiting >= MAX_WAITING:
                raise _too_busy(wanted)
            future = Compilation()
            future.num_waiting = 1
            try:
                lane.threads.submit(partial(self._run, wanted, future, lane))
            except RuntimeError:  # the system has no thread left
                raise no_process("grammar", "compiled", param=wanted.param) from None
            lane.num_waiting += 1
            self._cache[key] = future
            if len(self._cache) > MAX_CACHED:
                self._evict()
        return future

    def _evict(self) -> None:
        """Of the half that nobody has asked for longest, what took least. Many that are made in a
        moment, as somebody may send, do not displace what others have waited for; and freeing what
        took long holds Python's lock for milliseconds."""
        oldest = islice(self._cache, MAX_CACHED // 2)
        del self._cache[min(oldest, key=lambda key: self._cache[key].took_s)]

    def leave(self, future: Compilation) -> None:
        """Waits no longer. What nobody waits for is not begun: others are served first who have
        not gone meanwhile."""
        with self._lock:
            future.num_waiting -= 1

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """The same for a caller that can wait. Raises `RequestError` naming its field."""
        future = self.submit(wanted)
        try:
            return future.result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise self.give_up(wanted, future) from None
        except RequestError as error:
            raise named(error, wanted) from None
        finally:
            self.leave(future)

    def give_up(self, wanted: StructuredOutputsParams, future: Compilation) -> RequestError:
        """The error of a request that has waited for the longest time. Nobody is to wait for the
        same grammar again, unless it has only waited for others."""
        if not future.running():
            return _too_busy(wanted)
        error = RequestError(
            f"not compiled within {COMPILE_TIMEOUT_S:.0f} s; make it simpler", code="invalid_schema"
        )
        failed = Compilation()
        failed.took_s = COMPILE_TIMEOUT_S
        failed.set_exception(error)
        with self._lock:
            if self._cache.get(_key(wanted)) is future:
                self._cache[_key(wanted)] = failed
        return named(error, wanted)

    def _run(self, wanted: StructuredOutputsParams, future: Compilation, lane: _Lane) -> None:
        began = time.perf_counter()
        try:
            if self._begin(wanted, future):
                try:
                    grammar = self.times.measure(self._compile, wanted)
                finally:
                    future.took_s = time.perf_counter() - began
                future.set_result(grammar)
        except BaseException as error:  # goes to whoever waits for the grammar
            if not isinstance(error, RequestError) or isinstance(error, OverloadedError):
                with self._lock:  # a machine without processes or memory is to blame
                    self._forget(wanted, future)
            future.set_exception(error)
        finally:
            with self._lock:
                lane.num_waiting -= 1

    def _begin(self, wanted: StructuredOutputsParams, future: Compilation) -> bool:
        """Unless all who waited for it have gone."""
        with self._lock:
            if future.num_waiting:
                future.set_running_or_notify_cancel()
                return True
            self._forget(wanted, future)
            return False

    def _forget(self, wanted: StructuredOutputsParams, future: Compilation) -> None:
        """Whoever asks next tries again. Under the lock."""
        if self._cache.get(_key(wanted)) is future:
            del self._cache[_key(wanted)]

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        source = source_of(wanted, self._from_gbnf)
        if needs_trial(wanted):
            try_out(source)
        limits = LLParserLimits(**limits_of(wanted))
        vocabulary = self._vocabulary_of_model()
        with self._computing:
            with long_turns():
                prototype = LLMatcher(vocabulary, source, limits=limits, log_level=0)
            error = prototype.get_error()
            if error:
                raise RequestError(brief(error), code="invalid_schema")
            num_words = -(-self._num_tokens // 32)
            return Grammar(prototype, self._executor, num_words, self._eos_token_ids)

    def _from_gbnf(self, grammar: str) -> str:
        try:
            lark: str = self._gbnf.ask(grammar, limit_s=GBNF_LIMIT_S)
        except HelperClosed:
            raise EngineDeadError("the engine was shut down") from None
        except HelperTooSlow:
            raise RequestError(
                f"not converted within {GBNF_LIMIT_S:.0f} s; make it simpler", code="invalid_schema"
            ) from None
        except HelperFault:  # for lack of memory, as a rule: whoever asks next tries again
            raise no_process("grammar", "converted") from None
        return lark

    def _vocabulary_of_model(self) -> Any:
        """llguidance's own form of the vocabulary, made once: it takes up to a second, in which
        no other thread runs."""
        from llguidance import LLExecutor, LLTokenizer

        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._executor = LLExecutor(num_threads=spare_threads(NUM_THREADS))
                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer.to_json(),
                        n_vocab=self._num_tokens,
                        eos_token=self._eos_token_ids or None,
                    )
                except (ValueError, TypeError, RuntimeError) as error:
                    raise RequestError(
                        f"this model's tokenizer cannot be constrained: {brief(str(error))}",
                        code="unsupported_parameter",
                    ) from error
        return self._vocabulary


def _key(wanted: StructuredOutputsParams) -> tuple[str, object]:
    return wanted.kind, wanted.value


def _too_busy(wanted: StructuredOutputsParams) -> OverloadedError:
    return OverloadedError(
        "too many grammars wait to be compiled; try again soon",
        param=wanted.param,
        code="grammar_queue_full",
        retry_after_s=1.0,
    )


def named(error: RequestError, wanted: StructuredOutputsParams) -> RequestError:
    """The error of a shared compilation, for the field of one request."""
    if error.param is not None or isinstance(error, OverloadedError):
        return error
    return RequestError(f"{wanted.param}: {error}", param=wanted.param, code=error.code)
