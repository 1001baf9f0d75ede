"""Long prompts give the same tokens in another process, and the same errors."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_resources import no_process, no_thread
from sample_texts import SPECIAL_LOOKALIKES, sample_texts

from termgen.client import ChatPrompt, FillPrompt, Prompt
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine, SyncEngine
from termgen.engine.text import text_process
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.text_process import LONG_PROMPT_CHARS, PromptThreads, TextProcess, is_long
from termgen.engine.text.tokenizer import load_tokenizer
from termgen.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError
from termgen.vocabulary.sampling_params import SamplingParams

MAX_LEN = 3000


def chat(*contents: str, **variables: Any) -> ChatPrompt:
    messages = tuple({"role": "user", "content": content} for content in contents)
    return ChatPrompt(messages, template_kwargs=variables)


@pytest.fixture(scope="module")
def sizes(tiny_llama_dir: Path) -> tuple[Path, int, int]:
    return tiny_llama_dir, MAX_LEN, load_tokenizer(tiny_llama_dir).vocab_size


@pytest.fixture(scope="module")
def texts(sizes: tuple[Path, int, int]) -> Iterator[TextProcess]:
    texts = TextProcess(*sizes)
    yield texts
    texts.close()


@pytest.fixture
def here(sizes: tuple[Path, int, int]) -> InputProcessor:
    return InputProcessor(load_tokenizer(sizes[0]), *sizes[1:])


def outcome(tokenize: Any, prompt: Prompt, **how: Any) -> Any:
    """The tokens, or the error."""
    how = {"add_special_tokens": True, "has_to_fit": False, "marks_turns": True, **how}
    try:
        return tokenize(prompt, **how)
    except RequestError as error:
        return type(error), str(error), error.param, error.code, error.status


def test_it_gives_what_would_be_made_here(texts: TextProcess, here: InputProcessor) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    prompts: list[Prompt] = ["", "\ud800", chat(), chat("\udfff"), FillPrompt("a", "b"), [7, 8]]
    prompts += [chat("x", no_such_variable=1), chat("x", tokenize=True), [10**6]]
    for text in sample_texts(seed, 20):
        forged = rng.choice(SPECIAL_LOOKALIKES)
        prompts += [text, text + forged + text, chat(text), chat(text, forged * 3 + text)]
    for prompt in prompts:
        how: dict[str, Any] = {
            name: rng.random() < 0.5 for name in ("add_special_tokens", "has_to_fit")
        }
        how["keep"] = rng.choice((None, 1, 5, MAX_LEN - 1))
        assert outcome(texts.read, prompt, **how) == outcome(here.read, prompt, **how)


@pytest.mark.parametrize("prompt", ["ab " * MAX_LEN, chat("ab " * MAX_LEN)])
def test_what_does_not_fit_is_refused_there(
    prompt: Prompt, texts: TextProcess, here: InputProcessor
) -> None:
    """The refusal happens there, so that its tokens are not even sent back."""
    with pytest.raises(ContextLengthError, match="maximum context length is 3000 tokens") as fault:
        texts.read(prompt, add_special_tokens=True, has_to_fit=True, marks_turns=False)
    assert fault.value.param == ("prompt" if isinstance(prompt, str) else "messages")
    num_tokens = len(here.tokenize(prompt))
    assert f"requested {num_tokens} tokens" in str(fault.value)
    assert outcome(texts.read, prompt) == outcome(here.read, prompt)


def test_a_process_that_dies_costs_one_prompt(texts: TextProcess) -> None:
    def tokens() -> list[int]:
        return texts.read("hello", add_special_tokens=True, has_to_fit=True, marks_turns=False)

    expected = tokens()
    process = texts._helper.start()
    process.kill()
    process.wait()
    assert tokens() == expected, "one that has died before is started again"
    process = texts._helper.start()
    process.send_signal(signal.SIGSTOP)  # it cannot answer, and is then killed
    asked = asyncio.run(_ask_and_kill(texts, process))
    assert isinstance(asked, RequestError) and asked.status == 413 and asked.param == "prompt"
    assert tokens() == expected


def test_a_prompt_without_end_is_given_up(
    texts: TextProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(prompt: Prompt) -> list[int]:
        return texts.read(prompt, add_special_tokens=True, has_to_fit=True, marks_turns=False)

    expected = tokens("hello")
    for prompt, param in (("hello", "prompt"), (chat("hello"), "messages")):
        texts._helper.start().send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(text_process, "LIMIT_S", 0.05)
            with pytest.raises(RequestError, match="too much time to be tokenised") as refusal:
                tokens(prompt)
        fault = refusal.value
        assert (fault.status, fault.code, fault.param) == (413, "request_too_large", param)
        assert tokens("hello") == expected


async def _ask_and_kill(
    texts: TextProcess, process: subprocess.Popen[bytes]
) -> BaseException | None:
    asking = asyncio.create_task(
        asyncio.to_thread(
            texts.read, "x", add_special_tokens=True, has_to_fit=True, marks_turns=False
        )
    )
    while not texts._helper._turn.locked():
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    process.kill()
    await asyncio.wait([asking])
    return asking.exception()


def test_only_long_prompts_go_there(
    texts: TextProcess, here: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "_long_texts", texts)
    sent: list[Prompt] = []
    read = texts.read

    def noting(prompt: Prompt, **how: bool) -> Any:
        sent.append(prompt)
        return read(prompt, **how)

    monkeypatch.setattr(texts, "read", noting)
    long, short = "ab  " * (LONG_PROMPT_CHARS // 4), "ab"
    others: list[Prompt] = [short, chat(short), [1] * LONG_PROMPT_CHARS]
    for prompt in others:
        outcome(here.read, prompt)
    assert not sent
    expected: list[Prompt] = [long, chat(long), chat(*["ab"] * (LONG_PROMPT_CHARS // 2))]
    for prompt in expected:
        assert is_long(prompt)
        outcome(here.read, prompt)
    assert sent == expected
    own = ChatPrompt(({"role": "user", "content": long},), chat_template="{{ messages }}")
    assert not is_long(own), "that has processes of its own"


async def test_a_prewarmed_engine_has_one_and_ends_it(tiny_llama_dir: Path) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", max_model_len=512)
    engine = await AsyncEngine.start(config, prewarm=True)
    processor = engine.parts.input_processor
    assert processor._long_texts is not None
    process = processor._long_texts._helper.start()
    assert processor._grammars is not None
    of_grammars = processor._grammars._provers[0].start()
    try:
        text = "one two three " * 300
        with pytest.raises(ContextLengthError):
            await anext(engine.generate(text, SamplingParams()))
        assert await engine.tokenize(text) == engine.parts.tokenizer.encode(text)  # type: ignore
        assert process.poll() is None
    finally:
        await engine.shutdown()
    assert process.poll() is not None and of_grammars.poll() is not None
    with pytest.raises(EngineDeadError):  # and no other is started
        await asyncio.to_thread(processor.tokenize, text)


def test_an_engine_without_a_loop_ends_its_processes(tiny_llama_dir: Path) -> None:
    engine = SyncEngine(EngineConfig(model=str(tiny_llama_dir), device="cpu", max_model_len=64))
    grammars = engine.input_processor._grammars
    assert grammars is not None
    process = grammars._provers[0].start()
    engine.shutdown()
    assert process.poll() is not None


def test_without_a_process_prompts_are_tokenised_here(
    here: InputProcessor, sizes: tuple[Path, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process)
    here.prewarm(TextProcess(*sizes))
    assert len(here.tokenize("ab " * LONG_PROMPT_CHARS)) > 10


def test_without_another_process_later_a_prompt_is_to_come_again(
    texts: TextProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = texts._helper.start()
    process.kill()
    process.wait()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        with pytest.raises(OverloadedError, match="no process left") as refusal:
            texts.read(chat("x"), add_special_tokens=True, has_to_fit=True, marks_turns=False)
    assert (refusal.value.code, refusal.value.param) == ("no_process", "messages")
    assert texts.read(chat("x"), add_special_tokens=True, has_to_fit=True, marks_turns=False)


def test_a_process_that_never_starts_is_no_fault_of_the_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = TextProcess(tmp_path, MAX_LEN, 10)  # there is no tokenizer
    with pytest.raises(OverloadedError):
        texts.read("x", add_special_tokens=True, has_to_fit=True, marks_turns=False)
    assert "text_program.py ended with status 1" in caplog.text and "Error" in caplog.text
    texts.close()


async def test_what_waits_at_shutdown_is_told_so_and_so_is_what_comes_later() -> None:
    threads, gate = PromptThreads(), threading.Event()
    long = "x" * LONG_PROMPT_CHARS
    own = ChatPrompt(({"role": "user", "content": "x"},), chat_template="x")
    asked = [
        asyncio.create_task(
            threads.run(prompt, lambda: gate.wait(20), renders_elsewhere=prompt is own)
        )
        for prompt in [long, own, own] * 3
    ]
    await asyncio.sleep(0.05)
    threads.shutdown()
    gate.set()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert outcomes.count(True) == 3, "those that had begun"
    assert sum(isinstance(outcome, EngineDeadError) for outcome in outcomes) == 6
    with pytest.raises(EngineDeadError):
        await threads.run(long, gate.is_set, renders_elsewhere=False)


async def test_without_threads_prompts_are_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = PromptThreads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(OverloadedError) as refusal:
            await threads.run("x" * LONG_PROMPT_CHARS, lambda: 1, renders_elsewhere=False)
        assert refusal.value.code == "no_process"
    assert await threads.run("x" * LONG_PROMPT_CHARS, lambda: 1, renders_elsewhere=False) == 1
    threads.shutdown()


async def test_short_prompts_do_not_wait_for_long_ones() -> None:
    threads, order = PromptThreads(), []
    free = asyncio.Event()

    def wait(name: str) -> None:
        asyncio.run_coroutine_threadsafe(free.wait(), loop).result()
        order.append(name)

    loop = asyncio.get_running_loop()
    long = "x" * LONG_PROMPT_CHARS
    waiting = [
        asyncio.create_task(threads.run(long, lambda: wait("long"), renders_elsewhere=False))
        for _ in range(50)
    ]
    await asyncio.sleep(0.01)
    await threads.run("x", lambda: order.append("short"), renders_elsewhere=False)
    assert order == ["short"]
    free.set()
    await asyncio.gather(*waiting)
    threads.shutdown()
