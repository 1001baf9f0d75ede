"""Grammars that take long to compile, or for ever: who waits for them, and for how long."""

from __future__ import annotations

import asyncio
import gc
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

from termgen.engine import grammar as grammar_module
from termgen.engine import grammar_source, input_processor
from termgen.engine.daemon_threads import spare_threads
from termgen.engine.grammar import GrammarCompiler
from termgen.engine.grammar_source import needs_trial
from termgen.engine.input_processor import InputProcessor
from termgen.engine.sampling_params import SamplingParams
from termgen.engine.structured_outputs import MAX_GBNF_BYTES, StructuredOutputsParams
from termgen.engine.tokenizer import Tokenizer, load_tokenizer
from termgen.errors import (
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)

VOCAB = 600
ENDLESS: dict[str, Any] = {
    "type": "string",
    "allOf": [{"pattern": f"^x|{letter}$"} for letter in string.ascii_letters[:29]],
}
"""Multiplied out, the patterns have 2 ** 29 parts."""
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


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Whatever begins with `slow` is compiled once this is set."""
    may_go_on = threading.Event()
    source_of = grammar_source.source_of

    def slowly(wanted: StructuredOutputsParams, gbnf_to_lark: Callable[[str], str]) -> str:
        assert threading.current_thread().name.startswith("termgen-grammar")
        if wanted.regex and wanted.regex.startswith("slow"):
            assert may_go_on.wait(20)
        return source_of(wanted, gbnf_to_lark)

    monkeypatch.setattr("termgen.engine.grammar.source_of", slowly)
    yield may_go_on
    may_go_on.set()


@pytest.mark.parametrize("schema", [ENDLESS, ENDLESS_REFERENCES])
def test_patterns_without_end_are_stopped_and_hold_up_nobody(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    monkeypatch.setattr(grammar_source, "TRIAL_CPU_S", 1)
    waiting = [
        compiler.submit(StructuredOutputsParams(json={**schema, "title": str(i)})) for i in range(2)
    ]
    compiler.compile(StructuredOutputsParams(regex="innocent"))
    assert not any(future.done() for future in waiting)
    for future in waiting:
        with pytest.raises(RequestError, match="too complex to be compiled") as refusal:
            future.result(20)
        assert (refusal.value.status, refusal.value.code) == (400, "invalid_schema")


def test_what_asks_for_several_patterns_at_once_is_tried_out_and_taken_if_it_can_be(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def try_out(source: str) -> None:
        tried.append(source)
        grammar_source.try_out(source)

    monkeypatch.setattr("termgen.engine.grammar.try_out", try_out)
    few = {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "b"}]}
    both: list[dict[str, Any]] = [{"json": few}, {"grammar": "start: X\nX: /[a-z]+/ & /.*b.*/"}]
    for wanted in both:
        assert needs_trial(StructuredOutputsParams(**wanted))
        compiler.compile(StructuredOutputsParams(**wanted))
    assert len(tried) == 2
    plain = {"properties": {"a": {"type": "string", "pattern": "^a+$"}}}
    others: list[dict[str, Any]] = [{"json": plain}, {"regex": "a&b"}, {"json": {"allOf": [plain]}}]
    for wanted in others:
        compiler.compile(StructuredOutputsParams(**wanted))
    assert len(tried) == 3, "the last has a pattern below allOf"


def test_a_converter_that_dies_is_no_fault_of_the_grammar(compiler: GrammarCompiler) -> None:
    """It is stopped in the middle, as by a system short of memory; the next who asks starts one."""
    wanted = StructuredOutputsParams(grammar='root ::= "x"')
    converter = compiler._gbnf.start()
    converter.send_signal(signal.SIGSTOP)
    future = compiler.submit(wanted)
    while not compiler._gbnf._turn.locked():
        time.sleep(0.001)
    time.sleep(0.05)
    converter.kill()
    with pytest.raises(OverloadedError, match="grammar cannot be converted now"):
        future.result(20)
    compiler.compile(wanted)
    compiler.close()


def test_gbnf_without_end_is_given_up_once_and_holds_up_nobody(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = StructuredOutputsParams(grammar='root ::= "y"')
    compiler.compile(StructuredOutputsParams(grammar='root ::= "x"'))
    compiler._gbnf.start().send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "GBNF_LIMIT_S", 0.05)
        with pytest.raises(RequestError, match="not converted within .* make it simpler") as fault:
            compiler.compile(wanted)
    assert (fault.value.status, fault.value.code) == (400, "invalid_schema")
    assert fault.value.param == wanted.param
    compiler.compile(StructuredOutputsParams(grammar='root ::= "z"'))
    with pytest.raises(RequestError, match="make it simpler"):
        compiler.compile(wanted)
    compiler.close()
    with pytest.raises(EngineDeadError):
        compiler.compile(StructuredOutputsParams(grammar='root ::= "again"'))


def test_without_processes_or_threads_whoever_asks_next_tries_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "b"}]}
    wanted: list[dict[str, Any]] = [{"grammar": 'root ::= "x"'}, {"json": few}, {"regex": "a"}]
    for refuse, count in ((no_thread, 3), (no_process, 2)):
        for fields in wanted[:count]:
            with monkeypatch.context() as patch:
                where = (threading.Thread, "start") if count == 3 else (subprocess, "Popen")
                patch.setattr(*where, refuse)
                with pytest.raises(OverloadedError) as refusal:
                    compiler.compile(StructuredOutputsParams(**fields))
            assert (refusal.value.code, refusal.value.status) == ("no_process", 429)
    assert compiler._lane.num_waiting == compiler._trial_lane.num_waiting == 0
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
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(grammar_module, "MAX_WAITING", 2)
    with pytest.raises(RequestError, match=r"tools: not compiled within"):
        compiler.compile(StructuredOutputsParams(regex="slow", param="tools"))
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 20)
    compiler.compile(StructuredOutputsParams(regex="quick"))
    while compiler._lane.num_waiting > 1:  # the answer is there a moment before it is counted off
        time.sleep(0.001)
    compiler.submit(StructuredOutputsParams(regex="slow2"))
    with pytest.raises(OverloadedError, match="too many grammars wait") as refusal:
        compiler.compile(StructuredOutputsParams(regex="other", param="tools"))
    assert (refusal.value.status, refusal.value.code) == (429, "grammar_queue_full")
    assert refusal.value.param == "tools" and refusal.value.retry_after_s > 0


def test_a_grammar_that_took_too_long_is_not_waited_for_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(RequestError, match="tools: not compiled within"):
        compiler.compile(StructuredOutputsParams(regex="slow", param="tools"))
    again = compiler.submit(StructuredOutputsParams(regex="slow"))
    assert again.done()
    with pytest.raises(RequestError, match="not compiled within"):
        again.result()


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

    def noting(self: GrammarCompiler, wanted: StructuredOutputsParams) -> Any:
        begun.append(wanted.value)
        return compile_one(self, wanted)

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
    while compiler._lane.num_waiting:
        await asyncio.sleep(0.001)
    assert (await ask("gone")).grammar is not None
    assert (await ask("slow0")).grammar is not None
    assert begun[4:] == ["gone"], "what was under way is kept"
    assert all(not future.num_waiting for future in compiler._cache.values())


def test_a_trial_that_somebody_kills_says_nothing_about_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_and_kill(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        process.kill()
        return process

    wanted = StructuredOutputsParams(json={"patternProperties": {"^a": {"type": "string"}}})
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", start_and_kill)
        with pytest.raises(OverloadedError, match="cannot be tried out now"):
            compiler.compile(wanted)
    assert compiler.compile(wanted) is compiler.compile(wanted)


def test_a_failure_of_the_machine_is_not_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(source: str) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    wanted = StructuredOutputsParams(json={"patternProperties": {"^a": {"type": "string"}}})
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "try_out", no_process)
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
    """And nobody complains of errors that nobody waits for any more."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    processor = InputProcessor(tokenizer, 50, VOCAB, grammars=compiler)

    def request(regex: str) -> Any:
        wanted = StructuredOutputsParams(regex=regex, param="tools")
        return processor.prepare([1, 2], SamplingParams(structured_outputs=wanted))

    assert (await processor.add_grammar(request("a+"))).grammar is not None
    with pytest.raises(RequestError, match="tools: .*unclosed"):
        await processor.add_grammar(request("(["))
    gone = asyncio.create_task(processor.add_grammar(request("slow([")))
    monkeypatch.setattr(input_processor, "COMPILE_TIMEOUT_S", 0.05)
    late = asyncio.create_task(processor.add_grammar(request("slow)")))
    with pytest.raises(RequestError, match="tools: not compiled within"):
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
from termgen.engine.daemon_threads import DaemonThreads
threads, begun = DaemonThreads(1, "endless"), threading.Event()
threads.submit(lambda: [begun.set(), threading.Event().wait()])
assert begun.wait(20)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
