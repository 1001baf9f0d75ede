"""The real tokenizer, and an output processor that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from output_harness import EOS

from termgen.engine.text.output import OutputProcessor
from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture
def processor(smollm2: Tokenizer) -> OutputProcessor:
    return OutputProcessor(smollm2, (EOS,))
