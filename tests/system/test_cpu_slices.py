"""Short time slices on a core, where Linux grants them: which threads get them."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from termgen.config import EngineConfig
from termgen.engine.grammar.mask_filler import MaskFiller
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.loop.executor import LocalExecutor
from termgen.system import cpu_slices
from termgen.system.cpu_slices import (
    SHORT_SLICE_NS,
    long_slices,
    quick_lock,
    share_lock_quickly,
    slice_ns,
    take_long_slices,
    take_short_slices,
)
from termgen.system.helper_process import HelperProcess
from termgen.vocabulary.model_info import DeviceInfo
from termgen.vocabulary.token_mask import GrammarState, IntArray, faults_of


def in_a_thread(function: Callable[[], object]) -> None:
    """Slices belong to a thread: the test's own thread keeps its slice."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.fixture(autouse=True)
def same_interval() -> object:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def usual_ns() -> int:
    """Skip where the system offers no slices: it reports 0, or nothing."""
    found: list[int | None] = []
    in_a_thread(lambda: (take_long_slices(), found.append(slice_ns())))
    if not found[0]:
        pytest.skip("needs Linux 6.12 or newer")
    return found[0]


def test_short_slices_are_for_all_that_begins_later(usual_ns: int) -> None:
    def check() -> None:
        nice = os.nice(0)
        take_short_slices()
        assert slice_ns() == SHORT_SLICE_NS < usual_ns
        assert os.nice(0) == nice
        in_a_thread(lambda: _expect(SHORT_SLICE_NS))
        with long_slices():
            assert slice_ns() == usual_ns
        assert slice_ns() == SHORT_SLICE_NS
        take_long_slices()
        assert slice_ns() == usual_ns

    in_a_thread(check)
    in_a_thread(lambda: _expect(usual_ns))  # a new thread


def _expect(nanoseconds: int) -> None:
    assert slice_ns() == nanoseconds


def test_a_lower_priority_stays_what_it_is(usual_ns: int) -> None:
    code = (
        "import os; from termgen.system.cpu_slices import *; nice = os.nice(7);"
        " os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); take_short_slices();"
        " s = slice_ns(); take_long_slices();"
        " print(os.nice(0) - nice, os.sched_getscheduler(0), s, slice_ns())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    batch = os.SCHED_BATCH if sys.platform == "linux" else -1
    assert told.stdout.split() == [str(x) for x in (0, batch, SHORT_SLICE_NS, usual_ns)]


@pytest.mark.parametrize("missing", ["machine", "call"])
def test_other_systems_only_set_the_lock(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "machine":
        monkeypatch.setattr("platform.machine", lambda: "a new one")
    else:  # a sandbox without that call
        number = 1_000_000
        calls = dict.fromkeys(cpu_slices._CALLS, (number, number))
        monkeypatch.setattr(cpu_slices, "_CALLS", calls)

    def check() -> None:
        share_lock_quickly()
        take_short_slices()
        assert slice_ns() is None
        assert sys.getswitchinterval() == pytest.approx(cpu_slices.SWITCH_INTERVAL_S)
        with long_slices():
            pass

    in_a_thread(check)


def test_a_library_gives_the_lock_back_as_it_was() -> None:
    sys.setswitchinterval(0.005)
    with pytest.raises(KeyError), quick_lock():
        assert sys.getswitchinterval() == pytest.approx(cpu_slices.SWITCH_INTERVAL_S)
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(0.005)
    sys.setswitchinterval(1e-5)
    with quick_lock():
        assert sys.getswitchinterval() == pytest.approx(1e-5)


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from termgen.system.helper_process import answer_questions
from termgen.system.cpu_slices import slice_ns
answer_questions(lambda task, raw: slice_ns())
"""


def test_a_helper_has_long_slices(usual_ns: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(cpu_slices.__file__).parents[2])))
    helper = HelperProcess(program)

    def check() -> None:
        take_short_slices()
        assert helper.ask("your slice", limit_s=60.0) == usual_ns

    try:
        in_a_thread(check)
    finally:
        helper.close()


class TellingGrammar:
    """Its masks record the time slice of the thread that fills them."""

    num_words = 1
    is_ended = False

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.slices: list[int | None] = []

    def start(self, *, ends_at_eos: bool) -> TellingGrammar:
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def take_forced(self, most: int) -> list[int]:
        return []

    @staticmethod
    def fill_all(
        matchers: Sequence[Any], bits: IntArray, *, in_this_thread: bool
    ) -> list[BaseException | None]:
        return faults_of(lambda matcher, mask: matcher.fill(mask), matchers, bits)

    def fill(self, bits: IntArray) -> None:
        self.slices.append(slice_ns())


def test_slow_masks_have_long_slices(usual_ns: int) -> None:
    slow, quick = TellingGrammar(is_slow=True), TellingGrammar(is_slow=False)

    def check() -> None:
        take_short_slices()
        filler = MaskFiller()
        rows = [GrammarState(grammar, ends_at_eos=True) for grammar in (slow, quick)]
        filler.begin(rows)
        filler.wait(rows, 10.0)
        assert all(row.is_ready for row in rows)

    in_a_thread(check)
    assert slow.slices == [usual_ns]
    assert quick.slices == [SHORT_SLICE_NS]


def test_compiling_has_long_slices(usual_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llguidance = pytest.importorskip("llguidance")
    from termgen.engine.grammar import grammar
    from termgen.engine.grammar.grammar_source import Proof, Verdict

    found = []

    class Telling:
        grammar_from_regex = staticmethod(llguidance.LLMatcher.grammar_from_regex)

        def __init__(self, *arguments: object, **options: object) -> None:
            found.append(slice_ns())

        def get_error(self) -> str:
            return "no more than this is wanted here"

    monkeypatch.setattr(llguidance, "LLMatcher", Telling)
    compiler = grammar.GrammarCompiler.__new__(grammar.GrammarCompiler)
    compiler._vocabulary, compiler._vocabulary_lock = object(), threading.Lock()
    compiler._computing = threading.Semaphore(1)
    compiler._ask_prover = lambda task: Proof(Verdict.PROVEN, "{}")  # type: ignore[method-assign]
    wanted = grammar.StructuredOutputsParams(regex="a")

    def check() -> None:
        take_short_slices()
        with pytest.raises(grammar.RequestError, match="no more than this"):
            compiler._compile(grammar._Job(wanted, grammar.Compilation(), ""))
        assert slice_ns() == SHORT_SLICE_NS

    in_a_thread(check)
    assert found == [usual_ns]


@pytest.mark.parametrize("device", ["cpu", "scripted"])
def test_an_engine_and_its_loop_have_short_slices_beside_a_device(
    device: str, usual_ns: int, monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path
) -> None:
    """If the model runs on the cores, all threads have the usual slices."""
    if device != "cpu":
        start = LocalExecutor.start

        def named(self: LocalExecutor, on_progress: Callable[[str, float], None]) -> DeviceInfo:
            return replace(start(self, on_progress), device=device)

        monkeypatch.setattr(LocalExecutor, "start", named)
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", threads=1, kv_cache_gib=0.02)

    async def slices() -> list[int | None]:
        engine = await AsyncEngine.start(config)
        try:
            of_engine = await asyncio.wrap_future(engine.parts.core.call(slice_ns))
            return [of_engine, slice_ns()]
        finally:
            await engine.shutdown()

    found: list[int | None] = []
    in_a_thread(lambda: found.extend(asyncio.run(slices())))
    assert found == [usual_ns if device == "cpu" else SHORT_SLICE_NS] * 2


def test_asking_for_a_slice_leaves_no_garbage() -> None:
    """Compiling threads do it for every grammar, and Python's collector seldom runs."""
    slice_ns()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            with long_slices():
                slice_ns()
        assert gc.collect() == 0
    finally:
        gc.enable()
