"""A long conversation in lines through a real engine, as benchmarks/long_chat.py holds it with
SmolLM2: each turn is checked against what the chat says is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def long_chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_chat

    yield long_chat
    sys.modules.pop("long_chat")


@pytest.mark.parametrize("policy", ["drop", "ends", "summarise"])
def test_two_hundred_turns_through_an_engine(
    long_chat: ModuleType, policy: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir("llama", max_position_embeddings=1024)
    config = replace(long_chat.chat_config(str(folder)), threads=1, dtype="float32")
    row = long_chat.converse(config, policy, turns=200, seed=0, max_tokens=2)
    assert row["turns"] == 200 and row["left out"] > 20
    assert row["read, median"] < 200, "most turns read what is new"
    assert row["read, largest"] <= 1024
