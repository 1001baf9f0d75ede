"""Compiles grammars with llguidance, in its own threads.

Each engine has a `GrammarCompiler`; the input processor requests grammars, which are cached. A
client's grammar is compiled neither on the engine thread nor on an event loop, and only after a
helper process (`grammar_prover`) has compiled it: native code that crashes or never ends costs that
process only. Clients take turns, and slow grammars wait behind quick ones. A matcher is used by the
engine thread or by a mask thread, never by both at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from termgen.engine.grammar.grammar_source import (
    COMPILE_STACK_BYTES,
    MAX_PROOF_WALL_S,
    QUICK_CPU_S,
    SLOW_CPU_S,
    Proof,
    ProofTask,
    Verdict,
    VocabularyTask,
    brief,
    compile_source,
    read_vocabulary,
)
from termgen.engine.grammar.mask_filler import SLOW_S
from termgen.engine.grammar.schema_check import SchemaCheck, SchemaChecker
from termgen.errors import EngineDeadError, OverloadedError, RequestError
from termgen.system.cpu_slices import long_slices
from termgen.system.daemon_threads import DaemonThreads, spare_threads
from termgen.system.helper_process import HelperClosed, HelperFault, HelperProcess, no_process
from termgen.vocabulary.grammar_times import GrammarTimes
from termgen.vocabulary.schemas.enforced import enforced
from termgen.vocabulary.structured_outputs import StructuredOutputsParams
from termgen.vocabulary.token_mask import IntArray, faults_of

_Key = tuple[str, object, bool, bool]

MAX_CACHED = 64
MAX_WAITING = 512
"""Limit of queued and running compilations; more are refused."""
MAX_WAITING_OF_CLIENT = 64
"""The same limit for one client."""
SAMPLED_WORD = 16
"""Most masks show that they are not empty in every so many words."""
MASK_THREADS = 2
"""Threads of one joint fill. A mask takes some microseconds: waking more threads takes longer than
the work that they take over (32 masks on 16 cores: 0.32 ms with two, 0.63 with sixteen)."""
NUM_PROVERS = 2
"""Helper processes, of which at most one has a slow grammar."""
COMPILE_TIMEOUT_S = 10.0
VOCABULARY_TIMEOUT_S = 60.0
MAX_CLIENTS = 1024
"""Clients whose compile time is tracked."""
FORGETTING_S = 60.0
"""Half-life of a client's tracked compile time."""
PROGRAM = Path(__file__).with_name("grammar_prover.py")

MAX_EXPONENT_DIGITS = 2
MAX_INTEGER_DIGITS = 200
"""Digits at most; with `MAX_EXPONENT_DIGITS` a number stays below 1e300, finite in any parser."""


_FIRST_ROW = np.zeros(1, np.intp)


class Grammar:
    """A `TokenGrammar`."""

    def __init__(
        self,
        prototype: Any,
        executor: Any,
        num_words: int,
        eos_token_ids: Sequence[int],
        numbers: NumberTokens | None = None,
        check: SchemaCheck | None = None,
    ) -> None:
        """Fills the first mask, which all answers share. numbers: set if numbers in answers must be
        finite. Raises RequestError."""
        self.check = check
        self._prototype = prototype
        self._numbers = numbers
        self._executor = executor
        self._num_words = num_words
        stays: dict[int, int] = {}
        for token_id in eos_token_ids:
            bit = int(np.uint32(1 << token_id % 32).view(np.int32))
            stays[token_id // 32] = stays.get(token_id // 32, -1) & ~bit
        self._without_eos = list(stays.items())
        self._first_mask = np.zeros(num_words, np.int32)
        began = time.perf_counter()
        with long_slices():
            Matcher(prototype, executor, num_words, None).fill(self._first_mask)
        self.is_slow = time.perf_counter() - began > SLOW_S

    def start(self, *, ends_at_eos: bool) -> Matcher:
        withheld = None if ends_at_eos else self._without_eos
        first = None if self.is_slow else self._first_mask  # a copy would make the row look quick
        matcher = self._prototype.deep_copy()
        return Matcher(
            matcher, self._executor, self._num_words, withheld, first, numbers=self._numbers
        )


class Matcher:
    """A `TokenMatcher`."""

    __slots__ = (
        "_address",
        "_bits",
        "_executor",
        "_first",
        "_matcher",
        "_number",
        "_numbers",
        "_withheld",
        "num_words",
    )

    def __init__(
        self,
        matcher: Any,
        executor: Any,
        num_words: int,
        withheld: Sequence[tuple[int, int]] | None,
        first: IntArray | None = None,
        *,
        numbers: NumberTokens | None = None,
    ) -> None:
        """executor: llguidance's thread pool for several matchers at once.
        withheld: (word, bits to keep) pairs to clear in a mask, unless that would leave it empty.
        first: the first mask if known. numbers: see `Grammar`."""
        self._matcher = matcher
        self._numbers = numbers
        self._number = b""
        self._executor = executor
        self.num_words = num_words
        self._withheld = withheld
        self._first = first
        self._bits: IntArray | None = None
        self._address = 0  # reading an array's address takes as long as filling a short mask

    def accept(self, token_id: int) -> bool:
        self._first = None
        if self._numbers is not None:
            self._number = self._numbers.follow(self._number, token_id)
        # A failed matcher still accepts end tokens.
        return bool(self._matcher.consume_token(token_id)) and not self._matcher.is_error()

    @property
    def is_ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def take_forced(self, most: int) -> list[int]:
        # Where llguidance has such tokens, its mask allows the first of them only: they are what
        # the tokenizer makes of the text that must follow, but for a last one that the text behind
        # may change.
        forced: list[int] = self._matcher.compute_ff_tokens()[:most]
        for token_id in forced:
            if not self.accept(token_id):
                raise RequestError(
                    f"the grammar is too complex: {brief(self._matcher.get_error())}",
                    code="invalid_schema",
                )
        return forced

    def fill(self, bits: IntArray) -> None:
        if self._first is not None:
            bits[:] = self._first
        else:
            if bits is not self._bits:
                self._bits, self._address = bits, bits.ctypes.data
            self._matcher.unsafe_compute_mask_ptr(self._address, bits.nbytes)
        self._finish(bits)

    @staticmethod
    def fill_all(
        matchers: Sequence[Matcher], bits: IntArray, *, in_this_thread: bool
    ) -> list[BaseException | None]:
        address, size = bits.ctypes.data, bits.strides[0]
        if in_this_thread:
            for i, matcher in enumerate(matchers):
                matcher._matcher.unsafe_compute_mask_ptr(address + i * size, size)
        else:
            jobs = [(matcher._matcher, i) for i, matcher in enumerate(matchers)]
            matchers[0]._executor.unsafe_compute_mask_ptr(jobs, address, size, len(bits))
        faults: list[BaseException | None] = [None] * len(matchers)
        rows = []
        for i, matcher in enumerate(matchers):
            if matcher._number or matcher._matcher.is_error():
                faults[i : i + 1] = faults_of(Matcher._finish, [matcher], bits[i : i + 1])
            elif matcher._withheld is not None:
                rows.append(i)
        if rows:
            _withhold(bits, np.asarray(rows), matchers[rows[0]]._withheld or ())
        return faults

    def _finish(self, bits: IntArray) -> None:
        if self._matcher.is_error():  # the mask then allows end tokens, as for a complete answer
            raise RequestError(
                f"the grammar is too complex: {brief(self._matcher.get_error())}",
                code="invalid_schema",
            )
        if self._number:
            assert self._numbers is not None
            self._numbers.keep_finite(self._number, bits)
        if self._withheld is not None:
            _withhold(bits[None], _FIRST_ROW, self._withheld)


def _withhold(
    bits: IntArray, rows: npt.NDArray[np.intp], withheld: Sequence[tuple[int, int]]
) -> None:
    """Clear bits of these rows of `bits` [N, num_words], unless that would leave a row empty.
    withheld: (word, bits to keep). In a few calls for all rows: arithmetic on each takes as long as
    filling it."""
    words, stays = (np.asarray(column, np.intp) for column in zip(*withheld, strict=True))
    before = bits[rows[:, None], words]
    after = before & stays.astype(np.int32)
    is_cut = (before != after).any(axis=1)
    if not is_cut.any():
        return
    rows, before = rows[is_cut], before[is_cut]
    bits[rows[:, None], words] = after[is_cut]
    seems_empty = ~bits[rows, ::SAMPLED_WORD].any(axis=1)
    for row, old in zip(rows[seems_empty].tolist(), before[seems_empty], strict=True):
        if not bits[row].any():
            bits[row, words] = old


class NumberTokens:
    """Keeps JSON numbers finite: a grammar alone permits `4e888269132`.

    Tracks the number at the end of an answer, and masks tokens that would exceed
    `MAX_EXPONENT_DIGITS` or `MAX_INTEGER_DIGITS`. Text that may continue with a quotation mark is
    not a number, but a JSON string or free text.
    """

    _NUMBER_END = re.compile(rb"[0-9][0-9.]*(?:[eE][+-]?[0-9]*)?\Z")
    _EXPONENT_END = re.compile(rb"[eE][+-]?([0-9]*)\Z")
    _INTEGER_END = re.compile(rb"(?<![0-9.])[0-9]+\Z")
    _NUMBER_CHARS = frozenset(b"0123456789.eE+-")

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """tokens: the bytes of each token."""
        self._texts = {i: text for i, text in enumerate(tokens) if self._continues(text)}
        """Tokens that begin or continue a number, and end within it."""
        many = rb"[+-]?[0-9]{%d}"
        self._beyond = [
            _mask_of(tokens, re.compile(many % (left + 1)).match)
            for left in range(MAX_EXPONENT_DIGITS + 1)
        ]
        """[digits that an exponent may still have] mask of the tokens that add more."""
        exponent = re.compile(rb"[0-9.]*[eE]" + many % (MAX_EXPONENT_DIGITS + 1))
        self._exponents = _mask_of(tokens, exponent.match)
        """Mask of the tokens that contain a too long exponent."""
        self._quotes = _mask_of(tokens, re.compile(b'"').match)

    def _continues(self, text: bytes) -> bool:
        return bool(text) and text[-1] in self._NUMBER_CHARS

    def follow(self, number: bytes, token_id: int) -> bytes:
        """The number at the end of the text after this token; empty if there is none."""
        text = self._texts.get(token_id)
        if text is None:
            return b""
        found = self._NUMBER_END.search(number + text)
        return found[0] if found else b""

    def keep_finite(self, number: bytes, bits: IntArray) -> None:
        """Clear tokens in this mask, unless that would leave it empty."""
        if (bits & self._quotes).any():
            return
        exponent = self._EXPONENT_END.search(number)
        integer = self._INTEGER_END.search(number)
        if exponent:
            beyond = self._beyond[max(0, MAX_EXPONENT_DIGITS - len(exponent[1]))]
        elif integer and len(integer[0]) >= MAX_INTEGER_DIGITS:
            beyond = self._beyond[0] | self._exponents
        else:
            beyond = self._exponents
        left = bits & ~beyond
        if left.any():
            bits[:] = left


def _mask_of(tokens: Sequence[bytes], has: Callable[[bytes], object]) -> IntArray:
    """Mask of the tokens for which `has` is true."""
    flags = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
    flags[[i for i, text in enumerate(tokens) if has(text)]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class Compilation(Future[Grammar]):
    """A compiled or queued grammar. Must not be cancelled, as several requests may wait for it."""

    num_waiting = 0
    took_s = math.inf
    """Compile time; set when it has ended, successfully or not."""


@dataclass(slots=True, eq=False)
class _Job:
    """A queued or running compilation."""

    wanted: StructuredOutputsParams
    future: Compilation
    client: str
    is_slow: bool = False
    """Its first attempt took too long."""
    spent_s: float = 0.0

    @property
    def num_chars(self) -> int:
        value = self.wanted.value
        return sum(map(len, value)) if isinstance(value, tuple) else len(str(value))


class _NeedsLonger(Exception):
    """The first attempt took too long."""


class _FairQueue:
    """Jobs of several clients. Not thread-safe: its owner has a lock.

    Quick jobs go first; among these the client with the least compile time; among equals the
    shortest grammar. So a client delays mostly itself. One slow job at a time.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, list[_Job]] = {}
        self._used_s: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> (compile seconds, time of that figure)."""
        self._num_open = 0
        self._num_open_of: dict[str, int] = {}
        self._is_slow_under_way = False

    def is_full_for(self, client: str) -> bool:
        of_client = self._num_open_of.get(client, 0)
        return self._num_open >= MAX_WAITING or of_client >= MAX_WAITING_OF_CLIENT

    @property
    def num_open(self) -> int:
        """Queued and running jobs."""
        return self._num_open

    def open(self, job: _Job) -> None:
        self._num_open += 1
        self._num_open_of[job.client] = self._num_open_of.get(job.client, 0) + 1
        self.put(job)

    def put(self, job: _Job) -> None:
        self._jobs.setdefault(job.client, []).append(job)

    def take(self) -> _Job | None:
        """The next job that may run now."""
        best: tuple[tuple[bool, float, int], _Job] | None = None
        for client, jobs in self._jobs.items():
            job = min(jobs, key=lambda job: job.is_slow)  # the oldest of its kind
            if job.is_slow and self._is_slow_under_way:
                continue
            rank = (job.is_slow, self._used_by(client), job.num_chars)
            if best is None or rank < best[0]:
                best = (rank, job)
        if best is None:
            return None
        job = best[1]
        jobs = self._jobs[job.client]
        jobs.remove(job)
        if jobs:
            self._jobs[job.client] = self._jobs.pop(job.client)  # behind equals from now on
        else:
            del self._jobs[job.client]
        self._is_slow_under_way |= job.is_slow
        return job

    def note_try(self, job: _Job, seconds: float) -> None:
        """Charge the time of an attempt to the job's client."""
        if job.is_slow:
            self._is_slow_under_way = False
        used_s = self._used_by(job.client) + seconds
        self._used_s[job.client] = (used_s, time.monotonic())
        self._used_s.move_to_end(job.client)
        if len(self._used_s) > MAX_CLIENTS:
            self._used_s.popitem(last=False)

    def close(self, job: _Job) -> None:
        """End a job that was taken."""
        self._num_open -= 1
        self._num_open_of[job.client] -= 1
        if not self._num_open_of[job.client]:
            del self._num_open_of[job.client]

    def _used_by(self, client: str) -> float:
        used_s, when = self._used_s.get(client, (0.0, 0.0))
        return used_s and used_s * 0.5 ** ((time.monotonic() - when) / FORGETTING_S)


class GrammarTokens(Protocol):
    """The part of the tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int: ...

    def to_json(self) -> str:
        """The text of a tokenizer.json."""
        ...


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe."""

    def __init__(
        self, tokenizer: GrammarTokens, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.times = GrammarTimes()
        num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._vocabulary_task = VocabularyTask(num_tokens, tuple(sorted(eos_token_ids)))
        self._num_words = -(-num_tokens // 32)
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Compilation] = OrderedDict()
        self._queue = _FairQueue()
        self._threads = DaemonThreads(
            NUM_PROVERS, "termgen-grammar", stack_bytes=COMPILE_STACK_BYTES
        )
        self._provers = [HelperProcess(PROGRAM) for _ in range(NUM_PROVERS)]
        self._free_provers = self._provers[::-1]
        """Idle provers, as a stack: the first is used most, and the others start only if needed."""
        self._computing = threading.Semaphore(spare_threads(NUM_PROVERS))
        """Limits the cores in use. The slow job does not count, or others would wait for it."""
        self._vocabulary: Any = None
        self._numbers: NumberTokens | None = None
        self._executor: Any = None
        self._vocabulary_lock = threading.Lock()
        self._schemas = SchemaChecker()
        self._is_closed = False

    def prewarm(self) -> None:
        """Read the vocabulary now, here and in a prover; on failure, requests with a grammar get
        the error."""
        with contextlib.suppress(RequestError):
            self._vocabulary_of_model()
            with contextlib.suppress(RuntimeError):
                self._threads.submit(self._warm_up)

    def _warm_up(self) -> None:
        with contextlib.suppress(RequestError, EngineDeadError):
            self._ask_prover(ProofTask("json_object", True, SLOW_CPU_S))

    def close(self) -> None:
        """End all compilations; later ones raise `EngineDeadError`."""
        with self._lock:
            self._is_closed = True
        for prover in self._provers:
            prover.close()
        self._schemas.close()
        self._threads.close()

    @property
    def num_waiting(self) -> int:
        """Queued and running compilations."""
        return self._queue.num_open

    def submit(self, wanted: StructuredOutputsParams, *, client: str = "") -> Compilation:
        """Queue a compilation, or find it in the cache. Every caller must call `leave` at the end.

        client: whose turn it counts as; a client with too many compilations is refused."""
        key = _key(wanted)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                found.num_waiting += 1
                return found
            if self._is_closed:
                raise EngineDeadError("the engine was shut down")
            if self._queue.is_full_for(client):
                raise too_busy(wanted)
            future = Compilation()
            future.num_waiting = 1
            try:
                self._threads.submit(self._run_all)
            except RuntimeError:  # the system has no thread left
                raise no_process("grammar", "compiled", param=wanted.param) from None
            self._queue.open(_Job(wanted, future, client))
            self._cache[key] = future
            if len(self._cache) > MAX_CACHED:
                self._evict()
        return future

    def _evict(self) -> None:
        """Evict the grammar that compiled fastest among the least recently used half. So many quick
        grammars of one client do not displace slow ones of others; and freeing a slow one holds
        the GIL for milliseconds."""
        oldest = islice(self._cache, MAX_CACHED // 2)
        del self._cache[min(oldest, key=lambda key: self._cache[key].took_s)]

    def leave(self, future: Compilation) -> None:
        """Stop waiting. A compilation that no request waits for is not started."""
        with self._lock:
            future.num_waiting -= 1

    def compile(self, wanted: StructuredOutputsParams, *, client: str = "") -> Grammar:
        """Compile and wait. Raises `RequestError` naming the field."""
        future = self.submit(wanted, client=client)
        try:
            return future.result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise too_busy(wanted) from None
        except RequestError as error:
            raise named(error, wanted) from None
        finally:
            self.leave(future)

    # -- compile threads -------------------------------------------------------------------

    def _run_all(self) -> None:
        """Compile until no queued job may run."""
        while True:
            with self._lock:
                job = self._queue.take()
            if job is None:
                return
            self._run(job)

    def _run(self, job: _Job) -> None:
        began = time.perf_counter()
        grammar: Grammar | None = None
        raised: BaseException | None = None
        is_begun = False
        try:
            is_begun = self._begin(job)
            if is_begun:
                grammar = self._compile(job)
        except BaseException as error:  # raised where the grammar is awaited
            raised = error
        took_s = time.perf_counter() - began
        job.spent_s += took_s
        with self._lock:
            self._queue.note_try(job, took_s)
            if isinstance(raised, _NeedsLonger):
                job.is_slow = True
                self._queue.put(job)
                return
            self._queue.close(job)
            if not isinstance(raised, RequestError | None) or isinstance(raised, OverloadedError):
                self._forget(job)  # the machine lacks processes or memory: not the grammar's fault
        if is_begun:
            job.future.took_s = job.spent_s
            self.times.add(job.spent_s, raised)
        if raised is not None:
            job.future.set_exception(raised)
        elif grammar is not None:
            job.future.set_result(grammar)

    def _begin(self, job: _Job) -> bool:
        """Start a job, unless no request waits for it any more."""
        with self._lock:
            if job.future.num_waiting:
                if not job.future.running():
                    job.future.set_running_or_notify_cancel()
                return True
            self._forget(job)
            return False

    def _forget(self, job: _Job) -> None:
        """Drop it from the cache, so that the next request tries again. The lock is held."""
        if self._cache.get(_key(job.wanted)) is job.future:
            del self._cache[_key(job.wanted)]

    def _compile(self, job: _Job) -> Grammar:
        kind = job.wanted.kind
        limit_s = SLOW_CPU_S if job.is_slow else QUICK_CPU_S
        is_own = job.wanted.is_own_grammar
        is_strict = job.wanted.strict
        proof = self._ask_prover(ProofTask(kind, job.wanted.value, limit_s, is_own, is_strict))
        if proof.verdict is Verdict.SLOW and not job.is_slow:
            raise _NeedsLonger
        if proof.verdict is Verdict.SLOW:
            raise RequestError(
                "too complex to be compiled: fewer patterns may hold for the same text",
                code="invalid_schema",
            )
        if proof.verdict is not Verdict.PROVEN:
            raise no_process("grammar", "tried out")
        vocabulary = self._vocabulary_of_model()
        has_json = kind in ("json", "json_object") or "%json" in str(job.wanted.grammar)
        check = None
        if kind == "json" and not is_strict:
            schema = str(job.wanted.json)
            if not enforced(json.loads(schema), relaxed=True).is_whole:
                check = self._schemas.check_of(schema)
        with contextlib.nullcontext() if job.is_slow else self._computing:
            with long_slices():
                prototype = compile_source(proof.source, kind, vocabulary)
            return Grammar(
                prototype,
                self._executor,
                self._num_words,
                self._vocabulary_task.eos_token_ids,
                self._numbers if has_json else None,
                check,
            )

    def _ask_prover(self, task: ProofTask) -> Proof:
        """Raises llguidance's error for the grammar, EngineDeadError or OverloadedError."""
        with self._lock:
            prover = self._free_provers.pop()  # never empty: there is one per thread
        try:
            proof = self._ask(prover, task)
            if proof.verdict is Verdict.NO_VOCABULARY:
                self._ask(prover, self._vocabulary_task, self._tokenizer.to_json().encode())
                proof = self._ask(prover, task)
            return proof
        finally:
            with self._lock:
                self._free_provers.append(prover)

    def _ask(
        self, prover: HelperProcess, task: ProofTask | VocabularyTask, data: bytes = b""
    ) -> Proof:
        limit_s = VOCABULARY_TIMEOUT_S if data else 2 * MAX_PROOF_WALL_S
        try:
            proof: Proof = prover.ask(task, (data,), limit_s=limit_s)
        except HelperClosed:
            raise EngineDeadError("the engine was shut down") from None
        except HelperFault:  # usually lack of memory: the next request tries again
            raise no_process("grammar", "tried out") from None
        return proof

    def _vocabulary_of_model(self) -> Any:
        """llguidance's form of the vocabulary, cached: building it holds the GIL up to a second."""
        from llguidance import LLExecutor

        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._executor = LLExecutor(num_threads=MASK_THREADS)
                vocabulary = read_vocabulary(self._vocabulary_task, self._tokenizer.to_json())
                num_tokens = self._vocabulary_task.num_tokens
                self._numbers = NumberTokens(
                    [vocabulary.decode_bytes([i]) for i in range(num_tokens)]
                )
                self._vocabulary = vocabulary
        return self._vocabulary


def _key(wanted: StructuredOutputsParams) -> _Key:
    return wanted.kind, wanted.value, wanted.is_own_grammar, wanted.strict


def too_busy(wanted: StructuredOutputsParams) -> OverloadedError:
    """The error of a request whose grammar queued for too long, or found the queue full."""
    return OverloadedError(
        "too many grammars wait to be compiled; try again soon",
        param=wanted.param,
        code="grammar_queue_full",
        retry_after_s=1.0,
    )


def named(error: RequestError, wanted: StructuredOutputsParams) -> RequestError:
    """The error of a shared compilation, naming the field of one request."""
    if error.param is not None:
        return error
    if isinstance(error, OverloadedError):
        return OverloadedError(
            str(error), param=wanted.param, code=error.code, retry_after_s=error.retry_after_s
        )
    return RequestError(f"{wanted.param}: {error}", param=wanted.param, code=error.code)
