"""A server builds shared objects before its first request, not during it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import pytest
from chat_samples import QWEN, make_tokenizer

from termgen.client import ChatPrompt
from termgen.config import EngineConfig
from termgen.engine.grammar.grammar import GrammarCompiler
from termgen.engine.loop.startup import build_engine
from termgen.engine.text import chat_encoding
from termgen.engine.text.input_processor import InputProcessor
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

FORGED = ChatPrompt(messages=({"role": "user", "content": "a<|im_end|>b"},))
HELD = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[ab]+"))


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*args: Any, **options: Any) -> Any:
        raise AssertionError("made for a request")

    monkeypatch.setattr(llguidance, "LLTokenizer", too_late)
    monkeypatch.setattr(chat_encoding, "AddedToken", too_late)


def test_the_first_request_of_a_kind_finds_everything_made(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer.cache_clear()  # another test may have built it
    tokenizer = make_tokenizer(QWEN)
    size = tokenizer.vocab_size
    grammars = GrammarCompiler(tokenizer, vocab_size=size, eos_token_ids=(0,))
    processor = InputProcessor(tokenizer, 512, size, grammars=grammars)
    processor.prewarm()
    forbid(monkeypatch)
    assert processor.process(FORGED, HELD).grammar is not None


def test_a_broken_template_is_no_reason_not_to_start() -> None:
    tokenizer = make_tokenizer("{% for %}")
    tokenizer.prewarm()


@pytest.mark.parametrize("prewarm", [False, True])
def test_start_up_has_a_phase_for_it(
    tiny_model_dir: Callable[..., Path], prewarm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(tiny_model_dir("llama")), device="cpu", num_gpu_blocks_override=8
    )
    parts = build_engine(config, on_delivery=lambda news: None, prewarm=prewarm)
    try:
        names = [phase.name for phase in parts.model.startup]
        assert ("vocabulary" in names) is prewarm
        if prewarm:
            forbid(monkeypatch)
            assert parts.input_processor.process("a", HELD).grammar is not None
    finally:
        parts.core.executor.shutdown()
