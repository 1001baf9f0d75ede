"""Grammars that take long to compile, or for ever: which requests wait, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_resources import no_process, no_thread

from termgen.engine.grammar import grammar as grammar_module
from termgen.engine.grammar import grammar_source
from termgen.engine.grammar.grammar import (
    Compilation,
    GrammarCompiler,
    _FairQueue,
    _Job,
)
from termgen.engine.text import input_processor
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from termgen.errors import (
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from termgen.system.daemon_threads import spare_threads
from termgen.system.helper_process import HelperProcess
from termgen.vocabulary import structured_outputs
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import MAX_GBNF_BYTES, StructuredOutputsParams

VOCAB = 600
ENDLESS: dict[str, Any] = {
    "type": "string",
    "allOf": [{"pattern": f"^x|{letter}$"} for letter in string.ascii_letters[:29]],
}
"""Expanded, the patterns have 2 ** 29 parts."""
DOUBLING: dict[str, Any] = {
    f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)
}
ENDLESS_REFERENCES = {
    "$defs": {**DOUBLING, "d20": {"type": "string", "pattern": "^x|a$"}},
    "$ref": "#/$defs/d0",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(tiny_model_dir("llama"))


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def shared_compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(1,))
    yield compiler
    compiler.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars that begin with `slow` are compiled once this is set."""
    may_go_on = threading.Event()
    compile_source = grammar_source.compile_source

    def slowly(source: str, kind: str, vocabulary: Any) -> Any:
        assert threading.current_thread().name.startswith("termgen-grammar")
        if "slow" in source:
            assert may_go_on.wait(20)
        return compile_source(source, kind, vocabulary)

    monkeypatch.setattr("termgen.engine.grammar.grammar.compile_source", slowly)
    yield may_go_on
    may_go_on.set()


@pytest.mark.parametrize("schema", [ENDLESS, ENDLESS_REFERENCES])
def test_patterns_without_end_are_stopped_and_delay_no_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    monkeypatch.setattr(grammar_module, "SLOW_CPU_S", 0.5)
    waiting = [
        compiler.submit(StructuredOutputsParams(json={**schema, "title": str(i)})) for i in range(2)
    ]
    compiler.compile(StructuredOutputsParams(regex="innocent"))
    assert not any(future.done() for future in waiting)
    for future in waiting:
        with pytest.raises(RequestError, match="too complex to be compiled") as refusal:
            future.result(20)
        assert (refusal.value.status, refusal.value.code) == (400, "invalid_schema")


def test_everything_is_proven_once_and_nothing_else_is_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven: list[str] = []
    compiled: list[str] = []
    ask, compile_source = HelperProcess.ask, grammar_source.compile_source

    def asking(self: HelperProcess, task: Any, *arguments: Any, **options: Any) -> Any:
        told = ask(self, task, *arguments, **options)
        proven.append(told.source)
        return told

    def compiling(source: str, kind: str, vocabulary: Any) -> Any:
        assert source in proven
        compiled.append(source)
        return compile_source(source, kind, vocabulary)

    monkeypatch.setattr(HelperProcess, "ask", asking)
    monkeypatch.setattr(grammar_module, "compile_source", compiling)
    kinds: list[dict[str, Any]] = [
        {"json": {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "b"}]}},
        {"json_object": True},
        {"regex": "a&b"},
        {"choice": ("yes", "no")},
        {"grammar": "start: X\nX: /[a-z]+/ & /.*b.*/"},
        {"grammar": 'root ::= "x"'},
    ]
    for wanted in kinds * 2:
        compiler.compile(StructuredOutputsParams(**wanted))
    assert len(compiled) == len(kinds)
    compiler.close()
    with pytest.raises(EngineDeadError):
        compiler.compile(StructuredOutputsParams(regex="another"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_prover_that_somebody_ends_says_nothing_about_the_grammar(
    compiler: GrammarCompiler, number: signal.Signals
) -> None:
    """The program or its worker is killed, as by a system short of memory; the next request gets
    another."""
    compiler.compile(StructuredOutputsParams(regex="first"))
    for i, ends_worker in enumerate((False, True)):
        program = compiler._provers[0].start()
        worker = int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text())
        os.kill(worker, signal.SIGSTOP)
        wanted = StructuredOutputsParams(regex=f"again{i}")
        future = compiler.submit(wanted)
        while not compiler._provers[0]._turn.locked():
            time.sleep(0.001)
        time.sleep(0.05)
        os.kill(worker if ends_worker else program.pid, number)
        with contextlib.suppress(ProcessLookupError):  # ended with its program
            os.kill(worker, signal.SIGCONT)
        with pytest.raises(OverloadedError, match="grammar cannot be tried out now"):
            future.result(20)
        compiler.compile(wanted)
    compiler.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{worker}").exists()


CRASHES = [
    f"start: %json {schema}"
    for schema in (
        '{"const": -9223372036854775808}',
        '{"enum": ["a", -9223372036854775807]}',
        '{"const": {"a": [-9223372036854775808]}}',
        '{"type": "object", "properties": {"deep": {"items": {"const": -9223372036854775806}}}}',
    )
]
"""llguidance 1.9 overflows its stack at these, whatever its size."""


@pytest.mark.parametrize("grammar", CRASHES)
def test_a_grammar_that_crashes_the_library_costs_its_request(
    shared_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, grammar: str
) -> None:
    compiler = shared_compiler
    monkeypatch.setattr(structured_outputs, "_schemas_in", lambda lark: ())  # or it is refused
    for _ in range(2):  # the verdict is kept
        with pytest.raises(RequestError, match="tools: too complex to be compiled") as refusal:
            compiler.compile(StructuredOutputsParams(grammar=grammar, param="tools"))
        assert (refusal.value.status, refusal.value.code) == (400, "invalid_schema")
        assert refusal.value.param == "tools"
    program = compiler._provers[0].start()
    compiler.compile(StructuredOutputsParams(regex="innocent"))
    assert compiler._provers[0].start() is program, "only its worker has been replaced"


INEXACT = [
    *(f'{{"const": {sign * (2**bits + 1)}}}' for sign in (1, -1) for bits in (53, 60, 64)),
    *(f'{{"enum": [1, {{"a": [{-(2**63) + i}]}}]}}' for i in (0, 1, 2)),
    '{"type": "integer", "minimum": 9007199254740993}',
    '{"type": "integer", "exclusiveMaximum": 9007199254740995}',
    '{"type": "integer", "minimum": 1e25}',
    '{"type": ["integer", "null"], "exclusiveMaximum": -1e19}',
    '{"allOf": [{"type": "integer"}, {"const": 1e300}]}',
    '{"allOf": [{"type": "integer"}, {"enum": [7, 1e19]}]}',
    '{"type": "integer", "multipleOf": 4294967295}',
    '{"type": "number", "multipleOf": 9007199254740993}',
    '{"type": "number", "multipleOf": 123456789.125}',
    '{"multipleOf": 1e-7, "allOf": [{"multipleOf": 100000}]}',
    '{"$ref": "#/$defs/a", "multipleOf": 65537, "$defs": {"a": {"multipleOf": 65539}}}',
]
INFINITE = [
    schema.replace("?", number)
    for number in ("1e309", "-1e400", "1E999999")
    for schema in ('{"const": ?}', '{"title": ?}', '{"properties": {"a": {"default": [?]}}}')
]


@pytest.mark.parametrize(
    ("schema", "why"),
    [*((one, "kept exactly") for one in INEXACT), *((one, "not finite") for one in INFINITE)],
)
def test_numbers_that_are_not_exact_are_refused_by_name(schema: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refusal:
        StructuredOutputsParams(json=schema, param="tools")
    assert (refusal.value.code, refusal.value.param) == ("invalid_schema", "tools")
    with pytest.raises(RequestError, match=why):  # in the words of a grammar
        StructuredOutputsParams(grammar=f"start: %json {schema}", param="tools")


def test_an_integer_that_no_float_holds_is_refused_with_the_reason() -> None:
    for schema in ({"enum": [1, 1234567890123456789]}, {"const": {"id": 1234567890123456789}}):
        with pytest.raises(RequestError) as refusal:
            StructuredOutputsParams(json=schema, param="response_format")
        words = str(refusal.value)
        assert "1234567890123456789" in words and "every integer up to 9007199254740992" in words
        assert words.endswith("Ask for it as a string.")


@pytest.mark.parametrize(
    "schema",
    [
        *(f'{{"const": {value}}}' for value in (2**53, 2**53 - 1, -(2**53), 2**62, 2**63 - 1)),
        *(f'{{"type": "integer", "maximum": {value}}}' for value in (2**63 - 1, 2**64 - 1)),
        '{"type": "integer", "maximum": 9007199254740993}',
        '{"type": "integer", "maximum": 1e25}',
        '{"type": "number", "minimum": 1e15}',
        '{"const": 1e300}',
        *(f'{{"multipleOf": {value}}}' for value in (1, 5, 0.1, 0.01, 0.25, 1000)),
        '{"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 1000}}}',
        '{"allOf": [{"multipleOf": 0.5}, {"multipleOf": 3}, {"multipleOf": 100}]}',
    ],
)
def test_numbers_that_are_exact_are_taken(shared_compiler: GrammarCompiler, schema: str) -> None:
    shared_compiler.compile(StructuredOutputsParams(json=schema))


KEYWORDS = (
    *("type", "const", "enum", "title", "default", "format", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items"),
    *("prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
    *("minProperties", "maxProperties", "dependencies", "allOf", "anyOf", "oneOf", "not", "if"),
    *("then", "$ref", "$defs", "definitions", "$id", "$schema", "$anchor", "x-guidance"),
)
ODD_VALUES = (
    *(
        None,
        True,
        False,
        "",
        "x",
        "\x00",
        "\ud800",
        [],
        {},
        [[]],
        [None],
        [True],
        {"": {}},
        {"a": 1},
    ),
    *(0, -1, 1, 0.5, -0.0, 1e-320, 1e-7, 1e19, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63)),
)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_with_any_value_is_taken_or_refused_by_name(
    shared_compiler: GrammarCompiler, keyword: str
) -> None:
    for value in ODD_VALUES:
        for schema in ({keyword: value}, {"type": "object", "properties": {"a": {keyword: value}}}):
            try:
                wanted = StructuredOutputsParams(json=json.dumps(schema), param="tools")
                shared_compiler.compile(wanted)
            except RequestError as refusal:
                assert (refusal.code, refusal.param) == ("invalid_schema", "tools"), schema


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chain(length: int) -> dict[str, Any]:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
    return {"grammar": f'start: r0\n{rules}\nr{length}: "x"'}


@pytest.mark.parametrize(
    "wanted",
    [
        *(chain(length) for length in (500, 2000, 3000, 4600)),
        *({"grammar": "start: " + "(" * n + '"a"' + ")" * n} for n in (50, 2000, 30_000)),
        *({"regex": "(" * n + "a" + ")" * n} for n in (50, 2000, 30_000)),
        *({"regex": "(a|" * n + "b" + ")" * n} for n in (50, 1000, 10_000)),
        *({"regex": "a?" * n} for n in (50, 1000, 20_000)),
        *({"grammar": 'root ::= "x" ' + "(" * n + '"a"' + ")?" * n} for n in (10, 100, 2000)),
        *({"json": nested} for nested in map(deep, (5, 20, 29))),
        *({"choice": ("a" * n,)} for n in (10, 1000, 60_000)),
    ],
    ids=lambda wanted: f"{str(wanted)[:24]}-{len(str(wanted))}",
)
def test_depth_is_compiled_or_refused_by_name(
    shared_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    compiler = shared_compiler
    monkeypatch.setattr(grammar_module, "SLOW_CPU_S", 0.5)
    try:
        compiler.compile(StructuredOutputsParams(**wanted, param="tools"))
    except RequestError as refusal:
        assert (refusal.status, refusal.param) == (400, "tools")
    compiler.compile(StructuredOutputsParams(regex="innocent"))


def test_without_processes_or_threads_the_next_request_tries_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "b"}]}
    wanted: list[dict[str, Any]] = [{"grammar": 'root ::= "x"'}, {"json": few}, {"regex": "a"}]
    for refuse in (no_thread, no_process):
        for fields in wanted:
            with monkeypatch.context() as patch:
                where = (threading.Thread, "start")
                if refuse is no_process:
                    where = (subprocess, "Popen")
                patch.setattr(*where, refuse)
                with pytest.raises(OverloadedError) as refusal:
                    compiler.compile(StructuredOutputsParams(**fields))
            assert (refusal.value.code, refusal.value.status) == ("no_process", 429)
    assert compiler.num_waiting == 0
    for fields in wanted:
        compiler.compile(StructuredOutputsParams(**fields))
    compiler.close()


def test_the_worst_gbnf_that_is_taken_is_converted_in_time(compiler: GrammarCompiler) -> None:
    rules, i = ["root ::= r0"], 0
    while sum(map(len, rules)) + len(rules) < MAX_GBNF_BYTES - 30:  # each waits for the next
        rules.append(f"r{i} ::= r{i + 1}")
        i += 1
    text = "\n".join([*rules, f'r{i} ::= "x"'])
    compiler.compile(StructuredOutputsParams(grammar=text))


def test_a_slow_compilation_holds_up_only_who_waits_for_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(grammar_module, "spare_threads", lambda most: 2)
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(1,))
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(grammar_module, "MAX_WAITING_OF_CLIENT", 2)
    with pytest.raises(OverloadedError, match="too many grammars wait"):
        compiler.compile(StructuredOutputsParams(regex="slow", param="tools"))
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 20)
    compiler.compile(StructuredOutputsParams(regex="quick"))
    while compiler.num_waiting > 1:  # the answer arrives a moment before the counter goes down
        time.sleep(0.001)
    compiler.submit(StructuredOutputsParams(regex="slow2"))
    with pytest.raises(OverloadedError, match="too many grammars wait") as refusal:
        compiler.compile(StructuredOutputsParams(regex="other", param="tools"))
    assert (refusal.value.status, refusal.value.code) == (429, "grammar_queue_full")
    assert refusal.value.param == "tools" and refusal.value.retry_after_s > 0


def test_a_request_that_gives_up_may_come_back_and_finds_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """It has been proven: only the machine is slow."""
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.05)
    wanted = StructuredOutputsParams(regex="slow", param="tools")
    with pytest.raises(OverloadedError, match="too many grammars wait") as refusal:
        compiler.compile(wanted)
    assert refusal.value.param == "tools" and refusal.value.retry_after_s > 0
    gate.set()
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 20)
    compiler.compile(wanted)


def test_slow_grammars_of_some_delay_only_their_own(compiler: GrammarCompiler) -> None:
    """The client with slow grammars and the other one change roles: arrival order does not
    matter."""

    def slow(i: int) -> StructuredOutputsParams:
        return StructuredOutputsParams(regex="a?" * 20_000 + str(i))

    compiler.prewarm()
    compiler.compile(StructuredOutputsParams(regex="warm"))
    for round_, (bad, good) in enumerate([("one", "two"), ("two", "one")]):
        hostile = [compiler.submit(slow(10 * round_ + i), client=bad) for i in range(4)]
        for i in range(3):
            wanted = StructuredOutputsParams(regex=f"[ab]{{2}}{round_}{i}")
            compiler.compile(wanted, client=good)
        assert sum(not future.done() for future in hostile) >= 3
        for future in hostile:
            compiler.leave(future)  # its client has gone
    compiler.close()


def test_clients_take_turns_by_what_they_have_used() -> None:
    queue = _FairQueue()

    def job(client: str, chars: int, is_slow: bool = False) -> _Job:
        wanted = StructuredOutputsParams(regex="a" * chars)
        return _Job(wanted, Compilation(), client, is_slow=is_slow)

    heavy, short, long, slow = job("heavy", 1), job("a", 1), job("b", 9), job("c", 1, True)
    other_slow = job("d", 1, True)
    used = job("heavy", 1)
    for one in (used, slow, other_slow):
        queue.open(one)
    assert queue.take() is used
    queue.note_try(used, 2.0)
    queue.close(used)
    for one in (heavy, long, short):
        queue.open(one)
    assert [queue.take() for _ in range(4)] == [short, long, heavy, slow]
    assert queue.take() is None, "one slow job at a time"
    queue.note_try(slow, 1.0)
    assert queue.take() is other_slow
    assert queue.num_open == 5


def test_a_grammar_that_only_waited_for_others_is_not_blamed(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    slow = [compiler.submit(StructuredOutputsParams(regex=f"slow{i}")) for i in range(2)]
    while not all(future.running() for future in slow):
        assert not gate.wait(0.001)
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.05)
    innocent = StructuredOutputsParams(regex="innocent")
    with pytest.raises(RequestError, match="too many grammars wait") as refusal:
        compiler.compile(innocent)
    assert refusal.value.status == 429
    gate.set()
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 20)
    compiler.compile(innocent)


async def test_what_nobody_waits_for_any_more_is_not_begun(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    gate: threading.Event,
) -> None:
    begun: list[object] = []
    compile_one = GrammarCompiler._compile

    def noting(self: GrammarCompiler, job: _Job) -> Any:
        begun.append(job.wanted.value)
        return compile_one(self, job)

    monkeypatch.setattr(GrammarCompiler, "_compile", noting)
    processor = InputProcessor(tokenizer, 50, VOCAB, grammars=compiler)

    def ask(regex: str) -> asyncio.Task[Any]:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
        return asyncio.create_task(processor.add_grammar(processor.prepare([1, 2], params)))

    async def leave(*tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    under_way = [ask(f"slow{i}") for i in range(2)]
    while len(begun) < 2:
        await asyncio.sleep(0.001)
    gone, shared, others = ask("gone"), ask("shared"), [ask("shared"), ask("last")]
    await asyncio.sleep(0)
    await leave(gone, shared, *under_way)
    gate.set()
    for request in await asyncio.gather(*others):
        assert request.grammar is not None
    assert sorted(begun[2:], key=str) == ["last", "shared"], (
        "others waited for one, and nobody for the other"
    )
    while compiler.num_waiting:
        await asyncio.sleep(0.001)
    assert (await ask("gone")).grammar is not None
    assert (await ask("slow0")).grammar is not None
    assert begun[4:] == ["gone"], "what was under way is kept"
    assert all(not future.num_waiting for future in compiler._cache.values())


def test_a_failure_of_the_machine_is_not_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*arguments: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    wanted = StructuredOutputsParams(json={"patternProperties": {"^a": {"type": "string"}}})
    with monkeypatch.context() as patch:
        patch.setattr(HelperProcess, "ask", no_process)
        with pytest.raises(BlockingIOError):
            compiler.compile(wanted)
    assert compiler.compile(wanted) is compiler.compile(wanted)


def test_what_can_be_refused_at_once_is_refused_before_anything_is_compiled(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    processor = InputProcessor(tokenizer, 10, VOCAB, grammars=compiler)
    wanted = StructuredOutputsParams(regex="a+")
    for prompt, params in (
        ([1] * 20, SamplingParams(structured_outputs=wanted)),
        ([1, 2], SamplingParams(structured_outputs=wanted, max_tokens=50)),
    ):
        with pytest.raises(ContextLengthError):
            processor.process(prompt, params)
        with pytest.raises(ContextLengthError):
            processor.prepare(prompt, params)
    assert not compiler._cache
    request = processor.process([1, 2], SamplingParams(structured_outputs=wanted))
    assert request.grammar is compiler.compile(wanted)
    bare = InputProcessor(None, 10, VOCAB)
    with pytest.raises(RequestError, match="without one"):
        bare.prepare([1, 2], SamplingParams(structured_outputs=wanted))


async def test_waiting_on_the_loop_ends_as_waiting_in_a_thread_does(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    gate: threading.Event,
) -> None:
    """And an error that no task awaits any more is not reported as unhandled."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    processor = InputProcessor(tokenizer, 50, VOCAB, grammars=compiler)
    ask = HelperProcess.ask

    def ask_slowly(self: HelperProcess, task: Any, *arguments: Any, **options: Any) -> Any:
        """A malformed grammar ends where it is proven: it never gets to the gate behind that."""
        if "slow" in str(task):
            assert gate.wait(20)
        return ask(self, task, *arguments, **options)

    monkeypatch.setattr(HelperProcess, "ask", ask_slowly)

    def request(regex: str) -> Any:
        wanted = StructuredOutputsParams(regex=regex, param="tools")
        return processor.prepare([1, 2], SamplingParams(structured_outputs=wanted))

    assert (await processor.add_grammar(request("a+"))).grammar is not None
    with pytest.raises(RequestError, match="tools: .*unclosed"):
        await processor.add_grammar(request("(["))
    gone = asyncio.create_task(processor.add_grammar(request("slow([")))
    monkeypatch.setattr(input_processor, "COMPILE_TIMEOUT_S", 0.05)
    late = asyncio.create_task(processor.add_grammar(request("slow)")))
    with pytest.raises(OverloadedError, match="too many grammars wait"):
        await late
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    abandoned = list(compiler._cache.values())
    gate.set()
    while not all(future.done() for future in abandoned):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    del gone, late
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints


def test_a_core_is_left_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, expected in ((1, 1), (2, 1), (3, 2), (64, 2)):
        cores = set(range(num_cores))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores, raising=False)
        assert spare_threads(2) == expected


def test_a_job_that_never_ends_does_not_keep_the_process() -> None:
    program = """
import threading
from termgen.system.daemon_threads import DaemonThreads
threads, begun = DaemonThreads(1, "endless"), threading.Event()
threads.submit(lambda: [begun.set(), threading.Event().wait()])
assert begun.wait(20)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
